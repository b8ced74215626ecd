"""The ledger: where each planned row is, and the identity that must hold at all times.

planned = committed + set aside + in flight + remaining. A row goes planned -> leased -> captured -> in hand ->
trained -> committed, or back to planned, or is set aside.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any

from draftline.errors import UserError
from draftline.pipeline.core.items import ProtocolError
from draftline.records import PlannedRow


class RowState(IntEnum):
    """Where a row is. LEASED belongs to a target, IN_HAND and TRAINED to a drafter, CAPTURED to the queue."""

    PLANNED = 0
    LEASED = 1
    CAPTURED = 2
    IN_HAND = 3
    TRAINED = 4
    COMMITTED = 5
    SET_ASIDE = 6


NOBODY = -1
Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class LedgerCounts:
    """The identity in figures, for the whole run or one epoch."""

    planned: int
    committed: int
    set_aside: int
    in_flight: int
    remaining: int

    def __str__(self) -> str:
        return (
            f"planned {self.planned} = committed {self.committed} + set aside {self.set_aside}"
            f" + in flight {self.in_flight} + remaining {self.remaining}"
        )


@dataclass(frozen=True, slots=True)
class CaptureCounts:
    """What became of the captures of this process: produced = committed + returned + discarded + set aside + held."""

    produced: int
    committed: int
    returned: int
    discarded_at_stop: int
    set_aside: int
    held: int


@dataclass(frozen=True, slots=True)
class LedgerState:
    """What a checkpoint stores of the ledger. Rows in flight at that moment count as remaining after a restore.

    Attributes:
        committed, set_aside: half-open ranges of row ids.
        failures: (row id, times it failed) of rows that were blamed and are not set aside.
        rounds: rounds committed so far.
        in_flight: rows in flight when the state was cut.
    """

    planned: int
    committed: Ranges = ()
    set_aside: Ranges = ()
    failures: tuple[tuple[int, int], ...] = ()
    rounds: int = 0
    in_flight: int = 0

    @property
    def n_committed(self) -> int:
        """Rows committed."""
        return sum(stop - start for start, stop in self.committed)

    @property
    def n_set_aside(self) -> int:
        """Rows set aside."""
        return sum(stop - start for start, stop in self.set_aside)

    def to_json(self) -> dict[str, Any]:
        """A dictionary of numbers and lists, with the identity's figures beside the rows themselves."""
        remaining = self.planned - self.n_committed - self.n_set_aside - self.in_flight
        figures = {"n_committed": self.n_committed, "n_set_aside": self.n_set_aside, "remaining": remaining}
        return asdict(self) | figures

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> LedgerState:
        """Inverse of `to_json`.

        Raises:
            UserError: a field is missing, of another kind, or the figures contradict the rows.
        """
        try:
            state = cls(
                planned=int(data["planned"]),
                committed=_pairs(data["committed"]),
                set_aside=_pairs(data["set_aside"]),
                failures=_pairs(data["failures"]),
                rounds=int(data["rounds"]),
                in_flight=int(data["in_flight"]),
            )
            figures = int(data["n_committed"]), int(data["n_set_aside"])
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"the ledger cannot be read ({error!r})", mend="use an older checkpoint") from error
        _check_ranges(state)
        if figures != (state.n_committed, state.n_set_aside):
            raise UserError(f"the ledger's figures {figures} contradict its rows", mend="use an older checkpoint")
        return state


class Ledger:
    """State and holder of each row, with counts kept as rows move.

    Args:
        plan: rows with ids 0..n-1 in order.
        state: what a checkpoint stored; its committed and set-aside rows are not trained again.

    Raises:
        UserError: the state belongs to a plan of another length.
        ProtocolError: row ids that are not 0..n-1 in order.
    """

    def __init__(self, plan: Sequence[PlannedRow], state: LedgerState | None = None) -> None:
        n = len(plan)
        self.plan = plan
        self.states = [RowState.PLANNED] * n
        self.holders = [NOBODY] * n
        self.counts = [0] * len(RowState)
        self.counts[RowState.PLANNED] = n
        self.failures: dict[int, int] = {}
        self.rounds = 0
        self.produced = self.returned = self.discarded = self.set_aside_captured = self.committed_before = 0
        if any(row.row_id != i for i, row in enumerate(plan)):
            raise ProtocolError("row ids must be 0..n-1 in plan order")
        if state is not None:
            self._restore(state)

    def _restore(self, state: LedgerState) -> None:
        if state.planned != len(self.plan):
            raise UserError(
                f"the checkpoint's plan has {state.planned} rows, this run's plan has {len(self.plan)}",
                mend="resume with the data, seed, epochs and row_tokens of that run",
            )
        _check_ranges(state)
        for row_id in _rows_of(state.committed):
            self.move(row_id, RowState.PLANNED, RowState.COMMITTED)
        for row_id in _rows_of(state.set_aside):
            self.move(row_id, RowState.PLANNED, RowState.SET_ASIDE)
        self.failures = dict(state.failures)
        self.rounds = state.rounds
        self.committed_before = state.n_committed

    def move(self, row_id: int, before: RowState, after: RowState, *, holder: int = NOBODY, to: int = NOBODY) -> None:
        """Move one row from `before`, held by `holder`, to `after`, held by `to`.

        Raises:
            ProtocolError: the row is elsewhere or with somebody else.
        """
        if not 0 <= row_id < len(self.states):
            raise ProtocolError(f"row {row_id} is not in the plan of {len(self.states)} rows")
        if self.states[row_id] is not before or self.holders[row_id] != holder:
            is_now, wanted = self.states[row_id].name, before.name
            raise ProtocolError(
                f"row {row_id} is {is_now} with {self.holders[row_id]}, not {wanted} with {holder}; no {after.name}"
            )
        self.states[row_id] = after
        self.holders[row_id] = to
        self.counts[before] -= 1
        self.counts[after] += 1

    @property
    def in_flight(self) -> int:
        """Rows leased, captured or handed out, not yet committed."""
        counts = self.counts
        return counts[RowState.LEASED] + counts[RowState.CAPTURED] + self.handed

    @property
    def handed(self) -> int:
        """Rows handed out in the round that is open: at a commit nothing is in hand, so no other round has any."""
        return self.counts[RowState.IN_HAND] + self.counts[RowState.TRAINED]

    @property
    def is_complete(self) -> bool:
        """True if every planned row is committed or set aside."""
        return self.counts[RowState.COMMITTED] + self.counts[RowState.SET_ASIDE] == len(self.states)

    def set_aside_samples(self) -> int:
        """Samples in rows set aside."""
        if not self.counts[RowState.SET_ASIDE]:
            return 0
        rows = zip(self.plan, self.states, strict=True)
        return sum(len(row.samples) for row, state in rows if state is RowState.SET_ASIDE)

    def identity(self) -> LedgerCounts:
        """planned = committed + set aside + in flight + remaining, in figures."""
        counts = self.counts
        return LedgerCounts(
            planned=len(self.states),
            committed=counts[RowState.COMMITTED],
            set_aside=counts[RowState.SET_ASIDE],
            in_flight=self.in_flight,
            remaining=counts[RowState.PLANNED],
        )

    def epochs(self) -> tuple[LedgerCounts, ...]:
        """The identity of each epoch, in order; walks over the whole plan."""
        tallies: dict[int, list[int]] = {}
        for row, state in zip(self.plan, self.states, strict=True):
            tallies.setdefault(row.epoch, [0] * len(RowState))[state] += 1
        return tuple(_counts_of(tallies[epoch]) for epoch in sorted(tallies))

    def captures(self) -> CaptureCounts:
        """What became of every row that was captured."""
        return CaptureCounts(
            produced=self.produced,
            committed=self.counts[RowState.COMMITTED] - self.committed_before,
            returned=self.returned,
            discarded_at_stop=self.discarded,
            set_aside=self.set_aside_captured,
            held=self.counts[RowState.CAPTURED] + self.handed,
        )

    def snapshot(self) -> LedgerState:
        """What a checkpoint has to store; walks over the whole plan."""
        return LedgerState(
            planned=len(self.states),
            committed=_ranges(i for i, state in enumerate(self.states) if state is RowState.COMMITTED),
            set_aside=_ranges(i for i, state in enumerate(self.states) if state is RowState.SET_ASIDE),
            failures=tuple(sorted(self.failures.items())),
            rounds=self.rounds,
            in_flight=self.in_flight,
        )


def _counts_of(tally: Sequence[int]) -> LedgerCounts:
    flying = (RowState.LEASED, RowState.CAPTURED, RowState.IN_HAND, RowState.TRAINED)
    return LedgerCounts(
        planned=sum(tally),
        committed=tally[RowState.COMMITTED],
        set_aside=tally[RowState.SET_ASIDE],
        in_flight=sum(tally[state] for state in flying),
        remaining=tally[RowState.PLANNED],
    )


def _ranges(ids: Iterable[int]) -> Ranges:
    ranges: list[tuple[int, int]] = []
    for i in ids:
        if ranges and ranges[-1][1] == i:
            ranges[-1] = (ranges[-1][0], i + 1)
        else:
            ranges.append((i, i + 1))
    return tuple(ranges)


def _rows_of(ranges: Ranges) -> Iterable[int]:
    return (row_id for start, stop in ranges for row_id in range(start, stop))


def _pairs(data: Iterable[Sequence[int]]) -> Ranges:
    return tuple((int(first), int(second)) for first, second in data)


def _check_ranges(state: LedgerState) -> None:
    spans = sorted(state.committed + state.set_aside)
    ends = [0, *(stop for _, stop in spans)]
    in_order = all(end <= start < stop for end, (start, stop) in zip(ends[:-1], spans, strict=True))
    if not in_order or ends[-1] > state.planned or state.planned < 0 or state.rounds < 0:
        raise UserError(
            f"the ledger's rows overlap or lie outside the plan of {state.planned} rows", mend="use an older checkpoint"
        )
