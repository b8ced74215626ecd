"""Kills a real CPU run with SIGKILL at seeded random moments, resumes it, and checks after each kill what is left.

    python scripts/chaos.py --kills 200 --seed 0 --output benchmarks/results/chaos.json

The run is `draftline train` on a tiny random target and a tiny data set, made here without a network. A third of the
moments lie anywhere from the start of the process on, a third after its first step, a third while it writes a
checkpoint. After each kill every checkpoint must be whole (checked here, by its own reading of the files), its ledger
must add up, and nothing that was committed may have been lost. Each run that reaches its end must have committed every
planned row once, with the very weights of a run that nobody killed. Exits 1 at the first broken promise.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PHASES = ("anywhere", "training", "checkpoint")
PACKAGES = ("draftline", "torch", "transformers", "safetensors")
# Two rows a round, a checkpoint each round, and a drafter whose checkpoint takes about as long as a row.
OVERRIDES = (
    "epochs=4",
    "sync.every_rows=2",
    "checkpoint.every_rounds=1",
    "checkpoint.keep=2",
    "drafter.intermediate_size=1024",
    "monitor.status_every_s=60",
)
MOST_WRITES, AFTER_FIRST_STEP_S, DEADLINE_S = 4, 1.0, 300.0


class BrokenPromiseError(Exception):
    """Something that a kill must never do was found."""


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
    """What all jobs found; appended to under the lock."""

    wanted: int
    until_s: float = float("inf")
    kills: list[Kill] = field(default_factory=list)
    finished_runs: int = 0
    broken: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def is_over(self) -> bool:
        return bool(self.broken) or len(self.kills) >= self.wanted or time.monotonic() > self.until_s


# ---- the world: a target, data and a configuration


def load_module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"chaos_{path.parent.name}_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def build_world(folder: Path) -> Path:
    """Writes target, data and configuration as the tests make them; returns the configuration file."""
    tiny = load_module(ROOT / "tests" / "conftest.py")
    runs = load_module(ROOT / "tests" / "integration" / "conftest.py")
    model = tiny.save_tiny_target(folder / "target", "qwen3")
    data = runs.write_dataset(folder / "data")
    config = folder / "run.yaml"
    config.write_text(runs.TINY_YAML.format(output=folder / "run", model=model, data=data), encoding="utf-8")
    return config


def start(config: Path, run: Path, log: Path) -> subprocess.Popen[bytes]:
    """`draftline train`, with --resume once the run has begun, as a person would type it."""
    command = [str(Path(sys.executable).with_name("draftline")), "train", "-c", str(config)]
    command += [*OVERRIDES, f"output={run}"]
    if (run / "config.yaml").exists():
        command.append("--resume")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    with log.open("ab") as out:
        return subprocess.Popen(command, stdout=out, stderr=out, env=environment)


# ---- what is left of a run


def entries(run: Path) -> set[tuple[str, int, int]]:
    """Folders below `checkpoints/`, each with what tells it from an earlier one of the same name."""
    found = set()
    try:
        with os.scandir(run / "checkpoints") as folders:
            for entry in folders:
                if entry.is_dir():
                    stat = entry.stat()
                    found.add((entry.name, stat.st_ino, stat.st_ctime_ns if entry.name.startswith("round-") else 0))
    except FileNotFoundError:  # not begun, or renamed while we looked
        return found
    return found


def being_written(names: set[tuple[str, int, int]]) -> bool:
    return any(name.startswith(".tmp-round-") for name, _, _ in names)


def check_checkpoint(folder: Path) -> list[tuple[int, int]]:
    """Reads one checkpoint without any code of the project; returns the ranges of committed rows."""
    try:
        files = json.loads((folder / "manifest.json").read_bytes())["files"]
        present = {path.name for path in folder.iterdir()} - {"manifest.json"}
        if present != set(files) or "weights.safetensors" not in files:
            raise BrokenPromiseError(f"{folder.name} holds {sorted(present)}, its manifest names {sorted(files)}")
        for name, facts in files.items():
            if hashlib.sha256((folder / name).read_bytes()).hexdigest() != facts["sha256"]:
                raise BrokenPromiseError(f"{folder.name}/{name} is not what its manifest says")
        ledger = json.loads((folder / "state.json").read_bytes())["ledger"]
    except (OSError, ValueError, KeyError) as error:
        raise BrokenPromiseError(f"{folder.name} is unreadable: {error!r}") from error
    committed = [(int(a), int(b)) for a, b in ledger["committed"]]
    rows = [row for a, b in committed for row in range(a, b)]
    if len(set(rows)) != len(rows) or len(rows) != ledger["n_committed"] or ledger["n_set_aside"] != 0:
        raise BrokenPromiseError(f"{folder.name}: the ledger's rows are not unique or not counted: {ledger}")
    if ledger["planned"] != len(rows) + ledger["in_flight"] + ledger["remaining"]:
        raise BrokenPromiseError(f"{folder.name}: the ledger does not add up: {ledger}")
    return committed


def check_run(run: Path) -> tuple[int, set[int]]:
    """Every checkpoint is whole, and `latest.json` names one of them. Returns their number and the committed rows."""
    folders = sorted(path for path in run.glob("checkpoints/round-*"))
    rows: set[int] = set()
    for folder in folders:
        newer = {row for a, b in check_checkpoint(folder) for row in range(a, b)}
        if not newer >= rows:
            raise BrokenPromiseError(f"{folder.name} lost rows that an older checkpoint had committed")
        rows = newer
    latest = run / "checkpoints" / "latest.json"
    if latest.exists():
        named = json.loads(latest.read_bytes())["name"]
        if named not in [folder.name for folder in folders]:
            raise BrokenPromiseError(f"latest.json names {named}, which is not there")
    return len(folders), rows


def check_end(run: Path, weights_sha256: str) -> None:
    """A run that ended by itself: all rows once, the weights of the unbroken run, and an export."""
    folders = sorted(run.glob("checkpoints/round-*"))
    ledger = json.loads((folders[-1] / "state.json").read_bytes())["ledger"]
    if ledger["committed"] != [[0, ledger["planned"]]]:
        raise BrokenPromiseError(f"{run.name} ended with {ledger}")
    if not (run / "export" / "model.safetensors").exists():
        raise BrokenPromiseError(f"{run.name} ended without an export")
    if weights_sha256 and weights_of(run) != weights_sha256:
        raise BrokenPromiseError(f"{run.name} ended with other weights than the run that nobody killed")


def weights_of(run: Path) -> str:
    last = sorted(run.glob("checkpoints/round-*"))[-1]
    return hashlib.sha256((last / "weights.safetensors").read_bytes()).hexdigest()


# ---- one job: runs, one after the other, killed again and again


class Job:
    """Kills and resumes runs until all jobs together have killed often enough; then lets its run end."""

    def __init__(self, number: int, seed: int, config: Path, tally: Tally, start_s: float, weights: str) -> None:
        self.number, self.config, self.tally = number, config, tally
        self.rng = random.Random(seed * 1009 + number)
        self.start_s, self.weights = start_s, weights
        self.n_runs = 0
        self.log = config.with_name(f"job-{number}.log")
        self.rows: set[int] = set()
        self.phases: list[str] = []

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

    def next_run(self) -> Path:
        self.n_runs += 1
        self.rows = set()
        return self.config.with_name(f"run-{self.number}-{self.n_runs}")

    def next_phase(self) -> str:
        if not self.phases:
            self.phases = list(PHASES)
            self.rng.shuffle(self.phases)
        return self.phases.pop()

    def kill_once(self, run: Path) -> bool:
        """Starts the run and kills it; True if it came to its end before that."""
        phase, before, began = self.next_phase(), entries(run), time.monotonic()
        process = start(self.config, run, self.log)
        killed = self.wait_for_moment(process, phase, run, before)
        at_s = time.monotonic() - began
        process.kill()
        code = process.wait()
        if not killed or code == 0:
            if code != 0:
                raise BrokenPromiseError(f"{run.name} ended by itself with exit code {code}")
            return True
        after = entries(run)
        n_checkpoints, rows = check_run(run)
        if not rows >= self.rows:
            raise BrokenPromiseError(f"{run.name}: rows that were committed are lost")
        self.rows = rows
        new = after - before
        kill = Kill(run.name, phase, round(at_s, 3), bool(new), being_written(new), n_checkpoints, len(rows))
        with self.tally.lock:
            self.tally.kills.append(kill)
        return False

    def wait_for_moment(
        self, process: subprocess.Popen[bytes], phase: str, run: Path, before: set[tuple[str, int, int]]
    ) -> bool:
        """Waits for a random moment of the phase; False if the process ended first."""
        if phase == "anywhere":
            return not ends_within(process, self.rng.uniform(0.0, self.start_s))
        writes = 1 if phase == "training" else self.rng.randint(1, MOST_WRITES)
        for _ in range(writes):
            if not wait_until(process, lambda: being_written(entries(run) - before)):
                return False
            if writes > 1 and not wait_until(process, lambda: not being_written(entries(run) - before)):
                return False
        if phase == "training":
            return not ends_within(process, self.rng.uniform(0.0, AFTER_FIRST_STEP_S))
        return wait_until(process, lambda: being_written(entries(run) - before)) and not ends_within(
            process, self.rng.uniform(0.0, 0.02)
        )

    def run_to_end(self, run: Path) -> None:
        if (code := start(self.config, run, self.log).wait()) != 0:
            raise BrokenPromiseError(f"{run.name} ended with exit code {code}")
        self.finished(run)

    def finished(self, run: Path) -> None:
        check_run(run)
        check_end(run, self.weights)
        with self.tally.lock:
            self.tally.finished_runs += 1


def ends_within(process: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def wait_until(process: subprocess.Popen[bytes], holds: Callable[[], bool]) -> bool:
    """Looks often, for nothing tells a bystander that a folder appeared; False once the process has ended."""
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        if process.poll() is not None:
            return False
        if time.monotonic() > deadline:
            process.kill()
            raise BrokenPromiseError(f"nothing happened for {DEADLINE_S:g} s")
        time.sleep(0.0005)
    return True


# ---- command


def chaos(
    kills: int, seed: int, jobs: int, work: Path, *, compare: bool = True, most_s: float = float("inf")
) -> dict[str, Any]:
    """Runs everything below the folder `work`; returns the result as JSON-able facts. No kill begins after `most_s`."""
    began = time.monotonic()
    config = build_world(work)
    unbroken, start_s, weights = work / "unbroken", 8.0, ""
    if compare:
        started = time.monotonic()
        process = start(config, unbroken, work / "unbroken.log")
        if not wait_until(process, lambda: bool(entries(unbroken))):
            raise BrokenPromiseError(f"the unbroken run wrote no checkpoint, see {work / 'unbroken.log'}")
        start_s = time.monotonic() - started
        process.wait()
        check_end(unbroken, "")
        weights = weights_of(unbroken)
    tally = Tally(kills, began + most_s)
    workers = [Job(number, seed, config, tally, start_s, weights) for number in range(jobs)]
    threads = [threading.Thread(target=job.work) for job in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return facts(tally, seed, jobs, time.monotonic() - began, start_s, compare)


def facts(tally: Tally, seed: int, jobs: int, elapsed_s: float, start_s: float, compare: bool) -> dict[str, Any]:
    kills = tally.kills
    return {
        "seed": seed,
        "jobs": jobs,
        "kills": len(kills),
        "kills_after_the_first_step": sum(kill.after_step for kill in kills),
        "kills_inside_a_checkpoint_write": sum(kill.in_write for kill in kills),
        "kills_by_aim": dict(Counter(kill.aimed_at for kill in kills)),
        "runs_that_reached_their_end": tally.finished_runs,
        "final_weights_compared_bitwise": compare,
        "broken_promises": tally.broken,
        "elapsed_s": round(elapsed_s, 1),
        "start_s": round(start_s, 2),
        "commit": commit(),
        "versions": {
            "python": platform.python_version(),
            **{
                name: importlib.metadata.version(name) for name in ("draftline", "torch", "transformers", "safetensors")
            },
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
    parser.add_argument("--work", type=Path, help="folder to keep; a temporary one is removed at the end")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="chaos-") as temporary:
        work = options.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        limits = {"compare": not options.no_compare, "most_s": 60 * options.minutes}
        result = chaos(options.kills, options.seed, options.jobs, work, **limits)
    text = json.dumps(result, indent=1)
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(text + "\n", encoding="utf-8")
    print(json.dumps({name: value for name, value in result.items() if name != "moments"}, indent=1))
    return 1 if result["broken_promises"] else 0


if __name__ == "__main__":
    sys.exit(main())
