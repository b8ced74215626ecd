"""Intervals, comparisons, equality with near-ties, and prompt sets from files."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from draftline.data.conversations import Tally
from draftline.decode.generation import Generation
from draftline.errors import UserError
from draftline.evaluate.prompts import EvalPrompt, load_prompt_set
from draftline.evaluate.stats import PromptCounts, interval, paired_difference, pooled
from draftline.evaluate.summary import Case, Sample, compare_outputs, summarise

FP32_EPS, BF16_EPS = 2.0**-23, 2.0**-7


def test_pooling_weighs_rounds_and_not_prompts() -> None:
    assert pooled([PromptCounts(10, 2), PromptCounts(10, 10)]) == 20 / 12
    assert pooled([PromptCounts(0, 0)]) is None


def test_intervals_cover_the_true_mean_about_as_often_as_they_say() -> None:
    draw = random.Random(0)
    hits = 0
    for trial in range(200):
        # Each prompt has its own acceptance rate; the pooled truth is 2.5.
        counts = []
        for _ in range(40):
            mean = draw.uniform(1.5, 3.5)
            counts.append(PromptCounts(round(sum(draw.gauss(mean, 1.0) for _ in range(20))), 20))
        found = interval(counts, seed=trial)
        assert found is not None
        hits += found[0] <= 2.5 <= found[1]
    assert 175 <= hits <= 200


def test_intervals_need_two_prompts_and_repeat_with_their_seed() -> None:
    counts = [PromptCounts(n, 10) for n in (12, 20, 31, 18)]
    assert interval(counts[:1], 0) is None
    assert interval([counts[0], PromptCounts(0, 0)], 0) is None
    assert interval(counts, 3) == interval(counts, 3)


def test_pairing_decides_what_unpaired_intervals_cannot() -> None:
    draw = random.Random(1)
    a = [PromptCounts(draw.randint(100, 400), 100) for _ in range(20)]
    b = [PromptCounts(c.tokens + 15 + draw.randint(-3, 3), 100) for c in a]
    left, right = interval(a, 0), interval(b, 0)
    assert left is not None
    assert right is not None
    assert left[1] > right[0]
    found = paired_difference(a, b, 0)
    assert found is not None
    assert found.verdict("old", "new") == "new is better"
    assert found.value == pytest.approx(0.15, abs=0.02)
    backwards = paired_difference(b, a, 0)
    assert backwards is not None
    assert backwards.verdict("old", "new") == "old is better"


def test_an_undecided_comparison_says_how_many_prompts_would_decide() -> None:
    draw = random.Random(2)
    few = [(draw.randint(150, 250), draw.randint(152, 254)) for _ in range(12)]
    a, b = ([PromptCounts(pair[i], 100) for pair in few] for i in (0, 1))
    found = paired_difference(a, b, 0)
    assert found is not None
    assert found.verdict() == "undecided"
    assert found.n_needed is not None
    assert found.n_needed > 12
    same = paired_difference(a, a, 0)
    assert same is not None
    assert (same.value, same.n_needed, same.verdict()) == (0.0, None, "undecided")


def _generation(output_ids: list[int], top2: list[tuple[float, float]] | None = None, **changes: Any) -> Generation:
    values: dict[str, Any] = {
        "output_ids": output_ids,
        "prompt_tokens": 3,
        "acceptance_lengths": [1] * (len(output_ids) - 1),
        "clipped": [False] * (len(output_ids) - 1),
        "target_forwards": len(output_ids) - 1,
        "replay_forwards": 0,
        "drafted_by_position": [],
        "accepted_by_position": [],
        "tree_nodes": [],
        "prefill_s": 0.5,
        "decode_s": 1.0,
        "stopped": False,
        "top2": top2,
        **changes,
    }
    return Generation(**values)


def _sample(output: list[int], plain: list[int], gaps: list[float], best: float = 20.0) -> Sample:
    top2 = [(best, gap) for gap in gaps]
    return Sample("s", EvalPrompt("p", (1, 2, 3)), _generation(output), _generation(plain, top2))


def test_a_difference_counts_only_where_the_two_best_logits_are_apart() -> None:
    plain, other = [5, 6, 7, 8], [5, 6, 9, 9]
    assert compare_outputs(_sample(plain, plain, [1, 1, 1, 1]), FP32_EPS) is None
    near = compare_outputs(_sample(other, plain, [1, 1, 5e-5, 1]), FP32_EPS)
    assert near is not None
    assert near[1] is True
    assert near[0].position == 2
    real = compare_outputs(_sample(other, plain, [1, 1, 2e-4, 1]), FP32_EPS)
    assert real is not None
    assert real[1] is False
    assert (real[0].plain_token, real[0].token) == (7, 9)
    # In bf16 a logit of 20 moves in steps of 1/8.
    rounded = compare_outputs(_sample(other, plain, [1, 1, 0.2, 1]), BF16_EPS)
    assert rounded is not None
    assert rounded[1] is True
    apart = compare_outputs(_sample(other, plain, [1, 1, 0.9, 1]), BF16_EPS)
    assert apart is not None
    assert apart[1] is False


def test_a_text_that_only_ends_earlier_is_a_divergence() -> None:
    found = compare_outputs(_sample([5, 6], [5, 6, 7], [1, 1, 1e-9]), FP32_EPS)
    assert found is not None
    assert found[1] is False


def test_speed_up_compares_seconds_per_committed_token() -> None:
    plain = _generation([1, 2, 3, 4, 5], [(9.0, 1.0)] * 5, decode_s=4.0)
    fast = _generation([1, 2, 3, 4, 5], acceptance_lengths=[2, 2], clipped=[False, True], target_forwards=2)
    sample = Sample("s", EvalPrompt("p", (1, 2, 3)), fast, plain)
    result = summarise(Case("chain", "d", False, FP32_EPS, 0), [sample])
    assert result.speedup == 4.0
    assert result.tokens_per_s == 4.0
    assert result.forwards_per_token == 0.5
    assert result.acceptance_length == result.acceptance_length_unclipped == 2.0


def test_prompt_sets_drop_the_last_answer_and_keep_labels(tmp_path: Path, tiny_tokenizer: Any) -> None:
    user, answer = {"role": "user", "content": "How are you?"}, {"role": "assistant", "content": "I am fine."}
    rows = [
        {"id": "a", "category": "talk", "language": "en", "messages": [user, answer]},
        {"id": "b", "messages": [user]},
        {"id": "c", "prompt": "How are you?", "response": "I am fine."},
        {"id": "d", "messages": [user, answer, user, answer]},
    ]
    path = tmp_path / "set.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    a, b, c, d = load_prompt_set(path, tiny_tokenizer)
    text = tiny_tokenizer.decode(a.input_ids)
    assert text == "<|im_start|>user\nHow are you?<|im_end|>\n<|im_start|>assistant\n"
    assert a.input_ids == b.input_ids == c.input_ids
    assert tiny_tokenizer.decode(d.input_ids).count("I am fine.") == 1
    assert (a.category, a.language, b.category) == ("talk", "en", None)
    assert [p.prompt_id for p in load_prompt_set(path, tiny_tokenizer, limit=2)] == ["a", "b"]


def test_bad_prompt_files_are_refused(tmp_path: Path, tiny_tokenizer: Any) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text("")
    with pytest.raises(UserError, match=str(path)):
        load_prompt_set(path, tiny_tokenizer)
    path.write_text('{"messages": [{"role": "user", "content": "hi"}]}\nnot json\n')
    with pytest.raises(UserError, match=f"{path}:2"):
        load_prompt_set(path, tiny_tokenizer)
    assert len(load_prompt_set(path, tiny_tokenizer, tally=Tally(skip_bad_rows=True))) == 1
    path.write_text('{"messages": [{"role": "assistant", "content": "hi"}]}\n')
    with pytest.raises(UserError, match="user turn"):
        load_prompt_set(path, tiny_tokenizer)


def test_the_built_in_prompts_are_a_named_suite(tiny_tokenizer: Any) -> None:
    prompts = load_prompt_set("builtin", tiny_tokenizer)
    assert len(prompts) > 200
    assert all(p.category for p in prompts)
