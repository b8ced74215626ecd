"""A small world around the core for the simulator: workers as step programs, weights as sets of rows, and the checks.

Each step is one call of the core, as one worker would make it. Weights of a drafter are the set (a bit mask) of the
rows that went into them; averaging is the union over the members. Faults can be applied between any two steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from draftline.pipeline.core.admission import CoreSettings
from draftline.pipeline.core.items import (
    WAIT,
    End,
    Lease,
    Meeting,
    ProtocolError,
    RowItem,
    SyncItem,
    drafter_worker,
    target_worker,
)
from draftline.pipeline.core.ledger import RowState
from draftline.pipeline.core.machine import PipelineCore
from draftline.records import PlannedRow

PLANNED, LEASED, CAPTURED, IN_HAND, TRAINED, COMMITTED, SET_ASIDE = RowState
ROW_BYTES = (2, 1, 3, 2, 1, 3)
PLAN = tuple(PlannedRow(i, i // 3, (2 * i, 2 * i + 1), 10, 5) for i in range(len(ROW_BYTES)))


class BrokenPromiseError(AssertionError):
    """The protocol broke one of its promises."""


@dataclass(frozen=True, slots=True)
class Case:
    """Sizes of one simulated run; `tight` bounds are the smallest that are allowed."""

    n_targets: int
    n_drafters: int
    n_rows: int
    rows_per_drafter: int = 1
    prefetch_rows: int = 0
    tight: bool = False
    byte_bound: bool = False
    ordered: bool = False
    max_set_aside: int = 0

    def settings(self) -> CoreSettings:
        least = CoreSettings(self.n_targets, self.n_drafters, self.rows_per_drafter, self.prefetch_rows, 1)
        return CoreSettings(
            self.n_targets,
            self.n_drafters,
            self.rows_per_drafter,
            self.prefetch_rows,
            queue_depth=1,
            queue_bytes=least.least_bytes(ROW_BYTES[: self.n_rows]) if self.byte_bound else None,
            admitted_rows=least.least_rows if self.tight else None,
            ordered=self.ordered,
            max_set_aside=self.max_set_aside,
        )


class Fault(IntEnum):
    """What can go wrong between two steps, or be asked for."""

    TARGET_LOST = 0
    TARGET_RESTARTS = 1
    TARGET_GIVES_BACK = 2
    TARGET_BLAMES = 3
    DRAFTER_LOST = 4
    DRAFTER_GIVES_BACK = 5
    DRAFTER_BLAMES = 6
    STOP = 7
    FAIL = 8


class At(IntEnum):
    """Where a worker is in its program."""

    LEASE = 0
    PUT = 1
    REPORT = 2
    JOIN = 3
    WORK = 4
    MEET = 5
    AVERAGE = 6
    COMMIT = 7
    OVER = 8


STUCK = -1  # the worker can only wait


class SimTarget:
    """lease -> put -> ... -> producer_done; may be lost and join again."""

    def __init__(self, index: int) -> None:
        self.index, self.at, self.row_id = index, At.LEASE, -1

    def step(self, world: World, _draw: float) -> int:
        core = world.core
        if self.at is At.LEASE:
            answer = core.lease(self.index)
            if answer is WAIT:
                return STUCK
            if isinstance(answer, Lease):
                self.row_id, self.at = answer.row_id, At.PUT
            else:
                world.check_done()
                self.at = At.REPORT
        elif self.at is At.PUT:
            core.put(self.index, self.row_id)
            world.n_puts += 1
            world.n_discarded += world.stopped
            self.at = At.LEASE
        elif self.at is At.REPORT:
            self.report(world)
        else:
            self.at = At.LEASE if core.target_joined(self.index) else At.OVER
        return 0

    def report(self, world: World) -> None:
        world.core.producer_done(self.index)
        self.at = At.OVER


class SimDrafter:
    """get -> trained -> ... -> arrive -> (average -> commit) -> take the average over -> get; prefetches as it likes.

    Once it has asked for a row and must wait, it does nothing else, as a thread would.
    """

    def __init__(self, index: int) -> None:
        self.index, self.at = index, At.WORK
        self.hand: list[int] = []
        self.round_id = -1  # >= 0: called to that meeting
        self.asking = False
        self.meeting: Meeting | None = None

    def step(self, world: World, draw: float) -> int:
        if self.at is At.WORK:
            return self.work(world, draw)
        if self.at is At.MEET:
            return self.meet(world)
        assert self.meeting is not None
        if self.at is At.AVERAGE:
            world.average(self.meeting)
            self.at = At.COMMIT
            return 0
        world.commit(self.index, self.meeting)
        self.at = At.MEET
        return 0

    def can_choose(self, world: World) -> bool:
        """True if it may either train or ask for another row."""
        return bool(
            self.at is At.WORK
            and self.hand
            and self.round_id < 0
            and not self.asking
            and len(self.hand) <= world.case.prefetch_rows
        )

    def work(self, world: World, draw: float) -> int:
        if self.hand and not self.asking and not (draw < 0.5 and self.can_choose(world)):
            row_id = self.hand.pop(0)
            world.core.trained(self.index, row_id)
            world.train(self.index, row_id)
            return 1
        if self.round_id >= 0:
            world.core.arrive(self.index, self.round_id)
            self.at = At.MEET
            return 2
        answer = world.core.get(self.index)
        if answer is WAIT:
            asked, self.asking = self.asking, bool(self.hand)
            return STUCK if asked or not self.hand else 3
        self.asking = False
        if isinstance(answer, RowItem):
            world.check_row(answer)
            self.hand.append(answer.row_id)
        elif isinstance(answer, SyncItem):
            self.round_id = answer.round_id
        else:
            world.check_stop(self.index, answer.end)  # type: ignore[union-attr]
            self.at = At.OVER
        return 0

    def meet(self, world: World) -> int:
        core = world.core
        if core.failure:
            self.at = At.OVER
        elif core.round_id != self.round_id:
            world.take_over(self.index)
            self.at, self.round_id = At.WORK, -1
        elif core.leader == self.index:
            self.meeting, self.at = core.begin_average(self.index, self.round_id), At.AVERAGE
        else:
            return STUCK
        return 0


class World:
    """One run under simulation.

    Args:
        case: sizes.
        core_class, target_class: replaced by the tests' mutations.
    """

    def __init__(
        self,
        case: Case,
        core_class: Callable[..., PipelineCore] = PipelineCore,
        target_class: type[SimTarget] = SimTarget,
    ) -> None:
        self.case = case
        self.core = core_class(PLAN[: case.n_rows], ROW_BYTES[: case.n_rows], case.settings())
        self.targets = [target_class(t) for t in range(case.n_targets)]
        self.drafters = [SimDrafter(d) for d in range(case.n_drafters)]
        self.live = set(range(case.n_drafters))
        self.live_targets = set(range(case.n_targets))  # those that restart included
        self.weights = [0] * case.n_drafters
        self.averages = [0] * case.n_drafters
        self.blames = [0] * case.n_rows
        self.n_puts = self.n_discarded = self.n_committed = 0
        self.last_in_order = -1
        self.stopped = self.failed = False
        self.all = (1 << case.n_rows) - 1

    # ---- steps

    def worker(self, code: int) -> SimTarget | SimDrafter:
        """Workers are numbered: targets, then drafters."""
        n_targets = len(self.targets)
        return self.targets[code] if code < n_targets else self.drafters[code - n_targets]

    @property
    def n_workers(self) -> int:
        return len(self.targets) + len(self.drafters)

    def active(self) -> list[int]:
        return [code for code in range(self.n_workers) if self.worker(code).at is not At.OVER]

    def train(self, drafter: int, row_id: int) -> None:
        bit = 1 << row_id
        if not self.core.failure and any(self.weights[d] & bit for d in self.live):
            raise BrokenPromiseError(f"row {row_id} is trained twice")
        self.weights[drafter] |= bit

    def average(self, meeting: Meeting) -> None:
        union = 0
        for d in meeting.members:
            union |= self.weights[d]
        for d in meeting.members:
            self.averages[d] = union

    def commit(self, drafter: int, meeting: Meeting) -> None:
        result = self.core.commit(drafter, meeting.round_id, meeting.attempt)
        if result and result.is_last and not self.core.stopping and self.committed | self.set_aside != self.all:
            raise BrokenPromiseError("a meeting was called the last one, but rows are left")

    def take_over(self, drafter: int) -> None:
        self.weights[drafter] = self.averages[drafter]

    def apply(self, fault: Fault, index: int) -> bool:
        """Let a fault happen; False if it cannot happen now."""
        if self.core.end is not None:
            return False
        if fault <= Fault.TARGET_BLAMES:
            return self._target_fault(fault, self.targets[index])
        if fault <= Fault.DRAFTER_BLAMES:
            return self._drafter_fault(fault, self.drafters[index])
        if fault is Fault.FAIL:
            self.failed = self.core.fail("test", "asked for")
            return self.failed
        waiting = len(self.core.waiting_rows)
        if not self.core.request_stop():
            return False
        self.n_discarded += waiting
        self.stopped = True
        return True

    def _target_fault(self, fault: Fault, target: SimTarget) -> bool:
        if target.at is At.JOIN and fault is Fault.TARGET_LOST:
            self.live_targets.discard(target.index)
            self.core.target_lost(target.index)
            target.at = At.OVER
            return True
        if target.at is At.OVER or target.at is At.JOIN:
            return False
        if fault <= Fault.TARGET_RESTARTS:
            restarts = fault is Fault.TARGET_RESTARTS
            if not restarts:
                self.live_targets.discard(target.index)
            self.core.target_lost(target.index, returns=restarts)
            target.at = At.JOIN if restarts else At.OVER
            return True
        if target.at is not At.PUT:
            return False
        blame = fault is Fault.TARGET_BLAMES
        self.blames[target.row_id] += blame
        self.core.give_back(target_worker(target.index), target.row_id, blame=blame)
        target.at = At.LEASE
        return True

    def _drafter_fault(self, fault: Fault, drafter: SimDrafter) -> bool:
        if drafter.at is At.OVER:
            return False
        if fault is Fault.DRAFTER_LOST:
            self.live.discard(drafter.index)
            self.core.drafter_lost(drafter.index)
            drafter.at = At.OVER
            return True
        if not drafter.hand or drafter.asking:
            return False
        row_id, blame = drafter.hand.pop(0), fault is Fault.DRAFTER_BLAMES
        self.blames[row_id] += blame
        self.core.give_back(drafter_worker(drafter.index), row_id, blame=blame)
        return True

    # ---- checks

    @property
    def committed(self) -> int:
        return self._mask(COMMITTED)

    @property
    def set_aside(self) -> int:
        return self._mask(SET_ASIDE)

    def _mask(self, wanted: RowState) -> int:
        return sum(1 << i for i, state in enumerate(self.core.ledger.states) if state is wanted)

    def check(self) -> None:
        """What must hold after every step."""
        core = self.core
        states, counts, admission = core.ledger.states, core.ledger.counts, core.admission
        n_leased, n_waiting, n_in_hand = states.count(LEASED), states.count(CAPTURED), states.count(IN_HAND)
        n_committed = states.count(COMMITTED)
        found = [states.count(PLANNED), n_leased, n_waiting, n_in_hand, states.count(TRAINED), n_committed]
        if found != counts[:SET_ASIDE] or sum(counts) != len(states):
            raise BrokenPromiseError(f"the ledger's counts {counts} are not those of its rows {found}")
        charged = admission.charged
        if len(charged) != n_leased + n_waiting + n_in_hand and not core.failure:
            raise BrokenPromiseError(f"{len(charged)} slots are charged for {n_leased + n_waiting + n_in_hand} rows")
        if len(charged) > admission.max_rows or (admission.max_bytes or 99) < sum(charged.values()):
            raise BrokenPromiseError(f"the bound is exceeded: {charged}")
        if n_committed != self.n_committed:
            self.n_committed = n_committed
            self._check_commit()

    def _check_commit(self) -> None:
        committed = self.committed
        for d in self.live:
            if self.averages[d] != committed:
                raise BrokenPromiseError(
                    f"the average {self.averages[d]:b} of drafter-{d} is not what is committed: {committed:b}"
                )

    def check_done(self) -> None:
        if not (self.stopped or self.core.failure or self.committed | self.set_aside == self.all):
            raise BrokenPromiseError("a target was told DONE with rows left")

    def check_row(self, item: RowItem[None]) -> None:
        ledger, handed = self.core.ledger, 0
        for state in ledger.states:
            handed += state is IN_HAND or state is TRAINED
        if handed > self.case.rows_per_drafter * len(self.live):
            raise BrokenPromiseError(f"{handed} rows are handed out in a round of {len(self.live)} drafters")
        if item.clock_rows != ledger.states.count(COMMITTED) + handed - 1:
            raise BrokenPromiseError(f"the clock says {item.clock_rows}")
        if self.case.ordered:
            lower = ledger.states[self.last_in_order + 1 : item.row_id]
            if any(state is not COMMITTED and state is not SET_ASIDE for state in lower):
                raise BrokenPromiseError(f"row {item.row_id} overtook a lower one")
            self.last_in_order = max(self.last_in_order, item.row_id)

    def check_stop(self, drafter: int, end: End) -> None:
        counts = self.core.ledger.counts
        if end is End.FAILED:
            if not self.core.failure:
                raise BrokenPromiseError("a drafter was told FAILED, but nothing failed")
            return
        if self.core.failure or end is not (End.STOPPED if self.stopped else End.CLOSED):
            raise BrokenPromiseError(f"a drafter was told {end}")
        if counts[IN_HAND] or counts[TRAINED] or (end is End.CLOSED and self.committed | self.set_aside != self.all):
            raise BrokenPromiseError("a drafter was stopped before the last commit")
        if self.weights[drafter] != self.committed:
            raise BrokenPromiseError(f"drafter-{drafter} stops with weights that are not what is committed")

    def check_end(self) -> End:
        """What must hold when all workers are over."""
        core, end = self.core, self.core.end
        if end is None:
            raise BrokenPromiseError("all workers are over, but the run has no end")
        for d in self.live:
            self._check_single_stop(d)
        if (end is End.FAILED) != self._must_fail():
            raise BrokenPromiseError(f"the run ended {end}, {core.failure}")
        if end is End.FAILED:
            return end
        if core.admission.charged or core.ledger.in_flight:
            raise BrokenPromiseError(f"slots are left: {core.admission.charged}")
        self._check_captures()
        return end

    def _check_single_stop(self, drafter: int) -> None:
        try:
            self.core.get(drafter)
        except ProtocolError:
            return
        if not self.core.failure:
            raise BrokenPromiseError(f"drafter-{drafter} can get a second Stop")

    def _must_fail(self) -> bool:
        n_aside = sum(blames >= 2 for blames in self.blames)
        stuck = not self.live_targets and not self.stopped and self.core.ledger.counts[PLANNED] > 0
        return self.failed or not self.live or 2 * n_aside > self.case.max_set_aside or stuck

    def _check_captures(self) -> None:
        ledger, captures = self.core.ledger, self.core.ledger.captures()
        if captures.produced != self.n_puts or captures.discarded_at_stop != self.n_discarded:
            raise BrokenPromiseError(f"{self.n_puts} rows were put and {self.n_discarded} discarded, not {captures}")
        parts = captures.committed + captures.returned + captures.discarded_at_stop + captures.set_aside + captures.held
        if captures.produced != parts:
            raise BrokenPromiseError(f"captures do not add up: {captures}")
        aside = sum(1 << row_id for row_id, blames in enumerate(self.blames) if blames >= 2)
        if self.set_aside != aside or ledger.set_aside_samples() != 2 * aside.bit_count():
            raise BrokenPromiseError(f"set aside {self.set_aside:b}, blamed twice {aside:b}")


def fork(value: Any) -> Any:
    """A copy of simulated state: mutable containers and objects are copied, frozen ones shared."""
    kind = type(value)
    if kind in (list, set):
        return kind(map(fork, value)) if kind is list else value.copy()
    if kind is dict:
        return {key: fork(item) for key, item in value.items()}
    if kind.__module__.startswith("draftline.pipeline.core") and hasattr(value, "__dict__") and not _is_enum(value):
        copy = object.__new__(kind)
        copy.__dict__.update({key: fork(item) for key, item in value.__dict__.items()})
        return copy
    return value


def fingerprint(value: Any) -> Any:
    """A hashable picture of simulated state: equal pictures behave alike."""
    kind = type(value)
    if kind is list:
        return tuple(map(fingerprint, value))
    if kind is set:
        return frozenset(value)
    if kind is dict:
        return tuple((key, fingerprint(item)) for key, item in value.items())
    if kind.__module__.startswith("draftline.pipeline.core") and hasattr(value, "__dict__") and not _is_enum(value):
        return tuple(map(fingerprint, value.__dict__.values()))
    if kind is tuple:  # plan and sizes never change
        return None
    return (value.round_id, value.attempt, value.members) if kind is Meeting else value


def _is_enum(value: Any) -> bool:
    return hasattr(value, "_value_")
