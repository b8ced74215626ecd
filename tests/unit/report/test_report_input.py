"""Promises of `draftline report` about bad input: one line, exit code 2, and no file left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftline.errors import UserError
from draftline.report.command import write_report
from draftline.report.page import require_plotly
from made_run import evaluation, make_run


def newer(path: Path, key: str) -> None:
    lines = path.read_text().splitlines()
    lines[0] = json.dumps({**json.loads(lines[0]), key: 99})
    path.write_text("\n".join(lines))


BROKEN = {
    "no folder": (lambda run: run.rename(run.with_name("gone")), "no such folder"),
    "no status": (lambda run: (run / "status.json").unlink(), "holds no status.json"),
    "half a status": (lambda run: (run / "status.json").write_text('{"schema_version": 1, "pro'), "is not whole"),
    "newer status": (lambda run: newer(run / "status.json", "schema_version"), "version 99"),
    "no configuration": (lambda run: (run / "config.yaml").unlink(), "holds no config.yaml"),
    "half a configuration": (lambda run: (run / "config.yaml").write_text("output: ["), "config.yaml"),
    "no figures": (lambda run: (run / "metrics.jsonl").write_text(""), "no row has been trained yet"),
    "no events": (lambda run: (run / "events.jsonl").unlink(), "no event log here"),
    "newer events": (lambda run: newer(run / "events.jsonl", "anchor"), "version 99"),
    "newer evaluation": (
        lambda run: newer(evaluation(run / "evaluation.json"), "schema_version"),
        "evaluation of version 99",
    ),
    "no evaluation": (lambda run: (run / "evaluation.json").write_text("[]"), "is no evaluation report"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_run_folder_is_one_line_and_no_file(tmp_path, case):
    run = make_run(tmp_path / "run")
    break_it, words = BROKEN[case]
    break_it(run)
    with pytest.raises(UserError) as caught:
        write_report([run], output=tmp_path / "report.html")
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert caught.value.exit_code == 2
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("runs", "options", "words"),
    [
        ([], {}, "no run folder"),
        (["a"], {"compare": True}, "needs two runs"),
        (["a", "b"], {}, "add --compare"),
        (["a", "b"], {"compare": True, "evaluations": [Path("e.json")]}, "belongs to one run"),
    ],
)
def test_a_wrong_number_of_runs_is_refused(runs, options, words):
    with pytest.raises(UserError, match=words):
        write_report([Path(run) for run in runs], **options)


def test_without_plotly_the_extra_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'draftline\[report\]'"):
        require_plotly()


def test_torn_lines_are_passed_over_and_counted(tmp_path):
    run = make_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "train/lo')
    with (run / "events.jsonl").open("a") as file:
        file.write('\n{"w":"drafter-0","a":"working","d":"x","t0":1e400,"t1":0}\n[1]\n{"n":')
    text = write_report([run]).read_text(encoding="utf-8")
    assert "4 torn or unreadable lines" in text


def test_a_run_that_is_still_going_can_be_reported(tmp_path):
    run = make_run(tmp_path / "run")
    content = json.loads((run / "status.json").read_text())
    (run / "status.json").write_text(json.dumps({**content, "end": None}))
    assert "runs on elsewhere" in write_report([run]).read_text(encoding="utf-8")
