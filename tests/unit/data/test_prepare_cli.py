"""Promises of the commands around `prepare`: each option reaches what it is for, and mistakes are told in words."""

from __future__ import annotations

import json
from pathlib import Path

import data_kit as kit
import pytest
from typer.testing import CliRunner

from draftline.cli import app
from draftline.config.schema import TargetConfig
from draftline.data.manifest import read_manifest
from draftline.errors import UserError


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=True)
    if isinstance(result.exception, UserError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def source(folder: Path, name: str, n: int) -> Path:
    rows = [{"id": f"{name}{i}", "messages": kit.talk(f"{name} asks {i}", "yes one two")} for i in range(n)]
    return kit.write_lines(folder / f"{name}.jsonl", rows)


def test_mix_split_limits_preview_and_label_check_in_one_command(tmp_path: Path, target: TargetConfig) -> None:
    a, b = source(tmp_path, "a", 40), source(tmp_path, "b", 60)
    prompts = kit.write_lines(tmp_path / "eval.jsonl", [{"prompt": "b asks 7"}])
    output = tmp_path / "out"
    said = run(
        *("prepare", "--mix", f"{a}=0.75", f"{b}=0.25", "--output", str(output), "--target", target.model),
        *("--validation-fraction", "0.3", "--seed", "5", "--max-prompt-tokens", "60", "--min-supervised-tokens", "2"),
        *("--decontaminate", str(prompts), "--preview", "1", "--check-labels", "2", "--device", "cpu"),
        *("--chat-template-kwargs", '{"enable_thinking": false}'),
    )
    manifest = read_manifest(output)
    assert [s.weight for s in manifest.sources] == [0.75, 0.25]
    assert (manifest.seed, manifest.validation_fraction, manifest.max_prompt_tokens) == (5, 0.3, 60)
    assert manifest.rejected["in evaluation prompts"] == 1 and manifest.rejected["left out by the mix"] > 0
    assert manifest.label_check is not None and manifest.label_check.n_samples == 2
    assert "⟦yes one two<|im_end|>⟧" in said and "own first choice: " in said and "mixed: " in said
    plain = run("prepare", str(a), "-o", str(tmp_path / "plain"), "--target", target.model)
    assert read_manifest(tmp_path / "plain").template_hash != manifest.template_hash
    assert "rows: 40 in == 40 out + 0 rejected" in plain


def test_preview_and_check_labels_work_on_a_prepared_folder(tmp_path: Path, target: TargetConfig) -> None:
    output = tmp_path / "out"
    run("prepare", str(source(tmp_path, "a", 3)), "-o", str(output), "--target", target.model)
    shown = run("preview", str(output), "--target", target.model, "--samples", "2")
    assert shown.count("⟦yes one two<|im_end|>⟧") == 2
    told = run("check-labels", str(output), "--target", target.model, "--samples", "2", "--device", "cpu")
    assert "in 2 samples" in told
    assert json.loads((output / "manifest.json").read_text())["label_check"]["n_samples"] == 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--chat-template-kwargs", "[1]"], "--chat-template-kwargs: '[1]' is no JSON object; write"),
        (["--chat-template-kwargs", "{"], "is no JSON object"),
        (["--mix", "b.jsonl=0.5"], "some sources have a weight and some have none"),
        (["--turns", "first"], "turns is 'first'; set it to all or last"),
        (["--validation-fraction", "1"], "validation_fraction is 1.0"),
        (["--workers", "1000"], "workers is 1000; set it to 1 to 256"),
        (["--decontaminate", "nothing.jsonl"], "nothing.jsonl: no such file"),
    ],
)
def test_mistakes_are_told_in_words(
    tmp_path: Path, target: TargetConfig, arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        run("prepare", str(source(tmp_path, "a", 3)), "-o", "out", "--target", target.model, *arguments)
    assert says in str(caught.value) and "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl"]


def test_no_source_is_told(tmp_path: Path, target: TargetConfig) -> None:
    with pytest.raises(UserError, match="no source was given"):
        run("prepare", "-o", str(tmp_path / "out"), "--target", target.model)
