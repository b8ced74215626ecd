"""`draftline doctor RUN`: a healthy run has nothing to look at; each thing that is wrong is found and has a mend."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from draftline.config.load import load_config
from draftline.doctor import DoctorContext, Finding, check_run, run_doctor
from draftline.errors import RunFailedError
from draftline.pipeline.checkpoint import list_checkpoints
from draftline.pipeline.coordinator import MeetingRoom, train
from draftline.pipeline.runplan import make_run_plan


@pytest.fixture(scope="module")
def finished_run(
    tmp_path_factory: pytest.TempPathFactory, tiny_target_dir: Path, tiny_data: Path, tiny_yaml: str
) -> Path:
    folder = tmp_path_factory.mktemp("doctor")
    data = shutil.copytree(tiny_data, folder / "data")
    text = tiny_yaml.format(output=folder / "run", model=tiny_target_dir, data=data)
    (folder / "run.yaml").write_text(text, encoding="utf-8")
    train(make_run_plan(load_config([folder / "run.yaml"], ["max_rows=6", "checkpoint.keep=2"])))
    return folder / "run"


@pytest.fixture
def run(finished_run: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished_run, tmp_path / "run")


def examine(run: Path) -> list[Finding]:
    return run_doctor(DoctorContext(run=run), [("run", check_run)])


def wrong(run: Path) -> list[Finding]:
    return [finding for finding in examine(run) if finding.level != "ok"]


def test_a_finished_run_has_nothing_to_look_at(run: Path):
    findings = examine(run)
    assert [finding.what for finding in findings if finding.level != "ok"] == []
    text = "\n".join(finding.what for finding in findings)
    for word in ("config.yaml", "what the run was started with", "2 whole", "committed 6", "finished", "export"):
        assert word in text


def cut_newest(run: Path) -> None:
    path = list_checkpoints(run)[-1] / "weights.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def cut_all(run: Path) -> None:
    for folder in list_checkpoints(run):
        (folder / "manifest.json").write_text("{")


def spoil_ledger(run: Path) -> None:
    folder = list_checkpoints(run)[-1]
    state = json.loads((folder / "state.json").read_text())
    state["ledger"]["n_committed"] += 1
    (folder / "state.json").write_text(json.dumps(state))
    manifest = json.loads((folder / "manifest.json").read_text())
    data = (folder / "state.json").read_bytes()
    manifest["files"]["state.json"] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def say_failed(run: Path) -> None:
    status = json.loads((run / "status.json").read_text())
    status["end"] = {"outcome": "failed", "reason": "drafter-0: broke", "wall_s": 1.0}
    (run / "status.json").write_text(json.dumps(status))
    (run / "failures.log").write_text("trace")


def say_nothing(run: Path) -> None:
    status = json.loads((run / "status.json").read_text())
    status["end"], status["process"]["pid"] = None, 2**22 - 1
    (run / "status.json").write_text(json.dumps(status))


DAMAGE = {
    "a cut checkpoint": (cut_newest, "warn", "cut off?", "passed over"),
    "no whole checkpoint": (cut_all, "fail", "no checkpoint is whole", "new folder"),
    "a ledger that does not add up": (spoil_ledger, "fail", "contradict its rows", "one before"),
    "a broken configuration": (lambda run: (run / "config.yaml").write_text("seed: x"), "fail", "more)", "state.json"),
    "no configuration": (lambda run: (run / "config.yaml").unlink(), "fail", "config.yaml: no such file", "state.json"),
    "no identity": (lambda run: (run / "run.json").unlink(), "warn", "run.json: cannot be read", "resume is refused"),
    "another identity": (
        lambda run: (run / "run.json").write_text('{"fingerprints": {"data": "other"}}'),
        "fail",
        "fingerprint was other",
        "restore the data",
    ),
    "a pointer to nothing": (
        lambda run: (run / "checkpoints" / "latest.json").write_text('{"name": "round-00000099"}'),
        "warn",
        "names 'round-00000099'",
        "next checkpoint",
    ),
    "a write cut short": (
        lambda run: (run / "checkpoints" / ".tmp-round-00000009").mkdir(),
        "warn",
        ".tmp-round-00000009",
        "next checkpoint",
    ),
    "no export": (lambda run: shutil.rmtree(run / "export"), "warn", "no export", "draftline export"),
    "an export without weights": (
        lambda run: (run / "export" / "model.safetensors").unlink(),
        "fail",
        "holds no weights",
        "draftline export",
    ),
    "a cut export": (
        lambda run: (run / "export" / "model.safetensors").write_bytes(
            (run / "export" / "model.safetensors").read_bytes()[:-1]
        ),
        "fail",
        "export: ",
        "draftline export",
    ),
    "an export that is a file": (
        lambda run: (shutil.rmtree(run / "export"), (run / "export").write_text("x")),
        "fail",
        "is not a folder",
        "draftline export",
    ),
    "a torn log": (lambda run: (run / "events.jsonl").write_text("{{"), "warn", "1 lines are torn", "nothing is lost"),
    "a run that failed": (say_failed, "fail", "drafter-0: broke", "failures.log"),
    "a run that was killed": (say_nothing, "warn", "killed", "--resume"),
    "no status": (lambda run: (run / "status.json").unlink(), "warn", "status.json", "--resume"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_what_is_wrong_is_found_and_has_a_mend(run: Path, what: str):
    damage, level, words, mend = DAMAGE[what]
    damage(run)
    found = [finding for finding in wrong(run) if words in finding.what]
    assert found, wrong(run)
    assert found[0].level == level and mend in found[0].mend


def test_a_disk_without_room_for_the_next_checkpoint_is_told(run: Path, monkeypatch: pytest.MonkeyPatch):
    shutil.rmtree(list_checkpoints(run)[-1])  # the last rows are not committed
    assert [f for f in wrong(run) if "free on the disk" in f.what] == []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=100))
    found = [f for f in wrong(run) if "free on the disk" in f.what]
    assert len(found) == 1 and "free some space" in found[0].mend


def test_another_folder_is_no_run(tmp_path: Path):
    assert [(f.level, "is no run folder" in f.what) for f in examine(tmp_path)] == [("fail", True)]


def test_a_run_that_broke_off_says_how_to_go_on(make_run, monkeypatch):
    def broken(self, meeting, clock):
        raise RunFailedError("broke off", origin="drafter-0")

    monkeypatch.setattr(MeetingRoom, "hold", broken)
    config = make_run("max_rows=6")
    with pytest.raises(RunFailedError):
        train(make_run_plan(config))
    found = {finding.what: finding.mend for finding in wrong(config.output)}
    assert "starts from its first row" in found["no checkpoint yet"]
    assert any("broke off" in what and "--resume" in mend for what, mend in found.items())
