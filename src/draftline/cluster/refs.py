"""What the queue knows of a captured row that lies elsewhere: records without any tensor, and their check at the door.

The bytes of a row are one stretch of memory (a slot of a shared slab) or the buffers of one stored object; `Layout`
says which of its tensors lies where. Only these records pass through the queue actor. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from draftline.errors import RunFailedError
from draftline.records import FinalHiddenNorm, PlannedRow

SCHEMA_VERSION = 1
ALIGNMENT = 64
DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int64": 8,
    "int32": 4,
    "uint8": 1,
    "bool": 1,
}
TAPS, FINAL, IDS, MASK, DOCUMENTS, POSITIONS = "taps", "final", "ids", "mask", "documents", "positions"
_FLOATS = ("float32", "bfloat16", "float16")
# Of each tensor of a row: the dtypes it may have, and its number of dimensions.
_ALLOWED = {
    TAPS: (_FLOATS, 2),
    FINAL: (_FLOATS, 2),
    IDS: (("int64",), 1),
    MASK: (("bool",), 1),
    DOCUMENTS: (("int32",), 1),
    POSITIONS: (("int64",), 1),
}


@dataclass(frozen=True, slots=True)
class Field:
    """One tensor inside a buffer."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def n_bytes(self) -> int:
        """Bytes of the tensor; raises KeyError for a dtype that does not travel."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Layout:
    """Tensors of one buffer, in order, each aligned to 64 bytes."""

    fields: tuple[Field, ...]

    @property
    def n_bytes(self) -> int:
        """Bytes from the buffer's start to the end of its last tensor."""
        return max((f.offset + f.n_bytes for f in self.fields), default=0)

    @classmethod
    def of(cls, tensors: Sequence[tuple[str, str, tuple[int, ...]]]) -> Layout:
        """Places (name, dtype, shape) one behind the other."""
        fields, offset = [], 0
        for name, dtype, shape in tensors:
            fields.append(Field(name, dtype, shape, offset))
            offset += -(-fields[-1].n_bytes // ALIGNMENT) * ALIGNMENT
        return cls(tuple(fields))


@dataclass(frozen=True, slots=True)
class SlabPlace:
    """A slot of a host's slab.

    Attributes:
        node: the host's id in the cluster; only processes there can read it.
        slot: number of the slot.
    """

    node: str
    slot: int


@dataclass(frozen=True, slots=True)
class ObjectPlace:
    """Buffers in the object store, one for each tensor of the layout. `ref` is Ray's; its owner is who stored it."""

    ref: Any


@dataclass(frozen=True, slots=True)
class RowRef:
    """A captured row by reference. Fields as those of `HiddenStateRow`; the tensors lie at `place`."""

    version: int
    run_id: str
    row_id: int
    epoch: int
    sample_ids: tuple[str, ...]
    lengths: tuple[int, ...]
    final_hidden_norm: FinalHiddenNorm
    tap_layer_ids: tuple[int, ...]
    layout: Layout
    place: SlabPlace | ObjectPlace


@dataclass(frozen=True, slots=True)
class RowContract:
    """What every row of a run must be.

    Attributes:
        run_id: of this process of the run; rows of an earlier one are refused.
        tap_layer_ids: the drafter's taps.
        hidden_size: H; tap features are F = L * H wide.
        with_final: whether the last hidden state travels too.
    """

    run_id: str
    tap_layer_ids: tuple[int, ...]
    hidden_size: int
    with_final: bool


@dataclass(frozen=True, slots=True)
class Packed:
    """Tensors that travel as one stored object: weights, moments. `ref` is Ray's."""

    layout: Layout
    ref: Any


def check_ref(ref: RowRef, planned: PlannedRow, contract: RowContract, most_bytes: int) -> None:
    """The queue's door for rows by reference: what is told of the row is what the plan says.

    Args:
        most_bytes: what was charged for the row at its lease.

    Raises:
        RunFailedError: names the row and what does not fit.
    """
    wrong = _wrong_facts(ref, planned, contract) or _wrong_layout(ref, planned, contract, most_bytes)
    if wrong:
        raise RunFailedError(f"row {planned.row_id}: {'; '.join(wrong)}", origin="queue door")


def _wrong_facts(ref: RowRef, planned: PlannedRow, contract: RowContract) -> list[str]:
    found = {
        "schema version": (ref.version, SCHEMA_VERSION),
        "run": (ref.run_id, contract.run_id),
        "row id": (ref.row_id, planned.row_id),
        "epoch": (ref.epoch, planned.epoch),
        "samples": (len(ref.sample_ids), len(planned.samples)),
        "lengths": (len(ref.lengths), len(planned.samples)),
        "tokens": (sum(ref.lengths), planned.n_tokens),
        "taps": (ref.tap_layer_ids, contract.tap_layer_ids),
    }
    return [f"{what} is {got}, planned {want}" for what, (got, want) in found.items() if got != want]


def _wrong_layout(ref: RowRef, planned: PlannedRow, contract: RowContract, most_bytes: int) -> list[str]:
    n, names = planned.n_tokens, [f.name for f in ref.layout.fields]
    wanted = [TAPS, *([FINAL] if contract.with_final else []), IDS, MASK, DOCUMENTS, POSITIONS]
    if names != wanted:
        return [f"tensors are {names}, not {wanted}"]
    widths = {TAPS: len(contract.tap_layer_ids) * contract.hidden_size, FINAL: contract.hidden_size}
    wrong, end = [], 0
    for field in ref.layout.fields:
        dtypes, dimensions = _ALLOWED[field.name]
        shape = (n,) if dimensions == 1 else (n, widths[field.name])
        if field.dtype not in dtypes:
            wrong.append(f"{field.name} is {field.dtype}, not {' or '.join(dtypes)}")
        elif field.shape != shape:
            wrong.append(f"{field.name} has shape {field.shape}, planned {shape}")
        elif field.offset < end or field.offset % ALIGNMENT:
            wrong.append(f"{field.name} lies at byte {field.offset}, before byte {end} or not aligned")
        else:
            end = field.offset + field.n_bytes
    if not wrong and sum(f.n_bytes for f in ref.layout.fields) > most_bytes:
        wrong.append(f"{sum(f.n_bytes for f in ref.layout.fields)} bytes, {most_bytes} were charged")
    return wrong


def slot_bytes(largest_row_bytes: int) -> int:
    """Bytes of a slab's slot: the largest row, with the room that alignment may take, in whole pages."""
    return -(-(largest_row_bytes + ALIGNMENT * len(_ALLOWED)) // 4096) * 4096
