"""States captured once and kept on the host, so that later epochs need no target forward.

Samples of a row never see each other, so a sample's states do not depend on the row that it was packed in; they are
kept by sample and put together for whatever row comes next. What no longer fits the byte bound is captured again each
time; nothing is thrown out once it is in, because an epoch meets every sample once and eviction would gain nothing.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftline.data.shards import Sample
from draftline.records import HiddenStateRow, PlannedRow
from draftline.target.capture import TargetCapture
from draftline.target.door import check_row
from draftline.target.remote.capture import RemoteCapture


@dataclass(frozen=True, slots=True)
class SampleStates:
    """States of one sample, on the host."""

    taps_TF: Tensor
    final_TH: Tensor | None

    def n_bytes(self) -> int:
        """Bytes of its tensors."""
        tensors = [self.taps_TF] if self.final_TH is None else [self.taps_TF, self.final_TH]
        return sum(t.numel() * t.element_size() for t in tensors)


class StateCache:
    """Sample states by key, bounded in bytes. Thread-safe; shared by all targets of a run.

    Args:
        max_bytes: what may be kept.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._lock = max_bytes, threading.Lock()
        self._states: dict[str, SampleStates] = {}
        self.n_bytes = 0

    def get(self, keys: Sequence[str]) -> list[SampleStates] | None:
        """States of all these samples, or None if one is missing."""
        with self._lock:
            found = [self._states.get(name) for name in keys]
        return [f for f in found if f is not None] if all(f is not None for f in found) else None

    def offer(self, key: str, states: SampleStates) -> None:
        """Keeps a copy if there is room for it."""
        size = states.n_bytes()
        with self._lock:
            if key in self._states or self.n_bytes + size > self._max_bytes:
                return
            self.n_bytes += size
            self._states[key] = states

    def __len__(self) -> int:
        with self._lock:
            return len(self._states)


class CachedCapture:
    """A capture that asks the cache first. Same contract as TargetCapture.

    Args:
        capture: the target, run for rows that are not wholly cached.
        cache: shared by the run's targets.
    """

    def __init__(self, capture: TargetCapture | RemoteCapture, cache: StateCache) -> None:
        self._capture, self._cache = capture, cache

    def capture(self, planned: PlannedRow, samples: Sequence[Sample]) -> HiddenStateRow:
        """States of a row, from the cache if all its samples are there, else from the target."""
        keys = [_key(sample) for sample in samples]
        known = self._cache.get(keys)
        if known is None:
            row = self._capture.capture(planned, samples)
            check_row(row, planned)  # what is refused must be captured anew, not kept
            self._keep(keys, row)
            return row
        device = self._capture.target.device
        finals = [states.final_TH for states in known if states.final_TH is not None]
        return self._capture.assemble(
            planned,
            samples,
            torch.cat([states.taps_TF for states in known]).to(device),
            torch.cat(finals).to(device) if finals else None,
        )

    def _keep(self, keys: Sequence[str], row: HiddenStateRow) -> None:
        taps = row.taps_TF.split(row.lengths)
        finals = [None] * len(taps) if row.final_hidden_TH is None else row.final_hidden_TH.split(row.lengths)
        for name, sample_taps, final in zip(keys, taps, finals, strict=True):
            # Copies: a slice would keep the whole row's memory alive.
            kept = None if final is None else final.to("cpu", copy=True)
            self._cache.offer(name, SampleStates(sample_taps.to("cpu", copy=True), kept))


def _key(sample: Sample) -> str:
    """The sample's tokens too: training and validation data may use one id for different samples."""
    return f"{sample.sample_id} {hashlib.sha256(sample.input_ids.tobytes()).hexdigest()}"
