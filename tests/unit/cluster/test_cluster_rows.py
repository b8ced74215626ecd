"""Rows by reference: bytes in and out, the door, the slab, and where nothing may be copied or pickled."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import pytest
import torch
from cluster_fakes import CONTRACT, ROW_BYTES, planned, row_layout, row_ref

from draftline.cluster.buffers import layout_of, read_from, read_parts, row_from, row_tensors, write_into
from draftline.cluster.refs import Field, Layout, SlabPlace, check_ref, slot_bytes
from draftline.cluster.slab import PREFIX, Slab, remove_abandoned
from draftline.cluster.transport import (
    ObjectSender,
    RowReceiver,
    SlabSender,
    choose_kind,
    pack,
    unpack,
)
from draftline.errors import RunFailedError
from draftline.records import HiddenStateRow

CPU = torch.device("cpu")


class DictStore:
    """An object store of one process; what is put must be plain bytes."""

    def __init__(self):
        self.objects = []

    def put(self, value):
        assert all(str(array.dtype) == "uint8" for array in value)
        kept = [array.copy() for array in value]
        for array in kept:
            array.flags.writeable = False
        self.objects.append(kept)
        return len(self.objects) - 1

    def get(self, ref):
        return self.objects[ref]


def hidden_row(dtype=torch.bfloat16, *, with_final=False, row_id=3):
    n, generator = 8, torch.Generator().manual_seed(row_id)
    return HiddenStateRow(
        row_id=row_id,
        epoch=0,
        sample_ids=(f"s{row_id}",),
        lengths=(n,),
        input_ids_T=torch.randint(0, 99, (n,), generator=generator),
        loss_mask_T=torch.arange(n) > 3,
        document_ids_T=torch.zeros(n, dtype=torch.int32),
        position_ids_T=torch.arange(n),
        taps_TF=torch.randn(n, 8, generator=generator).to(dtype),
        final_hidden_TH=torch.randn(n, 4, generator=generator).to(dtype) if with_final else None,
        final_hidden_norm="post",
        tap_layer_ids=(0, 2),
    )


def assert_same_row(a, b):
    assert (a.row_id, a.epoch, a.sample_ids, a.lengths, a.tap_layer_ids) == (
        b.row_id,
        b.epoch,
        b.sample_ids,
        b.lengths,
        b.tap_layer_ids,
    )
    mine, its = row_tensors(a), row_tensors(b)
    assert mine.keys() == its.keys()
    for name in mine:
        assert mine[name].dtype == its[name].dtype and torch.equal(mine[name], its[name]), name


@pytest.fixture
def slab(tmp_path):
    slab = Slab("test", 3, slot_bytes(ROW_BYTES), tmp_path)
    yield slab
    slab.close()


@pytest.mark.parametrize("with_final", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_a_row_comes_out_of_the_slab_bit_by_bit(slab, dtype, with_final):
    row = hidden_row(dtype, with_final=with_final)
    ref = SlabSender(slab, "node", "run").send(row, 2)
    back = RowReceiver(CPU, DictStore(), slab, "node").receive(ref)
    assert_same_row(row, back)
    assert back.taps_TF.data_ptr() == slab.slot(2).data_ptr()  # read in place


@pytest.mark.parametrize("with_final", [False, True])
def test_a_row_comes_out_of_the_object_store_bit_by_bit_and_is_not_copied_again(with_final):
    store, row = DictStore(), hidden_row(with_final=with_final)
    ref = ObjectSender(store, "run").send(row, 0)
    back = RowReceiver(CPU, store, None, "node").receive(ref)
    assert_same_row(row, back)
    assert back.taps_TF.data_ptr() == store.objects[0][0].ctypes.data


def test_two_mappings_of_one_slab_see_the_same_bytes(slab, tmp_path):
    other = Slab("test", 3, slot_bytes(ROW_BYTES), tmp_path)
    slab.slot(1).fill_(7)
    assert int(other.slot(1).sum()) == 7 * other.n_bytes
    other.close()
    assert slab.path.exists()


def test_the_slab_goes_with_its_last_holder_and_one_of_a_killed_process_is_removed(tmp_path):
    pid = os.fork()
    if not pid:
        Slab("killed", 1, 4096, tmp_path)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    left = tmp_path / f"{PREFIX}killed"
    assert left.exists()
    held = Slab("held", 1, 4096, tmp_path)
    assert not left.exists() and held.path.exists()
    assert remove_abandoned(tmp_path) == 0
    held.close()
    assert not held.path.exists()


def test_a_slot_for_which_there_is_no_room_is_one_line(slab, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(RunFailedError, match=r"has no room for slot 0 .*cluster.transport: objects"):
        slab.reserve(0)


def test_a_row_larger_than_its_slot_and_a_slot_that_does_not_exist_are_refused(slab):
    with pytest.raises(RunFailedError, match="slot 3 of 3"):
        slab.slot(3)
    large = replace(hidden_row(), taps_TF=torch.zeros(8, 10_000))
    with pytest.raises(RunFailedError, match="a slot has"):
        SlabSender(slab, "node", "run").send(large, 0)


def test_the_slab_of_another_host_is_refused(slab):
    receiver = RowReceiver(CPU, DictStore(), slab, "here")
    with pytest.raises(RunFailedError, match="slab of another host"):
        receiver.receive(row_ref(3, SlabPlace("there", 0)))


def test_bytes_that_are_too_few_are_refused():
    layout = layout_of({"a": torch.zeros(4), "b": torch.zeros(3, dtype=torch.int64)})
    with pytest.raises(RunFailedError, match="bytes came"):
        read_from(layout, torch.zeros(layout.n_bytes - 1, dtype=torch.uint8))
    with pytest.raises(RunFailedError, match="buffers of"):
        read_parts(layout, [torch.zeros(16, dtype=torch.uint8).numpy()])


def test_tensors_lie_aligned_and_apart():
    tensors = {"a": torch.arange(5, dtype=torch.int32), "b": torch.tensor(3.5), "c": torch.ones(2, 3).bfloat16()}
    layout = layout_of(tensors)
    assert [f.offset % 64 for f in layout.fields] == [0, 0, 0]
    memory = torch.zeros(layout.n_bytes, dtype=torch.uint8)
    write_into(layout, tensors, memory)
    back = read_from(layout, memory)
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)


def test_weights_and_moments_travel_with_their_scalars():
    store, tensors = DictStore(), {"w": torch.randn(4, 3), "step": torch.tensor(7.0), "empty": torch.zeros(0)}
    back = unpack(pack(tensors, store), store)
    assert all(torch.equal(back[name], tensors[name]) and back[name].shape == tensors[name].shape for name in tensors)
    assert unpack(None, store) == {}


def changed_layout(**changes):
    fields = [replace(f, **changes) if f.name == "taps" else f for f in row_layout().fields]
    return Layout(tuple(fields))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"version": 2}, "schema version is 2"),
        ({"run_id": "old"}, "run is old"),
        ({"row_id": 4}, "row id is 4"),
        ({"epoch": 1}, "epoch is 1"),
        ({"sample_ids": ("a", "b")}, "samples is 2"),
        ({"lengths": (7,)}, "tokens is 7"),
        ({"tap_layer_ids": (1, 2)}, r"taps is \(1, 2\)"),
        ({"layout": Layout(row_layout().fields[1:])}, "tensors are"),
        ({"layout": changed_layout(dtype="float64")}, "taps is float64"),
        ({"layout": changed_layout(shape=(8, 9))}, r"taps has shape \(8, 9\)"),
        ({"layout": changed_layout(offset=64)}, "before byte"),
        ({"layout": Layout((*row_layout().fields[:-1], Field("positions", "int32", (8,), 512)))}, "positions is int32"),
    ],
)
def test_the_door_names_what_does_not_fit(change, told):
    with pytest.raises(RunFailedError, match=f"row 3: .*{told}"):
        check_ref(replace(row_ref(3), **change), planned(3), CONTRACT, ROW_BYTES)


def test_the_door_lets_the_planned_row_in_and_nothing_larger_than_was_charged():
    check_ref(row_ref(3), planned(3), CONTRACT, ROW_BYTES)
    with pytest.raises(RunFailedError, match="were charged"):
        check_ref(row_ref(3), planned(3), CONTRACT, ROW_BYTES - 1)
    with pytest.raises(RunFailedError, match="tensors are"):
        check_ref(row_ref(3), planned(3), replace(CONTRACT, with_final=True), ROW_BYTES)


def test_a_real_row_passes_its_own_door():
    row = hidden_row(torch.float32)
    ref = ObjectSender(DictStore(), "run").send(row, 0)
    check_ref(ref, planned(3), CONTRACT, ROW_BYTES)
    assert_same_row(row, row_from(ref, row_tensors(row)))


def test_auto_takes_the_slab_on_one_host_and_objects_between_hosts():
    assert choose_kind("auto", "a", ["a", "a"]) == "slab"
    assert choose_kind("auto", "a", ["a", "b"]) == "objects"
    assert choose_kind("objects", "a", ["a"]) == "objects"
    with pytest.raises(RunFailedError, match="use auto or objects"):
        choose_kind("slab", "a", ["b"])
