"""What an evaluation tells is what was measured: names as they are, each prompt once, nothing lost on the way out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from decoding_kit import random_prompt, tiny_spec, tiny_target
from draftline import cli_eval
from draftline.config.schema import TargetConfig
from draftline.data.conversations import Tally
from draftline.decode.memory import free_bytes
from draftline.drafter.model import Drafter
from draftline.errors import UserError
from draftline.evaluate.command import evaluate_files
from draftline.evaluate.entries import Decoding
from draftline.evaluate.prompts import EvalPrompt, load_prompt_set
from draftline.evaluate.report import EvalReport
from draftline.evaluate.runner import evaluate
from draftline.evaluate.table import print_report
from draftline.target.load import LoadedTarget

LITERAL = ("run[/v2]", "[bold]b", ":smile:")


@pytest.fixture(scope="module")
def target() -> LoadedTarget:
    return tiny_target(1, num_hidden_layers=2)


def drafters(*names: str) -> dict[str, Drafter]:
    found = {}
    for seed, name in enumerate(names):
        small: dict[str, Any] = {"num_layers": 1, "layer_types": ("full_attention",), "num_target_layers": 2}
        found[name] = Drafter(tiny_spec(**small, taps=(0,)))
        found[name].init_weights(torch.Generator().manual_seed(seed))
    return found


def measured(target: LoadedTarget, prompts: list[EvalPrompt], *names: str, **options: Any) -> EvalReport:
    methods = ["plain", "chain", "tree@4"]
    return evaluate(target, drafters(*names), {"s": prompts}, methods=methods, max_new_tokens=12, **options)


def printed(report: EvalReport) -> str:
    console = Console(record=True, width=300)
    print_report(report, console)
    return console.export_text()


def test_names_of_drafters_categories_and_prompts_are_printed_as_they_are(target: LoadedTarget) -> None:
    prompts = [EvalPrompt(name, tuple(random_prompt(i, 5)), category=name) for i, name in enumerate(LITERAL)]
    report = measured(target, prompts, *LITERAL)
    report = report.model_copy(update={"warnings": ["[/x] :smile:"]})
    text = printed(report)
    for name in LITERAL:
        assert f"category: {name} " in text
        assert f"{name} chain" in text
        assert f"{name} tree@4: accepted" in text
    assert f"chain: {LITERAL[1]} against {LITERAL[0]}: " in text
    assert "warning: [/x] :smile:" in text


@pytest.mark.parametrize("decoding", [Decoding(), Decoding(batch=3, timed_prompts=0)])
def test_a_prompt_that_is_asked_again_is_no_second_prompt(target: LoadedTarget, decoding: Decoding) -> None:
    """Six copies of two prompts know of two prompts: they neither narrow an interval nor decide a comparison."""
    texts = [tuple(random_prompt(seed, 6)) for seed in range(2)]
    once = [EvalPrompt(f"p{i}", text, category="c") for i, text in enumerate(texts)]
    often = [EvalPrompt(f"p{i}", texts[i % 2], category="c") for i in range(12)]
    two, twelve = (measured(target, prompts, "a", "b", decoding=decoding) for prompts in (once, often))
    for method in ("chain", "tree@4"):
        own, other = twelve.find(method, "a"), two.find(method, "a")
        assert (own.n_prompts, own.interval) == (12, pytest.approx(other.interval))
        assert [g.interval for g in own.groups] == [pytest.approx(g.interval) for g in other.groups]
    assert {(c.n_prompts, c.verdict) for c in twelve.comparisons} == {(2, "undecided")}
    assert [c.interval for c in twelve.comparisons] == [pytest.approx(c.interval) for c in two.comparisons]
    assert any("10 of 12 prompts repeat others" in line for line in twelve.warnings)
    assert not any("repeat" in line for line in two.warnings)


def test_the_speed_up_of_one_prompt_asked_often_has_no_interval(target: LoadedTarget) -> None:
    report = measured(target, [EvalPrompt(f"p{i}", (1, 2, 3)) for i in range(3)], "a")
    assert report.find("chain", "a").speedup is not None
    assert report.find("chain", "a").speedup_interval is None


def test_drafters_that_too_few_prompts_could_compare_are_told_so(target: LoadedTarget) -> None:
    report = measured(target, [EvalPrompt("p", (1, 2, 3))], "a", "b")
    assert report.comparisons == []
    assert any("not compared: that takes two different prompts" in line for line in report.warnings)


def test_a_report_is_on_disk_before_it_is_printed(
    target: LoadedTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A terminal that went away costs the table, not the measurement."""

    def gone(_self: EvalReport) -> None:
        raise BrokenPipeError

    report = measured(target, [EvalPrompt("p", (1, 2, 3))], "a")
    monkeypatch.setattr(EvalReport, "print", gone)
    with pytest.raises(BrokenPipeError):
        cli_eval._tell(report, tmp_path / "report.json", None)
    assert EvalReport.model_validate(json.loads((tmp_path / "report.json").read_text())) == report


def test_rows_behind_the_limit_are_not_looked_at(tmp_path: Path, tiny_tokenizer: Any) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text('{"prompt": "hi"}\n{"prompt": "you"}\nno JSON\n')
    tally = Tally(skip_bad_rows=True)
    assert len(load_prompt_set(path, tiny_tokenizer, limit=2, tally=tally)) == 2
    assert (tally.in_rows, tally.n_rejected) == (2, 0)
    assert len(load_prompt_set(path, tiny_tokenizer, limit=2)) == 2
    with pytest.raises(UserError, match="not JSON"):
        load_prompt_set(path, tiny_tokenizer, limit=3)


def test_methods_without_drafter_and_drafters_without_method_are_refused_before_anything_is_read(
    tmp_path: Path, target: LoadedTarget
) -> None:
    nowhere = TargetConfig(model=str(tmp_path / "none"))
    with pytest.raises(UserError, match=r"chain, tree@4 needs a drafter"):
        evaluate_files(nowhere, [], ["builtin"], methods=["chain", "tree@4"], max_new_tokens=4)
    with pytest.raises(UserError, match="no method drafts with it"):
        evaluate_files(nowhere, [tmp_path], ["builtin"], methods=["plain", "lookup"], max_new_tokens=4)
    with pytest.raises(UserError, match="no method drafts with it"):
        evaluate(target, drafters("a"), {"s": [EvalPrompt("p", (1,))]}, methods=["plain"], max_new_tokens=4)


def test_what_the_allocator_keeps_of_earlier_buffers_is_free_for_the_next_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each method of a batch makes buffers anew; the memory of those before is not given back to the device."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (10, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: 85)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _device: 30)
    assert free_bytes(torch.device("cuda:0")) == 10 + 55
