"""A slice of `make chaos`: a real run, killed with SIGKILL at random moments, resumed each time, to its end."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def chaos() -> ModuleType:
    path = Path(__file__).parents[2] / "scripts" / "chaos.py"
    spec = importlib.util.spec_from_file_location("chaos", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["chaos"] = module
    spec.loader.exec_module(module)
    return module


def test_e14_a_killed_run_goes_on_and_commits_every_row_once(chaos: ModuleType, tmp_path: Path):
    result = chaos.chaos(3, 5, 1, tmp_path, compare=False)
    assert result["broken_promises"] == []
    assert result["kills"] == 3 and result["kills_after_the_first_step"] >= 2
    assert result["runs_that_reached_their_end"] >= 1


def test_the_verifier_finds_a_checkpoint_that_is_half_there(chaos: ModuleType, tmp_path: Path):
    folder = tmp_path / "checkpoints" / "round-00000000"
    folder.mkdir(parents=True)
    (folder / "weights.safetensors").write_bytes(b"half")
    with pytest.raises(chaos.BrokenPromiseError, match="unreadable"):
        chaos.check_run(tmp_path)
