"""Admission: how many rows, and how many bytes of them, may be alive between lease and the end of their step."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from draftline.errors import UserError
from draftline.pipeline.core.items import ProtocolError


@dataclass(frozen=True, slots=True)
class CoreSettings:
    """Sizes and rules of one run.

    Attributes:
        n_targets, n_drafters: workers at the start, numbered from 0.
        rows_per_drafter: a round hands out this many rows for each live drafter.
        prefetch_rows: rows a drafter may hold besides the one it trains.
        queue_depth: waiting rows for each drafter.
        queue_bytes: bound on the bytes of all admitted rows; None: rows alone bind.
        admitted_rows: bound on admitted rows; None: T + D * (1 + prefetch) + depth * D.
        ordered: hand rows out in plan order (for repeatable runs).
        max_set_aside: samples that may be set aside before the run fails.
    """

    n_targets: int
    n_drafters: int
    rows_per_drafter: int
    prefetch_rows: int = 1
    queue_depth: int = 2
    queue_bytes: int | None = None
    admitted_rows: int | None = None
    ordered: bool = False
    max_set_aside: int = 0

    @property
    def max_rows(self) -> int:
        """Rows admitted at once."""
        if self.admitted_rows is not None:
            return self.admitted_rows
        return self.n_targets + self.n_drafters * (1 + self.prefetch_rows + self.queue_depth)

    @property
    def least_rows(self) -> int:
        """Fewest admitted rows with which every round can go on: each drafter may wait with `prefetch_rows` in hand,
        and then one more row must fit so that one of them can take it, train it and free a slot."""
        return self.n_drafters * self.prefetch_rows + 1

    def least_bytes(self, row_bytes: Iterable[int]) -> int:
        """Smallest byte bound with which every round can go on: `least_rows` of the largest rows at once."""
        return sum(heapq.nlargest(self.least_rows, row_bytes))


def check_settings(settings: CoreSettings, row_bytes: Iterable[int]) -> None:
    """Refuse settings with which a run could never end.

    Args:
        row_bytes: bytes of each row that is still to be trained.

    Raises:
        UserError: a count below one, or bounds too small, with the numbers.
    """
    for field in ("n_targets", "n_drafters", "rows_per_drafter"):
        if getattr(settings, field) < 1:
            raise UserError(f"{field} is {getattr(settings, field)}, at least 1 is needed", where="pipeline")
    for field in ("prefetch_rows", "queue_depth", "max_set_aside"):
        if getattr(settings, field) < 0:
            raise UserError(f"{field} is {getattr(settings, field)}, below zero", where="pipeline")
    if settings.max_rows < settings.least_rows:
        raise UserError(
            f"{settings.max_rows} rows may be admitted at once, but a round of {settings.n_drafters} drafters with "
            f"{settings.prefetch_rows} prefetched rows each needs {settings.least_rows}",
            where="pipeline",
            mend="raise hs_queue_depth or lower prefetch_rows",
        )
    _check_bytes(settings, list(row_bytes))


def _check_bytes(settings: CoreSettings, row_bytes: list[int]) -> None:
    if settings.queue_bytes is None or not row_bytes:
        return
    largest, least = max(row_bytes), settings.least_bytes(row_bytes)
    if settings.queue_bytes < largest:
        raise UserError(
            f"queue_bytes {settings.queue_bytes} is below the largest row of {largest} bytes",
            where="pipeline",
            mend=f"raise pipeline.queue_bytes to at least {least} or lower data.row_tokens",
        )
    if settings.queue_bytes < least:
        raise UserError(
            f"queue_bytes {settings.queue_bytes} is below the {least} bytes that a round of {settings.n_drafters} "
            f"drafters with {settings.prefetch_rows} prefetched rows each needs (largest row {largest} bytes)",
            where="pipeline",
            mend=f"raise pipeline.queue_bytes to at least {least} or lower pipeline.prefetch_rows",
        )


class Admission:
    """Slots: charged when a row is leased, freed when its training step has really finished."""

    def __init__(self, max_rows: int, max_bytes: int | None) -> None:
        self.max_rows = max_rows
        self.max_bytes = max_bytes
        self.n_bytes = 0
        self.charged: dict[int, int] = {}

    def fits(self, n_bytes: int) -> bool:
        """True if a row of so many bytes may be leased now."""
        if len(self.charged) >= self.max_rows:
            return False
        return self.max_bytes is None or self.n_bytes + n_bytes <= self.max_bytes

    def charge(self, row_id: int, n_bytes: int) -> None:
        """Take a slot for a row. Raises ProtocolError if it has one."""
        if row_id in self.charged:
            raise ProtocolError(f"row {row_id} holds a slot already")
        self.charged[row_id] = n_bytes
        self.n_bytes += n_bytes

    def release(self, row_id: int) -> None:
        """Free a row's slot. Raises ProtocolError if it has none."""
        if row_id not in self.charged:
            raise ProtocolError(f"row {row_id} holds no slot")
        self.n_bytes -= self.charged.pop(row_id)
