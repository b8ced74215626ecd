"""DrafterTrainLoop: one thread per drafter device.

consumes     Row | Sync | Stop from the one shared queue (RowExchange.get)
produces     trained weights in its replica; statistics for the monitor
waits for    get(): woken by a row, by a full round, by the end; and for the completion of its own earlier step,
             which is what frees the row's slot
at a Sync    finishes the rows in hand, then meets the others; the last to arrive averages for all
ends         at its first Stop
"""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from draftline.drafter.schedule import LearningRate
from draftline.drafter.step import DrafterStep, StepStats
from draftline.drafter.sync import Replica
from draftline.monitor.status import Wait
from draftline.pipeline.core import RowItem, StopItem, SyncItem
from draftline.pipeline.threads import Meeting, RowExchange
from draftline.records import HiddenStateRow
from draftline.target.loop import Clock, map_tensors


class TrainingLog(Protocol):
    """Where a drafter reports, in its own thread: each finished row, and each other step that was skipped."""

    def row_trained(self, report: TrainedRow) -> None:
        """A row's step has finished."""

    def step_skipped(self, drafter: int, what: str) -> None:
        """An optimizer step changed nothing, because its gradient was not finite."""


class Meetings(Protocol):
    """What becomes of the replicas when drafters meet; see pipeline/meeting.py."""

    def hold(self, meeting: Meeting) -> None:
        """Take part in a meeting from its beginning to its end."""

    def take_over(self, meeting: Meeting) -> tuple[Tensor, Tensor] | None:
        """Take what the meeting decided into this drafter's replica; see `pipeline/meeting.py`."""


@dataclass(frozen=True, slots=True)
class TrainedRow:
    """What is known of a row once its step has really finished.

    Attributes:
        drafter: who trained it.
        row_id: which row.
        tokens, supervised_tokens: of the row.
        stats: sums of the step, on the host.
        learning_rate: rate of the optimizer step it went into.
        gradient_norm: before clipping, or None if the step was still accumulating.
        skipped: True if the gradient was not finite and nothing was changed.
    """

    drafter: int
    row_id: int
    tokens: int
    supervised_tokens: int
    stats: StepStats
    learning_rate: float
    gradient_norm: float | None
    skipped: bool


@dataclass(slots=True)
class _InFlight:
    item: RowItem[HiddenStateRow]
    row: HiddenStateRow
    stats: StepStats
    learning_rate: float
    outcome: tuple[Tensor, Tensor] | None
    done: Any | None


class DrafterTrainLoop:
    """Trains one replica on the rows it pulls.

    Args:
        drafter: number of this drafter.
        exchange: the shared queue.
        step: forward and backward of one row.
        replica: masters and optimizer of this drafter.
        learning_rate: the run's schedule.
        meetings: held by the last drafter to arrive, taken over by each.
        log: where finished rows are reported.
        clock: records working and waiting.
        accumulate_rows: rows of one optimizer step; 0 leaves stepping to the synchronizer.
        prefetch_rows: rows taken before the step in hand has finished.
    """

    def __init__(
        self,
        drafter: int,
        exchange: RowExchange[HiddenStateRow],
        step: DrafterStep,
        replica: Replica,
        learning_rate: LearningRate,
        *,
        meetings: Meetings,
        log: TrainingLog,
        clock: Clock,
        accumulate_rows: int,
        prefetch_rows: int,
    ) -> None:
        self.drafter, self.name = drafter, f"drafter-{drafter}"
        self._exchange, self._step, self._replica = exchange, step, replica
        self._learning_rate, self._meetings, self._log, self._clock = learning_rate, meetings, log, clock
        self._accumulate_rows = accumulate_rows
        self._device = replica.optimizer.device
        self._prefetch_rows = prefetch_rows if self._device.type == "cuda" else 0
        self._in_flight: deque[_InFlight] = deque()
        self._absorbed_rows = 0
        self._last_rate = 0.0

    def run(self) -> None:
        """The loop. Returns at the coordinated stop; raises RunFailedError if the run failed."""
        with self._own_stream():
            while True:
                with self._clock.span("waiting", Wait.ROW):
                    item = self._exchange.get(self.drafter)
                if isinstance(item, StopItem):
                    return
                if isinstance(item, SyncItem):
                    self._attend(item.round_id)
                    continue
                with self._clock.span("working", f"row {item.row.row_id}", tokens=item.row.n_tokens):
                    self._train(item)
                while len(self._in_flight) > self._prefetch_rows:
                    self._finish_one()

    def _attend(self, round_id: int) -> None:
        self._finish_rows()
        with self._clock.span("waiting", Wait.MEETING):
            meeting = self._exchange.meet(self.drafter, round_id, self._averaging)
        with self._clock.span("averaging", f"round {round_id}"):
            step = self._meetings.take_over(meeting)
        if step is not None and self.drafter == meeting.leader:  # all members took the same step
            self._count_skipped(step, f"the step of round {round_id}")

    def _averaging(self, meeting: Meeting) -> None:
        with self._clock.span("averaging", f"round {meeting.round_id}"):
            self._meetings.hold(meeting)

    def _count_skipped(self, step: tuple[Tensor, Tensor], what: str) -> None:
        if bool(step[1]):
            self._log.step_skipped(self.drafter, what)

    def _train(self, item: RowItem[HiddenStateRow]) -> None:
        row = self._on_device(item.payload)
        stats = self._step.forward_backward(row)
        self._replica.optimizer.absorb(torch.where(stats.finite, stats.denominator, float("nan")))
        self._absorbed_rows += 1
        self._last_rate = self._learning_rate.at(item.clock_rows)
        outcome = None
        if self._accumulate_rows and self._absorbed_rows >= self._accumulate_rows:
            outcome = self._update()
        done = None
        if self._device.type == "cuda":
            done = torch.cuda.Event()
            done.record()
        self._in_flight.append(_InFlight(item, row, stats, self._last_rate, outcome, done))

    def _update(self) -> tuple[Tensor, Tensor]:
        self._absorbed_rows = 0
        return self._replica.optimizer.step(self._last_rate)

    def _finish_rows(self) -> None:
        """Everything before a meeting: open rows, and an optimizer step over what was still accumulating."""
        while self._in_flight:
            self._finish_one()
        if self._accumulate_rows and self._absorbed_rows:
            self._count_skipped(self._update(), "the last step of a round")

    def _finish_one(self) -> None:
        flight = self._in_flight.popleft()
        if flight.done is not None:
            with self._clock.span("working", f"row {flight.item.row.row_id} (device)"):
                flight.done.synchronize()
        planned = flight.item.row
        self._clock.done(rows=1, tokens=planned.n_tokens)
        self._replica.supervised_tokens += planned.n_supervised
        self._exchange.trained(self.drafter, planned.row_id)
        norm, skipped = flight.outcome if flight.outcome is not None else (None, None)
        self._log.row_trained(
            TrainedRow(
                drafter=self.drafter,
                row_id=planned.row_id,
                tokens=planned.n_tokens,
                supervised_tokens=planned.n_supervised,
                stats=flight.stats.to("cpu"),
                learning_rate=flight.learning_rate,
                gradient_norm=None if norm is None else float(norm),
                skipped=skipped is not None and bool(skipped),
            )
        )

    def _on_device(self, row: HiddenStateRow) -> HiddenStateRow:
        if row.ready is not None and self._device.type == "cuda":
            torch.cuda.current_stream(self._device).wait_event(row.ready)
        if row.taps_TF.device == self._device:
            return row
        return map_tensors(row, lambda t: t.to(self._device, non_blocking=True))

    def _own_stream(self) -> AbstractContextManager[Any]:
        if self._device.type != "cuda":
            return nullcontext()
        return torch.cuda.stream(torch.cuda.Stream(self._device))
