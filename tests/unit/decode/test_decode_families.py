"""Other families of targets: soft caps, sliding windows, multimodal wrappers, recurrent layers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from decoding_kit import NoisyDrafter, greedy_text, random_prompt
from draftline.config.schema import TargetConfig
from draftline.decode.budget import FixedBudget
from draftline.decode.chain import chain_generate
from draftline.decode.target_session import TargetSession
from draftline.decode.tree_generate import tree_generate
from draftline.decode.tree_replay import tree_replay
from draftline.errors import UserError
from draftline.target.load import LoadedTarget, load_target

VOCAB = 400
FAMILIES = ("qwen3", "llama_tied", "gemma2", "mistral_sliding", "gpt_oss", "gemma3_multimodal")


@pytest.fixture(scope="module")
def load(make_tiny_target: Callable[..., Path]) -> Callable[[str], LoadedTarget]:
    loaded: dict[str, LoadedTarget] = {}

    def get(kind: str) -> LoadedTarget:
        if kind not in loaded:
            loaded[kind] = load_target(TargetConfig(model=str(make_tiny_target(kind))), "cpu")
        return loaded[kind]

    return get


@pytest.mark.parametrize("kind", FAMILIES)
def test_chain_and_tree_give_the_greedy_text_of_each_family(load: Callable[[str], LoadedTarget], kind: str) -> None:
    target = load(kind)
    for seed in range(2):
        prompt = random_prompt(seed, 3 + 9 * seed, VOCAB)
        text = greedy_text(target, prompt, 34)
        drafter = NoisyDrafter(text, target.vocab_size, 6, seed=seed, strength=4.0, taps=(0, 2))
        options = {"max_new_tokens": 30, "stop_token_ids": ()}
        chain = chain_generate(target, drafter, prompt, **options)
        tree = tree_generate(target, drafter, prompt, budget=FixedBudget(20), **options)
        assert [*prompt, *chain.output_ids] == [*prompt, *tree.output_ids] == text[: len(prompt) + 30]
        assert max(chain.acceptance_lengths) > 1
        assert min(chain.acceptance_lengths) < 6


def test_a_recurrent_target_is_rolled_back_exactly_by_replay(load: Callable[[str], LoadedTarget]) -> None:
    target = load("qwen3_next")
    for seed in range(3):
        prompt = random_prompt(seed, 7, VOCAB)
        text = greedy_text(target, prompt, 34)
        drafter = NoisyDrafter(text, target.vocab_size, 6, seed=seed, strength=4.0, taps=(0, 2))
        chain = chain_generate(target, drafter, prompt, max_new_tokens=30, stop_token_ids=())
        assert [*prompt, *chain.output_ids] == text[: len(prompt) + 30]
        rejected = sum(length < 6 for length in chain.acceptance_lengths)
        assert rejected > 3
        # A round that keeps its whole block needs no repair, every other one exactly one.
        assert rejected - 1 <= chain.replay_forwards <= rejected


@torch.inference_mode()
def test_rolled_back_recurrent_states_equal_those_of_a_straight_run(load: Callable[[str], LoadedTarget]) -> None:
    target, ids = load("qwen3_next"), random_prompt(5, 20, VOCAB)
    straight, rolled = TargetSession(target), TargetSession(target)
    straight.prefill(ids[:13])
    rolled.prefill(ids[:9])
    rolled.extend(torch.tensor([*ids[9:13], 7, 7, 7]))
    rolled.commit(4)
    rolled.extend(torch.tensor([3, 4]))
    rolled.commit(0)
    assert straight.length == rolled.length == 13
    following = torch.tensor(ids[13:])
    torch.testing.assert_close(rolled.extend(following)[0], straight.extend(following)[0], atol=1e-4, rtol=1e-4)


def test_a_tree_on_a_recurrent_target_is_refused(load: Callable[[str], LoadedTarget]) -> None:
    target = load("qwen3_next")
    drafter = NoisyDrafter([1] * 40, target.vocab_size, 4, seed=0)
    with pytest.raises(UserError, match="recurrent layers"):
        tree_generate(target, drafter, [1, 2], budget=FixedBudget(4), max_new_tokens=9)


@pytest.mark.parametrize("budget", [1, 5, 40])
def test_the_replayed_tree_counts_the_rounds_of_the_decoded_one(
    load: Callable[[str], LoadedTarget], budget: int
) -> None:
    target = load("qwen3")
    for seed in range(3):
        prompt = random_prompt(seed, 6, VOCAB)
        text = greedy_text(target, prompt, 40)
        drafter = NoisyDrafter(text, target.vocab_size, 6, seed=seed, strength=4.0)
        stops = {text[len(prompt) + 17]} if seed == 2 else set()
        rule, options = FixedBudget(budget), {"max_new_tokens": 31, "stop_token_ids": stops}
        real = tree_generate(target, drafter, prompt, budget=rule, **options)
        replayed = tree_replay(target, drafter, prompt, real.output_ids, budget=rule, **options)
        assert replayed.acceptance_lengths == real.acceptance_lengths
        assert replayed.output_ids == real.output_ids
        assert replayed.tree_nodes == real.tree_nodes
        assert replayed.stopped == real.stopped
