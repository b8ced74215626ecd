"""A checkpoint write that dies at any of its steps: there is always a whole checkpoint, and never half a one."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from draftline.errors import UserError
from draftline.pipeline import checkpoint as module
from draftline.pipeline.checkpoint import (
    Checkpoint,
    latest_checkpoint,
    list_checkpoints,
    read_checkpoint,
    verify_checkpoint,
    write_checkpoint,
)

STEPS = (
    (module, "save_file"),
    (os, "fsync"),
    (os, "rename"),
    (os, "replace"),
    (shutil, "rmtree"),
)


class DiedError(BaseException):
    """The process is gone: no handler of the code under test may tidy up."""


class Disk:
    """Counts the steps of a write, and does something else at one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int, happens: Callable[[], None]) -> None:
        self.names: list[str] = []
        self._at, self._happens = at, happens
        for owner, name in STEPS:
            monkeypatch.setattr(owner, name, self._watched(name, getattr(owner, name)))

    def _watched(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            self.names.append(name)
            if len(self.names) - 1 == self._at:
                self._happens()
            return original(*args, **kwargs)

        return step


def die() -> None:
    raise DiedError


def full() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def sample(value: float) -> Checkpoint:
    state = {"round_id": 1, "ledger": {"planned": 3}}
    return Checkpoint(
        state, {"w": torch.full((3,), value)}, [{"w.exp_avg": torch.ones(3)}], {"global.0": torch.ones(1)}
    )


def weight(run: Path) -> float:
    found = latest_checkpoint(run)
    assert found is not None and found[1] == [], "what bears a checkpoint's name is whole"
    return float(read_checkpoint(found[0]).weights["w"][0])


def steps_of_a_write(tmp_path: Path) -> list[str]:
    run = tmp_path / "counted"
    write_checkpoint(run, 1, sample(1.0), keep=1)
    with pytest.MonkeyPatch.context() as patch:
        disk = Disk(patch, -1, die)
        write_checkpoint(run, 2, sample(2.0), keep=1)
    return disk.names


def write_second(run: Path, at: int, happens: Callable[[], None]) -> BaseException | None:
    write_checkpoint(run, 1, sample(1.0), keep=1)
    with pytest.MonkeyPatch.context() as patch:
        Disk(patch, at, happens)
        try:
            write_checkpoint(run, 2, sample(2.0), keep=1)
        except (DiedError, UserError) as error:
            return error
    return None


def test_a_crash_at_any_step_leaves_a_whole_checkpoint_and_the_next_write_tidies_up(tmp_path: Path):
    found = set()
    for at in range(len(steps_of_a_write(tmp_path)) + 2):
        run = tmp_path / f"run-{at}"
        write_second(run, at, die)
        for folder in list_checkpoints(run):
            verify_checkpoint(folder)
        found.add(weight(run))
        write_checkpoint(run, 3, sample(3.0), keep=1)
        left = {path.name for path in (run / "checkpoints").iterdir()}
        assert left == {"round-00000003", "latest.json"}, at
    assert found == {1.0, 2.0}


def test_a_disk_that_is_full_at_any_step_is_one_line_or_no_loss(tmp_path: Path):
    for at, name in enumerate(steps_of_a_write(tmp_path)):
        if name == "rmtree":  # no full disk stops a deletion
            continue
        run = tmp_path / f"run-{at}"
        error = write_second(run, at, full)
        assert error is None or (isinstance(error, UserError) and "could not be written" in str(error)), (at, name)
        assert weight(run) in (1.0, 2.0)
        assert not list((run / "checkpoints").glob(".tmp-round-*")), (at, name)


def test_the_old_one_goes_only_after_the_new_one_is_on_the_disk(tmp_path: Path):
    """Files, their folder, its new name and the pointer are all synced before anything old is touched."""
    names = steps_of_a_write(tmp_path)
    last_sync = max(i for i, name in enumerate(names) if name == "fsync")
    renames = [i for i, name in enumerate(names) if name == "rename"]
    assert len(renames) == 2 and renames[0] < last_sync < renames[1]
    assert names.count("fsync") >= 3 + 2 + 1 + 1 + 1 + 1  # tensors, JSON, folder, root, pointer, root
