"""Kills a real CPU run with SIGKILL at seeded random moments, resumes it, and checks after each kill what is left.

    python scripts/chaos.py --kills 200 --seed 0 --work build/chaos --output benchmarks/results/chaos.json

The run is `draftline train` on a tiny random target and a tiny data set, made here without a network. A third of the
moments lie anywhere from the start of the process on (a new interpreter each time), a third after its first step, a
third while it writes a checkpoint (both in children of one interpreter, which saves the seconds that imports take).
After each kill every checkpoint must be whole (chaos_checks.py reads the files by itself), its ledger must add up, and
nothing that was committed may have been lost. Each run that reaches its end must have committed every planned row once,
with the very weights of a run that nobody killed. Exits 1 at the first broken promise.

What was done is kept in the folder --work: cut off, the same command goes on with the kill that came next.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from chaos_checks import BrokenPromiseError, Entries, being_written, check_end, check_run, entries, weights_of
from chaos_run import ROOT, Forked, ForkServer, Fresh, Process, arguments_of, build_world, wait_until

PHASES = ("anywhere", "training", "checkpoint")
PACKAGES = ("draftline", "torch", "transformers", "safetensors")
MOST_WRITES, AFTER_FIRST_STEP_S = 4, 1.0


@dataclass(frozen=True)
class Kill:
    """One SIGKILL. `after_step` and `in_write` are what was found, not what was aimed at."""

    run: str
    aimed_at: str
    at_s: float
    after_step: bool
    in_write: bool
    checkpoints: int
    committed_rows: int


@dataclass
class Tally:
    """What all jobs found; changed under the lock, and kept in a file."""

    journal: Path
    wanted: int
    until_s: float = float("inf")
    kills: list[Kill] = field(default_factory=list)
    finished_runs: int = 0
    broken: list[str] = field(default_factory=list)
    earlier_s: float = 0.0
    began_s: float = field(default_factory=time.monotonic)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def is_over(self) -> bool:
        return bool(self.broken) or len(self.kills) >= self.wanted or time.monotonic() > self.until_s

    @property
    def elapsed_s(self) -> float:
        return self.earlier_s + time.monotonic() - self.began_s

    def add(self, *, kill: Kill | None = None, finished: bool = False) -> None:
        with self.lock:
            self._count(kill, finished)
            line = {"kill": kill and asdict(kill), "finished": finished, "elapsed_s": self.elapsed_s}
            with self.journal.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    def recall(self) -> None:
        """Counts what an earlier process wrote down."""
        lines = self.journal.read_text(encoding="utf-8").splitlines() if self.journal.exists() else []
        for line in map(json.loads, lines):
            self._count(line["kill"] and Kill(**line["kill"]), line["finished"])
            self.earlier_s = line["elapsed_s"]

    def _count(self, kill: Kill | None, finished: bool) -> None:
        self.kills += [kill] if kill else []
        self.finished_runs += finished

    def last_run(self, job: int) -> int:
        """Number of the newest run of a job that is written down."""
        names = [kill.run.split("-") for kill in self.kills]
        return max((int(run) for _, number, run in names if int(number) == job), default=0)


class Job:
    """Kills and resumes runs until all jobs together have killed often enough; then lets its run end."""

    def __init__(self, number: int, seed: int, config: Path, tally: Tally, start_s: float, weights: str) -> None:
        self.number, self.seed, self.config, self.tally = number, seed, config, tally
        self.start_s, self.weights = start_s, weights
        self.log = config.with_name(f"job-{number}.log")
        self.n_runs = tally.last_run(number)  # whatever an earlier process had begun is left to itself
        self.n_starts = len(tally.kills)
        self.rng = random.Random()
        self.rows: set[int] = set()
        self.server: ForkServer | None = None

    def work(self) -> None:
        try:
            run = self.next_run()
            while not self.tally.is_over:
                if self.kill_once(run):
                    self.finished(run)
                    run = self.next_run()
            if run.exists() and not self.tally.broken:
                self.run_to_end(run)
        except BrokenPromiseError as error:
            with self.tally.lock:
                self.tally.broken.append(f"{error} (log: {self.log})")
        finally:
            if self.server is not None:
                self.server.close()

    def next_run(self) -> Path:
        self.n_runs += 1
        self.rows = set()
        return self.config.with_name(f"run-{self.number}-{self.n_runs}")

    def next_phase(self) -> str:
        """Each three starts have one of each phase; the moment depends on seed, job and number of the start alone."""
        block, place = divmod(self.n_starts, len(PHASES))
        order = random.Random(f"{self.seed}/{self.number}/{block}").sample(PHASES, len(PHASES))
        self.rng.seed(f"{self.seed}/{self.number}/start {self.n_starts}")
        self.n_starts += 1
        return order[place]

    def start(self, run: Path, *, fresh: bool) -> Process:
        arguments = arguments_of(self.config, run)
        if fresh:
            return Fresh(arguments, self.log)
        self.server = self.server or ForkServer(self.log)
        return Forked(self.server, arguments, self.log)

    def kill_once(self, run: Path) -> bool:
        """Starts the run and kills it; True if it came to its end before that."""
        phase, before, began = self.next_phase(), entries(run), time.monotonic()
        process = self.start(run, fresh=phase == "anywhere")
        self.wait_for_moment(process, phase, run, before)
        at_s = time.monotonic() - began
        code = process.kill()
        if code == 0:
            return True
        if code != -9:
            raise BrokenPromiseError(f"{run.name} ended by itself with exit code {code}")
        after = entries(run)
        n_checkpoints, rows = check_run(run)
        if not rows >= self.rows:
            raise BrokenPromiseError(f"{run.name}: rows that were committed are lost")
        self.rows = rows
        new = after - before
        kill = Kill(run.name, phase, round(at_s, 3), bool(new), being_written(new), n_checkpoints, len(rows))
        self.tally.add(kill=kill)
        return False

    def wait_for_moment(self, process: Process, phase: str, run: Path, before: Entries) -> None:
        """Waits for a random moment of the phase, or until the process has ended."""

        def writes() -> bool:
            return being_written(entries(run) - before)

        if phase == "anywhere":
            process.ends_within(self.rng.uniform(0.0, self.start_s))
            return
        n_writes = 1 if phase == "training" else self.rng.randint(1, MOST_WRITES)
        for number in range(n_writes):
            if number and not wait_until(process, lambda: not writes()):
                return
            if not wait_until(process, writes):
                return
        process.ends_within(self.rng.uniform(0.0, AFTER_FIRST_STEP_S if phase == "training" else 0.02))

    def run_to_end(self, run: Path) -> None:
        if (code := self.start(run, fresh=True).wait()) != 0:
            raise BrokenPromiseError(f"{run.name} ended with exit code {code}")
        self.finished(run)

    def finished(self, run: Path) -> None:
        check_run(run)
        check_end(run, self.weights)
        self.tally.add(finished=True)
        shutil.rmtree(run)


# ---- command


def unbroken_run(config: Path) -> dict[str, Any]:
    """A run that nobody kills: seconds until it is ready to write, and its weights."""
    run, log = config.with_name("unbroken"), config.with_name("unbroken.log")
    began = time.monotonic()
    process = Fresh(arguments_of(config, run), log)
    if not wait_until(process, lambda: bool(entries(run))):
        raise BrokenPromiseError(f"the unbroken run wrote no checkpoint, see {log}")
    start_s = time.monotonic() - began
    if process.wait() != 0:
        raise BrokenPromiseError(f"the unbroken run failed, see {log}")
    check_end(run, "")
    return {"start_s": start_s, "weights": weights_of(run)}


def begin(work: Path, seed: int, jobs: int, *, compare: bool) -> dict[str, Any]:
    """Makes the world, or finds the one that an earlier process made for the same commit, seed and jobs."""
    identity = {"commit": commit(), "seed": seed, "jobs": jobs, "compare": compare}
    header = work / "chaos.json"
    if header.exists():
        world: dict[str, Any] = json.loads(header.read_text(encoding="utf-8"))
        if {name: world[name] for name in identity} != identity:
            raise SystemExit(f"{work} belongs to other kills ({world}); remove it, or choose another --work")
        return world
    marker = work / ".chaos"
    if work.exists() and any(work.iterdir()) and not marker.exists():
        raise SystemExit(f"{work} holds something else; choose another --work")
    shutil.rmtree(work, ignore_errors=True)  # a beginning that was cut off
    work.mkdir(parents=True)
    marker.touch()
    config = build_world(work)
    unbroken = unbroken_run(config) if compare else {"start_s": 8.0, "weights": ""}
    world = {**identity, "config": str(config), **unbroken}
    header.write_text(json.dumps(world), encoding="utf-8")
    return world


def chaos(
    kills: int, seed: int, jobs: int, work: Path, *, compare: bool = True, most_s: float = float("inf")
) -> dict[str, Any]:
    """Runs everything below the folder `work`; returns the result as JSON-able facts. No kill begins after `most_s`."""
    began = time.monotonic()
    world = begin(work, seed, jobs, compare=compare)
    tally = Tally(work / "kills.jsonl", kills, began + most_s, began_s=began)
    tally.recall()
    config = Path(world["config"])
    workers = [Job(number, seed, config, tally, world["start_s"], world["weights"]) for number in range(jobs)]
    threads = [threading.Thread(target=job.work) for job in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return facts(tally, world)


def facts(tally: Tally, world: dict[str, Any]) -> dict[str, Any]:
    kills = tally.kills
    return {
        "seed": world["seed"],
        "jobs": world["jobs"],
        "kills": len(kills),
        "kills_after_the_first_step": sum(kill.after_step for kill in kills),
        "kills_inside_a_checkpoint_write": sum(kill.in_write for kill in kills),
        "kills_by_aim": dict(Counter(kill.aimed_at for kill in kills)),
        "runs_that_reached_their_end": tally.finished_runs,
        "final_weights_compared_bitwise": world["compare"],
        "broken_promises": tally.broken,
        "elapsed_s": round(tally.elapsed_s, 1),
        "start_s": round(world["start_s"], 2),
        "commit": world["commit"],
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in PACKAGES},
        },
        "moments": [asdict(kill) for kill in kills],
    }


def commit() -> str:
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Kill a real run at random moments, resume it, check what is left.")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="runs at once")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no kill after so long")
    parser.add_argument("--no-compare", action="store_true", help="leave out the unbroken run and its weights")
    parser.add_argument("--output", type=Path, help="JSON file for the result")
    parser.add_argument("--work", type=Path, help="folder of its own; removed at the end if nothing was broken")
    options = parser.parse_args(arguments)
    limits = {"compare": not options.no_compare, "most_s": 60 * options.minutes}
    work = options.work or Path(tempfile.mkdtemp(prefix="chaos-"))
    result = chaos(options.kills, options.seed, options.jobs, work, **limits)
    text = json.dumps(result, indent=1)
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(text + "\n", encoding="utf-8")
    print(json.dumps({name: value for name, value in result.items() if name != "moments"}, indent=1))
    if result["broken_promises"]:
        return 1
    if result["kills"] >= options.kills:
        shutil.rmtree(work)
    return 0


if __name__ == "__main__":
    sys.exit(main())
