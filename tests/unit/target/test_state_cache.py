"""States kept from epoch to epoch: by what a sample holds, and never bad ones."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from draftline.target.cache import CachedCapture, StateCache


class Captures:
    """Gives the tokens themselves as states; counts its calls. The first may be spoilt."""

    def __init__(self, *, spoil_first: bool = False) -> None:
        self.calls, self._spoil = 0, spoil_first
        self.target = SimpleNamespace(device="cpu")

    def capture(self, planned: Any, samples: Sequence[Any]) -> Any:
        self.calls += 1
        taps = torch.cat([torch.from_numpy(s.input_ids).float()[:, None] for s in samples])
        if self._spoil and self.calls == 1:
            taps[0] = float("nan")
        return self.assemble(planned, samples, taps, None)

    def assemble(self, planned: Any, samples: Sequence[Any], taps_TF: torch.Tensor, final_TH: Any) -> Any:
        lengths = tuple(len(s.input_ids) for s in samples)
        return SimpleNamespace(taps_TF=taps_TF, final_hidden_TH=final_TH, lengths=lengths)


def sample(name: str, *ids: int) -> Any:
    return SimpleNamespace(sample_id=name, input_ids=np.array(ids, dtype=np.int32))


def test_two_samples_with_one_id_and_other_tokens_do_not_share_states() -> None:
    captures = Captures()
    cached = CachedCapture(captures, StateCache(1 << 20))  # type: ignore[arg-type]
    for ids in ((1, 2, 3), (4, 5, 6), (7, 8)):
        row = cached.capture(None, [sample("same", *ids)])  # type: ignore[arg-type]
        assert row.taps_TF.flatten().tolist() == list(ids)
    assert captures.calls == 3
    assert cached.capture(None, [sample("same", 4, 5, 6)]).taps_TF.flatten().tolist() == [4, 5, 6]  # type: ignore[arg-type]
    assert captures.calls == 3


def test_states_that_are_not_finite_are_not_kept() -> None:
    captures = Captures(spoil_first=True)
    cached = CachedCapture(captures, StateCache(1 << 20))  # type: ignore[arg-type]
    wanted = [sample("a", 1, 2)]
    assert not bool(cached.capture(None, wanted).taps_TF.isfinite().all())  # type: ignore[arg-type]
    assert cached.capture(None, wanted).taps_TF.flatten().tolist() == [1, 2]  # type: ignore[arg-type]
    assert captures.calls == 2
