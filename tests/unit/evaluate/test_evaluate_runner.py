"""An evaluation states what real decoding gave: exact acceptance lengths, equality with plain output, plain errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from rich.console import Console

from decoding_kit import NoisyDrafter, OracleDrafter, greedy_text, random_prompt, tiny_spec, tiny_target
from draftline.config.schema import TargetConfig
from draftline.decode.sampling import Sampling
from draftline.drafter.model import Drafter
from draftline.errors import UserError
from draftline.evaluate.entries import Decoding
from draftline.evaluate.prompts import EvalPrompt
from draftline.evaluate.report import EvalReport
from draftline.evaluate.runner import evaluate
from draftline.evaluate.table import print_report
from draftline.target.load import load_target

LIMIT = 1 + 2 * 5


class Oracles:
    """One oracle for several prompts: knows each prompt's text by its start."""

    block_size, taps, vocab_size = 5, (1,), 13

    def __init__(self, texts: list[list[int]], right_slots: int) -> None:
        self._texts, self._right = texts, right_slots

    def start(self) -> None:
        pass

    def block_logits(self, context: Any) -> torch.Tensor:
        text = next(t for t in self._texts if t[: len(context.tokens)] == list(context.tokens))
        oracle = OracleDrafter(text, 13, 5, lambda _round, slot: slot <= self._right)
        return oracle.block_logits(context)


class Forking(Oracles):
    """For batches: one for each prompt."""

    def fork(self) -> Forking:
        return self


@pytest.fixture(scope="module")
def parts() -> tuple[Any, list[EvalPrompt], list[list[int]]]:
    target = tiny_target(1)
    prompts = [
        EvalPrompt(f"p{i}", tuple(random_prompt(i, 4 + i)), category="even" if i % 2 == 0 else "odd") for i in range(6)
    ]
    return target, prompts, [greedy_text(target, p.input_ids, LIMIT + 6) for p in prompts]


@pytest.fixture(scope="module")
def report(parts: tuple[Any, list[EvalPrompt], list[list[int]]]) -> EvalReport:
    target, prompts, texts = parts
    drafters = {"right": Oracles(texts, 4), "half": Oracles(texts, 1), "wrong": Oracles(texts, 0)}
    return evaluate(
        target,
        drafters,
        {"first": prompts[:2], "second": prompts[2:]},
        methods=["plain", "lookup", "chain", "tree@4"],
        max_new_tokens=LIMIT,
    )


def test_x5_oracle_drafters_get_exactly_what_they_must(report: EvalReport) -> None:
    """Perfect: the block size. Always wrong: 1. Right up to slot 1: 2, apart from rounds that the limit cut (E25)."""
    assert report.find("chain", "right").acceptance_length == 5.0
    assert report.find("chain", "wrong").acceptance_length == 1.0
    assert report.find("chain", "half").acceptance_length_unclipped == 2.0
    assert report.find("plain").acceptance_length == 1.0
    assert report.find("tree@4", "right").acceptance_length == 5.0
    assert report.find("chain", "right").full_block_share == 1.0
    assert "target forward" in report.definition


def test_acceptance_by_position_stops_where_the_drafter_goes_wrong(report: EvalReport) -> None:
    half = report.find("chain", "half")
    assert half.accepted_by_position[1:] == [0, 0, 0]
    assert half.accepted_by_position[0] == half.drafted_by_position[0] > 0
    wrong = report.find("chain", "wrong")
    assert wrong.accepted_by_position == [0, 0, 0, 0]


def test_e26_one_wrong_slot_ends_what_is_accepted_whatever_stands_behind_it(
    parts: tuple[Any, list[EvalPrompt], list[list[int]]],
) -> None:
    target, prompts, texts = parts
    holed = OracleDrafter(texts[0], 13, 5, lambda _round, slot: slot != 2)
    found = evaluate(target, {"holed": holed}, {"s": prompts[:1]}, methods=["chain"], max_new_tokens=1 + 2 * 5)
    assert found.find("chain", "holed").acceptance_length_unclipped == 2.0
    assert sum(found.find("chain", "holed").accepted_by_position[1:]) == 0


def test_every_output_equals_the_plain_one_and_forwards_are_counted(report: EvalReport) -> None:
    assert report.divergences == 0
    for result in report.results:
        assert result.equality is not None
        assert result.equality.equal == result.n_prompts
        assert result.target_forwards == sum(p.rounds for p in result.prompts)
        assert result.forwards_per_token == pytest.approx(1 / (result.acceptance_length or 0))
        assert result.tokens_per_s is not None
    assert report.find("chain", "right").speedup is not None
    assert report.find("plain").speedup == 1.0


def test_results_come_by_prompt_set_and_category(report: EvalReport) -> None:
    """E37, A26: one mean hides what differs between groups."""
    assert report.find("chain", "right", "first").n_prompts == 2
    assert report.find("chain", "right").n_prompts == 6
    groups = {(g.kind, g.name): g for g in report.find("chain", "half").groups}
    assert groups["category", "even"].n_prompts == groups["category", "odd"].n_prompts == 3
    assert groups["prompt length", "0-63"].n_prompts == 6


def test_drafters_are_compared_pairwise_on_the_same_prompts(report: EvalReport) -> None:
    found = {(c.method, c.a, c.b): c for c in report.comparisons}
    assert len(found) == 6
    against_wrong = found["chain", "right", "wrong"]
    assert against_wrong.difference == -4.0
    assert against_wrong.interval == (-4.0, -4.0)
    assert against_wrong.verdict == "right is better"
    assert (against_wrong.n_prompts, against_wrong.least_prompts, against_wrong.note) == (6, 6, None)


def test_drafters_of_different_block_sizes_are_compared_with_a_note_and_few_prompts_decide_nothing(
    parts: tuple[Any, list[EvalPrompt], list[list[int]]],
) -> None:
    target, prompts, texts = parts
    drafters = {"short": Oracles(texts, 4), "long": Oracles(texts, 4)}
    drafters["short"].block_size = 3
    suite = {"s": prompts[:5]}
    found = evaluate(target, drafters, suite, methods=["chain"], max_new_tokens=LIMIT)
    (comparison,) = found.comparisons
    assert comparison.difference > 0
    assert comparison.verdict == "undecided"
    assert comparison.note == "block sizes differ: short 3, long 5"
    console = Console(record=True, width=200)
    print_report(found, console)
    text = " ".join(console.export_text().split())
    assert "undecided; nothing is called better on fewer than 6 prompts (block sizes differ: short 3, long 5)" in text


def test_the_report_survives_json_and_prints_its_definition(report: EvalReport, tmp_path: Path) -> None:
    report.write(tmp_path / "deep" / "report.json")
    content = json.loads((tmp_path / "deep" / "report.json").read_text())
    assert EvalReport.model_validate(content) == report
    console = Console(record=True, width=160)
    print_report(report, console)
    text = console.export_text()
    assert "tokens committed per target forward" in text
    assert "right is better" in text
    assert "5.00" in text


def test_e24_settings_that_change_acceptance_are_recorded(report: EvalReport) -> None:
    assert report.settings["max_new_tokens"] == LIMIT
    assert report.settings["temperature"] == 0.0
    assert report.target["dtype"] == "float32"
    assert report.drafters["right"]["block_size"] == 5
    assert {"torch", "transformers", "draftline"} <= report.versions.keys()


def test_e27_a_mask_token_that_the_target_writes_is_warned_about(
    parts: tuple[Any, list[EvalPrompt], list[list[int]]],
) -> None:
    target, prompts, texts = parts
    written = texts[0][len(prompts[0].input_ids)]
    drafter = Drafter(tiny_spec(mask_token_id=written))
    found = evaluate(target, {"d": drafter}, {"s": prompts[:1]}, methods=["plain", "chain"], max_new_tokens=8)
    assert f"wrote its mask token {written}" in found.warnings[0]
    assert found.divergences == 0


def test_sampled_outputs_are_not_compared_with_a_greedy_text(
    parts: tuple[Any, list[EvalPrompt], list[list[int]]],
) -> None:
    target, prompts, _ = parts
    drafter = Drafter(tiny_spec())
    found = evaluate(
        target,
        {"d": drafter},
        {"s": prompts},
        methods=["plain", "lookup", "chain", "tree@4", "adaptive"],
        max_new_tokens=8,
        decoding=Decoding(Sampling(temperature=1.0)),
    )
    assert all(r.equality is None for r in found.results)
    assert found.settings["cost_curves"]["d adaptive"]["points"][0][0] == 0


def test_a_recurrent_target_gets_its_tree_counted_along_its_own_text(make_tiny_target: Callable[..., Path]) -> None:
    target = load_target(TargetConfig(model=str(make_tiny_target("qwen3_next"))), "cpu")
    prompt = EvalPrompt("p", tuple(random_prompt(1, 6, 400)))
    text = greedy_text(target, prompt.input_ids, 30)
    drafter = NoisyDrafter(text, target.vocab_size, 5, seed=0, strength=4.0)
    sets = {"s": [prompt]}
    found = evaluate(target, {"d": drafter}, sets, methods=["plain", "chain", "tree@30"], max_new_tokens=21)
    tree = found.find("tree@30", "d")
    assert tree.replayed
    assert tree.tokens_per_s is tree.speedup is tree.equality is None
    assert (tree.acceptance_length or 0) > 1.0
    assert found.find("chain", "d").replay_forwards > 0
    assert found.divergences == 0
    with pytest.raises(UserError, match="add the method plain"):
        evaluate(target, {"d": drafter}, sets, methods=["tree@30"], max_new_tokens=21)


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        ([], "no method"),
        (["chian"], "'chian' is not a method"),
        (["tree@"], "'tree@' is not a method"),
        (["tree@0"], "budget of 0"),  # E30
        (["tree@²"], "'tree@²' is not a method"),
        (["tree@" + "9" * 5000], "is not a method"),
        (["chain", "chain"], "named twice"),
        (["tree@16", "tree@016"], "tree@16 is named twice"),
    ],
)
def test_bad_methods_are_named(
    parts: tuple[Any, list[EvalPrompt], list[list[int]]], methods: list[str], message: str
) -> None:
    target, prompts, texts = parts
    with pytest.raises(UserError, match=message):
        evaluate(target, {"o": Oracles(texts, 4)}, {"s": prompts}, methods=methods, max_new_tokens=4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 24}, "hidden size is 24, the target's is 16"),
        ({"vocab_size": 14}, "vocabulary is 14, the target's is 13"),
        ({"num_target_layers": 5}, "number of target layers is 5, the target's is 4"),
    ],
)
def test_a_drafter_for_another_target_is_refused_and_both_are_named(
    parts: tuple[Any, list[EvalPrompt], list[list[int]]], changes: dict[str, int], message: str
) -> None:
    target, prompts, _ = parts
    with pytest.raises(UserError, match=message):
        evaluate(target, {"d": Drafter(tiny_spec(**changes))}, {"s": prompts}, methods=["chain"], max_new_tokens=4)


def test_a_tree_above_the_memory_is_refused_with_the_largest_that_fits(
    parts: tuple[Any, list[EvalPrompt], list[list[int]]],
) -> None:
    target, prompts, texts = parts
    with pytest.raises(UserError, match=r"a tree of 30000000 drafts needs .* a budget up to \d+ fits"):
        evaluate(target, {"o": Oracles(texts, 4)}, {"s": prompts}, methods=["tree@30000000"], max_new_tokens=4)


def test_a_batch_larger_than_the_suite_takes_the_memory_of_the_suite(
    parts: tuple[Any, list[EvalPrompt], list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two prompts under a batch of 64 need what two rows need."""
    target, prompts, texts = parts
    memory = SimpleNamespace(available=1_000_000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    asked: dict[str, Any] = {"methods": ["chain", "tree@100"], "max_new_tokens": 4}
    for batch in (2, 64):
        found = evaluate(target, {"o": Forking(texts, 4)}, {"s": prompts[:2]}, decoding=Decoding(batch=batch), **asked)
        assert found.find("tree@100", "o").n_prompts == 2
    memory.available = 150_000
    with pytest.raises(UserError, match="a tree of 100 drafts needs"):
        evaluate(target, {"o": Forking(texts, 4)}, {"s": prompts[:2]}, decoding=Decoding(batch=64), **asked)


def test_bad_suites_are_refused_before_anything_is_decoded(
    parts: tuple[Any, list[EvalPrompt], list[list[int]]],
) -> None:
    target, prompts, _ = parts
    plain: dict[str, Any] = {"methods": ["plain"], "max_new_tokens": 4}
    with pytest.raises(UserError, match="no prompt set"):
        evaluate(target, {}, {}, **plain)
    with pytest.raises(UserError, match="the prompt set is empty"):
        evaluate(target, {}, {"s": []}, **plain)
    with pytest.raises(UserError, match="token 77 is outside the target's vocabulary of 13"):
        evaluate(target, {}, {"s": [EvalPrompt("p", (1, 77))]}, **plain)
    with pytest.raises(UserError, match=r"s, long: .* exceed the target's context of 512"):
        evaluate(target, {}, {"s": [*prompts, EvalPrompt("long", (1,) * 510)]}, **plain)
    with pytest.raises(UserError, match="chain needs a drafter"):
        evaluate(target, {}, {"s": prompts}, methods=["chain"], max_new_tokens=4)
    with pytest.raises(UserError, match="cannot be called 'all'"):
        evaluate(target, {}, {"all": prompts}, **plain)
