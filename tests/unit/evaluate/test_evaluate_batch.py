"""Batches, compiled rounds and trees on the chain's rounds in a whole evaluation, and its plots."""

from __future__ import annotations

import importlib.util
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from decoding_kit import random_prompt, tiny_spec, tiny_target
from draftline.config.schema import TargetConfig
from draftline.decode.sampling import Sampling
from draftline.decode.tree import DraftTree
from draftline.drafter.model import Drafter
from draftline.errors import UserError
from draftline.evaluate import rounds
from draftline.evaluate.entries import Decoding, decoding_of
from draftline.evaluate.plots import write_plots
from draftline.evaluate.prompts import EvalPrompt
from draftline.evaluate.report import EvalReport
from draftline.evaluate.runner import evaluate
from draftline.evaluate.table import print_report
from draftline.target.load import load_target

METHODS = ["plain", "chain", "tree@3", "tree@12"]
# What a batch may not change.
COUNTED = (
    "method",
    "drafter",
    "n_prompts",
    "output_tokens",
    "acceptance_length",
    "interval",
    "acceptance_length_unclipped",
    "target_forwards",
    "accepted_by_position",
    "drafted_by_position",
    "mean_tree_nodes",
    "equality",
    "groups",
)


@pytest.fixture(scope="module")
def run() -> Callable[..., EvalReport]:
    target = tiny_target(1, num_hidden_layers=2)
    prompts = [EvalPrompt(f"p{i}", tuple(random_prompt(i, 3 + 5 * i)), category="ab"[i % 2]) for i in range(5)]
    small: dict[str, Any] = {"num_layers": 1, "layer_types": ("full_attention",), "num_target_layers": 2, "taps": (0,)}
    sharp, other = Drafter(tiny_spec(**small)), Drafter(tiny_spec(**small))
    other.init_weights(torch.Generator().manual_seed(5))

    def evaluated(decoding: Decoding = Decoding(), methods: list[str] = METHODS) -> EvalReport:  # noqa: B008
        sets = {"s": prompts[:2], "t": prompts[2:]}
        return evaluate(target, {"a": sharp, "b": other}, sets, methods=methods, max_new_tokens=12, decoding=decoding)

    return evaluated


@pytest.fixture(scope="module")
def alone(run: Callable[..., EvalReport]) -> EvalReport:
    return run()


def counted(report: EvalReport) -> list[dict[str, Any]]:
    return [{name: getattr(result, name) for name in COUNTED} for result in report.results]


@pytest.fixture(scope="module")
def together(run: Callable[..., EvalReport]) -> EvalReport:
    return run(Decoding(batch=4, timed_prompts=3))


def test_a_batch_reports_the_numbers_of_one_at_a_time(together: EvalReport, alone: EvalReport) -> None:
    assert counted(together) == counted(alone)
    assert together.comparisons == alone.comparisons
    assert together.tree_rounds == alone.tree_rounds
    assert together.warnings == alone.warnings


def test_times_are_those_of_prompts_decoded_one_at_a_time(
    run: Callable[..., EvalReport], together: EvalReport, alone: EvalReport
) -> None:
    """A batch's seconds belong to no prompt, so they never make a speed-up."""
    for result in run(Decoding(batch=5, timed_prompts=0), ["plain", "chain"]).results:
        assert result.speedup is result.tokens_per_s is result.speedup_interval is None
        assert result.timed_prompts == 0
        assert (result.batch_tokens_per_s is not None) == (result.prompt_set == "all")
    chain = together.find("chain", "a")
    assert (chain.n_prompts, chain.timed_prompts, together.find("chain", "a", "t").timed_prompts) == (5, 3, 1)
    assert chain.speedup is not None
    assert chain.speedup_interval is not None
    assert chain.speedup_interval[0] <= chain.speedup_interval[1]
    assert alone.find("chain", "a").timed_prompts == 5
    assert alone.find("chain", "a").batch_tokens_per_s is None
    console = Console(record=True, width=160)
    print_report(together, console)
    assert "decoded 4 prompts at a time; tok/s and speed-up are of 3 prompts" in console.export_text()


def test_compiled_rounds_report_the_numbers_of_ordinary_ones(run: Callable[..., EvalReport], alone: EvalReport) -> None:
    static = run(Decoding(compile="graph"))
    assert counted(static) == counted(alone)
    assert static.settings["compile"] == "graph"
    assert static.drafters == alone.drafters
    adaptive = run(Decoding(compile="graph", batch=2, timed_prompts=1), ["plain", "adaptive"])
    assert adaptive.divergences == 0
    assert adaptive.find("adaptive", "a").timed_prompts == 1


def test_a_tree_that_holds_the_chain_accepts_no_less_on_the_chains_own_rounds(alone: EvalReport) -> None:
    found = {(r.drafter, r.method): r for r in alone.tree_rounds}
    assert set(found) == {(name, method) for name in "ab" for method in ("tree@3", "tree@12")}
    assert alone.rounds_below_chain == 0
    for name in "ab":
        chain, small, large = alone.find("chain", name), found[name, "tree@3"], found[name, "tree@12"]
        # The replayed chain is the decoded one, round for round.
        assert (large.rounds, large.chain_tokens) == (chain.target_forwards, sum(p.tokens for p in chain.prompts))
        assert small.rounds_with_chain <= large.rounds_with_chain
        for one in (small, large):
            assert one.rounds_not_below_chain == one.rounds_with_chain > 0
        assert large.tree_tokens >= small.tree_tokens
    assert found["a", "tree@12"].tree_tokens > found["a", "tree@12"].chain_tokens


def test_the_report_states_for_each_tree_in_how_many_rounds_it_kept_what_it_promises(alone: EvalReport) -> None:
    content = alone.model_dump(mode="json")
    console = Console(record=True, width=160)
    print_report(alone, console)
    text = console.export_text()
    assert len(content["tree_rounds"]) == 4
    for found in content["tree_rounds"]:
        held = found["rounds_with_chain"]
        assert found["rounds_not_below_chain"] == held
        line = f"{found['drafter']} {found['method']}: accepted no less than the chain in {held} of the {held} rounds"
        assert line in text


def test_a_tree_that_breaks_its_promise_is_counted_and_warned_about(
    run: Callable[..., EvalReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A walk that stops at the root, in trees that hold the chain: what a fault of the code would look like."""
    monkeypatch.setattr(rounds, "holds", lambda tree, chain: True)
    monkeypatch.setattr(DraftTree, "walk_text", lambda tree, text: 0)
    found = run(methods=["plain", "chain", "tree@12"])
    assert found.rounds_below_chain > 0
    assert [w for w in found.warnings if w.startswith("a tree@12: accepted no less than the chain in")]


def test_batches_of_recurrent_targets_are_refused_before_anything_is_decoded(
    make_tiny_target: Callable[..., Path],
) -> None:
    target = load_target(TargetConfig(model=str(make_tiny_target("qwen3_next"))), "cpu")
    with pytest.raises(UserError, match="recurrent layers"):
        evaluate(
            target,
            {},
            {"s": [EvalPrompt("p", (1, 2))]},
            methods=["plain"],
            max_new_tokens=4,
            decoding=Decoding(batch=2),
        )


def test_words_of_the_command_line_that_mean_nothing_are_refused() -> None:
    good: dict[str, Any] = {
        "batch": 2,
        "timed": 1,
        "compile_name": "graph",
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "proposals": "sampled",
    }
    assert decoding_of(**good) == Decoding(Sampling(0.7, 0.9, 5, proposals="sampled"), 2, 1, "graph")
    for change, message in (
        ({"compile_name": "fast"}, "'fast' is not a way to compile"),
        ({"proposals": "best"}, "'best' is no way to draft"),
        ({"batch": 0}, "batch >= 1"),
    ):
        with pytest.raises(UserError, match=message):
            decoding_of(**(good | change))


@pytest.mark.parametrize("ending", [".svg", ".png", ".html"])
def test_plots_name_their_axes_and_units(alone: EvalReport, tmp_path: Path, ending: str) -> None:
    path = tmp_path / "deep" / f"plot{ending}"
    write_plots(alone, path)
    content = path.read_bytes()
    if ending == ".png":
        assert content.startswith(b"\x89PNG")
        return
    text = content.decode()
    for words in (
        "tree size (drafts a round)",
        "acceptance length (tokens a target forward)",
        "position in the block (slot; depth of a tree)",
        "prompt length (tokens)",
        "speed-up over plain decoding (times)",
        "a chain",
    ):
        assert words in text, words
    if ending == ".svg":
        ET.fromstring(text)
    else:
        assert "<script" not in text
        assert "tokens committed per target forward" in text


def test_plots_without_the_package_or_of_an_unknown_kind_are_refused(
    alone: EvalReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=r"cannot be written as \.pdf"):
        write_plots(alone, tmp_path / "a.pdf")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'draftline\[plots\]'"):
        write_plots(alone, tmp_path / "a.svg")
    assert not list(tmp_path.iterdir())
