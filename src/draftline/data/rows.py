"""The plan: which samples form which row, in which order, for every epoch.

Rows are a pure function of (seed, epochs, lengths, row_tokens), alike on every platform: the order comes from the raw
output of PCG64, whose stream numpy promises to keep, and not from `Generator.permutation`, which may change.

Packing is best fit over a bounded window: samples come in the seeded order and each goes to the fullest open row that
still holds it; when more than `OPEN_ROWS` rows are open, the fullest one is closed. Short samples slip into early
rows that way, so the rows of an epoch are shuffled once more: length does not decide when a sample is trained.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from draftline.errors import UserError
from draftline.records import PlannedRow

OPEN_ROWS = 128


def seeded_order(n_items: int, *, seed: int, epoch: int, what: str = "samples") -> npt.NDArray[np.int64]:
    """A permutation of 0..n_items-1, int64 [n_items], that depends on nothing but the arguments."""
    digest = hashlib.sha256(f"draftline plan {what} {seed} {epoch}".encode()).digest()
    keys = np.random.PCG64(int.from_bytes(digest[:16], "little")).random_raw(n_items)
    return np.argsort(keys, kind="stable")


def plan_rows(
    lengths: npt.ArrayLike,
    supervised: npt.ArrayLike,
    *,
    row_tokens: int,
    seed: int,
    epochs: int,
    max_rows: int | None = None,
) -> list[PlannedRow]:
    """Pack every sample into exactly one row per epoch, at most `row_tokens` tokens a row.

    Args:
        lengths: tokens of each sample, [N].
        supervised: supervised tokens of each sample, [N].
        row_tokens: most tokens of a row.
        seed: the run's seed; each epoch has its own order.
        epochs: passes over the data; row ids run on over all of them.
        max_rows: keep only the first rows of the plan; None keeps all.

    Raises:
        UserError: no samples, or a sample longer than a row.
    """
    sizes, labels = np.asarray(lengths, dtype=np.int64), np.asarray(supervised, dtype=np.int64)
    _check(sizes, labels, row_tokens)
    size_list, label_list = sizes.tolist(), labels.tolist()
    rows: list[PlannedRow] = []
    for epoch in range(epochs):
        if max_rows is not None and len(rows) >= max_rows:
            break
        order = seeded_order(len(size_list), seed=seed, epoch=epoch)
        packed = _pack(order.tolist(), size_list, row_tokens)
        for place in seeded_order(len(packed), seed=seed, epoch=epoch, what="rows"):
            samples = packed[place]
            n_tokens = sum(size_list[i] for i in samples)
            n_supervised = sum(label_list[i] for i in samples)
            rows.append(PlannedRow(len(rows), epoch, tuple(samples), n_tokens, n_supervised))
    return rows[:max_rows]


def plan_fill(rows: Sequence[PlannedRow], row_tokens: int) -> float:
    """Share of the rows' room that holds tokens, 0..1."""
    return sum(row.n_tokens for row in rows) / (row_tokens * len(rows)) if rows else 0.0


def _check(sizes: npt.NDArray[np.int64], labels: npt.NDArray[np.int64], row_tokens: int) -> None:
    if sizes.ndim != 1 or sizes.shape != labels.shape:
        raise ValueError(f"lengths {sizes.shape} and supervised {labels.shape} must be one-dimensional and alike")
    if sizes.size == 0:
        raise UserError("the data set has no samples", mend="check the rejected counts that `prepare` printed")
    if sizes.min() < 1 or labels.min() < 0 or bool((labels > sizes).any()):
        raise ValueError("each sample needs at least one token, and no more supervised tokens than tokens")
    longest = int(sizes.argmax())
    if sizes[longest] > row_tokens:
        raise UserError(
            f"sample {longest} has {sizes[longest]} tokens, more than data.row_tokens {row_tokens}",
            mend=f"set data.row_tokens to at least {sizes[longest]}, or prepare with a lower max_tokens",
        )


def _pack(order: list[int], sizes: list[int], row_tokens: int) -> list[list[int]]:
    """Rows of one epoch as lists of sample indices, in the order in which they were opened."""
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []  # (free tokens, row), sorted: the fullest first
    for sample in order:
        size = sizes[sample]
        place = bisect_left(open_rows, (size, -1))
        if place < len(open_rows):
            free, row = open_rows.pop(place)
        else:
            free, row = row_tokens, len(rows)
            rows.append([])
        rows[row].append(sample)
        if free - size > 0:
            insort(open_rows, (free - size, row))
            if len(open_rows) > OPEN_ROWS:
                open_rows.pop(0)
    return rows
