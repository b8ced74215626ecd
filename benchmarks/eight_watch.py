"""Looks at a run of the real coordinator from outside: marks the stretch that counts, samples the queue."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftline.monitor.events import read_events
from draftline.monitor.run import EVENTS_FILE
from draftline.monitor.status import WorkerStatus
from draftline.pipeline.coordinator import PipelineCoordinator
from draftline.pipeline.reporting import RunReporter
from draftline.pipeline.runplan import RunPlan

POLL_S, QUEUE_EVERY_S = 0.02, 0.25
ENOUGH = "the benchmark has measured enough"


@dataclass(frozen=True)
class Mark:
    """The run at one moment."""

    at_s: float
    round_id: int
    committed: int
    workers: dict[str, WorkerStatus]


@dataclass
class Watcher:
    """Counts from when every drafter has trained `warm_rows` rows to the same point `rounds` rounds later, so that
    whole rounds with their averagings are counted; then it ends the run.

    Args:
        stop: how to end it: `fail` at once (nothing is written), or `stop` in the coordinated way.
    """

    plan: RunPlan
    coordinator: PipelineCoordinator
    reporter: RunReporter
    warm_rows: int
    rounds: int
    stop: str = "fail"
    begin: Mark | None = None
    end: Mark | None = None
    stop_asked_s: float | None = None
    queue: list[tuple[float, int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._names = [f"target-{i}" for i in range(self.plan.num_targets)]
        self._drafters = [f"drafter-{i}" for i in range(self.plan.num_drafters)]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watcher", daemon=True)

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def mark(self) -> Mark:
        stats, now = self.coordinator.exchange.stats(), time.monotonic()
        names = [*self._names, *self._drafters]
        workers = {name: self.reporter.clock(name).status(now, 1.0) for name in names}
        return Mark(now, stats.round_id, stats.ledger.committed, workers)

    def _rows(self) -> list[int]:
        return [self.reporter.clock(name).totals()[0] for name in self._drafters]

    def _watch(self) -> None:
        next_look_s, at_commit = 0.0, None
        first_round = self.coordinator.exchange.stats().round_id
        while not self._over.wait(POLL_S):
            now, stats = time.monotonic(), self.coordinator.exchange.stats()
            if now >= next_look_s:
                next_look_s = now + QUEUE_EVERY_S
                self.queue.append((now, stats.waiting_rows, stats.admitted_rows))
            rows = self._rows()
            if self.begin is None and min(rows) >= self.warm_rows:
                self.begin = self.mark()
            if at_commit is None and stats.round_id >= first_round + self.rounds:
                at_commit = rows
            if at_commit is None or self.begin is None:
                continue
            if min(n - was for n, was in zip(rows, at_commit, strict=True)) >= self.warm_rows:
                self.end = self.mark()
                self._end_run()
                return

    def _end_run(self) -> None:
        self.stop_asked_s = time.monotonic()
        if self.stop == "stop":
            self.coordinator.exchange.request_stop()
        else:
            self.coordinator.exchange.fail("benchmark", ENOUGH)

    def figures(self) -> dict[str, Any]:
        """Rates and shares of the counted stretch."""
        if self.begin is None or self.end is None:
            raise RuntimeError("the run ended before enough of it was counted: give it more rows")
        begin, end = self.begin, self.end
        seconds = end.at_s - begin.at_s
        tokens = sum(end.workers[n].tokens - begin.workers[n].tokens for n in self._drafters)
        rows = sum(end.workers[n].rows - begin.workers[n].rows for n in self._drafters)
        row, objective = self.plan.rows[0], self.plan.config.objective
        rounds = end.round_id - begin.round_id
        looks = [(t - begin.at_s, w, a) for t, w, a in self.queue if begin.at_s <= t <= end.at_s]
        workers = {name: _shares(begin.workers[name], end.workers[name], seconds) for name in begin.workers}
        return {
            "seconds": seconds,
            "rows": rows,
            "rounds": rounds,
            "tokens_per_s": tokens / seconds,
            "supervised_tokens_per_s": rows * row.n_supervised / seconds,
            "block_tokens_per_s": rows * objective.anchors * self.plan.spec.block_size / seconds,
            "workers": workers,
            "drafter_waiting": _mean([workers[n]["waiting"] for n in self._drafters]),
            "target_waiting": _mean([workers[n]["waiting"] for n in self._names]),
            "queue_rows_mean": _mean([w for _, w, _ in looks]),
            "queue_rows_over_time": [(round(t, 2), w) for t, w, _ in looks],
            "admitted_rows_mean": _mean([a for _, _, a in looks]),
            "state_bytes_per_s": rows * max(self.plan.row_bytes) / seconds,
        }


def averaging_s(run_folder: Path) -> list[float]:
    """Seconds of each meeting's averaging: from its first span (the leader reduces) to its last (all have applied)."""
    found: dict[str, tuple[float, float]] = {}
    for span in read_events(run_folder / EVENTS_FILE).spans():
        if span.activity == "averaging":
            begin, end = found.get(span.what, (span.t0_s, span.t1_s))
            found[span.what] = (min(begin, span.t0_s), max(end, span.t1_s))
    return [end - begin for begin, end in found.values()]


def _shares(before: WorkerStatus, after: WorkerStatus, seconds: float) -> dict[str, Any]:
    """Shares of the stretch by activity and by what was waited for."""
    spent = {name: after.seconds.get(name, 0.0) - before.seconds.get(name, 0.0) for name in after.seconds}
    waits = {n: after.wait_seconds.get(n, 0.0) - before.wait_seconds.get(n, 0.0) for n in after.wait_seconds}
    return {
        "rows": after.rows - before.rows,
        "working": spent.get("working", 0.0) / seconds,
        "waiting": spent.get("waiting", 0.0) / seconds,
        "averaging": spent.get("averaging", 0.0) / seconds,
        "waiting_for": {name: value / seconds for name, value in waits.items()},
        "row_s": after.row_s,
    }


def _mean(values: list[Any]) -> float | None:
    return sum(values) / len(values) if values else None
