"""A slice of `make chaos`: a real run, killed with SIGKILL at a random moment and resumed to its end."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def chaos() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[2] / "scripts")
        yield importlib.import_module("chaos")


def test_e14_a_killed_run_goes_on_and_commits_every_row_once(chaos: ModuleType, tmp_path: Path):
    result = chaos.chaos(1, 5, 1, tmp_path / "work", compare=False)
    assert result["broken_promises"] == []
    assert result["kills"] == 1 and result["kills_after_the_first_step"] >= 1
    assert result["runs_that_reached_their_end"] >= 1
    again = chaos.chaos(1, 5, 1, tmp_path / "work", compare=False)  # all of it is written down
    assert again["moments"] == result["moments"]
    with pytest.raises(SystemExit, match="belongs to other kills"):
        chaos.chaos(1, 6, 1, tmp_path / "work", compare=False)


def test_a_folder_with_something_else_in_it_is_left_alone(chaos: ModuleType, tmp_path: Path):
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(SystemExit, match="holds something else"):
        chaos.chaos(1, 0, 1, tmp_path)
    assert (tmp_path / "mine.txt").exists()


def test_the_verifier_finds_a_checkpoint_that_is_half_there(chaos: ModuleType, tmp_path: Path):
    folder = tmp_path / "checkpoints" / "round-00000000"
    folder.mkdir(parents=True)
    (folder / "weights.safetensors").write_bytes(b"half")
    with pytest.raises(chaos.BrokenPromiseError, match="unreadable"):
        chaos.check_run(tmp_path)
