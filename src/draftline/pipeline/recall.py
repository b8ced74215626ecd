"""recall@k of each position of the block, as curves: how often the label is among the drafter's k likeliest tokens."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from draftline.drafter.metrics import RECALL_AT, StepStats, selector_summary

HALF_LIFE_ROWS = 50.0
EVERY_S = 60.0  # K positions times five k's are many numbers: rarer than the other curves


def recall_curves(stats: StepStats, kind: str) -> dict[str, float]:
    """`validation/recall_4/slot_2` and so on, in 0..1; slots that were never supervised are left out.

    Of a candidate selector also `validation/selector_accuracy` and so on; see `selector_summary`.

    Args:
        stats: sums over rows, on the host.
        kind: `train` or `validation`.
    """
    counts = stats.per_slot("count").tolist()
    selector = selector_summary(stats) or {}
    return {f"{kind}/selector_{name}": round(value, 4) for name, value in selector.items() if value is not None} | {
        f"{kind}/recall_{k}/slot_{slot}": round(hits / count, 4)
        for k in RECALL_AT
        for slot, (hits, count) in enumerate(zip(stats.per_slot(f"recall_{k}").tolist(), counts, strict=True), start=1)
        if count > 0
    }


class RecentRecall:
    """The same of recent training rows, whose weight halves every 50 rows. Thread-safe; nothing here waits.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._sums: StepStats | None = None
        self._told_s: float | None = None

    def add(self, stats: StepStats) -> None:
        """Fold in one row's sums, on the host. A row that was not finite adds nothing but its count."""
        with self._lock:
            if self._sums is None:
                self._sums = StepStats.zeros(stats.block_size)
            keep = 0.5 ** (1.0 / HALF_LIFE_ROWS)
            self._sums = StepStats(self._sums.vector * keep + stats.vector, stats.block_size)

    def curves(self, *, last: bool = False) -> dict[str, float]:
        """The curves, or nothing if they were told less than a minute ago and this is not the `last` time."""
        now = self._clock()
        with self._lock:
            if self._sums is None or not (last or self._told_s is None or now - self._told_s >= EVERY_S):
                return {}
            self._told_s = now
            return recall_curves(self._sums, "train")
