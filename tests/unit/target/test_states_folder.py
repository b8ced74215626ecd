"""A folder of states has one writer at a time, and what it lends belongs to the states that are in it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from decoding_kit import tiny_target
from draftline.errors import UserError
from draftline.target.cache import SampleStates
from draftline.target.load import LoadedTarget, wrap_model
from draftline.target.states.manifest import StatesIdentity
from draftline.target.states.store import StatesReader, StatesWriter
from draftline.target.states.stored_target import load_stored_target, store_target

CPU = torch.device("cpu")


def identity(**changes: object) -> StatesIdentity:
    same = {"model": "m", "revision": None, "facts": "f", "fingerprint": "p", "quantization": None, "backend": "local"}
    numbers = {"hidden_size": 4, "dtype": "float32", "compute_dtype": "float32"}
    return StatesIdentity(**{**same, **numbers, "taps": (0, 2), "final_norm": None, "data": "d", **changes})


def states(n_tokens: int) -> SampleStates:
    return SampleStates(torch.randn(n_tokens, 8), None)


def test_a_second_writer_is_refused_until_the_first_is_done(tmp_path: Path) -> None:
    """Both would name their first shard alike, and the later manifest would not fit the earlier shard."""
    first = StatesWriter(tmp_path, identity())
    first.add(0, states(3))
    with pytest.raises(UserError, match="another process adds states to it; wait for it"):
        StatesWriter(tmp_path, identity())
    first.close()
    second = StatesWriter(tmp_path, identity())
    second.add(1, states(5))
    second.close()
    reader = StatesReader(tmp_path, 2)
    assert [reader.read(i, n).taps_TF.shape[0] for i, n in ((0, 3), (1, 5))] == [3, 5]


def test_a_writer_that_closes_twice_writes_once_and_gives_up_what_did_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise SafetensorError("No space left on device")

    writer = StatesWriter(tmp_path, identity())
    writer.add(0, states(3))
    with monkeypatch.context() as patched:
        patched.setattr("draftline.target.states.tensor_files.save_file", full)
        with pytest.raises(UserError, match="cannot be written"):
            writer.close()
    assert writer.close().n_samples == 0
    StatesWriter(tmp_path, identity()).close()


def test_a_writer_never_adds_to_other_states(tmp_path: Path) -> None:
    writer = StatesWriter(tmp_path, identity())
    writer.add(0, states(3))
    writer.close()
    with pytest.raises(UserError, match=r"taps is \[0, 2\] there, \[0, 1\] here"):
        StatesWriter(tmp_path, identity(taps=(0, 1)))


def in_bfloat16(target: LoadedTarget) -> LoadedTarget:
    return wrap_model(target.model.to(torch.bfloat16), config=target.config, facts=target.facts)


def test_what_a_capture_left_that_was_killed_before_its_first_shard_is_replaced(tmp_path: Path) -> None:
    """The fingerprint is the same in fp32 and bf16; a drafter that borrows the wrong one learns other weights."""
    store_target(tiny_target(), tmp_path)
    store_target(in_bfloat16(tiny_target()), tmp_path)
    assert load_stored_target(tmp_path, CPU).dtype == torch.bfloat16
    other = tiny_target(seed=1)
    store_target(other, tmp_path)
    assert load_stored_target(tmp_path, CPU).fingerprint == other.fingerprint


def test_what_states_rest_on_is_kept_and_another_targets_refused(tmp_path: Path) -> None:
    store_target(tiny_target(), tmp_path)
    writer = StatesWriter(tmp_path, identity())
    writer.add(0, states(3))
    writer.close()
    before = (tmp_path / "borrowed.safetensors").stat().st_mtime_ns
    store_target(tiny_target(), tmp_path)
    assert (tmp_path / "borrowed.safetensors").stat().st_mtime_ns == before
    with pytest.raises(UserError, match="holds states of another target"):
        store_target(tiny_target(seed=1), tmp_path)


def test_a_full_disk_is_one_line_and_leaves_no_half_of_what_is_borrowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(tensors: object, file: Path) -> None:
        file.write_bytes(b"half")
        raise SafetensorError("No space left on device")

    monkeypatch.setattr("draftline.target.states.tensor_files.save_file", full)
    with pytest.raises(UserError, match="cannot be written"):
        store_target(tiny_target(), tmp_path / "states")
    assert list((tmp_path / "states").iterdir()) == []
