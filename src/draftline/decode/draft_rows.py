"""Context keys and values of many prompts' drafters in common buffers: written and read for all prompts at once.

Each prompt has a row of its own while it is decoded. Buffers grow as prompts and texts come; what a row held before is
overwritten or hidden by the mask of the attention, which knows every prompt's length.

Shape letters: P prompts, T new context tokens of all prompts end to end, C columns, M key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

import torch

from draftline.decode.chain import BoundDrafter
from draftline.decode.steps import DraftModel
from draftline.drafter.attention import KeyValue
from draftline.drafter.model import Drafter

_LEAST_COLUMNS = 256


class DraftRows:
    """One drafter's contexts, of the prompts that are decoded together: the first drafter's that is asked about."""

    def __init__(self) -> None:
        self._drafter: Drafter | None = None
        self._row_of: dict[BoundDrafter, int] = {}
        self._free: list[int] = []
        self._lengths: list[int] = []
        self._buffers: list[KeyValue] = []

    def serves(self, prompt: DraftModel) -> TypeGuard[BoundDrafter]:
        """True for prompts of this drafter."""
        if not isinstance(prompt, BoundDrafter):
            return False
        self._drafter = self._drafter or prompt.drafter
        return prompt.drafter is self._drafter

    def seat(self, prompts: Sequence[BoundDrafter]) -> list[int]:
        """Row of each prompt; a new one begins with an empty context."""
        for prompt in prompts:
            if prompt not in self._row_of:
                if not self._free:
                    self._free.append(len(self._lengths))
                    self._lengths.append(0)
                self._row_of[prompt] = self._free.pop()
                self._lengths[self._row_of[prompt]] = 0
        return [self._row_of[prompt] for prompt in prompts]

    def release(self, prompt: DraftModel) -> None:
        """The prompt is done: its row, if it has one, serves another."""
        row = self._row_of.pop(prompt, None) if isinstance(prompt, BoundDrafter) else None
        if row is not None:
            self._free.append(row)

    def lengths(self, rows: Sequence[int]) -> list[int]:
        """Context tokens held of each row; they stand at positions 0..length-1."""
        return [self._lengths[row] for row in rows]

    def reserve(self, layers: int, like_TMD: torch.Tensor, columns: int) -> None:
        """Make room for all rows and for `columns` context tokens in each of the `layers`."""
        held = self._buffers[0][0].shape[:2] if self._buffers else (0, 0)
        need = (len(self._lengths), columns)
        if held[0] >= need[0] and held[1] >= need[1]:
            return
        n_rows = max(need[0], held[0])
        n_columns = held[1] if held[1] >= columns else max(columns, 2 * held[1], _LEAST_COLUMNS)
        shape = (n_rows, n_columns, *like_TMD.shape[1:])
        for layer in range(layers):
            # Zeros, not whatever memory holds: a hidden value counts 0 times, which is only 0 for finite ones.
            grown = (like_TMD.new_zeros(shape), like_TMD.new_zeros(shape))
            if layer < len(self._buffers):
                for new, old in zip(grown, self._buffers[layer], strict=True):
                    new[: held[0], : held[1]] = old
                self._buffers[layer] = grown
            else:
                self._buffers.append(grown)

    def write(self, layer: int, new_TMD: KeyValue, rows_T: torch.Tensor, at_T: torch.Tensor) -> None:
        """Put a layer's keys and values at positions `at_T` of their rows; `advance` then makes them count."""
        for held, new in zip(self._buffers[layer], new_TMD, strict=True):
            held[rows_T, at_T] = new

    def advance(self, rows: Sequence[int], sizes: Sequence[int]) -> None:
        """Count what `write` has put in."""
        for row, size in zip(rows, sizes, strict=True):
            self._lengths[row] += size

    def read(self, layer: int, rows_P: torch.Tensor, columns_PC: torch.Tensor) -> KeyValue:
        """Keys and values [P, C, M, D] of a layer at some positions of each row."""
        keys, values = self._buffers[layer]
        return keys[rows_P[:, None], columns_PC], values[rows_P[:, None], columns_PC]
