"""Measures one target and one drafter alone, by the loops that a run uses, on exchanges that never make them wait.

TargetForwardLoop and DrafterTrainLoop run unchanged: what is timed is what a run does, from the lease to the put and
from the row to the end of its step. The first rows warm up and do not count.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from draftline.config.drafter_spec import DrafterSpec
from draftline.data.shards import TokenDataset
from draftline.drafter.loop import DrafterTrainLoop, TrainedRow
from draftline.drafter.schedule import LearningRate
from draftline.errors import RunFailedError
from draftline.monitor.clock import WorkerClock
from draftline.pipeline.budget import FailureBudget
from draftline.pipeline.core import End, Lease, Meeting, RowItem, StopItem
from draftline.pipeline.runplan import RunPlan
from draftline.pipeline.workers import DrafterWorker
from draftline.records import HiddenStateRow, PlannedRow
from draftline.target.loop import Capture, TargetForwardLoop

WARM_UP_ROWS = 2


@dataclass(frozen=True, slots=True)
class StageRate:
    """What one worker does while it never waits.

    Attributes:
        tokens_per_s: over all rows counted.
        row_s: median seconds of a row.
        jitter: standard deviation of a row's seconds over their mean.
        rows: rows counted.
    """

    tokens_per_s: float
    row_s: float
    jitter: float
    rows: int


class _Endless:
    """One side of an exchange that never makes anybody wait; notes when each row was done."""

    def __init__(self, rows: Sequence[PlannedRow]) -> None:
        self._rows = iter(rows)
        self._tokens = [row.n_tokens for row in rows]
        self._done_s: list[float] = []

    def _next(self) -> PlannedRow | None:
        return next(self._rows, None)

    def _note(self) -> None:
        self._done_s.append(time.perf_counter())

    def rate(self, warm_up_rows: int) -> StageRate:
        """Of the rows behind the warm-up: the time of a row is that from the row before it being done."""
        done_s = self._done_s[warm_up_rows - 1 :]
        times = [after - before for before, after in itertools.pairwise(done_s)]
        mean = statistics.fmean(times)
        scatter = statistics.pstdev(times) / mean if len(times) > 1 else 0.0
        tokens = sum(self._tokens[warm_up_rows : warm_up_rows + len(times)])
        return StageRate(tokens / sum(times), statistics.median(times), scatter, len(times))


class _TargetSide(_Endless):
    def lease(self, _target: int) -> Lease | None:
        row = self._next()
        return None if row is None else Lease(row, 0)

    def put(self, _target: int, _row_id: int, _payload: HiddenStateRow) -> None:
        self._note()

    def producer_done(self, _target: int) -> None:
        """Nobody waits for it."""

    def give_back(self, worker: object, row_id: int, *, blame: bool, reason: str) -> None:
        del blame
        raise RunFailedError(f"row {row_id}: {reason}", origin=str(worker))


class _DrafterSide(_Endless):
    def __init__(self, rows: Sequence[PlannedRow], payload: HiddenStateRow) -> None:
        super().__init__(rows)
        self._payload = payload

    def get(self, _drafter: int) -> RowItem[HiddenStateRow] | StopItem:
        row = self._next()
        return StopItem(End.CLOSED) if row is None else RowItem(row, 0, 0, self._payload)

    def trained(self, _drafter: int, _row_id: int) -> None:
        self._note()


class _NoLog:
    def row_trained(self, report: TrainedRow) -> None:
        """Figures of made-up rows are of no use."""

    def step_skipped(self, drafter: int, what: str) -> None:
        """Nor are skipped steps: random states may give any gradient."""


class _NoMeetings:
    def hold(self, meeting: Meeting) -> None:
        raise AssertionError(f"no meeting was called: {meeting}")

    def take_over(self, meeting: Meeting) -> None:
        raise AssertionError(f"no meeting was called: {meeting}")


def measure_target(
    capture: Capture, dataset: TokenDataset, planned: Sequence[PlannedRow], *, device: str, rows: int
) -> StageRate:
    """Captures `rows` rows of the plan (again from its start if it is shorter), and before them a warm-up.

    Raises:
        RunFailedError: a row could not be captured.
    """
    side = _TargetSide(_repeated(planned, rows + WARM_UP_ROWS))
    loop = TargetForwardLoop(
        0, cast(Any, side), dataset, capture, _clock("target-0"), FailureBudget(0), device=device, hold_on_host=False
    )
    loop.run()
    return side.rate(WARM_UP_ROWS)


def measure_drafter(plan: RunPlan, worker: DrafterWorker, *, rows: int) -> StageRate:
    """Trains `rows` steps on made-up states of the plan's first row, and before them a warm-up; optimizer included."""
    device = worker.replica.optimizer.device
    payload = made_up_row(plan.spec, plan.dataset, plan.rows[0], device, teacher=plan.config.objective.needs_teacher)
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # the loop reads the row on a stream of its own
    side = _DrafterSide(_repeated(plan.rows[:1], rows + WARM_UP_ROWS), payload)
    loop = DrafterTrainLoop(
        0,
        cast(Any, side),
        worker.step,
        worker.replica,
        LearningRate(plan.config.optimizer, len(plan.rows)),
        meetings=_NoMeetings(),
        log=_NoLog(),
        clock=_clock("drafter-0"),
        accumulate_rows=plan.config.optimizer.accumulate_rows,
        prefetch_rows=plan.config.pipeline.prefetch_rows,
    )
    loop.run()
    return side.rate(WARM_UP_ROWS)


def made_up_row(
    spec: DrafterSpec, dataset: TokenDataset, planned: PlannedRow, device: torch.device, *, teacher: bool
) -> HiddenStateRow:
    """A planned row with random states in place of captured ones: normal, because zeros draw less power."""
    samples = [dataset.sample(i) for i in planned.samples]
    lengths = tuple(len(s.input_ids) for s in samples)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    generator = torch.Generator(device).manual_seed(0)

    def states(width: int) -> torch.Tensor:
        return torch.randn(sum(lengths), width, generator=generator, device=device, dtype=dtype)

    return HiddenStateRow(
        row_id=planned.row_id,
        epoch=planned.epoch,
        sample_ids=tuple(s.sample_id for s in samples),
        lengths=lengths,
        input_ids_T=torch.cat([torch.from_numpy(s.input_ids).long() for s in samples]).to(device),
        loss_mask_T=torch.cat([torch.from_numpy(s.loss_mask) for s in samples]).to(device),
        document_ids_T=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).int().to(device),
        position_ids_T=torch.cat([torch.arange(n) for n in lengths]).to(device),
        taps_TF=states(len(spec.taps) * spec.hidden_size),
        final_hidden_TH=states(spec.hidden_size) if teacher else None,
        final_hidden_norm="post",
        tap_layer_ids=spec.taps,
    )


def _repeated(rows: Sequence[PlannedRow], count: int) -> list[PlannedRow]:
    return [rows[i % len(rows)] for i in range(count)]


def _clock(name: str) -> WorkerClock:
    return WorkerClock(name, "other", time.monotonic)
