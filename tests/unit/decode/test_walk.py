"""Rounds walked along captured answers are the rounds that real decoding takes, whatever ends the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch

from decoding_kit import NoisyDrafter, greedy_text, random_prompt, tiny_spec, tiny_target
from dflash2_kit import DFLASH2, awake
from draftline.config.drafter_spec import Dflash2Spec, DrafterSpec
from draftline.config.schema import NoDecay, ObjectiveConfig, ValidationConfig
from draftline.decode.budget import FixedBudget
from draftline.decode.chain import BoundDrafter, chain_generate
from draftline.decode.generation import Generation
from draftline.decode.plain import plain_generate
from draftline.decode.tree_generate import tree_generate
from draftline.decode.tree_replay import tree_replay
from draftline.decode.walk import Answer, WalkSums, answers_of, walk_answers
from draftline.drafter.drafts import SlotDrafts
from draftline.drafter.model import Drafter
from draftline.drafter.step import DrafterStep
from draftline.pipeline.validation import Validator, choose_answers, tree_metric
from draftline.pipeline.workers import borrow
from draftline.records import HiddenStateRow, PlannedRow
from draftline.target.capture import TargetCapture
from draftline.target.load import LoadedTarget

BUDGETS = (3, 16)
LIMIT = 24
KINDS = {
    "full": tiny_spec(block_size=6),
    "sliding": tiny_spec(block_size=5, layer_types=("sliding_attention", "full_attention"), sliding_window=7),
    "dflash2": tiny_spec(block_size=6, dflash2=Dflash2Spec(**DFLASH2)),
}


@dataclass(frozen=True)
class Text:
    """A sample: a prompt, then what the target wrote."""

    sample_id: str
    input_ids: np.ndarray
    loss_mask: np.ndarray


@cache
def target() -> LoadedTarget:
    return tiny_target()


@cache
def texts(stops: frozenset[int]) -> list[tuple[list[int], list[int]]]:
    """Prompts of several lengths with the target's greedy answers."""
    prompts = [random_prompt(seed, length) for seed, length in enumerate((1, 9, 4))]
    known = {"max_new_tokens": LIMIT, "stop_token_ids": stops}
    return [(prompt, plain_generate(target(), prompt, **known).output_ids) for prompt in prompts]


def captured(spec: DrafterSpec, pairs: Sequence[tuple[list[int], list[int]]]) -> HiddenStateRow:
    samples = [
        Text(f"s{i}", np.array([*prompt, *output]), np.arange(len(prompt) + len(output)) >= len(prompt))
        for i, (prompt, output) in enumerate(pairs)
    ]
    n_tokens = sum(len(sample.input_ids) for sample in samples)
    planned = PlannedRow(0, 0, tuple(range(len(samples))), n_tokens, sum(int(s.loss_mask.sum()) for s in samples))
    return TargetCapture(target(), spec.taps, want_final=False).capture(planned, samples)


def make_step(drafter: Drafter, *, static_shapes: bool | None = None) -> DrafterStep:
    embedding, head, _ = borrow(drafter.spec, target(), torch.device("cpu"), torch.float32)
    objective = ObjectiveConfig(anchors=40, decay=NoDecay(), head_chunk_positions=64)
    return DrafterStep(
        drafter,
        embedding,
        head,
        objective,
        row_tokens=256,
        seed=0,
        static_shapes=static_shapes,
        trees=tree_metric(ValidationConfig(tree_budgets=BUDGETS)),
    )


def a_stop_token() -> int:
    """A token that ends some of the answers, well before the limit, and leaves others to the limit."""
    answers = [answer for _, answer in texts(frozenset())]
    for token in range(13):
        places = [answer.index(token) if token in answer else None for answer in answers]
        stopped = [place for place in places if place is not None]
        if None in places and stopped and min(stopped) >= 4 and max(stopped) < LIMIT - 6:
            return token
    raise AssertionError(answers)


@cache
def trained(kind: str, with_stops: bool) -> tuple[Drafter, frozenset[int], HiddenStateRow]:
    """A drafter that learned a little of the answers in a row, so that its rounds have all lengths."""
    stops = frozenset({a_stop_token()} if with_stops else ())
    row = captured(KINDS[kind], texts(stops))
    drafter = awake(Drafter(KINDS[kind]), size=0.1)
    step, optimizer = make_step(drafter), torch.optim.AdamW(drafter.parameters(), lr=3e-3)
    for _ in range(25):
        optimizer.zero_grad()
        step.forward_backward(row)
        optimizer.step()
    return drafter, stops, row


def sums(generations: Sequence[Generation]) -> tuple[int, int, int, int]:
    """(rounds, tokens, clipped rounds, tokens of clipped rounds)."""
    rounds = [pair for g in generations for pair in zip(g.acceptance_lengths, g.clipped, strict=True)]
    clipped = [n for n, is_clipped in rounds if is_clipped]
    return len(rounds), sum(n for n, _ in rounds), len(clipped), sum(clipped)


def of_method(walk: WalkSums, method: int) -> tuple[int, int, int, int]:
    return walk.rounds[method], walk.tokens[method], walk.clipped_rounds[method], walk.clipped_tokens[method]


@pytest.mark.parametrize(("kind", "with_stops"), [("full", True), ("sliding", False), ("dflash2", True)])
def test_walked_rounds_are_those_of_real_decoding(kind: str, with_stops: bool) -> None:
    drafter, stops, row = trained(kind, with_stops)
    bound = BoundDrafter(drafter, target())
    prompts = [prompt for prompt, _ in texts(stops)]
    # With stop tokens the limit is far: an answer that stops is taken as one without a limit.
    known = {"max_new_tokens": LIMIT, "stop_token_ids": stops}
    answers = answers_of(row, stops)
    walk = walk_answers(make_step(drafter), row, answers)
    chain = [chain_generate(target(), bound, prompt, **known) for prompt in prompts]
    assert {g.stopped for g in chain} == ({True, False} if with_stops else {False})
    assert of_method(walk, 0) == sums(chain)
    for method, budget in enumerate(BUDGETS, start=1):
        trees = [tree_generate(target(), bound, prompt, budget=FixedBudget(budget), **known) for prompt in prompts]
        assert of_method(walk, method) == sums(trees)
    lengths = walk.acceptance_lengths()
    assert None not in lengths and 1.2 < lengths[0] <= lengths[2]


def test_walked_trees_are_those_of_the_replay() -> None:
    """The replay is the reference for targets that cannot verify trees."""
    drafter, stops, row = trained("full", True)
    walk = walk_answers(make_step(drafter), row, answers_of(row, stops))
    for method, budget in enumerate(BUDGETS, start=1):
        replayed = [
            tree_replay(
                target(),
                BoundDrafter(drafter, target()),
                prompt,
                answer,
                budget=FixedBudget(budget),
                max_new_tokens=LIMIT,
                stop_token_ids=stops,
            )
            for prompt, answer in texts(stops)
        ]
        assert of_method(walk, method) == sums(replayed)


@pytest.mark.parametrize("seed", range(30))
def test_a_replay_is_real_tree_decoding_in_every_count_also_where_a_stop_token_ends_a_block(seed: int) -> None:
    model, prompt = tiny_target(seed, num_hidden_layers=1), random_prompt(seed, 6)
    text = greedy_text(model, prompt, 40)
    drafter = NoisyDrafter(text, 13, 6, seed=seed, strength=5.0)
    stops = {text[6 + 8 + seed % 9]} if seed % 3 else set()
    known = {"budget": FixedBudget(40), "max_new_tokens": 25, "stop_token_ids": stops}
    real = tree_generate(model, drafter, prompt, **known)
    replayed = tree_replay(model, drafter, prompt, real.output_ids, **known)
    assert replace(real, prefill_s=0.0, decode_s=0.0) == replayed
    assert sum(real.accepted_by_position) <= len(real.output_ids) - 1


def test_walks_do_not_depend_on_padding_packing_or_how_many_blocks_go_at_once() -> None:
    drafter, stops, row = trained("full", True)
    answers = answers_of(row, stops)
    expected = walk_answers(make_step(drafter), row, answers)
    assert walk_answers(make_step(drafter, static_shapes=True), row, answers) == expected
    alone = [captured(drafter.spec, [(prompt, answer)]) for prompt, answer in texts(stops)]
    total = WalkSums.zeros(1 + len(BUDGETS))
    for one in alone:
        total = total + walk_answers(make_step(drafter), one, answers_of(one, stops))
    assert total == expected


def test_the_validator_adds_up_rows_and_walks_only_the_first_samples() -> None:
    drafter, stops, row = trained("full", True)
    step = make_step(drafter)
    both = Validator([row, row], ValidationConfig(tree_budgets=BUDGETS, walk_samples=5), stops).score(step)
    one = Validator([row], ValidationConfig(tree_budgets=BUDGETS), stops).score(step)
    assert one.acceptance_lengths() == pytest.approx(both.acceptance_lengths())
    assert list(one.acceptance_lengths()) == list(one.walked_lengths()) == ["chain", "tree@3", "tree@16"]
    assert one.walk == walk_answers(step, row, answers_of(row, stops)[:4])
    assert both.walk == walk_answers(step, row, answers_of(row, stops)) + walk_answers(
        step, row, answers_of(row, stops)[:2]
    )
    off = Validator([row], ValidationConfig(walk_samples=0), stops).score(step)
    assert off.walk is None and off.walked_lengths() == {}


def text_row(mask: list[int], lengths: tuple[int, ...], ids: list[int]) -> HiddenStateRow:
    nothing = torch.zeros(len(mask), 0)
    return HiddenStateRow(
        row_id=0,
        epoch=0,
        sample_ids=tuple(f"s{i}" for i in range(len(lengths))),
        lengths=lengths,
        input_ids_T=torch.tensor(ids),
        loss_mask_T=torch.tensor(mask, dtype=torch.bool),
        document_ids_T=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).int(),
        position_ids_T=torch.cat([torch.arange(n) for n in lengths]),
        taps_TF=nothing,
        final_hidden_TH=None,
        final_hidden_norm="post",
        tap_layer_ids=(),
    )


def test_answers_are_the_runs_of_written_tokens_up_to_their_stop_token() -> None:
    """Two turns, one that goes on behind its stop token, one that a limit cut, and one too short for a round."""
    mask = [0, 1, 1, 1, 0, 1, 1, 1, 1, 0, 1, 1, 0, 1]
    ids = [5, 5, 5, 2, 5, 5, 5, 2, 7, 5, 5, 5, 5, 5]
    row = text_row(mask, (9, 5), ids)
    assert answers_of(row, {2}) == [
        Answer(0, 1, 4, limited=False),
        Answer(0, 5, 8, limited=False),
        Answer(9, 10, 12, limited=True),
    ]
    assert [len(answers) for answers in choose_answers([row, row], 3, {2})] == [3, 2]
    assert choose_answers([row], 0, {2}) == [[]]


class ScriptedStep:
    """Drafts the next `right` tokens of the text rightly, wherever it is asked, and remembers where that was."""

    block_size, trees = 4, None

    def __init__(self, right: int) -> None:
        self.right = right
        self.whole: list[int] = []
        self.short: list[tuple[int, int]] = []

    def blocks_at_once(self, row: HiddenStateRow) -> int:
        return 2

    def _tokens(self, row: HiddenStateRow, anchor: int, drafts: int) -> list[int]:
        text = [*row.input_ids_T.tolist(), *[99] * drafts]
        return [text[anchor + k] if k <= self.right else -5 for k in range(1, drafts + 1)]

    def draft_blocks(self, row: HiddenStateRow, anchors: Sequence[int]) -> SlotDrafts:
        assert len(anchors) <= 2
        self.whole += anchors
        tokens = torch.tensor([self._tokens(row, anchor, 3) for anchor in anchors])[..., None]
        return SlotDrafts(torch.zeros(tokens.shape), tokens)

    def draft_short(
        self, row: HiddenStateRow, first: int, anchor: int, slots: int, cache: object
    ) -> tuple[SlotDrafts, object]:
        self.short.append((anchor, slots))
        tokens = torch.tensor([self._tokens(row, anchor, slots - 1)])[..., None]
        return SlotDrafts(torch.zeros(tokens.shape), tokens), cache


@pytest.mark.parametrize(
    ("right", "stop_id", "short", "rounds", "clipped"),
    [
        # Eight tokens: the prefill's and seven more. Wrong always: a round a token; two drafts: three tokens a round.
        (0, 98, [(6, 3), (7, 2)], 7, 2),
        (2, 98, [(7, 2)], 3, 1),
        (3, 98, [], 2, 1),
        (0, 50, [], 7, 0),
        (3, 50, [], 2, 1),
        (2, 50, [], 3, 1),
    ],
)
def test_blocks_are_shortened_before_a_length_limit_and_not_before_a_stop_token(
    right: int, stop_id: int, short: list[tuple[int, int]], rounds: int, clipped: int
) -> None:
    row = text_row([0, *[1] * 8], (9,), [*range(8), 50])
    step = ScriptedStep(right)
    walk = walk_answers(step, row, answers_of(row, {stop_id}))  # type: ignore[arg-type]
    assert of_method(walk, 0)[:3] == (rounds, 7, clipped)
    assert step.short == short


def test_a_row_without_answers_walks_no_round() -> None:
    drafter, _, row = trained("full", True)
    walk = walk_answers(make_step(drafter), row, [])
    assert walk == WalkSums.zeros(3) and walk.acceptance_lengths() == (None, None, None)
