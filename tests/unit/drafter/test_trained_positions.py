"""Which tokens of a conversation are learned: the gradient itself is looked at, position by position."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from draftline.config.schema import ExponentialDecay, ObjectiveConfig
from draftline.drafter.model import Drafter
from draftline.drafter.step import DrafterStep
from objective_kit import random_embedding, random_head, random_row, tiny_spec

SPEC = tiny_spec()
CASES = {
    "three of the prompt, three of the answer": ((6,), [0, 0, 0, 1, 1, 1], {4, 5}),
    "two answers": ((12,), [0, 1, 1, 0, 0, 1, 1, 1, 0, 0, 0, 0], {2, 6, 7}),
    "an answer of one token": ((6,), [0, 1, 0, 1, 1, 0], {4}),
    "two conversations in a row": ((6, 5), [0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 0], {3, 4, 5, 9}),
    "one that begins where the other ends": ((4, 4), [0, 0, 1, 1, 1, 1, 0, 0], {3, 5}),
}


@pytest.mark.parametrize("case", CASES)
def test_a1_the_gradient_reaches_exactly_the_tokens_behind_the_first_of_each_answer(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first token of an answer is the target's own when served; all behind it are the drafter's to foresee."""
    lengths, mask, learned = CASES[case]
    row = random_row(lengths, SPEC, dtype=torch.float64)
    row = replace(row, loss_mask_T=torch.tensor(mask).bool())
    drafter, head = Drafter(SPEC).double(), random_head(SPEC, torch.float64)
    objective = ObjectiveConfig(anchors=64, decay=ExponentialDecay(gamma=3.0))
    step = DrafterStep(drafter, random_embedding(SPEC, torch.float64), head, objective, row_tokens=64, seed=1)
    plain, seen = step._hidden, []

    def watched(prepared: Any, taps_TF: torch.Tensor) -> torch.Tensor:
        hidden_QH = plain(prepared, taps_TF)
        hidden_QH.retain_grad()
        seen.append((prepared.blocks, hidden_QH))
        return hidden_QH

    monkeypatch.setattr(step, "_hidden", watched)
    step.forward_backward(row)
    ((blocks, hidden_QH),) = seen
    assert hidden_QH.grad is not None
    position_AB = blocks.anchors_A[:, None] + torch.arange(SPEC.block_size)
    reached_AB = hidden_QH.grad.abs().sum(dim=-1).view_as(position_AB) > 0
    assert set(position_AB[reached_AB].tolist()) == learned
