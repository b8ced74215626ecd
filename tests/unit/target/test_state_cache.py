"""States kept from epoch to epoch: by what a sample holds, and never bad ones."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from draftline.data.shards import Sample
from draftline.errors import RunFailedError
from draftline.records import HiddenStateRow, PlannedRow
from draftline.target.cache import CachedCapture, StateCache
from draftline.target.capture import assemble_row
from draftline.target.states.capture import StoringCapture


class Captures:
    """Gives the tokens themselves as states; counts its calls. The first may be spoilt."""

    def __init__(self, *, spoil_first: bool = False) -> None:
        self.calls, self._spoil = 0, spoil_first
        self.target = SimpleNamespace(device="cpu")

    def capture(self, planned: PlannedRow, samples: Sequence[Sample]) -> HiddenStateRow:
        self.calls += 1
        taps = torch.cat([torch.from_numpy(s.input_ids).float()[:, None] for s in samples])
        if self._spoil and self.calls == 1:
            taps[0] = float("nan")
        return self.assemble(planned, samples, taps, None)

    def assemble(self, planned: PlannedRow, samples: Sequence[Sample], taps_TF: Any, final_TH: Any) -> HiddenStateRow:
        return assemble_row(planned, samples, taps_TF, final_TH, taps=(0,))


def states_of(cached: CachedCapture, name: str, *ids: int) -> list[float]:
    sample = Sample(name, np.array(ids, dtype=np.int32), np.ones(len(ids), dtype=np.bool_))
    planned = PlannedRow(0, 0, (0,), len(ids), len(ids))
    return cached.capture(planned, [sample]).taps_TF.flatten().tolist()


def test_two_samples_with_one_id_and_other_tokens_do_not_share_states() -> None:
    captures = Captures()
    cached = CachedCapture(captures, StateCache(1 << 20))  # type: ignore[arg-type]
    for ids in ((1, 2, 3), (4, 5, 6), (7, 8)):
        assert states_of(cached, "same", *ids) == list(ids)
    assert captures.calls == 3
    assert states_of(cached, "same", 4, 5, 6) == [4, 5, 6]
    assert captures.calls == 3


def test_a_row_that_the_queues_door_refuses_is_not_kept() -> None:
    captures = Captures(spoil_first=True)
    cached = CachedCapture(captures, StateCache(1 << 20))  # type: ignore[arg-type]
    with pytest.raises(RunFailedError, match="layer 0 are not finite"):
        states_of(cached, "a", 1, 2)
    assert states_of(cached, "a", 1, 2) == [1, 2]
    assert captures.calls == 2


def test_nor_does_it_reach_the_disk() -> None:
    kept: list[int] = []
    writer = SimpleNamespace(add=lambda index, states: kept.append(index))
    storing = StoringCapture(Captures(spoil_first=True), None, writer)  # type: ignore[arg-type]
    sample = Sample("a", np.array([1, 2], dtype=np.int32), np.ones(2, dtype=np.bool_))
    with pytest.raises(RunFailedError, match="layer 0 are not finite"):
        storing.capture(PlannedRow(0, 0, (5,), 2, 2), [sample])
    assert kept == []
    storing.capture(PlannedRow(0, 0, (5,), 2, 2), [sample])
    assert kept == [5]
