"""From files to a report: exports and run folders by name, and mistakes met before any weight is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from draftline.config.schema import DrafterConfig, TargetConfig
from draftline.drafter.model import Drafter
from draftline.drafter.spec import build_spec
from draftline.errors import UserError
from draftline.evaluate.command import evaluate_files, load_drafter
from draftline.export.zlab import export_zlab
from draftline.target.facts import target_facts


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "held-out.jsonl"
    rows = [
        {"messages": [{"role": "user", "content": text}]} for text in ("How are you?", "What is France?", "One two")
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _export(path: Path, target: Path, seed: int) -> Path:
    config = DrafterConfig(num_layers=1, block_size=4, mask_token_id=450)
    drafter = Drafter(build_spec(config, target_facts(TargetConfig(model=str(target)))))
    drafter.init_weights(torch.Generator().manual_seed(seed))
    return export_zlab(drafter, path)


def test_two_exports_are_decoded_side_by_side_and_named_by_what_differs(
    tmp_path: Path, tiny_target_dir: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exports = [_export(tmp_path / name / "export", tiny_target_dir, seed) for seed, name in enumerate(("a", "b"))]
    report = evaluate_files(
        TargetConfig(model=str(tiny_target_dir)),
        exports,
        [prompts],
        methods=["plain", "lookup", "chain", "tree@3"],
        max_new_tokens=9,
        limit=2,
    )
    assert list(report.drafters) == ["a/export", "b/export"]
    assert report.find("chain", "a/export", "held-out").n_prompts == 2
    assert report.divergences == 0
    assert report.target["attention"] == "sdpa"
    report.print()
    assert "speed-up" in capsys.readouterr().out


def test_mistakes_are_met_with_one_line(tmp_path: Path, tiny_target_dir: Path, prompts: Path) -> None:
    target = TargetConfig(model=str(tiny_target_dir))
    with pytest.raises(UserError, match="'chian' is not a method"):
        evaluate_files(TargetConfig(model=str(tmp_path / "none")), [], [prompts], methods=["chian"], max_new_tokens=4)
    with pytest.raises(UserError, match="two prompt sets are called held-out"):
        evaluate_files(target, [], [prompts, prompts], methods=["plain"], max_new_tokens=4)
    with pytest.raises(UserError, match="no such folder"):
        load_drafter(tmp_path / "none", "cpu", torch.float32)
    with pytest.raises(UserError, match="holds no checkpoint"):
        load_drafter(tmp_path, "cpu", torch.float32)
    export = _export(tmp_path / "export", tiny_target_dir, 0)
    with pytest.raises(UserError, match="named twice"):
        evaluate_files(target, [export, export], [prompts], methods=["chain"], max_new_tokens=4)
