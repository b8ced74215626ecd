"""`draftline eval` and `export` from the command line: which checkpoint, bad rows, batches, plots, plain refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from draftline.cli import app
from draftline.errors import UserError
from draftline.evaluate.command import find_drafter
from draftline.export.formats import load_drafter_export
from draftline.export.zlab import export_zlab
from draftline.pipeline.checkpoint import list_checkpoints, read_checkpoint
from draftline.pipeline.choice import choose_checkpoint
from draftline.pipeline.exporting import drafter_of_run
from tiny_run_kit import finished_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_target_dir: Path, tiny_data: Path) -> Path:
    """Two checkpoints, and a `best` drafter as validation leaves it."""
    run = finished_run(tmp_path_factory.mktemp("eval"), tiny_target_dir, tiny_data, "max_rows=4", "sync.every_rows=2")
    drafter = drafter_of_run(run)
    with torch.no_grad():
        drafter.norm.weight.mul_(2.0)
    export_zlab(drafter, run / "best")
    return run


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "held-out.jsonl"
    rows = [{"prompt": text, "response": "x"} for text in ("How are you?", "What is France?", "One two")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "not json\n")
    return path


def invoke(*arguments: object) -> tuple[int, str]:
    """Exit code as `draftline` would end, and all that it said."""
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    if isinstance(result.exception, UserError):
        return result.exception.exit_code, str(result.exception)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def test_newest_best_or_a_round_is_chosen_and_said(run: Path, tmp_path: Path) -> None:
    first, newest = list_checkpoints(run)
    number = int(first.name.removeprefix("round-"))
    for which, folder, label in (
        ("newest", newest, newest.name),
        (str(number), first, first.name),
        ("best", run / "best", "best by validation"),
    ):
        choice = choose_checkpoint(run, which)
        assert (choice.folder, choice.label) == (folder, label)
        output = tmp_path / which
        code, said = invoke("export", run, "--output", output, "--dtype", "float32", "--checkpoint", which)
        assert code == 0
        assert f"({label} of {run})" in said.replace("\n", "")
        exported = load_drafter_export(output).state_dict()["norm.weight"]
        chosen = find_drafter(run, which).load("cpu", torch.float32).state_dict()["norm.weight"]
        assert torch.equal(exported, chosen)
    weights = read_checkpoint(newest).weights["norm.weight"]
    best = find_drafter(run, "best").load("cpu", torch.float32).state_dict()["norm.weight"]
    torch.testing.assert_close(best, 2.0 * weights, rtol=1e-2, atol=1e-2)


def test_a_checkpoint_that_is_not_there_is_refused_with_those_that_are(run: Path, tmp_path: Path) -> None:
    kept = ", ".join(str(int(p.name.removeprefix("round-"))) for p in list_checkpoints(run))
    with pytest.raises(UserError, match=f"no checkpoint of round 77.*kept are: {kept}"):
        choose_checkpoint(run, "77")
    for word in ("last", "²", "9" * 5000):
        with pytest.raises(UserError, match=f"'{word[:79]}.* is no checkpoint"):
            choose_checkpoint(run, word)
    with pytest.raises(UserError, match="no drafter was chosen by validation"):
        choose_checkpoint(tmp_path, "best")
    with pytest.raises(UserError, match="holds no checkpoint"):
        choose_checkpoint(tmp_path)
    with pytest.raises(UserError, match="an export, which holds one drafter"):
        find_drafter(run / "best", "newest-but-one")


def test_a_newest_checkpoint_that_is_not_whole_is_passed_over_and_said(
    run: Path, tiny_target_dir: Path, prompts: Path, tmp_path: Path
) -> None:
    broken = Path(shutil.copytree(run, tmp_path / "broken"))
    first, newest = list_checkpoints(broken)
    (newest / "state.json").write_text("{}")
    options = ["--methods", "chain", "--max-new-tokens", 3, "--skip-bad-rows", "--output", tmp_path / "report.json"]
    code, _ = invoke("eval", "--target", tiny_target_dir, "--drafter", broken, "--prompts", prompts, *options)
    assert code == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["drafters"]["broken"]["checkpoint"] == first.name
    assert any(f"passed over {newest / 'state.json'}" in line for line in report["warnings"])
    code, said = invoke("export", broken, "--output", tmp_path / "export")
    assert code == 0
    assert f"passed over: {newest / 'state.json'}" in said.replace("\n", "")


def test_compare_asks_whether_the_second_drafter_is_better_than_the_first(
    run: Path, tiny_target_dir: Path, prompts: Path, tmp_path: Path
) -> None:
    common = ["eval", "--target", tiny_target_dir, "--prompts", prompts, "--skip-bad-rows", "--max-new-tokens", 4]
    common += ["--device", "cpu", "--methods", "chain", "--output", tmp_path / "report.json"]
    code, said = invoke(*common, "--compare", run, run / "best")
    assert code == 0
    (comparison,) = json.loads((tmp_path / "report.json").read_text())["comparisons"]
    assert (comparison["a"], comparison["b"]) == ("run", "best")
    assert comparison["verdict"] == "undecided"
    assert "chain: best against run:" in said


def test_bad_rows_are_refused_or_left_out_and_counted(
    run: Path, tiny_target_dir: Path, prompts: Path, tmp_path: Path
) -> None:
    common = ["eval", "--target", tiny_target_dir, "--drafter", run, "--prompts", prompts, "--max-new-tokens", 6]
    common += ["--device", "cpu", "--methods", "plain,chain,tree@3", "--output", tmp_path / "report.json"]
    code, said = invoke(*common)
    assert code == 2
    assert f"{prompts}:4" in said
    assert "--skip-bad-rows" in said
    plot = tmp_path / "plot.svg"
    code, said = invoke(*common, "--skip-bad-rows", "--batch", 2, "--timed", 1, "--checkpoint", "best", "--plot", plot)
    assert code == 0
    flat = " ".join(said.split())
    assert "1 rows of the prompt files were left out" in flat
    assert "best by validation of" in flat
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["settings"]["batch"] == 2
    assert next(iter(report["drafters"].values()))["checkpoint"] == "best by validation"
    assert plot.read_text().startswith("<?xml")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dtype", "int8"], "dtype 'int8' is not known"),
        (["--compile", "fast"], "'fast' is not a way to compile"),
        (["--plot", "a.pdf"], "cannot be written as .pdf"),
        (["--proposals", "best"], "'best' is no way to draft"),
        (["--chat-template-kwargs", "{"], "--chat-template-kwargs"),
        (["--seed", "-1"], "'--seed'"),
        (["--seed", str(2**64)], "'--seed'"),
        (["--temperature", "1e-40"], "temperature 1e-40, top_p 1.0, top_k 0 cannot be sampled from"),
        (["--temperature", "nan"], "'--temperature'"),
        (["--temperature", "inf"], "'--temperature'"),
        (["--methods", "tree@²"], "'tree@²' is not a method"),
        (["--methods", "tree@16,tree@016", "--plot", "a.svg"], "tree@16 is named twice"),
    ],
)
def test_options_that_mean_nothing_are_refused_in_one_line(
    tmp_path: Path, tiny_target_dir: Path, prompts: Path, options: list[str], message: str
) -> None:
    code, said = invoke("eval", "--target", tiny_target_dir, "--prompts", prompts, "--methods", "plain", *options)
    assert code == 2
    assert message in said
