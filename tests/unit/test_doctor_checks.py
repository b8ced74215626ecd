"""The doctor's further checks: template, peers, memory of a plan, serving of an export, and the preview."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from draftline import doctor_checks
from draftline.config.schema import TargetConfig
from draftline.data.manifest import DatasetFacts
from draftline.data.shards import ShardWriter
from draftline.data.template import tokenizer_fingerprint
from draftline.doctor import DoctorContext, Finding, doctor_command, run_doctor
from draftline.doctor_checks import check_peers, check_plan, check_serving, check_template
from draftline.errors import UserError
from draftline.export.check import CheckReport
from draftline.export.traps import TrapFinding
from draftline.target.facts import TargetFacts, target_facts

RUN_YAML = """
output: {output}
target: {{model: "{model}"}}
data: {{path: "{data}", row_tokens: 64}}
drafter: {{num_layers: 2, block_size: 4, taps: [0, 2], mask_token_id: 300, intermediate_size: 64}}
objective: {{anchors: 16}}
pipeline: {{target_devices: [cpu], drafter_devices: [cpu]}}
"""


def only(check: Any, **context: Any) -> list[Finding]:
    return run_doctor(DoctorContext(**context), [("check", check)])


@pytest.fixture
def data(tmp_path: Path, tiny_tokenizer: Any) -> Path:
    with ShardWriter(tmp_path / "data") as writer:
        for i in range(8):
            writer.add(f"s{i}", list(range(40)), [False] * 20 + [True] * 20)
        fingerprint = tokenizer_fingerprint(tiny_tokenizer)
        writer.finish(DatasetFacts(tokenizer_fingerprint=fingerprint, template_hash="t", vocab_size=400, max_tokens=64))
    return tmp_path / "data"


@pytest.fixture
def config(tmp_path: Path, tiny_target_dir: Path, data: Path) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text(RUN_YAML.format(output=tmp_path / "run", model=tiny_target_dir, data=data), encoding="utf-8")
    return file


def test_a_sound_template_supervises_both_answers(tiny_target_dir: Path) -> None:
    (finding,) = only(check_template, target=TargetConfig(model=str(tiny_target_dir)))
    assert finding.level == "ok" and "supervised" in finding.what


def edited(target: Path, folder: Path, template: str) -> TargetConfig:
    """The target with another chat template."""
    copy = shutil.copytree(target, folder / "edited")
    (copy / "chat_template.jinja").write_text(template, encoding="utf-8")
    return TargetConfig(model=str(copy))


@pytest.mark.parametrize(
    ("template", "level", "words"),
    [
        ("{% for m in messages %}{{ m.content }", "fail", "chat template is broken"),
        ("{% for m in messages %}{{ m.role }}{% endfor %}", "warn", "cannot be supervised"),
        (
            "{% for m in messages %}{% if loop.last or m.role == 'user' %}{{ m.content }}{% else %}..{% endif %} "
            "{% endfor %}",
            "warn",
            "",
        ),
    ],
)
def test_a_template_that_cannot_be_trained_on_is_found(
    tiny_target_dir: Path, tmp_path: Path, template: str, level: str, words: str
) -> None:
    found = only(check_template, target=edited(tiny_target_dir, tmp_path, template))
    assert [f.level for f in found] == [level] and words in found[0].what and found[0].mend


def test_gpus_that_do_not_reach_each_other_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_checks, "resolve_devices", lambda names: ["cuda:0", "cuda:1", "cuda:2"])
    monkeypatch.setattr(doctor_checks, "_reaches", lambda a, b: "cuda:2" not in (a, b))
    (finding,) = only(check_peers)
    assert finding.level == "warn" and "cuda:0 and cuda:2, cuda:1 and cuda:2" in finding.what and finding.mend
    monkeypatch.setattr(doctor_checks, "_reaches", lambda a, b: True)
    assert [f.level for f in only(check_peers)] == ["ok"]
    monkeypatch.setattr(doctor_checks, "resolve_devices", lambda names: ["cpu", "cuda:0"])
    assert only(check_peers) == []


@pytest.mark.parametrize(("factor", "level"), [(0.5, "fail"), (1.05, "warn"), (100.0, "ok")])
def test_a_plan_is_held_against_the_memory_that_is_free(
    config: Path, monkeypatch: pytest.MonkeyPatch, factor: float, level: str
) -> None:
    from draftline.config.load import load_config
    from draftline.pipeline.runplan import estimate_memory, make_run_plan

    (needed,) = estimate_memory(make_run_plan(load_config([config])))
    free = int(needed.total_bytes * factor)
    monkeypatch.setattr(doctor_checks, "device_memory_bytes", lambda name: (free, free))
    told, memory = only(check_plan, config=config)
    assert told.level == "ok" and "1 targets, 1 drafters" in told.what
    assert memory.level == level and bool(memory.mend) == (level != "ok")


def test_a_configuration_that_cannot_run_is_a_failed_finding(config: Path) -> None:
    config.write_text(config.read_text().replace("block_size: 4", "block_size: 1"))
    (finding,) = only(check_plan, config=config)
    assert finding.level == "fail" and "block_size" in finding.what


def test_exports_are_told_by_the_servers_that_run_them(
    tmp_path: Path, tiny_target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("export", "best"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    trap = TrapFinding("refuse", "vllm", "it ignores the window", "train without it")
    note = TrapFinding("note", "any", "slower", "nothing")
    servers = ("dflash", "vllm")
    reports = {"export": (trap, note), "best": (TrapFinding("refuse", "any", "no weights", "export it again"),)}

    asked = []

    def check(path: Path, *, target: TargetFacts | None) -> CheckReport:
        asked.append(target)
        return CheckReport(path, "zlab", servers, reports[path.name])  # type: ignore[arg-type]

    monkeypatch.setattr("draftline.export.check.check_export", check)
    found = only(check_serving, run=tmp_path)
    assert [f.level for f in found] == ["warn", "ok", "warn", "fail"]
    assert "vllm: it ignores the window" in found[0].what and found[0].mend == "train without it"
    assert found[1].what.endswith("by dflash") and only(check_serving, run=tmp_path / "none") == []
    assert only(check_serving, run=tmp_path, target=TargetConfig(model=str(tiny_target_dir))) == found
    known = target_facts(TargetConfig(model=str(tiny_target_dir)))
    assert asked == [None, None, known, known]  # the target, where it is named, must be the drafter's


def test_the_command_shows_a_sample_with_its_mask_where_data_and_target_are_named(
    data: Path, tiny_target_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor_command(target=str(tiny_target_dir), data=data, devices=["cpu"], samples=2) == 0
    out = capsys.readouterr().out
    assert out.count("40 tokens, 20 supervised") == 2 and "\u27e6" in out
    assert doctor_command(target=str(tiny_target_dir), data=data, devices=["cpu"], samples=0) == 0
    assert "supervised\u27e7" not in capsys.readouterr().out
    doctor_command(target=None, data=data, devices=["cpu"])
    assert "\u27e6" not in capsys.readouterr().out


def test_a_check_without_anything_to_look_at_says_nothing() -> None:
    assert [only(check) for check in (check_template, check_plan, check_serving)] == [[], [], []]
    with pytest.raises(UserError):
        list(check_plan(DoctorContext(config=Path("nowhere.yaml"))))
