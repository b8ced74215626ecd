"""Intervals, comparisons, equality with near-ties, and prompt sets from files."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from draftline.data.conversations import Tally
from draftline.decode.generation import Generation, Leaders
from draftline.errors import UserError
from draftline.evaluate.prompts import EvalPrompt, load_prompt_set
from draftline.evaluate.stats import (
    LEAST_PROMPTS,
    PromptCounts,
    interval,
    paired_difference,
    pooled,
    speedup_interval,
    t_quantile,
)
from draftline.evaluate.summary import Case, Sample, compare_outputs, summarise

FP32_EPS, BF16_EPS = 2.0**-23, 2.0**-7


def test_pooling_weighs_rounds_and_not_prompts() -> None:
    assert pooled([PromptCounts(10, 2), PromptCounts(10, 10)]) == 20 / 12
    assert pooled([PromptCounts(0, 0)]) is None


def test_intervals_cover_the_true_mean_about_as_often_as_they_say() -> None:
    draw = random.Random(0)
    hits = 0
    for _ in range(200):
        # Each prompt has its own acceptance rate; the pooled truth is 2.5.
        counts = []
        for _ in range(40):
            mean = draw.uniform(1.5, 3.5)
            counts.append(PromptCounts(round(sum(draw.gauss(mean, 1.0) for _ in range(20))), 20))
        found = interval(counts)
        assert found is not None
        hits += found[0] <= 2.5 <= found[1]
    assert 175 <= hits <= 200


def test_intervals_need_two_prompts_and_widen_as_students_t_does() -> None:
    counts = [PromptCounts(n, 10) for n in (12, 20, 31, 18)]
    assert interval(counts[:1]) is None
    assert interval([counts[0], PromptCounts(0, 0)]) is None
    # Means of 2.0 with a standard error of 0.1: 12.706 and 4.303 of them for one and two degrees of freedom.
    found = interval([PromptCounts(19, 10), PromptCounts(21, 10)])
    assert found == pytest.approx((1.0, 2.0 + 1.2706), abs=1e-4)
    spread = 0.1 * 3**0.5
    three = interval([PromptCounts(round(1e6 * x), 10**6) for x in (2 - spread, 2, 2 + spread)])
    assert three == pytest.approx((2 - 0.43027, 2 + 0.43027), abs=1e-4)


@pytest.mark.parametrize(
    ("degrees", "t"), [(1, 12.7062), (2, 4.30265), (3, 3.18245), (4, 2.77645), (23, 2.06866), (120, 1.97993)]
)
def test_quantiles_are_those_of_the_printed_table(degrees: int, t: float) -> None:
    assert t_quantile(degrees) == pytest.approx(t, abs=1e-4)


def test_speed_up_intervals_are_symmetric_on_a_logarithmic_scale_and_never_negative() -> None:
    own = [(100, 10.0), (100, 14.0), (50, 4.0)]
    found = speedup_interval(own, [(100, 20.0), (100, 20.0), (50, 10.0)])
    assert found is not None
    assert 0 < found[0] < found[1]
    assert (found[0] * found[1]) ** 0.5 == pytest.approx((250 / 28) / (250 / 50))
    assert speedup_interval(own[:1], [(100, 20.0)]) is None


def _prompt(draw: random.Random, tau: float, tokens: int) -> PromptCounts:
    """A text written in rounds that each accept drafts with a fixed chance, block 8."""
    written = rounds = 0
    while written < tokens:
        written, rounds = written + 1, rounds + 1
        for _ in range(7):
            if draw.random() > 1 - 1 / tau:
                break
            written += 1
    return PromptCounts(min(written, tokens), rounds)


@pytest.mark.parametrize("n_prompts", [2, 5, 6, 24])
def test_equal_drafters_are_called_different_in_at_most_six_percent_of_comparisons(n_prompts: int) -> None:
    """A prompt has an acceptance and a length of its own, the same for both drafters, which differ by chance alone."""
    draw, trials = random.Random(n_prompts), 2000 if n_prompts < 20 else 1000
    decided = outside = 0
    for _ in range(trials):
        kinds = [(draw.uniform(1.2, 3.5), draw.choice([16, 33, 64])) for _ in range(n_prompts)]
        a, b = ([_prompt(draw, *kind) for kind in kinds] for _ in range(2))
        found = paired_difference(a, b)
        assert found is not None
        decided += found.verdict() != "undecided"
        outside += not found.low <= 0 <= found.high
    assert outside / trials <= 0.06
    assert decided / trials <= (0.06 if n_prompts >= LEAST_PROMPTS else 0)


def test_nothing_is_called_better_on_fewer_prompts_than_could_tell() -> None:
    a, b = ([PromptCounts(tokens, 10)] * LEAST_PROMPTS for tokens in (20, 30))
    few = paired_difference(a[:-1], b[:-1])
    assert few is not None
    assert (few.value, few.verdict(), few.n_needed) == (1.0, "undecided", LEAST_PROMPTS)
    enough = paired_difference(a, b)
    assert enough is not None
    assert enough.verdict("old", "new") == "new is better"


def test_pairing_decides_what_unpaired_intervals_cannot() -> None:
    draw = random.Random(1)
    a = [PromptCounts(draw.randint(100, 400), 100) for _ in range(20)]
    b = [PromptCounts(c.tokens + 15 + draw.randint(-3, 3), 100) for c in a]
    left, right = interval(a), interval(b)
    assert left is not None
    assert right is not None
    assert left[1] > right[0]
    found = paired_difference(a, b)
    assert found is not None
    assert found.verdict("old", "new") == "new is better"
    assert found.value == pytest.approx(0.15, abs=0.02)
    backwards = paired_difference(b, a)
    assert backwards is not None
    assert backwards.verdict("old", "new") == "old is better"


def test_an_undecided_comparison_says_how_many_prompts_would_decide() -> None:
    draw = random.Random(2)
    few = [(draw.randint(150, 250), draw.randint(152, 254)) for _ in range(12)]
    a, b = ([PromptCounts(pair[i], 100) for pair in few] for i in (0, 1))
    found = paired_difference(a, b)
    assert found is not None
    assert found.verdict() == "undecided"
    assert found.n_needed is not None
    assert found.n_needed > 12
    same = paired_difference(a, a)
    assert same is not None
    assert (same.value, same.n_needed, same.verdict()) == (0.0, None, "undecided")


def _generation(output_ids: list[int], leaders: list[Leaders] | None = None, **changes: Any) -> Generation:
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
        "leaders": leaders,
        **changes,
    }
    return Generation(**values)


def _sample(output: list[int], plain: list[int], gaps: list[float], best: float = 20.0) -> Sample:
    """Plain decoding's second best token is 9, a gap behind the best, and the third 11, half as far again."""
    leaders = [
        Leaders((own, 9, 11), (best, best - gap, best - 1.5 * gap)) for own, gap in zip(plain, gaps, strict=True)
    ]
    return Sample("s", EvalPrompt("p", (1, 2, 3)), _generation(output), _generation(plain, leaders))


@pytest.mark.parametrize(
    ("gap", "eps", "is_tie"),
    # In bf16 a logit of 20 moves in steps of 1/8.
    [(5e-5, FP32_EPS, True), (2e-4, FP32_EPS, False), (0.2, BF16_EPS, True), (0.9, BF16_EPS, False)],
)
def test_a_difference_counts_unless_the_token_itself_is_nearly_the_best(gap: float, eps: float, is_tie: bool) -> None:
    plain, other = [5, 6, 7, 8], [5, 6, 9, 9]
    assert compare_outputs(_sample(plain, plain, [1, 1, gap, 1]), eps) is None
    found = compare_outputs(_sample(other, plain, [1, 1, gap, 1]), eps)
    assert found is not None
    assert found[1] is is_tie
    assert (found[0].position, found[0].plain_token, found[0].token) == (2, 7, 9)
    assert found[0].gap == pytest.approx(gap)


@pytest.mark.parametrize(("wrong", "gap"), [(11, 1.2e-4), (12345, None)])
def test_a_tie_of_two_other_tokens_does_not_excuse_a_wrong_one(wrong: int, gap: float | None) -> None:
    """The best two are 8e-5 apart, within the tolerance of 1e-4; what was written is neither of them."""
    found = compare_outputs(_sample([5, 6, wrong, 8], [5, 6, 7, 8], [1, 1, 8e-5, 1]), FP32_EPS)
    assert found is not None
    assert found[1] is False
    assert found[0].gap == (None if gap is None else pytest.approx(gap, rel=1e-3))
    result = summarise(Case("chain", "d", False, FP32_EPS), [_sample([5, 6, wrong, 8], [5, 6, 7, 8], [1, 1, 8e-5, 1])])
    assert result.equality is not None
    assert (result.equality.equal, len(result.equality.near_ties), len(result.equality.divergences)) == (0, 0, 1)


def test_a_text_that_only_ends_earlier_is_a_divergence() -> None:
    found = compare_outputs(_sample([5, 6], [5, 6, 7], [1, 1, 1e-9]), FP32_EPS)
    assert found is not None
    assert found[1] is False
    assert found[0].gap is None


def test_lengths_are_grouped_in_rising_order() -> None:
    """By number: as words, 4096+ would stand in front of 64-255."""
    lengths = (5000, 70, 3, 2000, 300)
    samples = [Sample("s", EvalPrompt(f"p{n}", (1,) * n), _generation([1, 2, 3]), None) for n in lengths]
    groups = summarise(Case("chain", "d", False, FP32_EPS), samples).groups
    assert [g.name for g in groups if g.kind == "prompt length"] == ["0-63", "64-255", "256-1023", "1024-4095", "4096+"]


def test_speed_up_compares_seconds_per_committed_token() -> None:
    plain = _generation([1, 2, 3, 4, 5], [Leaders((1, 2), (9.0, 8.0))] * 5, decode_s=4.0)
    fast = _generation([1, 2, 3, 4, 5], acceptance_lengths=[2, 2], clipped=[False, True], target_forwards=2)
    sample = Sample("s", EvalPrompt("p", (1, 2, 3)), fast, plain)
    result = summarise(Case("chain", "d", False, FP32_EPS), [sample])
    assert result.speedup == 4.0
    assert result.tokens_per_s == 4.0
    assert result.forwards_per_token == 0.5
    assert result.acceptance_length == result.acceptance_length_unclipped == 2.0


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_prompt_sets_drop_the_last_answer_and_keep_labels(tmp_path: Path, tiny_tokenizer: Any, ending: str) -> None:
    user, answer = {"role": "user", "content": "How are you?"}, {"role": "assistant", "content": "I am fine."}
    rows = [
        {"id": "a", "category": "talk", "language": "en", "messages": [user, answer]},
        {"id": "b", "messages": [user]},
        {"id": "c", "prompt": "How are you?", "response": "I am fine."},
        {"id": "d", "messages": [user, answer, user, answer]},
    ]
    path = tmp_path / f"set.{ending}"
    if ending == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        columns = {key: [row.get(key) for row in rows] for key in {key for row in rows for key in row}}
        pyarrow.parquet.write_table(pyarrow.table(columns), path)
    a, b, c, d = load_prompt_set(path, tiny_tokenizer)
    text = tiny_tokenizer.decode(a.input_ids)
    assert text == "<|im_start|>user\nHow are you?<|im_end|>\n<|im_start|>assistant\n"
    assert a.input_ids == b.input_ids == c.input_ids
    assert tiny_tokenizer.decode(d.input_ids).count("I am fine.") == 1
    assert (a.category, a.language, b.category, b.language) == ("talk", "en", None, None)
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
