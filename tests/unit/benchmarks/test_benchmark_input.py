"""What is wrong in a benchmark's input is said in one line, before anything is measured."""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from draftline.errors import UserError

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def benchmarks(monkeypatch):
    """Modules of the benchmarks, by name; forgotten afterwards."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.syspath_prepend(str(BENCHMARKS / "real"))
    import argtypes
    import experiment
    import prompts
    import report
    import store

    yield SimpleNamespace(argtypes=argtypes, experiment=experiment, prompts=prompts, report=report, store=store)
    for name in set(sys.modules) - before:
        if str(BENCHMARKS) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.mark.parametrize("text", ["0", "-3", "2.5", "many", ""])
def test_a_count_is_a_whole_number_above_zero(benchmarks, text):
    with pytest.raises(argparse.ArgumentTypeError, match="not a whole number of at least 1"):
        benchmarks.argtypes.whole(1)(text)
    assert benchmarks.argtypes.whole(0)("0") == 0 and benchmarks.argtypes.wholes("3,20") == (3, 20)


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "soon"])
def test_seconds_are_a_number_above_zero(benchmarks, text):
    with pytest.raises(argparse.ArgumentTypeError, match="not a number above 0"):
        benchmarks.argtypes.positive(text)
    assert benchmarks.argtypes.positive("0.5") == 0.5 and benchmarks.argtypes.not_negative("0.00") == 0.0
    if text != "0":
        with pytest.raises(argparse.ArgumentTypeError, match="not a number of at least 0"):
            benchmarks.argtypes.not_negative(text)


def test_names_are_known_ones(benchmarks):
    parse = benchmarks.argtypes.one_of(("chain", "tree"))
    assert parse("tree,chain") == ("tree", "chain")
    for text, what in (("tree,tre", "tre is not among chain, tree"), (",", "nothing is not among")):
        with pytest.raises(argparse.ArgumentTypeError, match=what):
            parse(text)


def test_a_result_goes_into_a_folder_that_is_there(benchmarks, tmp_path):
    assert benchmarks.argtypes.json_file(str(tmp_path / "out.json")) == tmp_path / "out.json"
    for path, what in ((tmp_path / "no" / "out.json", "there is no folder"), (tmp_path, "is a folder")):
        with pytest.raises(argparse.ArgumentTypeError, match=what):
            benchmarks.argtypes.json_file(str(path))


def run(benchmarks, tmp_path, *arguments):
    prompts = [f"--{name}={tmp_path / name}.jsonl" for name in ("gsm8k", "arena")]
    folder = tmp_path / "out"
    given = ["--tiny", f"--target={tmp_path}", f"--output={folder}", *prompts, *arguments]
    return benchmarks.experiment.main(given)


def test_missing_prompts_end_the_experiment_in_one_line(benchmarks, tmp_path, capsys):
    assert run(benchmarks, tmp_path) == 2
    out = capsys.readouterr().out
    assert out.startswith("real: ") and "gsm8k.jsonl" in out and out.count("\n") == 1


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"parts": {}}'])
def test_results_that_are_none_end_experiment_and_report_in_one_line(benchmarks, tmp_path, capsys, content):
    merged = tmp_path / "results.json"
    merged.write_text(content)
    assert run(benchmarks, tmp_path, f"--merged={merged}") == 2
    assert benchmarks.report.main([str(merged), "--docs", str(tmp_path)]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["real", "report"] and merged.read_text() == content
    assert not (tmp_path / "results.md").exists()


def test_an_output_that_is_a_file_and_a_part_that_is_cut_are_said(benchmarks, tmp_path, capsys):
    (tmp_path / "out").write_text("x")
    assert run(benchmarks, tmp_path) == 2
    assert "cannot be made" in capsys.readouterr().out
    store = benchmarks.store.Store(tmp_path / "other", tmp_path / "r.json", 1e18, {}, {})
    store.restore()
    store.path("baselines").write_text('{"part_s": 1.')
    with pytest.raises(UserError, match="cannot be read"):
        store.find("baselines")


def test_a_cut_archive_of_answers_leaves_nothing_in_the_way_of_a_whole_one(benchmarks, tmp_path):
    archive = tmp_path / "answers.jsonl.gz"
    whole = gzip.compress(b'{"id": "a"}\n' * 500)
    files = benchmarks.prompts.PromptFiles(tmp_path / "g", tmp_path / "a", tmp_path / "work", archive)
    for damaged in (whole[:-9], whole[:30], b"no archive"):
        archive.write_bytes(damaged)
        with pytest.raises(UserError, match="no whole archive"):
            benchmarks.prompts.answer_all(files, None, None, "cpu")
        assert not list(files.folder.iterdir())
    archive.write_bytes(whole)
    assert benchmarks.prompts.answer_all(files, None, None, "cpu") == {"from": "kept answers", "answers": 500}


def test_parts_are_known_by_their_beginnings(benchmarks):
    results = json.loads((BENCHMARKS / "results" / "real" / "results.json").read_text())
    assert set(results["parts"]) <= set(benchmarks.experiment.known_parts())
    assert benchmarks.experiment.part_names("main,sync-often") == ("main", "sync-often")
    with pytest.raises(argparse.ArgumentTypeError, match="no part begins with nosuch; known: answers, baselines"):
        benchmarks.experiment.part_names("main,nosuch")
