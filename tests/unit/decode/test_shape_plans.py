"""While texts grow, no attention kernel is chosen that is planned anew for each shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from decoding_kit import NoisyDrafter, greedy_text, random_prompt, tiny_target
from draftline.data.answering import answer_batch
from draftline.data.label_check import own_labels
from draftline.data.sampling import Prompt, Sampling
from draftline.data.shards import Sample
from draftline.decode.batch import BatchedTarget, decode_together
from draftline.decode.budget import FixedBudget
from draftline.decode.chain import chain_generate
from draftline.decode.cost import measure_cost_curve
from draftline.decode.plain import plain_steps
from draftline.decode.steps import Task
from draftline.decode.tree_replay import tree_replay
from draftline.evaluate.rounds import tree_rounds
from draftline.target.load import LoadedTarget

PROMPT = random_prompt(3, 12)
Deed = Callable[[LoadedTarget, Any, list[int]], object]


def answered(target: LoadedTarget, _drafter: Any, _text: list[int]) -> object:
    greedy = Sampling(temperature=0.0, top_p=1.0, top_k=0, seed=0)
    return answer_batch(target, [Prompt("one", PROMPT)], max_new_tokens=4, sampling=greedy)


def together(target: LoadedTarget, _drafter: Any, _text: list[int]) -> object:
    return decode_together(BatchedTarget(target, (), 1, 60), [lambda session: plain_steps(session, Task(PROMPT, 4))])


def labels(target: LoadedTarget, _drafter: Any, text: list[int]) -> object:
    return own_labels(target, Sample("one", np.array(text, np.int32), np.ones(len(text), np.bool_)))


def against_trees(target: LoadedTarget, drafter: Any, _text: list[int]) -> object:
    chain = chain_generate(target, drafter, PROMPT, max_new_tokens=6, stop_token_ids=())
    return tree_rounds(target, "d", drafter, [(PROMPT, chain)], {"tree": FixedBudget(4)}, 6)


DEEDS: dict[str, Deed] = {
    "alone": lambda target, drafter, _: chain_generate(target, drafter, PROMPT, max_new_tokens=6),
    "together": together,
    "cost": lambda target, drafter, _: measure_cost_curve(target, drafter, PROMPT, budgets=(0, 2), repeats=1),
    "replay": lambda target, drafter, text: tree_replay(
        target, drafter, PROMPT, text[len(PROMPT) :], budget=FixedBudget(4), max_new_tokens=6
    ),
    "trees against the chain": against_trees,
    "answers": answered,
    "labels": labels,
}


@contextmanager
def allowed_in_forwards(target: LoadedTarget) -> Iterator[list[bool]]:
    """Whether cuDNN's kernels are allowed, at each forward of the target."""
    seen: list[bool] = []
    hook = target.decoder.register_forward_pre_hook(lambda *_: seen.append(torch.backends.cuda.cudnn_sdp_enabled()))
    try:
        yield seen
    finally:
        hook.remove()


@pytest.mark.parametrize("name", DEEDS)
def test_no_kernel_is_planned_for_the_shapes_of_a_growing_text(name: str) -> None:
    target = tiny_target(1)
    text = greedy_text(target, PROMPT, 6)
    drafter = NoisyDrafter(text, 13, 4, seed=5)
    with allowed_in_forwards(target) as seen:
        DEEDS[name](target, drafter, text)
    assert seen and not any(seen)
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_an_error_leaves_the_choice_of_kernels_as_it_was() -> None:
    target = tiny_target(1)
    with pytest.raises(AttributeError):
        chain_generate(target, object(), PROMPT, max_new_tokens=6)  # type: ignore[arg-type]
    assert torch.backends.cuda.cudnn_sdp_enabled()
