"""Looking into a run on a cluster, and doing things to it while it goes on."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import ray
from held import Hold

from draftline.cluster.control import ADDRESS_FILE
from draftline.cluster.joining import NAMESPACE
from draftline.config.schema import RunConfig
from draftline.pipeline.checkpoint import list_checkpoints, read_checkpoint
from draftline.pipeline.runplan import make_run_plan

MEMORY = 200 << 20
DEFAULTS = (
    "pipeline.max_restarts=8",
    "checkpoint.keep=1000",
    "cluster.averaging_timeout_s=20",
    "monitor.status_every_s=0.2",
)
# A run to which everything happens: three targets, two drafters, rounds of eight rows.
LOSSY = (
    "pipeline.target_devices=[cpu,cpu,cpu]",
    "pipeline.drafter_devices=[cpu,cpu]",
    "epochs=12",
    "sync.every_rows=4",
    "checkpoint.every_rounds=3",
    "cluster.strategy=SPREAD",
    "cluster.drafter_resources={drafters: 1}",  # each host has one, so that no loss of a host is that of all drafters
)
TWO_ROUNDS = 18  # rows, with some of a third


def node_with(name: str) -> dict[str, Any]:
    """A node of the test cluster: room for three workers, one of them a drafter of a `LOSSY` run."""
    return {"num_cpus": 3, "object_store_memory": MEMORY, "resources": {name: 8, "drafters": 1}}


def processes(name: str) -> list[psutil.Process]:
    """Ray's worker processes that run an actor of that class."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if words and words[0].startswith(f"ray::{name}"):
            found.append(process)
    return found


def kill_one(name: str) -> None:
    """SIGKILL to one actor of that class."""
    victim = processes(name)[0]
    os.kill(victim.pid, signal.SIGKILL)
    victim.wait(20)


def queue_of(run: Path) -> Any:
    """The queue actor of a run that goes on, or None while it has not begun."""
    file = run / ADDRESS_FILE
    if not file.exists():
        return None
    try:
        return ray.get_actor(json.loads(file.read_text())["queue"], namespace=NAMESPACE)
    except ValueError:
        return None


def committed_rows(run: Path) -> int:
    """Rows committed so far, as everybody can see."""
    try:
        return int(json.loads((run / "status.json").read_text())["snapshot"]["ledger"]["committed"])
    except (OSError, ValueError, KeyError):
        return 0


def wait_until_whole(
    run: Path, hold: Hold, alive: Callable[[], tuple[int, int]], whole: tuple[int, int], *, limit_s: float = 300.0
) -> None:
    """Every worker that was lost has been replaced, and the new ones take part: two rounds went by since, not held.

    Args:
        alive: numbers of processes of targets and of drafters now; those that were killed are gone already.
        whole: how many there shall be.
    """
    deadline = time.monotonic() + limit_s
    while alive() != whole or _states(run) != ["running"] * sum(whole):
        assert time.monotonic() < deadline, (alive(), _states(run))
        time.sleep(0.2)
    rows = committed_rows(run) + TWO_ROUNDS
    hold.off()
    while committed_rows(run) < rows:
        assert time.monotonic() < deadline, committed_rows(run)
        time.sleep(0.05)
    hold.on()


def rows_of(checkpoint: Path) -> set[int]:
    """Rows that a checkpoint's ledger calls committed."""
    state = read_checkpoint(checkpoint).state["ledger"]
    return {row for start, stop in state["committed"] for row in range(start, stop)}


def samples_of(config: RunConfig) -> list[tuple[int, int]]:
    """(epoch, sample) of everything committed, as the last checkpoint tells."""
    plan = make_run_plan(config)
    rows = [plan.rows[i] for i in rows_of(list_checkpoints(config.output)[-1])]
    return sorted((row.epoch, sample) for row in rows for sample in row.samples)


def check_committed_once(config: RunConfig) -> None:
    """Every planned row is committed, and no round commits one that an earlier round has committed."""
    history = [rows_of(folder) for folder in list_checkpoints(config.output)]
    assert all(before < after for before, after in pairwise(history))
    assert history[-1] == set(range(len(make_run_plan(config).rows)))


def _states(run: Path) -> list[str]:
    try:
        workers = json.loads((run / "status.json").read_text())["snapshot"]["workers"]
    except (OSError, ValueError, KeyError):
        return []
    return [w["state"] for w in workers if w["role"] in ("target", "drafter")]


class Meanwhile(threading.Thread):
    """Does things to a run when it has committed so many rows; `check` raises what went wrong here."""

    def __init__(self, run: Path, *deeds: tuple[int, Callable[[], None]]) -> None:
        super().__init__(daemon=True)
        self.run_folder, self.deeds = run, list(deeds)
        self.done: list[int] = []
        self.error: Exception | None = None
        self.stats: list[Any] = []

    def run(self) -> None:
        try:
            for rows, deed in self.deeds:
                self._wait_for(rows)
                deed()
                self.done.append(rows)
        except Exception as error:  # noqa: BLE001  raised again by `check`
            self.error = error

    def _wait_for(self, rows: int) -> None:
        deadline = time.monotonic() + 480
        while time.monotonic() < deadline:
            queue = queue_of(self.run_folder)
            if queue is not None:
                self.stats.append(ray.get(queue.stats.remote()))
                if self.stats[-1].ledger.committed >= rows:
                    return
            time.sleep(0.1)
        raise TimeoutError(f"{rows} rows were never committed")

    def check(self) -> None:
        self.join(10)
        if self.error is not None:
            raise self.error
        assert len(self.done) == len(self.deeds), self.done
