"""DFlash2 drafters whose further parts really do something, for unit and interop tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from draftline.config.dflash2 import SelectorObjective
from draftline.config.drafter_spec import DrafterSpec
from draftline.config.schema import NoDecay, ObjectiveConfig, ValidationConfig
from draftline.decode.plain import plain_generate
from draftline.drafter.convolution import is_added
from draftline.drafter.model import Drafter
from draftline.drafter.step import DrafterStep
from draftline.pipeline.validation import tree_metric
from draftline.pipeline.workers import borrow
from draftline.records import HiddenStateRow, PlannedRow
from draftline.target.capture import TargetCapture
from draftline.target.load import LoadedTarget

DFLASH2: dict[str, int] = {"conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 6, "selector_top_k": 5}


@torch.no_grad()
def awake(drafter: Drafter, *, seed: int = 5, size: float = 0.4) -> Drafter:
    """Noise on all that DFlash2 adds: at the start it has no effect."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in drafter.named_parameters():
        if is_added(name):
            parameter.add_(size * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))
    return drafter


@dataclass(frozen=True)
class Text:
    """A sample: a prompt, then what the target wrote."""

    sample_id: str
    input_ids: np.ndarray
    loss_mask: np.ndarray


def greedy_row(target: LoadedTarget, spec: DrafterSpec, prompts: Sequence[Sequence[int]], limit: int) -> HiddenStateRow:
    """The captured greedy answers to prompts, one row."""
    samples = []
    for index, prompt in enumerate(prompts):
        output = plain_generate(target, prompt, max_new_tokens=limit, stop_token_ids=()).output_ids
        mask = np.arange(len(prompt) + len(output)) >= len(prompt)
        samples.append(Text(f"s{index}", np.array([*prompt, *output]), mask))
    n_tokens = sum(len(sample.input_ids) for sample in samples)
    planned = PlannedRow(0, 0, tuple(range(len(samples))), n_tokens, sum(int(s.loss_mask.sum()) for s in samples))
    return TargetCapture(target, spec.taps, want_final=False).capture(planned, samples)


def step_on(drafter: Drafter, target: LoadedTarget, budgets: tuple[int, ...] = (), **selector: Any) -> DrafterStep:
    """A step of `drafter` with the target's head, no decay, selector loss as told."""
    embedding, head, _ = borrow(drafter.spec, target, torch.device("cpu"), torch.float32)
    objective = ObjectiveConfig(
        anchors=60, decay=NoDecay(), head_chunk_positions=64, selector=SelectorObjective(**selector)
    )
    trees = tree_metric(ValidationConfig(tree_budgets=budgets))
    return DrafterStep(drafter, embedding, head, objective, row_tokens=256, seed=0, trees=trees)


def trained_a_little(
    spec: DrafterSpec, target: LoadedTarget, row: HiddenStateRow, *, steps: int = 30, drafter: Drafter | None = None
) -> Drafter:
    """A drafter that learned some of a row, so that its rounds have several lengths."""
    drafter = drafter or awake(Drafter(spec), size=0.1)
    step, optimizer = step_on(drafter, target), torch.optim.AdamW(drafter.parameters(), lr=3e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        step.forward_backward(row)
        optimizer.step()
    return drafter.eval()
