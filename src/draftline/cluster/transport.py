"""How a row gets from a target to a drafter: bytes into shared memory, a record through the queue, views out of it.

slab      the target writes into the slot that came with its lease, the drafter on the same host reads it in place:
          one copy, no allocation. The slot is free again when the row's training step has finished
objects   the target stores the row's buffers in the object store of its host; a drafter there maps them, a drafter on
          another host pulls them over. Freed when the last reference goes. Never pickled: uint8 arrays travel out of
          band. If their owner dies, they are lost with it, and the row is captured again
direct    objects whose bytes stay where they were captured, on the GPU too, and are fetched by NIXL (alpha in Ray)

A row that is to be trained on a GPU goes there from pinned memory: slots are registered with the device, other rows
pass through a pinned buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from draftline.cluster.buffers import (
    as_bytes,
    layout_of,
    read_from,
    read_parts,
    ref_to,
    row_from,
    row_tensors,
    write_into,
)
from draftline.cluster.refs import Layout, ObjectPlace, Packed, RowRef, SlabPlace
from draftline.cluster.slab import Slab
from draftline.errors import RunFailedError
from draftline.records import HiddenStateRow

Kind = Literal["slab", "objects", "direct"]


class RowLostError(Exception):
    """The row's buffers are gone with the process or the host that held them: it has to be captured again."""


class Store(Protocol):
    """Where buffers are kept for others; Ray's object store, or a fake."""

    def put(self, value: Any) -> Any:
        """A reference to a stored value."""

    def get(self, ref: Any) -> Any:
        """The value; raises RowLostError if it is gone for good."""


class RowSender(Protocol):
    """The target's side."""

    def send(self, row: HiddenStateRow, slot: int) -> RowRef:
        """Puts the row's bytes where its drafter will find them; `slot` is the lease's."""

    def close(self) -> None:
        """Nothing more will be sent."""


class SlabSender:
    """Writes rows into the host's slab.

    Args:
        slab, node: of this host.
        run_id: told in each record.
    """

    def __init__(self, slab: Slab, node: str, run_id: str) -> None:
        self._slab, self._node, self._run_id = slab, node, run_id
        self._pinned: set[int] = set()

    def send(self, row: HiddenStateRow, slot: int) -> RowRef:
        """See `RowSender`."""
        tensors = row_tensors(row)
        layout = layout_of(tensors)
        if layout.n_bytes > self._slab.n_bytes:
            raise RunFailedError(
                f"row {row.row_id} takes {layout.n_bytes} bytes, a slot has {self._slab.n_bytes}",
                origin="row transport",
            )
        self._slab.reserve(slot)
        memory = self._slab.slot(slot)
        device = row.taps_TF.device
        if device.type == "cuda":
            pin(memory, slot, self._pinned)
        write_into(layout, tensors, memory)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        return ref_to(row, layout, SlabPlace(self._node, slot), self._run_id)

    def close(self) -> None:
        """See `RowSender`."""
        self._slab.close()


class ObjectSender:
    """Stores rows in the object store.

    Args:
        store: of this process, which will own what it puts.
        run_id: told in each record.
    """

    def __init__(self, store: Store, run_id: str) -> None:
        self._store, self._run_id = store, run_id
        self._stage = PinnedStage()

    def send(self, row: HiddenStateRow, slot: int) -> RowRef:
        """See `RowSender`; the slot is not used."""
        del slot
        tensors = row_tensors(row)
        layout = layout_of(tensors)
        if row.taps_TF.device.type == "cuda":
            tensors = self._stage.to_host(layout, tensors)
        arrays = [as_bytes(t).numpy() for t in tensors.values()]
        return ref_to(row, layout, ObjectPlace(self._store.put(arrays)), self._run_id)

    def close(self) -> None:
        """See `RowSender`."""


class DirectSender:
    """Leaves rows where they were captured; a drafter fetches the one buffer of a row over NIXL.

    Args:
        store: puts a tensor for direct transport.
        run_id: told in each record.
    """

    def __init__(self, store: Store, run_id: str) -> None:
        self._store, self._run_id = store, run_id

    def send(self, row: HiddenStateRow, slot: int) -> RowRef:
        """See `RowSender`; the slot is not used."""
        del slot
        tensors = row_tensors(row)
        layout = layout_of(tensors)
        memory = torch.empty(layout.n_bytes, dtype=torch.uint8, device=row.taps_TF.device)
        write_into(layout, tensors, memory)
        return ref_to(row, layout, ObjectPlace(self._store.put(memory)), self._run_id)

    def close(self) -> None:
        """See `RowSender`."""


class RowReceiver:
    """The drafter's side, for rows of every kind.

    Args:
        device: where the rows will be trained.
        store: where objects are got from.
        slab, node: of this host; None where no slab is in use.
    """

    def __init__(self, device: torch.device, store: Store, slab: Slab | None, node: str) -> None:
        self._device, self._store, self._slab, self._node = device, store, slab, node
        self._pinned: set[int] = set()
        self._stage = PinnedStage()

    def receive(self, ref: RowRef) -> HiddenStateRow:
        """The row, on the host or already on the device. Its memory stays as it is until the row counts as trained.

        Raises:
            RowLostError: its buffers are gone.
            RunFailedError: what came is not what was told.
        """
        if isinstance(ref.place, SlabPlace):
            return row_from(ref, self._from_slab(ref, ref.place))
        value = self._store.get(ref.place.ref)
        tensors = read_from(ref.layout, value) if isinstance(value, Tensor) else read_parts(ref.layout, value)
        if self._device.type == "cuda" and not isinstance(value, Tensor):
            tensors = self._stage.to_device(ref.layout, tensors, self._device)
        return row_from(ref, tensors)

    def _from_slab(self, ref: RowRef, place: SlabPlace) -> dict[str, Tensor]:
        if self._slab is None or place.node != self._node:
            raise RunFailedError(f"row {ref.row_id} lies in the slab of another host", origin="row transport")
        memory = self._slab.slot(place.slot)
        if self._device.type == "cuda":
            pin(memory, place.slot, self._pinned)
        return read_from(ref.layout, memory)

    def close(self) -> None:
        """Nothing more will be received."""
        if self._slab is not None:
            self._slab.close()


class PinnedStage:
    """Pinned buffers between a GPU and memory that cannot be pinned; two of them, used in turn.

    A buffer is used again only when the copies that went through it are done.
    """

    def __init__(self) -> None:
        self._buffers: list[Tensor | None] = [None, None]
        self._events: list[Any] = [None, None]
        self._turn = 0

    def to_host(self, layout: Layout, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """GPU tensors of the layout's shapes on the host; done when this returns."""
        memory = self._next(layout.n_bytes)
        write_into(layout, tensors, memory)
        torch.cuda.current_stream(next(iter(tensors.values())).device).synchronize()
        return read_from(layout, memory)

    def to_device(self, layout: Layout, tensors: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
        """Host tensors of the layout's shapes on the device, by one copy that is launched on the current stream."""
        memory = self._next(layout.n_bytes)
        write_into(layout, tensors, memory)
        there = memory.to(device, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._events[self._turn] = event
        return read_from(layout, there)

    def _next(self, n_bytes: int) -> Tensor:
        self._turn = 1 - self._turn
        if self._events[self._turn] is not None:
            self._events[self._turn].synchronize()
        buffer = self._buffers[self._turn]
        if buffer is None or buffer.numel() < n_bytes:
            buffer = torch.empty(n_bytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
            self._buffers[self._turn] = buffer
        return buffer[:n_bytes]


def pin(memory: Tensor, slot: int, pinned: set[int]) -> None:
    """Registers a slot, uint8 [bytes], with the GPU's driver once, so that copies run beside everything else.

    Raises:
        RunFailedError: the driver refuses.
    """
    if slot not in pinned:
        code = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
        if int(code):
            raise RunFailedError(f"slot {slot} cannot be pinned (CUDA error {int(code)})", origin="row transport")
        pinned.add(slot)


def pack(tensors: dict[str, Tensor], store: Store) -> Packed:
    """Weights or moments as one stored object of uint8 arrays; 0-dim tensors too."""
    on_host = {name: t.detach().to("cpu") for name, t in tensors.items()}
    return Packed(layout_of(on_host), store.put([as_bytes(t).numpy() for t in on_host.values()]))


def unpack(packed: Packed | None, store: Store) -> dict[str, Tensor]:
    """Inverse of `pack`: views of the packed shapes, valid for as long as they live; {} for None.

    Raises:
        RowLostError: the object is gone.
    """
    return {} if packed is None else read_parts(packed.layout, store.get(packed.ref))


def choose_kind(wanted: str, target_node: str, drafter_nodes: Sequence[str]) -> Kind:
    """`auto` is the slab where the target and all drafters share a host, else objects.

    Raises:
        RunFailedError: a slab was asked for over several hosts.
    """
    alone = all(node == target_node for node in drafter_nodes)
    if wanted == "slab" and not alone:
        raise RunFailedError(
            "cluster.transport is slab, but targets and drafters are on several hosts; use auto or objects",
            origin="row transport",
        )
    if wanted == "auto":
        return "slab" if alone else "objects"
    return wanted  # type: ignore[return-value]
