"""Counting what a run does: one clock per worker, training statistics, gauges, and the snapshot of them all.

Worker threads write (`WorkerClock.span`, `.done`, `RunMetrics.record_training`): a lock of their own each, held for a
few assignments. The monitor thread reads (`snapshot`): it takes one clock's lock at a time and calls the gauges, which
take the pipeline's own lock, while holding none. Nothing here waits for anything.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, cast, get_args

from draftline.monitor.clock import RECENT_DONE, RecentCounts, WorkerClock
from draftline.monitor.events import EventLog
from draftline.monitor.status import (
    Capacities,
    GpuGauge,
    LedgerCounts,
    QueueGauge,
    Role,
    StatusSnapshot,
    Wait,
    WorkerStatus,
)
from draftline.monitor.verdict import bottleneck

WINDOW_S = 60.0
LOSS_HALF_LIFE_ROWS = 50.0
MIN_ROWS_FOR_RATE = 3


@dataclass(frozen=True, slots=True)
class ValidationLengths:
    """Acceptance lengths of the validation rows, the bonus token counted.

    Attributes:
        anchors: mean over whole blocks at the fixed anchors, of `chain` and `tree@N`.
        walk: tokens per round along the walked samples, of the same.
    """

    anchors: Mapping[str, float] = field(default_factory=dict)
    walk: Mapping[str, float] = field(default_factory=dict)

    def curves(self) -> dict[str, float]:
        """`validation/acceptance`, `validation/acceptance_tree_16`, `validation/acceptance_walk`, ..."""
        kinds = (("validation/acceptance", self.anchors), ("validation/acceptance_walk", self.walk))
        return {
            kind if name == "chain" else f"{kind}_{name.replace('@', '_')}": length
            for kind, lengths in kinds
            for name, length in lengths.items()
        }


@dataclass(frozen=True, slots=True)
class TrainingStats:
    """Host-side sums of one optimizer step, or of several rows.

    Attributes:
        numerator, denominator: of the whole loss.
        terms: name -> (numerator, denominator).
        acceptance_sum: accepted draft tokens summed over blocks (runs of correct slots, the bonus token not counted).
        acceptance_blocks: blocks in that sum.
    """

    rows: int
    tokens: int
    supervised_tokens: int
    numerator: float
    denominator: float
    terms: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    acceptance_sum: float = 0.0
    acceptance_blocks: float = 0.0
    learning_rate: float | None = None
    grad_norm: float | None = None


class _Ratio:
    """A quotient of two sums, both forgetting with a half-life counted in rows."""

    def __init__(self) -> None:
        self.numerator = self.denominator = 0.0

    def add(self, numerator: float, denominator: float, keep: float) -> None:
        self.numerator = keep * self.numerator + numerator
        self.denominator = keep * self.denominator + denominator

    def value(self) -> float | None:
        return self.numerator / self.denominator if self.denominator > 0 else None


class RunMetrics:
    """Everything countable about one run. Thread-safe.

    Args:
        clock: monotonic seconds.
        events: span log that every finished span goes to.
        window_s: length of the recent window for shares and rates.
        stall_after_s: standstill after which the verdict says so.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        events: EventLog | None = None,
        window_s: float = WINDOW_S,
        stall_after_s: float = 60.0,
    ) -> None:
        self._clock, self._events = clock, events
        self._window_s, self._stall_after_s = window_s, stall_after_s
        self._start_s = clock()
        self._lock = threading.Lock()
        self._workers: dict[str, WorkerClock] = {}
        self._queue: Callable[[], QueueGauge] | None = None
        self._ledger: Callable[[], LedgerCounts] | None = None
        self._gpus: Callable[[], tuple[GpuGauge, ...]] | None = None
        self._loss, self._acceptance = _Ratio(), _Ratio()
        self._terms: dict[str, _Ratio] = {}
        self._supervised = RecentCounts(RECENT_DONE)
        self._learning_rate: float | None = None
        self._grad_norm: float | None = None
        self._validation_loss: float | None = None
        self._validation = ValidationLengths()
        self._nonfinite = 0

    def worker(self, name: str) -> WorkerClock:
        """The clock of a worker; made on first use, revived if it had failed. `target-0` has the role target."""
        prefix = name.partition("-")[0]
        role = cast(Role, prefix if prefix in get_args(Role) else "other")
        with self._lock:
            if name not in self._workers:
                on_span = self._events.span if self._events else None
                self._workers[name] = WorkerClock(name, role, self._clock, on_span)
            clock = self._workers[name]
        clock.revive()
        return clock

    def watch(
        self,
        *,
        queue: Callable[[], QueueGauge] | None = None,
        ledger: Callable[[], LedgerCounts] | None = None,
        gpus: Callable[[], tuple[GpuGauge, ...]] | None = None,
    ) -> None:
        """Gauges read at each snapshot, by the monitor thread."""
        with self._lock:
            self._queue, self._ledger = queue or self._queue, ledger or self._ledger
            self._gpus = gpus or self._gpus

    def record_training(self, stats: TrainingStats) -> None:
        """Fold in the sums of finished rows. Non-finite sums are counted and left out."""
        keep = 0.5 ** (stats.rows / LOSS_HALF_LIFE_ROWS)
        with self._lock:
            self._supervised.add(self._clock(), stats.supervised_tokens)
            self._learning_rate = self._learning_rate if stats.learning_rate is None else stats.learning_rate
            self._grad_norm = self._grad_norm if stats.grad_norm is None else stats.grad_norm
            if not (math.isfinite(stats.numerator) and math.isfinite(stats.denominator)):
                self._nonfinite += 1
                return
            self._loss.add(stats.numerator, stats.denominator, keep)
            self._acceptance.add(stats.acceptance_sum, stats.acceptance_blocks, keep)
            for name, (numerator, denominator) in stats.terms.items():
                if math.isfinite(numerator) and math.isfinite(denominator):
                    self._terms.setdefault(name, _Ratio()).add(numerator, denominator, keep)

    def record_validation(self, *, loss: float | None, lengths: ValidationLengths) -> None:
        """Latest scores of the validation rows."""
        with self._lock:
            self._validation_loss, self._validation = loss, lengths

    def elapsed_s(self) -> float:
        """Seconds since this object was made."""
        return self._clock() - self._start_s

    def snapshot(self) -> StatusSnapshot:
        """Everything at this moment, with the verdict."""
        now = self._clock()
        with self._lock:
            clocks = list(self._workers.values())
            read_queue, read_ledger, read_gpus = self._queue, self._ledger, self._gpus
        queue = read_queue() if read_queue else None
        ledger = read_ledger() if read_ledger else LedgerCounts()
        statuses = (c.status(now, self._window_s) for c in clocks)
        # The coordinator is told only while it does something: it waits for no row and holds none.
        workers = tuple(w for w in statuses if w.role != "other" or w.activity is not None)
        capacities = _capacities(workers)
        rows_per_s, tokens_per_s = self._rates(clocks, now)
        drafters = [w for w in workers if w.role == "drafter"]
        return StatusSnapshot(
            elapsed_s=now - self._start_s,
            time_left_s=ledger.remaining / rows_per_s if rows_per_s else None,
            ledger=ledger,
            queue=queue,
            rows_trained=sum(w.rows for w in drafters),
            tokens_trained=sum(w.tokens for w in drafters),
            tokens_per_s=tokens_per_s,
            capacities=capacities,
            workers=workers,
            gpus=read_gpus() if read_gpus else (),
            verdict=bottleneck(capacities, workers, queue, stall_after_s=self._stall_after_s),
            **self._training(now),
        )

    def _training(self, now: float) -> dict[str, Any]:
        with self._lock:
            accepted = self._acceptance.value()
            return {
                "loss": self._loss.value(),
                "terms": {name: v for name, r in self._terms.items() if (v := r.value()) is not None},
                "acceptance": None if accepted is None else 1.0 + accepted,
                "validation_loss": self._validation_loss,
                "validation_acceptance": self._validation.anchors.get("chain"),
                "validation_trees": {k: v for k, v in self._validation.anchors.items() if k != "chain"},
                "validation_walk": dict(self._validation.walk),
                "learning_rate": self._learning_rate,
                "grad_norm": self._grad_norm,
                "supervised_tokens_per_s": self._supervised_rate(now),
                "nonfinite_updates": self._nonfinite,
            }

    def _supervised_rate(self, now: float) -> float | None:
        begin = max(self._start_s, now - self._window_s)
        total, _ = self._supervised.since(begin)
        return total / (now - begin) if total and now > begin else None

    def _rates(self, clocks: list[WorkerClock], now: float) -> tuple[float | None, float | None]:
        """Rows and tokens trained per second of wall clock, of the window, or of the session while rows are few."""
        drafters = [c for c in clocks if c.role == "drafter"]
        starts = [c.first_work_s for c in drafters if c.first_work_s is not None]
        if not starts:
            return None, None
        begin = max(min(starts), now - self._window_s)
        recent = [c.done_since(begin) for c in drafters]
        rows, tokens = sum(r for r, _ in recent), sum(t for _, t in recent)
        if rows < MIN_ROWS_FOR_RATE:
            begin = min(starts)
            totals = [c.totals() for c in drafters]
            rows, tokens = sum(r for r, _ in totals), sum(t for _, t in totals)
        if not rows or now <= begin:
            return None, None
        return rows / (now - begin), tokens / (now - begin)


def _capacities(workers: tuple[WorkerStatus, ...]) -> Capacities:
    """Sum of what living workers could do; one that has done no row yet counts like the mean of its side.

    Data loading counts the time that targets waited for samples.
    """
    alive = [w for w in workers if w.state != "failed"]
    sides = {role: [w for w in alive if w.role == role] for role in ("target", "drafter")}
    known = {role: [w.tokens_per_s for w in side if w.tokens_per_s] for role, side in sides.items()}
    speeds = {role: fmean(known[role]) * len(side) if known[role] else None for role, side in sides.items()}
    loading = sum(w.wait_seconds.get(Wait.SAMPLES, 0.0) for w in sides["target"])
    loaded = sum(w.tokens for w in sides["target"])
    return Capacities(
        targets=len(sides["target"]),
        drafters=len(sides["drafter"]),
        target_tokens_per_s=speeds["target"],
        drafter_tokens_per_s=speeds["drafter"],
        data_tokens_per_s=loaded / loading * len(sides["target"]) if loading and loaded else None,
    )
