"""TargetForwardLoop: one thread per target device.

consumes     leases of planned rows (RowExchange.lease), samples of the data set
produces     HiddenStateRow, put into the one shared queue (never blocks)
waits for    a lease: admission in rows and bytes; woken when a drafter finishes a row, by a row that comes back,
             by the end of the run
ends         when lease() says that nothing is left; then it reports producer_done() once
failing      a row that raises goes back and is tried by whoever leases it next; a sticky device error, or more
             failures than the budget allows, fails the run by name
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from draftline.data.shards import Sample, TokenDataset
from draftline.errors import RunFailedError
from draftline.monitor.status import Wait
from draftline.pipeline.budget import FailureBudget
from draftline.pipeline.core import target_worker
from draftline.pipeline.threads import RowExchange
from draftline.records import HiddenStateRow, PlannedRow
from draftline.target.door import check_row


class Capture(Protocol):
    """What the loop needs of a target: samples in, hidden states out."""

    def capture(self, planned: PlannedRow, samples: Sequence[Sample]) -> HiddenStateRow:
        """Hidden states of a planned row, whose samples come in its order."""


class Clock(Protocol):
    """What the loops need of the monitor."""

    def span(self, activity: Any, what: str, **facts: Any) -> AbstractContextManager[Any]:
        """Times what stands inside it."""

    def done(self, *, rows: int, tokens: int) -> None:
        """Counts rows and tokens that were finished."""


class TargetForwardLoop:
    """Captures leased rows until none is left.

    Args:
        worker: number of this target.
        exchange: the shared queue.
        dataset: where samples are read from.
        capture: the frozen target on its device.
        clock: records working and waiting.
        budget: failures allowed in the whole run, shared by all workers.
        device: device of the target; on CUDA the loop runs on a stream of its own.
        hold_on_host: bring rows to pinned host memory before they are put.
    """

    def __init__(
        self,
        worker: int,
        exchange: RowExchange[HiddenStateRow],
        dataset: TokenDataset,
        capture: Capture,
        clock: Clock,
        budget: FailureBudget,
        *,
        device: str = "cpu",
        hold_on_host: bool = False,
    ) -> None:
        self.worker, self.name = worker, f"target-{worker}"
        self._exchange, self._dataset, self._capture = exchange, dataset, capture
        self._clock, self._budget = clock, budget
        self._device, self._hold_on_host = torch.device(device), hold_on_host

    def run(self) -> None:
        """The loop. Returns at the coordinated stop; raises RunFailedError if the run failed."""
        with self._own_stream():
            while True:
                with self._clock.span("waiting", Wait.SLOT):
                    lease = self._exchange.lease(self.worker)
                if lease is None:
                    break
                self._serve(lease.row)
        self._exchange.producer_done(self.worker)

    def _serve(self, planned: PlannedRow) -> None:
        try:
            with self._clock.span("working", f"row {planned.row_id}", tokens=planned.n_tokens):
                row = self._captured(planned)
                self._clock.done(rows=1, tokens=planned.n_tokens)
        except (RunFailedError, RuntimeError, ValueError, OSError, MemoryError) as error:
            self._budget.spend(self.name, error, f"row {planned.row_id}")
            self._exchange.give_back(target_worker(self.worker), planned.row_id, blame=True, reason=str(error))
            return
        self._exchange.put(self.worker, planned.row_id, row)

    def _captured(self, planned: PlannedRow) -> HiddenStateRow:
        with self._clock.span("waiting", Wait.SAMPLES):
            samples = [self._dataset.sample(i) for i in planned.samples]
        row = self._capture.capture(planned, samples)
        if self._hold_on_host and self._device.type == "cuda":
            row = map_tensors(row, lambda t: t.to("cpu", non_blocking=True))
        if self._device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
            # Waiting here costs one launch gap a row and means that a device error is blamed on its own row.
            event.synchronize()
        check_row(row, planned)
        return row

    def _own_stream(self) -> AbstractContextManager[Any]:
        if self._device.type != "cuda":
            return nullcontext()
        return torch.cuda.stream(torch.cuda.Stream(self._device))


def map_tensors(row: HiddenStateRow, change: Callable[[torch.Tensor], torch.Tensor]) -> HiddenStateRow:
    """The row with `change`, which keeps shapes, applied to every tensor."""
    return HiddenStateRow(
        row_id=row.row_id,
        epoch=row.epoch,
        sample_ids=row.sample_ids,
        lengths=row.lengths,
        input_ids_T=change(row.input_ids_T),
        loss_mask_T=change(row.loss_mask_T),
        document_ids_T=change(row.document_ids_T),
        position_ids_T=change(row.position_ids_T),
        taps_TF=change(row.taps_TF),
        final_hidden_TH=None if row.final_hidden_TH is None else change(row.final_hidden_TH),
        final_hidden_norm=row.final_hidden_norm,
        tap_layer_ids=row.tap_layer_ids,
        ready=row.ready,
    )
