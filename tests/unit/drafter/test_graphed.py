"""A recorded drafter gives the plain step's numbers, whatever becomes of gradients and weights between replays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from draftline.config.schema import ObjectiveConfig, OptimizerConfig
from draftline.drafter.graphed import Function, GraphedFunction
from draftline.drafter.model import Drafter
from draftline.drafter.optimizer import MasterOptimizer
from draftline.drafter.step import DrafterStep
from draftline.records import HiddenStateRow
from objective_kit import random_embedding, random_head, random_row, tiny_spec

SPEC = tiny_spec()
RECIPE = ObjectiveConfig(anchors=40, kl_weight=0.15, cap_weight=0.1)
ROW_TOKENS = 96


class ReusingRecording:
    """Computes anew and, as a graph does, writes everything into the same memory each time."""

    def __init__(
        self, function: Function, parameters: Sequence[Tensor], inputs: Sequence[Tensor], shared: dict[str, Any]
    ) -> None:
        self._function, self._parameters = function, parameters
        result = function(*inputs)
        self._memory = torch.empty_like(result).detach()
        found = torch.autograd.grad(result, parameters, torch.zeros_like(result), allow_unused=True)
        self.gradients = [None if g is None else torch.empty_like(g) for g in found]
        shared["made"] = shared.get("made", 0) + 1

    def forward(self, inputs: Sequence[Tensor]) -> Tensor:
        with torch.enable_grad():
            self._result = self._function(*inputs)
        return self._memory.copy_(self._result.detach())

    def backward(self, gradient: Tensor) -> None:
        found = torch.autograd.grad(self._result, self._parameters, gradient, allow_unused=True)
        for own, new in zip(self.gradients, found, strict=True):
            if own is not None and new is not None:
                own.copy_(new)


def make_step(dtype: torch.dtype, *, recorded: bool) -> DrafterStep:
    step = DrafterStep(
        Drafter(SPEC).to(dtype),
        random_embedding(SPEC, dtype),
        random_head(SPEC, dtype),
        RECIPE,
        teacher=random_head(SPEC, dtype),
        row_tokens=ROW_TOKENS,
        seed=7,
        static_shapes=True,
    )
    if recorded:
        step._graphed = GraphedFunction(step._drafted, list(step._drafter.parameters()), ReusingRecording)
    return step


def rows(dtype: torch.dtype) -> list[HiddenStateRow]:
    return [
        random_row(lengths, SPEC, seed=seed, dtype=dtype) for seed, lengths in enumerate([(50, 30), (96,), (9, 80)])
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_several_rows_of_one_optimizer_step_give_the_weights_of_the_plain_step(dtype: torch.dtype) -> None:
    found = []
    for recorded in (False, True):
        step = make_step(dtype, recorded=recorded)
        optimizer = MasterOptimizer(step._drafter, OptimizerConfig(learning_rate=1e-2))
        for _ in range(3):  # weights change in place between replays
            for row in rows(dtype):
                stats = step.forward_backward(row)
                optimizer.absorb(stats.denominator)
            optimizer.step(1e-2)
        found.append(torch.cat([master.detach().flatten() for master in optimizer.masters]))
    assert torch.equal(*found)


def test_gradients_that_nobody_took_add_up_over_rows() -> None:
    found = []
    for recorded in (False, True):
        step = make_step(torch.bfloat16, recorded=recorded)
        for row in rows(torch.bfloat16):
            step.forward_backward(row)
        found.append(torch.cat([p.grad.flatten() for p in step._drafter.parameters() if p.grad is not None]))
    assert torch.equal(*found)


def test_rows_of_one_padded_length_share_a_recording_and_validation_needs_none() -> None:
    step = make_step(torch.float32, recorded=True)
    graphed = step._graphed
    assert graphed is not None
    for row in rows(torch.float32):
        step.forward_backward(row)
        step.evaluate(row)
    assert graphed._shared == {"made": 1}
