"""Captured rows that wait for a drafter, first come first served or in plan order."""

from __future__ import annotations

from collections.abc import Sequence

from draftline.pipeline.core.ledger import RowState


class WaitingRows:
    """The queue's content, as row ids. In plan order, a row waits for every lower row that was never handed out."""

    def __init__(self, ordered: bool) -> None:
        self.ordered = ordered
        self.rows: dict[int, None] = {}  # in order of arrival
        self._next_row = 0  # ordered: the lowest row that was never handed out

    def add(self, row_id: int) -> None:
        """A captured row begins to wait."""
        self.rows[row_id] = None

    def take(self, states: Sequence[RowState]) -> int | None:
        """The next row, or None. Rows that come back after they were handed out once hold nothing up."""
        if not self.rows:
            return None
        row_id = self._lowest_in_turn(states) if self.ordered else next(iter(self.rows))
        if row_id is not None:
            del self.rows[row_id]
        return row_id

    def take_all(self) -> list[int]:
        """Ids of all rows that wait, in order; none waits afterwards."""
        rows = list(self.rows)
        self.rows.clear()
        return rows

    def _lowest_in_turn(self, states: Sequence[RowState]) -> int | None:
        last = len(states) - 1
        while self._next_row < last and states[self._next_row] in (RowState.COMMITTED, RowState.SET_ASIDE):
            self._next_row += 1
        row_id = min(self.rows)
        if row_id > self._next_row:
            return None
        if row_id == self._next_row < last:
            self._next_row += 1
        return row_id
