"""Targets whose rotary frequencies depend on a forward's length: lossless on either side, never across."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from decoding_kit import NoisyDrafter, greedy_text, random_prompt, tiny_target
from draftline.decode.batch import BatchedTarget, RowSession, decode_together
from draftline.decode.budget import FixedBudget
from draftline.decode.chain import chain_generate
from draftline.decode.plain import plain_generate, plain_steps
from draftline.decode.static_call import StaticCompiler
from draftline.decode.static_target import StaticTarget
from draftline.decode.steps import Steps, Task
from draftline.decode.tree_generate import tree_generate
from draftline.errors import UserError
from draftline.evaluate.prompts import EvalPrompt
from draftline.evaluate.runner import evaluate
from draftline.target.load import LoadedTarget

EDGE = 40


def longrope_target(seed: int, edge: int = EDGE, **changes: Any) -> LoadedTarget:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [8.0] * 4,
        "original_max_position_embeddings": edge,
        "factor": 8.0,
    }
    return tiny_target(seed, rope_parameters=rope, max_position_embeddings=200, **changes)


def both_sides(seed: int) -> list[tuple[list[int], int]]:
    """Prompts and limits: up to the very edge from below, and from the first length above it on."""
    return [(random_prompt(seed, 14), EDGE - 14), (random_prompt(seed, EDGE + 1), 24)]


@pytest.mark.parametrize("seed", range(8))
def test_chain_and_tree_are_the_targets_own_greedy_text_on_either_side_of_the_change(seed: int) -> None:
    target = longrope_target(seed)
    for prompt, limit in both_sides(seed):
        drafter = NoisyDrafter(greedy_text(target, prompt, limit), 13, 9, seed=seed, strength=6.0)
        options: dict[str, Any] = {"max_new_tokens": limit, "stop_token_ids": ()}
        own = target.model.generate(torch.tensor([prompt]), max_new_tokens=limit, do_sample=False)[0].tolist()
        chain = chain_generate(target, drafter, prompt, **options)
        assert [*prompt, *chain.output_ids] == own
        assert chain.acceptance_length > 1.2
        assert [*prompt, *tree_generate(target, drafter, prompt, budget=FixedBudget(16), **options).output_ids] == own


def test_a_text_across_the_change_is_refused_by_every_method_and_before_an_evaluation_decodes() -> None:
    target, prompt = longrope_target(0), random_prompt(0, 14)
    drafter = NoisyDrafter(prompt * 20, 13, 9, seed=0)
    message = rf"14 tokens and {EDGE - 13} new ones cross the length of {EDGE} tokens"
    limit = EDGE - 13
    with pytest.raises(UserError, match=message):
        plain_generate(target, prompt, max_new_tokens=limit)
    with pytest.raises(UserError, match=message):
        chain_generate(target, drafter, prompt, max_new_tokens=limit)
    with pytest.raises(UserError, match=message):
        tree_generate(target, drafter, prompt, budget=FixedBudget(4), max_new_tokens=limit)
    suite = {"s": [EvalPrompt("short", (1, 2)), EvalPrompt("p", tuple(prompt))]}
    with pytest.raises(UserError, match=message):
        evaluate(target, {}, suite, methods=["plain"], max_new_tokens=limit)


def test_the_refusal_is_needed_because_blocks_across_the_change_are_not_lossless() -> None:
    """Control: with an edge that the decoder is not told of, the same pairs differ from plain decoding."""
    differ = 0
    for seed in range(8):
        target, prompt = longrope_target(seed, edge=24), random_prompt(seed, 14)
        object.__setattr__(target.facts, "rope_parameters", {"rope_type": "default"})
        text = greedy_text(target, prompt, 30)
        drafter = NoisyDrafter(text, 13, 9, seed=seed, strength=6.0)
        differ += (
            chain_generate(target, drafter, prompt, max_new_tokens=24, stop_token_ids=()).output_ids != text[14:38]
        )
    assert differ > 1


def test_a_batch_keeps_texts_of_both_sides_in_forwards_of_their_own() -> None:
    for seed in range(4):
        target = longrope_target(seed)
        tasks = [Task(prompt, limit, ()) for prompt, limit in both_sides(seed)]

        def opener(task: Task) -> Any:
            def steps(session: RowSession) -> Steps:
                return plain_steps(session, task)

            return steps

        together = decode_together(BatchedTarget(target, (), 2, 120), [opener(task) for task in tasks])
        for task, found in zip(tasks, together, strict=True):
            alone = plain_generate(target, task.prompt_ids, max_new_tokens=task.max_new_tokens, stop_token_ids=())
            assert found.output_ids == alone.output_ids


def test_compiled_rounds_are_refused_where_frequencies_depend_on_the_length() -> None:
    with pytest.raises(UserError, match=r"rotary frequencies by the text's length.*without --compile"):
        StaticTarget(longrope_target(1), 100, StaticCompiler("eager", torch.device("cpu")))


def test_the_length_of_the_change_is_read_from_every_form_of_the_configuration() -> None:
    assert longrope_target(0).facts.rope_changes_at == EDGE
    assert tiny_target(0).facts.rope_changes_at is None
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    target = tiny_target(0, rope_parameters=dynamic, max_position_embeddings=64)
    assert target.facts.rope_changes_at == 64
    # `dynamic` changes with every token behind the context, which no text may pass.
    with pytest.raises(UserError, match="exceed the target's context of 64"):
        plain_generate(target, random_prompt(1, 70), max_new_tokens=5)
