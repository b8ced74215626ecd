"""Tensors to bytes and back, without a pickle in between: one copy in, none out."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from draftline.cluster.refs import (
    DOCUMENTS,
    FINAL,
    IDS,
    MASK,
    POSITIONS,
    SCHEMA_VERSION,
    TAPS,
    Layout,
    ObjectPlace,
    RowRef,
    SlabPlace,
)
from draftline.errors import RunFailedError
from draftline.records import HiddenStateRow


def layout_of(tensors: Mapping[str, Tensor]) -> Layout:
    """Where each tensor, of any shape, will lie, in the mapping's order."""
    return Layout.of([(name, _dtype_name(t), tuple(t.shape)) for name, t in tensors.items()])


def as_bytes(tensor: Tensor) -> Tensor:
    """The same memory as uint8 [n_bytes]; copied only if it is not contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def write_into(layout: Layout, tensors: Mapping[str, Tensor], memory: Tensor) -> None:
    """Copies tensors of the layout's shapes (of any device) to their places in `memory`, uint8 [n_bytes or more].

    From a GPU the copies are launched on the current stream and are only done once that stream is.
    """
    for field in layout.fields:
        part = memory[field.offset : field.offset + field.n_bytes]
        part.copy_(as_bytes(tensors[field.name]), non_blocking=True)


def read_from(layout: Layout, memory: Tensor) -> dict[str, Tensor]:
    """Views of the layout's shapes in `memory`, uint8 [layout.n_bytes or more].

    Raises:
        RunFailedError: the memory is too short for the layout.
    """
    if memory.numel() < layout.n_bytes:
        raise RunFailedError(f"{memory.numel()} bytes came, {layout.n_bytes} were told", origin="row transport")
    return {f.name: _typed(memory[f.offset : f.offset + f.n_bytes], f.dtype, f.shape) for f in layout.fields}


def read_parts(layout: Layout, parts: Sequence[Any]) -> dict[str, Tensor]:
    """Views of the layout's shapes, of tensors that came as one uint8 array each.

    Raises:
        RunFailedError: the arrays are not those of the layout.
    """
    sizes, wanted = [part.nbytes for part in parts], [f.n_bytes for f in layout.fields]
    if sizes != wanted:
        raise RunFailedError(f"buffers of {sizes} bytes came, {wanted} were told", origin="row transport")
    pairs = zip(layout.fields, parts, strict=True)
    return {f.name: _typed(_read_only_view(part), f.dtype, f.shape) for f, part in pairs}


def row_tensors(row: HiddenStateRow) -> dict[str, Tensor]:
    """The tensors of a row, by the names and in the order of its layout. See `HiddenStateRow` for their shapes."""
    final = {} if row.final_hidden_TH is None else {FINAL: row.final_hidden_TH}
    return {
        TAPS: row.taps_TF,
        **final,
        IDS: row.input_ids_T,
        MASK: row.loss_mask_T,
        DOCUMENTS: row.document_ids_T,
        POSITIONS: row.position_ids_T,
    }


def ref_to(row: HiddenStateRow, layout: Layout, place: SlabPlace | ObjectPlace, run_id: str) -> RowRef:
    """The record that stands for a row whose tensors lie at `place`."""
    return RowRef(
        version=SCHEMA_VERSION,
        run_id=run_id,
        row_id=row.row_id,
        epoch=row.epoch,
        sample_ids=tuple(row.sample_ids),
        lengths=tuple(row.lengths),
        final_hidden_norm=row.final_hidden_norm,
        tap_layer_ids=tuple(row.tap_layer_ids),
        layout=layout,
        place=place,
    )


def row_from(ref: RowRef, tensors: Mapping[str, Tensor]) -> HiddenStateRow:
    """The row again, of the tensors that `row_tensors` took from it. See `HiddenStateRow` for their shapes."""
    return HiddenStateRow(
        row_id=ref.row_id,
        epoch=ref.epoch,
        sample_ids=ref.sample_ids,
        lengths=ref.lengths,
        input_ids_T=tensors[IDS],
        loss_mask_T=tensors[MASK],
        document_ids_T=tensors[DOCUMENTS],
        position_ids_T=tensors[POSITIONS],
        taps_TF=tensors[TAPS],
        final_hidden_TH=tensors.get(FINAL),
        final_hidden_norm=ref.final_hidden_norm,
        tap_layer_ids=ref.tap_layer_ids,
    )


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _typed(memory: Tensor, dtype: str, shape: tuple[int, ...]) -> Tensor:
    kind = getattr(torch, dtype)
    return memory.view(kind).view(shape) if memory.numel() else torch.empty(shape, dtype=kind)


def _read_only_view(array: Any) -> Tensor:
    """Memory of the object store cannot be written; torch warns of that once, and nothing here writes to a row."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array)
