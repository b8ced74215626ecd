"""Greedy text of every method is the target's own, token for token; acceptance lengths are exact for known drafters."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from decoding_kit import NoisyDrafter, OracleDrafter, greedy_text, random_prompt, tiny_target
from draftline.decode.budget import AdaptiveBudget, CostCurve, FixedBudget
from draftline.decode.chain import chain_generate
from draftline.decode.generation import Generation
from draftline.decode.lookup import lookup_generate
from draftline.decode.plain import plain_generate
from draftline.decode.tree_generate import tree_generate
from draftline.errors import UserError


def test_plain_decoding_gives_the_text_of_the_models_own_generate() -> None:
    target, prompt = tiny_target(1), random_prompt(1, 7)
    own = target.model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)[0].tolist()
    generation = plain_generate(target, prompt, max_new_tokens=20, stop_token_ids=())
    assert [*prompt, *generation.output_ids] == own
    assert generation.acceptance_lengths == [1] * 19
    assert generation.target_forwards == 19


def cut_behind(output_ids: list[int], stops: set[int]) -> list[int]:
    """Up to the first stop token, which stays."""
    end = next((index + 1 for index, token in enumerate(output_ids) if token in stops), len(output_ids))
    return output_ids[:end]


@pytest.mark.parametrize("pair", range(240))
def test_chain_tree_and_lookup_give_the_plain_text_for_random_pairs(pair: int) -> None:
    """Blocks of 2 to 16, trees of 1 to 200. Every sixth text is long, 40 tokens in many rounds."""
    draw = random.Random(pair)
    vocab_size, is_long = draw.randint(11, 32), pair % 6 == 0
    target = tiny_target(pair, vocab_size=vocab_size, hidden_size=draw.choice([16, 32]), num_hidden_layers=1 + pair % 2)
    prompt = random_prompt(pair, draw.randint(1, 12), vocab_size)
    limit, block_size, budget = 40 if is_long else draw.randint(2, 8), draw.randint(2, 16), draw.randint(1, 200)
    text = greedy_text(target, prompt, limit)
    drafter = NoisyDrafter(text, vocab_size, block_size, seed=pair, strength=1.5 if is_long else 3.0)
    stops = {draw.randrange(vocab_size)} if not is_long and draw.random() < 0.5 else set()
    expected = cut_behind(text[len(prompt) :], stops)
    options = {"max_new_tokens": limit, "stop_token_ids": stops}
    found = {
        "chain": chain_generate(target, drafter, prompt, **options),
        "tree": tree_generate(target, drafter, prompt, budget=FixedBudget(budget), **options),
    }
    if pair % 3 == 1:
        found["lookup"] = lookup_generate(target, prompt, block_size=block_size, **options)
    if pair % 3 == 2:
        adaptive = AdaptiveBudget(CostCurve(1.0, ((0, 1.0), (40, 2.0))))
        found["adaptive"] = tree_generate(target, drafter, prompt, budget=adaptive, **options)
    for method, generation in found.items():
        assert generation.output_ids == expected, method
        assert sum(generation.acceptance_lengths) + 1 == len(generation.output_ids), method
        assert generation.target_forwards == len(generation.acceptance_lengths), method
        assert generation.stopped == (expected[-1] in stops), method
    if is_long:
        assert found["chain"].target_forwards >= 5


@pytest.mark.parametrize("seed", range(4))
def test_plain_decoding_stops_behind_its_first_stop_token(seed: int) -> None:
    target, prompt = tiny_target(seed), random_prompt(seed, 5)
    output_ids = greedy_text(target, prompt, 12)[5:]
    stops = {output_ids[4], output_ids[7]}
    found = plain_generate(target, prompt, max_new_tokens=12, stop_token_ids=stops)
    assert found.output_ids == cut_behind(output_ids, stops)
    assert found.stopped


@pytest.mark.parametrize("window", [2, 3, 6])
@pytest.mark.parametrize("sliding_layers", [(0, 2), (0, 1, 2, 3)])
def test_sliding_windows_are_rolled_back_and_compacted_right(window: int, sliding_layers: tuple[int, ...]) -> None:
    kinds = ["sliding_attention" if i in sliding_layers else "full_attention" for i in range(4)]
    for seed in range(2):
        target = tiny_target(seed, layer_types=kinds, sliding_window=window, use_sliding_window=True)
        prompt = random_prompt(seed, 1 + 8 * seed)
        text = greedy_text(target, prompt, 40)
        with torch.inference_mode():
            full_NV = target.model(torch.tensor([text])).logits[0]
        assert full_NV.argmax(-1).tolist()[len(prompt) - 1 : -1] == text[len(prompt) :]
        drafter = NoisyDrafter(text, 13, 8, seed=seed)
        options = {"max_new_tokens": 30, "stop_token_ids": ()}
        assert [*prompt, *chain_generate(target, drafter, prompt, **options).output_ids] == text[: len(prompt) + 30]
        tree = tree_generate(target, drafter, prompt, budget=FixedBudget(24), **options)
        assert [*prompt, *tree.output_ids] == text[: len(prompt) + 30]


def _oracle_run(is_right: Callable[[int, int], bool], rounds: int, block_size: int) -> list[Generation]:
    target, prompt = tiny_target(3), random_prompt(3, 5)
    limit = 1 + rounds * block_size
    text = greedy_text(target, prompt, limit + block_size)
    drafter = OracleDrafter(text, 13, block_size, is_right)
    options = {"max_new_tokens": limit, "stop_token_ids": ()}
    return [
        chain_generate(target, drafter, prompt, **options),
        tree_generate(target, drafter, prompt, budget=FixedBudget(block_size - 1), **options),
    ]


@pytest.mark.parametrize("block_size", [2, 5, 16])
def test_a_perfect_drafter_gets_exactly_the_block_size(block_size: int) -> None:
    chain, _ = _oracle_run(lambda _round, _slot: True, rounds=3, block_size=block_size)
    assert chain.acceptance_lengths == [block_size] * 3
    assert not any(chain.clipped)
    assert chain.accepted_by_position == chain.drafted_by_position == [3] * (block_size - 1)


def test_a_drafter_that_is_always_wrong_gets_exactly_one() -> None:
    chain, _ = _oracle_run(lambda _round, _slot: False, rounds=3, block_size=8)
    assert set(chain.acceptance_lengths) == {1}
    assert chain.accepted_by_position == [0] * 7


@pytest.mark.parametrize("right_slots", [1, 3, 6])
def test_a_drafter_right_up_to_slot_j_gets_exactly_j_plus_one(right_slots: int) -> None:
    chain, _ = _oracle_run(lambda _round, slot: slot <= right_slots, rounds=right_slots + 1, block_size=8)
    full = [length for length, clipped in zip(chain.acceptance_lengths, chain.clipped, strict=True) if not clipped]
    assert full
    assert set(full) == {right_slots + 1}


def test_a_tree_that_holds_the_perfect_chain_gets_exactly_the_block_size() -> None:
    # A spike of 9 over 0 in 13 tokens leaves the chain of best tokens the likeliest prefixes by far.
    _, tree = _oracle_run(lambda _round, _slot: True, rounds=3, block_size=8)
    assert tree.acceptance_lengths == [8] * 3
    assert tree.tree_nodes == [7] * 3


def test_the_drafter_sees_each_context_position_once_and_nothing_beyond_the_newest_token() -> None:
    target, prompt = tiny_target(4), random_prompt(4, 6)
    text = greedy_text(target, prompt, 60)
    drafter = OracleDrafter(text, 13, 6, lambda index, slot: slot <= index % 5)
    chain_generate(target, drafter, prompt, max_new_tokens=40, stop_token_ids=())
    seen = 0
    for start, _slots, new_rows in drafter.calls:
        seen += new_rows
        assert seen == start
    tree_generate(target, drafter, prompt, budget=FixedBudget(9), max_new_tokens=40, stop_token_ids=())
    seen = 0
    for start, _slots, new_rows in drafter.calls:
        seen += new_rows
        assert seen == start


def test_tap_features_handed_to_the_drafter_are_those_of_the_text_in_order() -> None:
    target, prompt = tiny_target(5), random_prompt(5, 6)
    text = greedy_text(target, prompt, 60)

    class Spy(NoisyDrafter):
        rows: list[torch.Tensor]

        def start(self) -> None:
            super().start()
            self.rows = []

        def block_logits(self, context) -> torch.Tensor:  # type: ignore[no-untyped-def]
            self.rows.append(context.new_taps_SF)
            return super().block_logits(context)

    with torch.inference_mode():
        hidden = target.model(torch.tensor([text]), output_hidden_states=True).hidden_states
    straight_TF = torch.cat([hidden[1][0], hidden[3][0]], dim=-1)
    for budget in (None, FixedBudget(20)):
        spy = Spy(text, 13, 7, seed=5, taps=(0, 2))
        options = {"max_new_tokens": 40, "stop_token_ids": ()}
        if budget is None:
            chain_generate(target, spy, prompt, **options)
        else:
            tree_generate(target, spy, prompt, budget=budget, **options)
        seen_TF = torch.cat(spy.rows)
        torch.testing.assert_close(seen_TF, straight_TF[: seen_TF.shape[0]], atol=1e-4, rtol=1e-4)


def test_a_tree_that_holds_the_chain_never_accepts_less_on_the_same_rounds() -> None:
    more = 0
    for seed in range(6):
        target, prompt = tiny_target(seed, num_hidden_layers=1), random_prompt(seed, 5)
        text = greedy_text(target, prompt, 30)
        for start in range(len(prompt), len(prompt) + 10):
            drafter = NoisyDrafter(text, 13, 4, seed=seed)
            options = {"max_new_tokens": 5, "stop_token_ids": ()}
            chain = chain_generate(target, drafter, text[:start], **options).acceptance_lengths[0]
            # Room for most prefixes of three tokens, so the tree holds the chain.
            tree = tree_generate(target, drafter, text[:start], budget=FixedBudget(300), **options)
            assert tree.acceptance_lengths[0] >= chain
            more += tree.acceptance_lengths[0] > chain
    assert more > 10


def test_a_tree_one_token_wide_is_the_chain() -> None:
    """With one node a round, the tree drafts the chain's first token and commits what a block of two does."""
    target, prompt = tiny_target(6), random_prompt(6, 5)
    text = greedy_text(target, prompt, 60)
    drafter, pair = NoisyDrafter(text, 13, 6, seed=6), NoisyDrafter(text, 13, 2, seed=6)
    tree = tree_generate(target, drafter, prompt, budget=FixedBudget(1), max_new_tokens=30, stop_token_ids=())
    assert tree.output_ids == text[len(prompt) : len(prompt) + 30]
    assert max(tree.acceptance_lengths) <= 2
    pair_lengths = chain_generate(target, pair, prompt, max_new_tokens=30, stop_token_ids=()).acceptance_lengths
    assert sum(pair_lengths) == sum(tree.acceptance_lengths)


# --- faults that people hit (evaluation and decoding) ---


def test_e27_a_target_that_emits_the_mask_id_keeps_its_text_and_does_not_stop() -> None:
    """Text is cut by index, never by the value of the mask id; nothing unwritten is scanned for stop tokens."""
    target, prompt = tiny_target(7), random_prompt(7, 5)
    text = greedy_text(target, prompt, 40)
    emitted = set(text[len(prompt) :])
    never = next(token for token in range(13) if token not in emitted)
    for block_size in (2, 9):
        drafter = NoisyDrafter(text, 13, block_size, seed=7)
        got = chain_generate(target, drafter, prompt, max_new_tokens=30, stop_token_ids={never})
        assert got.output_ids == text[len(prompt) : len(prompt) + 30]
        assert not got.stopped


def test_a_stop_token_inside_a_block_ends_the_text_behind_it() -> None:
    target, prompt = tiny_target(8), random_prompt(8, 5)
    text = greedy_text(target, prompt, 40)
    new = text[len(prompt) :]
    stop = next(token for index, token in enumerate(new) if index >= 2 and token not in new[:index])
    at = new.index(stop)
    drafter = OracleDrafter(text, 13, 8, lambda _round, _slot: True)
    for budget in (None, FixedBudget(7)):
        options = {"max_new_tokens": 30, "stop_token_ids": {stop}}
        if budget is None:
            got = chain_generate(target, drafter, prompt, **options)
        else:
            got = tree_generate(target, drafter, prompt, budget=budget, **options)
        assert got.output_ids == new[: at + 1]
        assert got.stopped
        assert got.clipped_last_round == (at % 8 != 0)


def test_a_stop_token_from_the_prefill_ends_at_once() -> None:
    target, prompt = tiny_target(9), random_prompt(9, 5)
    first = greedy_text(target, prompt, 1)[-1]
    drafter = OracleDrafter([*prompt, *[0] * 40], 13, 8, lambda _round, _slot: True)
    got = chain_generate(target, drafter, prompt, max_new_tokens=30, stop_token_ids={first})
    assert got.output_ids == [first]
    assert got.acceptance_lengths == []
    assert got.acceptance_length == 1.0


def test_e30_edge_budgets_and_limits_have_defined_results() -> None:
    target, prompt = tiny_target(10), random_prompt(10, 5)
    text = greedy_text(target, prompt, 40)
    drafter = NoisyDrafter(text, 13, 5, seed=10)
    for limit in (1, 2, 3):  # limit 2 leaves a tree of depth 1, limit 1 none
        for budget in (1, 5000):  # more nodes than prefixes exist, more than the vocabulary a depth
            got = tree_generate(
                target, drafter, prompt, budget=FixedBudget(budget), max_new_tokens=limit, stop_token_ids=()
            )
            assert got.output_ids == text[len(prompt) : len(prompt) + limit]
    with pytest.raises(UserError, match="budget of 0"):
        FixedBudget(0)


def test_prompts_beyond_the_context_and_empty_prompts_are_refused() -> None:
    target = tiny_target(11, max_position_embeddings=20)
    with pytest.raises(UserError, match="18 tokens and 5 new ones exceed the target's context of 20"):
        plain_generate(target, random_prompt(1, 18), max_new_tokens=5)
    with pytest.raises(UserError, match="no token"):
        plain_generate(target, [], max_new_tokens=5)
    with pytest.raises(UserError, match="max_new_tokens is 0"):
        plain_generate(target, [1], max_new_tokens=0)


def test_lookup_copies_the_continuation_of_the_longest_most_recent_match() -> None:
    from draftline.decode.lookup import NgramIndex

    index = NgramIndex(3)
    assert index.continuation([1, 2, 3], 4) == []
    # (2, 3) occurs twice; the later one is followed by 9 4, and the text behind it is repeated from there.
    assert NgramIndex(3).continuation([2, 3, 8, 2, 3, 9, 4, 2, 3], 3) == [9, 4, 2]
    # The three-token match wins over the more recent two-token one.
    assert NgramIndex(3).continuation([5, 2, 3, 7, 2, 3, 9, 5, 2, 3], 1) == [7]
    # A repetition goes on past the end of the text.
    assert NgramIndex(3).continuation([6, 1, 2, 1, 2], 5) == [1, 2, 1, 2, 1]


def test_lookup_index_grows_with_the_text_without_being_rebuilt() -> None:
    from draftline.decode.lookup import NgramIndex

    draw = random.Random(0)
    text = [draw.randrange(3) for _ in range(60)]
    grown = NgramIndex(3)
    for end in range(1, len(text) + 1):
        assert grown.continuation(text[:end], 5) == NgramIndex(3).continuation(text[:end], 5)
