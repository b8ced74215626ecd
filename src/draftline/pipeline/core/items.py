"""What the core hands out: small frozen records, the three ends, and the error of a misused transition."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final, Generic, Literal, TypeVar

from draftline.records import PlannedRow

P = TypeVar("P")


class ProtocolError(RuntimeError):
    """A transition was asked for whose precondition does not hold: a fault of the caller, never of the data."""


class End(Enum):
    """How a run ended: all done, asked to stop, or failed. Never confused with one another."""

    CLOSED = "closed"
    STOPPED = "stopped"
    FAILED = "failed"


class Signal(Enum):
    """Answers that carry nothing. WAIT changes no state: ask again after any other transition."""

    WAIT = "wait"
    DONE = "done"


WAIT: Final = Signal.WAIT
DONE: Final = Signal.DONE


@dataclass(frozen=True, slots=True)
class Worker:
    """A target or a drafter, by number; prints as `target-2`."""

    role: Literal["target", "drafter"]
    index: int

    def __str__(self) -> str:
        return f"{self.role}-{self.index}"


def target_worker(index: int) -> Worker:
    """The target of that number."""
    return Worker("target", index)


def drafter_worker(index: int) -> Worker:
    """The drafter of that number."""
    return Worker("drafter", index)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a run FAILED and in whose hands."""

    origin: str
    reason: str


@dataclass(frozen=True, slots=True)
class Lease:
    """A row that a target is to capture. Its slot of `n_bytes` is charged already."""

    row: PlannedRow
    n_bytes: int

    @property
    def row_id(self) -> int:
        """Of the leased row."""
        return self.row.row_id


@dataclass(frozen=True, slots=True)
class RowItem(Generic[P]):
    """A captured row for a drafter.

    Attributes:
        row: what was planned.
        clock_rows: rows committed, plus rows handed out in this round before this one: the learning rate's clock.
        round_id: the round that the row counts for.
        payload: what the target put; None where the core runs without payloads.
    """

    row: PlannedRow
    clock_rows: int
    round_id: int
    payload: P

    @property
    def row_id(self) -> int:
        """Of the row."""
        return self.row.row_id


@dataclass(frozen=True, slots=True)
class SyncItem:
    """Call to the meeting of a round: train what is in hand, then arrive."""

    round_id: int


@dataclass(frozen=True, slots=True)
class StopItem:
    """The one Stop of a drafter."""

    end: End


@dataclass(frozen=True, slots=True)
class Meeting:
    """An averaging of one round.

    Attributes:
        round_id: rounds are counted from 0, over restarts too.
        attempt: counts repetitions after a death in the middle of averaging.
        members: the drafters that meet, ascending.
        leader: the member that averages and commits.
        rows: what each member trained in the round, in training order; empty for a member that trained none.
        committed_rows: rows of the whole run committed once this meeting is.
        is_last: True if no further row will be handed out after this meeting. Before a drafter gets its Stop, the
            last meeting that committed anything, or an empty one after it, was begun with is_last.
    """

    round_id: int
    attempt: int
    members: tuple[int, ...]
    leader: int
    rows: Mapping[int, tuple[PlannedRow, ...]]
    committed_rows: int
    is_last: bool

    @property
    def n_rows(self) -> int:
        """Rows trained in the round; 0 in a meeting that is only there to end the run, or whose rows went back."""
        return sum(map(len, self.rows.values()))
