"""Prompts decoded together give the texts and acceptance lengths of decoding one at a time."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from decoding_kit import NoisyDrafter, greedy_text, random_prompt, tiny_spec, tiny_target
from draftline.config.schema import TargetConfig
from draftline.decode import batch
from draftline.decode.batch import BatchedTarget, RowSession, decode_together, split_by_width
from draftline.decode.budget import FixedBudget
from draftline.decode.chain import BoundDrafter, ChainSource, chain_generate
from draftline.decode.draft_batch import draft_together
from draftline.decode.draft_rows import DraftRows
from draftline.decode.generation import Generation
from draftline.decode.linear import linear_steps
from draftline.decode.lookup import LookupSource, lookup_generate
from draftline.decode.plain import plain_generate, plain_steps
from draftline.decode.sampling import Sampling
from draftline.decode.steps import Draft, RoundContext, Steps, Task
from draftline.decode.tree_generate import tree_generate, tree_steps
from draftline.drafter.model import Drafter
from draftline.errors import UserError
from draftline.target.load import LoadedTarget, load_target

Opener = Callable[[RowSession], Steps]


def together(target: LoadedTarget, taps: tuple[int, ...], openers: list[Opener], rows: int) -> list[Generation]:
    return decode_together(BatchedTarget(target, taps, rows, columns=120), openers)


def assert_same(found: list[Generation], alone: list[Generation]) -> None:
    for one, other in zip(found, alone, strict=True):
        for name in ("output_ids", "acceptance_lengths", "clipped", "target_forwards", "tree_nodes", "stopped"):
            assert getattr(one, name) == getattr(other, name), name
        assert one.accepted_by_position == other.accepted_by_position


def chain_opener(drafter: Any, task: Task) -> Opener:
    return lambda session: linear_steps(session, ChainSource(drafter), task)


def tree_opener(drafter: Any, task: Task, budget: int) -> Opener:
    return lambda session: tree_steps(session, drafter, task, FixedBudget(budget))


@pytest.mark.parametrize("seed", range(8))
def test_a_batch_decodes_what_one_at_a_time_does_for_random_pairs(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "_WORTH_A_FORWARD", 1 + 40 * (seed % 2))  # rows of unequal width apart, or not
    draw = random.Random(seed)
    target, block_size = tiny_target(seed, num_hidden_layers=1 + seed % 2), draw.randint(2, 9)
    prompts = [random_prompt(100 * seed + i, draw.randint(1, 20)) for i in range(7)]
    stops = {draw.randrange(13)} if seed % 3 else set()
    limit, budget, rows = draw.randint(2, 20), draw.choice([1, 6, 30]), draw.choice([2, 3, 7])
    drafters = [NoisyDrafter(greedy_text(target, p, limit), 13, block_size, seed=seed, strength=3.0) for p in prompts]
    tasks = [Task(prompt, limit, stops) for prompt in prompts]
    options = {"max_new_tokens": limit, "stop_token_ids": stops}
    pairs = list(zip(drafters, tasks, strict=True))
    chains = [chain_generate(target, d, p, **options) for d, p in zip(drafters, prompts, strict=True)]
    assert_same(together(target, (0,), [chain_opener(d, t) for d, t in pairs], rows), chains)
    trees = [
        tree_generate(target, d, p, budget=FixedBudget(budget), **options)
        for d, p in zip(drafters, prompts, strict=True)
    ]
    assert_same(together(target, (0,), [tree_opener(d, t, budget) for d, t in pairs], rows), trees)
    plains = [plain_generate(target, p, **options) for p in prompts]
    openers: list[Opener] = [lambda session, t=task: plain_steps(session, t) for task in tasks]  # type: ignore[misc]
    assert_same(together(target, (), openers, rows), plains)
    assert [g.output_ids for g in chains] == [g.output_ids for g in plains]


def test_narrow_and_wide_rows_are_apart_where_that_saves_padding_and_each_row_is_in_one_group() -> None:
    sizes = [1, 16, 1, 1, 16, 1, 1, 2, 1, 1]
    assert split_by_width(range(10), sizes) == [[0, 2, 3, 5, 6, 7, 8, 9], [1, 4]]
    assert split_by_width([0, 1], sizes) == [[0, 1]]  # 15 tokens less are not worth a forward
    assert split_by_width([1], sizes) == [[1]]
    assert split_by_width([4, 1], [9, 40, 9, 9, 40]) == [[4, 1]]


def test_lookup_and_sampled_drafts_are_the_same_in_a_batch() -> None:
    target, sampling = tiny_target(3), Sampling(temperature=1.0, seed=5, proposals="sampled")
    prompts = [random_prompt(i, 3 + 2 * i) for i in range(4)]
    tasks = [Task(prompt, 15, ()) for prompt in prompts]
    openers: list[Opener] = [
        lambda session, t=task: linear_steps(session, LookupSource(6, 3), t)  # type: ignore[misc]
        for task in tasks
    ]
    options = {"max_new_tokens": 15, "stop_token_ids": ()}
    assert_same(
        together(target, (), openers, 4), [lookup_generate(target, p, block_size=6, **options) for p in prompts]
    )
    drafters = [NoisyDrafter(greedy_text(target, p, 15), 13, 5, seed=1) for p in prompts]
    sampled = [Task(prompt, 15, (), sampling) for prompt in prompts]
    openers = [chain_opener(d, t) for d, t in zip(drafters, sampled, strict=True)]
    alone = [chain_generate(target, d, p, sampling=sampling, **options) for d, p in zip(drafters, prompts, strict=True)]
    assert_same(together(target, (0,), openers, 2), alone)


@pytest.mark.parametrize("kind", ["llama_tied", "gemma2", "mistral_sliding", "gemma3_multimodal"])
def test_families_with_windows_caps_and_wrappers_are_batched_right(
    make_tiny_target: Callable[..., Path], kind: str
) -> None:
    target = load_target(TargetConfig(model=str(make_tiny_target(kind))), "cpu")
    prompts = [random_prompt(i, 3 + 8 * i, 400) for i in range(3)]
    drafters = [
        NoisyDrafter(greedy_text(target, p, 26), target.vocab_size, 6, seed=2, strength=4.0, taps=(0, 2))
        for p in prompts
    ]
    tasks = [Task(prompt, 22, ()) for prompt in prompts]
    found = together(target, (0, 2), [tree_opener(d, t, 14) for d, t in zip(drafters, tasks, strict=True)], rows=3)
    alone = [
        tree_generate(target, d, p, budget=FixedBudget(14), max_new_tokens=22, stop_token_ids=())
        for d, p in zip(drafters, prompts, strict=True)
    ]
    assert_same(found, alone)
    assert max(max(g.acceptance_lengths) for g in found) > 1


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 5},
        {
            "layer_types": ("sliding_attention", "full_attention"),
            "sliding_window": 5,
            "in_block_attention": "causal",
            "window_origin": "anchor",
        },
    ],
)
def test_blocks_of_several_prompts_in_one_forward_have_the_logits_of_single_ones(changes: dict[str, Any]) -> None:
    target = tiny_target(1)
    drafter = Drafter(tiny_spec(**changes)).eval()
    generator = torch.Generator().manual_seed(0)
    singles, joint = ([BoundDrafter(drafter, target) for _ in range(3)] for _ in range(2))
    for one in (*singles, *joint):
        one.start()
    lengths, contexts_of_joint = [2, 7, 12], DraftRows()
    for _ in range(3):
        taps = [
            torch.randn(n if not one.cache.length else 2, 32, generator=generator)
            for n, one in zip(lengths, singles, strict=True)
        ]  # type: ignore[union-attr]
        contexts = [
            RoundContext([1] * (one.cache.length + t.shape[0] + 1), t, 2 + i)  # type: ignore[union-attr]
            for i, (one, t) in enumerate(zip(singles, taps, strict=True))
        ]
        alone = [one.block_logits(context) for one, context in zip(singles, contexts, strict=True)]
        requests = [Draft(one, context) for one, context in zip(joint, contexts, strict=True)]
        found = draft_together(requests, contexts_of_joint)
        for a, b in zip(alone, found, strict=True):
            torch.testing.assert_close(b, a, atol=1e-5, rtol=1e-5)


def test_a_trained_kind_of_drafter_gives_the_same_rounds_in_a_batch() -> None:
    target = tiny_target(2)
    bound = BoundDrafter(Drafter(tiny_spec()).eval(), target)
    prompts = [random_prompt(i, 2 + 3 * i) for i in range(5)]
    options = {"max_new_tokens": 18, "stop_token_ids": ()}
    openers = [tree_opener(bound.fork(), Task(p, 18, ()), 9) for p in prompts]
    alone = [tree_generate(target, bound, p, budget=FixedBudget(9), **options) for p in prompts]
    assert_same(together(target, bound.taps, openers, rows=2), alone)
    openers = [chain_opener(bound.fork(), Task(p, 18, ())) for p in prompts]
    assert_same(
        together(target, bound.taps, openers, rows=2), [chain_generate(target, bound, p, **options) for p in prompts]
    )


class Computing(TorchDispatchMode):
    """Counts operations that a device would be given; views of what is there cost it nothing."""

    VIEWS = ("select", "slice", "split", "unsqueeze", "squeeze", "view", "transpose", "resolve", "unbind", "detach")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, _types: Any, arguments: Any = (), options: Any = None) -> Any:
        self.count += not any(word in str(function) for word in (*self.VIEWS, "expand", "reshape", "permute", "lift"))
        return function(*arguments, **(options or {}))


@pytest.mark.parametrize("kind", ["chain", "lookup", "plain"])
def test_a_round_computes_as_often_for_many_prompts_as_for_few(kind: str) -> None:
    target = tiny_target(2)
    bound = BoundDrafter(Drafter(tiny_spec()).eval(), target)
    prompt = random_prompt(1, 6)

    def opener(session: RowSession) -> Steps:
        task = Task(prompt, 12, ())
        if kind == "plain":
            return plain_steps(session, task)
        return linear_steps(session, ChainSource(bound.fork()) if kind == "chain" else LookupSource(6, 3), task)

    counts = []
    for prompts in (3, 9):
        with Computing() as mode:
            together(target, bound.taps if kind == "chain" else (), [opener] * prompts, rows=prompts)
        counts.append(mode.count)
    # The prompts' first tokens are picked one by one.
    assert counts[1] - counts[0] <= 6 * 3


def test_recurrent_targets_and_batches_above_the_memory_are_refused(make_tiny_target: Callable[..., Path]) -> None:
    recurrent = load_target(TargetConfig(model=str(make_tiny_target("qwen3_next"))), "cpu")
    with pytest.raises(UserError, match=r"recurrent layers.*one prompt at a time"):
        BatchedTarget(recurrent, (), 2, 50)
    with pytest.raises(UserError, match=r"need .* GiB.*a batch of \d+ fits"):
        BatchedTarget(tiny_target(0), (), 10**7, 10**6)
