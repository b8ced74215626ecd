"""Promises of checkpoints: whole or not at all, verified on load, the newest whole one is found."""

from __future__ import annotations

import builtins
import errno
import json
import os

import pytest
import torch

from draftline.errors import UserError
from draftline.pipeline import checkpoint as module
from draftline.pipeline.checkpoint import (
    Checkpoint,
    CheckpointError,
    latest_checkpoint,
    list_checkpoints,
    read_checkpoint,
    verify_checkpoint,
    write_checkpoint,
)


def sample(value: float = 1.0) -> Checkpoint:
    weights = {"fc.weight": torch.full((3, 4), value), "norm.weight": torch.arange(4.0)}
    return Checkpoint({"round_id": 1, "ledger": {"planned": 3}}, weights, [{"fc.weight.exp_avg": torch.ones(3, 4)}], {})


def test_round_trip(tmp_path):
    folder = write_checkpoint(tmp_path, 7, sample(), keep=2)
    read = read_checkpoint(folder)
    assert read.state["ledger"] == {"planned": 3}
    assert torch.equal(read.weights["fc.weight"], sample().weights["fc.weight"])
    assert torch.equal(read.moments[0]["fc.weight.exp_avg"], torch.ones(3, 4))
    assert json.loads((tmp_path / "checkpoints" / "latest.json").read_text())["name"] == folder.name


def test_only_the_last_ones_are_kept(tmp_path):
    for round_id in range(5):
        write_checkpoint(tmp_path, round_id, sample(round_id), keep=2)
    assert [p.name for p in list_checkpoints(tmp_path)] == ["round-00000003", "round-00000004"]


@pytest.mark.parametrize("name", ["weights.safetensors", "moments-0.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["cut", "flip", "delete"])
def test_a_damaged_file_is_found_and_the_older_checkpoint_is_used(tmp_path, name, damage):
    write_checkpoint(tmp_path, 1, sample(1.0), keep=3)
    newest = write_checkpoint(tmp_path, 2, sample(2.0), keep=3)
    path = newest / name
    data = bytearray(path.read_bytes())
    if damage == "cut":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "flip":
        data[len(data) // 2] ^= 0xFF
        path.write_bytes(data)
    else:
        path.unlink()
    with pytest.raises(CheckpointError):
        verify_checkpoint(newest)
    found = latest_checkpoint(tmp_path)
    assert found is not None
    folder, problems = found
    assert folder.name == "round-00000001"
    assert len(problems) == 1 and newest.name in problems[0]


def test_all_damaged_is_one_clear_line(tmp_path):
    folder = write_checkpoint(tmp_path, 1, sample(), keep=3)
    (folder / "weights.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match="no checkpoint is whole"):
        latest_checkpoint(tmp_path)


def test_no_checkpoint_is_none(tmp_path):
    assert latest_checkpoint(tmp_path) is None


@pytest.mark.parametrize("fails_at", ["save", "rename"])
def test_a_full_disk_leaves_the_earlier_checkpoint_and_no_half(tmp_path, monkeypatch, fails_at):
    earlier = write_checkpoint(tmp_path, 1, sample(1.0), keep=1)

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(*((module, "save_file") if fails_at == "save" else (os, "rename")), full)
    with pytest.raises(UserError, match="could not be written"):
        write_checkpoint(tmp_path, 2, sample(2.0), keep=1)
    monkeypatch.undo()
    assert [p.name for p in (tmp_path / "checkpoints").iterdir() if p.is_dir()] == [earlier.name]
    assert torch.equal(read_checkpoint(earlier).weights["fc.weight"], sample(1.0).weights["fc.weight"])


def test_a_manifest_cannot_name_files_outside_its_folder(tmp_path):
    folder = write_checkpoint(tmp_path, 1, sample(), keep=1)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["../../outside"] = manifest["files"]["state.json"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (tmp_path / "outside").write_bytes((folder / "state.json").read_bytes())
    with pytest.raises(CheckpointError, match="outside"):
        verify_checkpoint(folder)


def test_nothing_is_unpickled(tmp_path, monkeypatch):
    """A file that pickle would run is refused as not being what the manifest says."""
    import pickle

    folder = write_checkpoint(tmp_path, 1, sample(), keep=1)

    class Evil:
        def __reduce__(self):
            return builtins.exec, (f"open({str(tmp_path / 'owned')!r}, 'w')",)

    (folder / "weights.safetensors").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError):
        read_checkpoint(folder)
    assert not (tmp_path / "owned").exists()
