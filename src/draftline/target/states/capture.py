"""Rows out of states on disk: read only, or read and added to. Both stand where a TargetCapture stands."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from draftline.data.shards import Sample
from draftline.errors import RunFailedError
from draftline.records import HiddenStateRow, PlannedRow
from draftline.target.cache import SampleStates
from draftline.target.capture import TargetCapture, assemble_row
from draftline.target.door import check_row
from draftline.target.remote.capture import RemoteCapture
from draftline.target.states.store import StatesReader, StatesWriter


class OfflineCapture:
    """Reads the states of a row instead of computing them. One may serve several threads.

    Args:
        reader: of the data set's states.
        device: where rows are put.
        want_final: also hand out the last hidden state, which must have been kept.
    """

    def __init__(self, reader: StatesReader, device: torch.device, *, want_final: bool) -> None:
        self._reader, self._device, self._want_final = reader, device, want_final

    def capture(self, planned: PlannedRow, samples: Sequence[Sample]) -> HiddenStateRow:
        """The row, laid out as a TargetCapture would, on the device.

        Raises:
            RunFailedError: a sample is not there, or not as long as the data says.
        """
        if sum(len(s.input_ids) for s in samples) != planned.n_tokens:
            raise RunFailedError(f"row {planned.row_id} is planned otherwise than its samples", origin="offline states")
        states = [
            self._reader.read(i, len(sample.input_ids)) for i, sample in zip(planned.samples, samples, strict=True)
        ]
        return row_of_states(planned, samples, states, self._reader.taps, self._device, want_final=self._want_final)


class StoringCapture:
    """Reads rows whose samples are all on disk; lets the target run for the others, and keeps what it gives.

    Args:
        capture: of the target, for one thread.
        reader: states that were there at the start; None: none.
        writer: shared by the run's targets.
    """

    def __init__(
        self, capture: TargetCapture | RemoteCapture, reader: StatesReader | None, writer: StatesWriter
    ) -> None:
        self._capture, self._reader, self._writer = capture, reader, writer

    def capture(self, planned: PlannedRow, samples: Sequence[Sample]) -> HiddenStateRow:
        """The row, from the disk if all its samples are there, else from the target."""
        reader = self._reader
        if reader is not None and reader.has(planned.samples):
            states = [reader.read(i, len(sample.input_ids)) for i, sample in zip(planned.samples, samples, strict=True)]
            device, want_final = self._capture.target.device, self._capture.want_final
            return row_of_states(planned, samples, states, self._capture.taps, device, want_final=want_final)
        row = self._capture.capture(planned, samples)
        check_row(row, planned)  # what is refused must be captured anew, not kept
        keep_row(self._writer, planned, row)
        return row


def row_of_states(
    planned: PlannedRow,
    samples: Sequence[Sample],
    states: Sequence[SampleStates],
    taps: tuple[int, ...],
    device: torch.device,
    *,
    want_final: bool,
) -> HiddenStateRow:
    """Puts the states of a row's samples together."""
    taps_TF = _joined([s.taps_TF for s in states], device)
    finals = [s.final_TH for s in states if s.final_TH is not None] if want_final else []
    return assemble_row(planned, samples, taps_TF, _joined(finals, device) if finals else None, taps=taps)


def keep_row(writer: StatesWriter, planned: PlannedRow, row: HiddenStateRow) -> None:
    """Adds a captured row's states, sample by sample. Waits for the device: what is kept must be finished."""
    taps = row.taps_TF.split(row.lengths)
    finals = [None] * len(taps) if row.final_hidden_TH is None else row.final_hidden_TH.split(row.lengths)
    for index, sample_taps, final in zip(planned.samples, taps, finals, strict=True):
        writer.add(index, SampleStates(sample_taps, final))


def _joined(parts: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    joined = torch.cat(list(parts))
    return joined.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else joined.to(device)
