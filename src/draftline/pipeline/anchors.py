"""How many anchors the rows of a plan hold, for people who ask for more than there are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from draftline.data.shards import Sample
from draftline.records import PlannedRow

_ROWS_LOOKED_AT = 64


class Samples(Protocol):
    """What a data set gives by number."""

    def sample(self, index: int) -> Sample:
        """One sample."""
        ...


def count_anchors(loss_mask_T: np.ndarray, block_size: int) -> tuple[int, int]:
    """(anchors, those that start a whole block) of one sample.

    An anchor is a token whose next one is supervised. Its block is whole if its block_size - 1 next tokens all are;
    other blocks are cut at the first token that is not, or at the end of the sample.
    """
    supervised = np.concatenate([[False], loss_mask_T[1:].astype(bool), [False]])
    edges = np.flatnonzero(np.diff(supervised.astype(np.int8)))
    stretches = edges[1::2] - edges[::2]
    return int(stretches.sum()), int(np.maximum(stretches - (block_size - 2), 0).sum())


def anchor_lines(dataset: Samples, rows: Sequence[PlannedRow], wanted: int, block_size: int) -> list[str]:
    """One line where rows hold fewer anchors than wanted, one where few blocks are whole; of the first rows."""
    per_row, whole = [], 0
    for row in rows[:_ROWS_LOOKED_AT]:
        counts = [count_anchors(dataset.sample(i).loss_mask, block_size) for i in row.samples]
        per_row.append(sum(c for c, _ in counts))
        whole += sum(w for _, w in counts)
    lines, seen = [], f"(first {len(per_row)} rows)"
    if max(per_row) < wanted:
        lines.append(
            f"anchors: {wanted} wanted, rows hold {min(per_row)} to {max(per_row)} {seen}: all of them are used, "
            "the other slots of a row stay empty"
        )
    if whole * 2 < sum(per_row):
        lines.append(
            f"blocks: {whole} of {sum(per_row)} anchors start a whole block of {block_size} {seen}; "
            "the others are cut where the supervised stretch ends"
        )
    return lines
