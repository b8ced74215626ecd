"""What a worker has to tell, gathered and sent to the driver about twice a second.

consumes     spans, counts, finished rows and survived errors of one worker's thread
produces     batches in the queue's mailbox; sending never waits. What a killed worker had not sent yet is lost with it:
             the ledger does not depend on it
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from draftline.cluster.link import QueueLink
from draftline.cluster.messages import Batch, RowReport, SpanRecord
from draftline.drafter.loop import TrainedRow
from draftline.errors import RunFailedError
from draftline.pipeline.budget import is_sticky

SEND_EVERY_S = 0.5


class WorkerReports:
    """Clock, training log and failure budget of one worker, for one thread.

    Args:
        worker: `target-0` and so on, as people know it.
        link: to the queue.
    """

    def __init__(self, worker: str, link: QueueLink) -> None:
        self.worker, self._link = worker, link
        self._parts: dict[str, list[Any]] = {}
        self._sent_s = time.monotonic()

    # ---- clock

    @contextmanager
    def span(self, activity: Any, what: str, **facts: Any) -> Iterator[None]:
        """See `Clock.span`."""
        begin = time.time()
        try:
            yield
        except BaseException as error:
            facts["error"] = type(error).__name__
            raise
        finally:
            self._add("spans", SpanRecord(str(activity), str(what), begin, time.time(), facts))

    def done(self, *, rows: int, tokens: int) -> None:
        """See `Clock.done`."""
        self._add("done", (time.time(), rows, tokens))

    # ---- training log

    def row_trained(self, report: TrainedRow) -> None:
        """See `TrainingLog.row_trained`; limits are checked where all drafters' reports come together."""
        row = RowReport(
            row_id=report.row_id,
            tokens=report.tokens,
            supervised_tokens=report.supervised_tokens,
            sums=tuple(report.stats.vector.tolist()),
            block_size=report.stats.block_size,
            learning_rate=report.learning_rate,
            gradient_norm=report.gradient_norm,
            skipped=report.skipped,
        )
        self._add("rows", row)

    def step_skipped(self, drafter: int, what: str) -> None:
        """See `TrainingLog.step_skipped`."""
        del drafter
        self._add("skipped", what)

    # ---- failure budget

    def spend(self, worker: str, error: BaseException, what: str) -> None:
        """See `FailureBudget.spend`; the count is the queue's.

        Raises:
            RunFailedError: the budget is spent, or the device cannot be used any more in this process.
        """
        self._add("failures", "".join(traceback.format_exception(error)))
        line = f"{what}: {type(error).__name__}: {error}"
        if is_sticky(error):
            raise RunFailedError(line, origin=worker) from error
        self._link.call(("spend", (worker, line)))

    def say(self, line: str) -> None:
        """A plain line for people."""
        self._add("lines", line)

    def send(self, *, wait: bool = False) -> None:
        """Sends what there is. `wait`: until it has arrived."""
        self._sent_s = time.monotonic()
        if not self._parts:
            return
        batch = Batch(self.worker, **{name: tuple(items) for name, items in self._parts.items()})
        self._parts = {}
        if wait:
            self._link.call(("tell", (batch,)))
        else:
            self._link.tell(batch)

    def _add(self, part: str, item: Any) -> None:
        self._parts.setdefault(part, []).append(item)
        if time.monotonic() - self._sent_s > SEND_EVERY_S:
            self.send()
