"""A folder is replaced whole or not at all, whenever its writer is killed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from draftline.errors import UserError
from draftline.export import files
from draftline.export.files import whole_folder

MARKER = "mark.json"


class KilledError(BaseException):
    """Stands for SIGKILL: nothing that comes after it in the writer runs."""


def write(path: Path, text: str) -> None:
    with whole_folder(path, replaces=MARKER) as folder:
        (folder / MARKER).write_text(text)


def killed_at(monkeypatch: pytest.MonkeyPatch, name: str, call: int) -> None:
    """The `call`-th use of os.replace or shutil.rmtree, and all clean-up after it, does not happen."""
    module, calls = (os if name == "replace" else files.shutil), []
    real = getattr(module, name)

    def dies(*arguments: object, **options: object) -> object:
        calls.append(arguments)
        if len(calls) >= call:
            raise KilledError
        return real(*arguments, **options)

    monkeypatch.setattr(module, name, dies)
    monkeypatch.setattr(files, "_undo", lambda temporary, path: None)


@pytest.mark.parametrize(("name", "call"), [("replace", 1), ("replace", 2), ("rmtree", 1)])
def test_after_a_kill_at_any_step_a_whole_folder_is_there_for_the_next_writer(
    tmp_path: Path, name: str, call: int
) -> None:
    path = tmp_path / "best"
    write(path, "old")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KilledError):
        killed_at(patch, name, call)
        write(path, "new")
    held = [folder for folder in tmp_path.iterdir() if (folder / MARKER).is_file()]
    assert held  # the old one or the new one, under whatever name
    write(path, "newer")
    assert (path / MARKER).read_text() == "newer"
    assert [folder.name for folder in tmp_path.iterdir()] == ["best"]


def test_an_old_folder_gets_its_name_back_when_the_next_write_fails(tmp_path: Path) -> None:
    path = tmp_path / "best"
    write(path, "old")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KilledError):
        killed_at(patch, "replace", 2)
        write(path, "new")
    assert not path.exists()
    with pytest.raises(UserError), whole_folder(path, replaces=MARKER):
        raise OSError(28, "No space left on device")
    assert (path / MARKER).read_text() == "old"


def test_what_a_living_writer_has_in_hand_is_left_alone(tmp_path: Path) -> None:
    theirs = tmp_path / f".best.{os.getppid()}-abc.tmp"
    theirs.mkdir()
    other = tmp_path / ".best.notes.tmp"
    other.mkdir()
    write(tmp_path / "best", "new")
    assert theirs.is_dir() and other.is_dir()


def test_a_link_to_a_folder_stays_and_the_folder_behind_it_is_replaced(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    write(real, "old")
    link.symlink_to(real, target_is_directory=True)
    write(link, "new")
    assert link.is_symlink() and (real / MARKER).read_text() == "new"
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["link", "real"]
