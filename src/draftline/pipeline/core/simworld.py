"""A small world around the core for the simulator: workers as step programs, weights as sets of rows, and the checks.

Each step is one call of the core, as one worker would make it. Weights of a drafter are the set (a bit mask) of the
rows that went into them; averaging is the union over the members. Faults can be applied between any two steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import cast

from draftline.pipeline.core.admission import CoreSettings
from draftline.pipeline.core.items import (
    End,
    Meeting,
    ProtocolError,
    RowItem,
    drafter_worker,
    target_worker,
)
from draftline.pipeline.core.ledger import RowState
from draftline.pipeline.core.machine import PipelineCore
from draftline.pipeline.core.simworkers import At, SimDrafter, SimTarget
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
        """The core's settings of this case."""
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
    DRAFTER_REPLACED = 5
    DRAFTER_GIVES_BACK = 6
    DRAFTER_BLAMES = 7
    STOP = 8
    FAIL = 9


class World:
    """One run under simulation. What must hold and does not raises BrokenPromiseError.

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
        targets = [target_class(t) for t in range(case.n_targets)]
        self.workers: list[SimTarget | SimDrafter] = [*targets, *map(SimDrafter, range(case.n_drafters))]
        self.live = set(range(case.n_drafters))
        self.live_targets = set(range(case.n_targets))  # those that restart included
        self.weights = [0] * case.n_drafters
        self.averages = [0] * case.n_drafters
        self.blames = [0] * case.n_rows
        self.n_puts = self.n_discarded = self.n_committed = self.committed = 0
        self.last_in_order = -1
        self.stopped = self.failed = False
        self.sealed = True
        self.max_bytes = self.core.admission.max_bytes or sum(ROW_BYTES)

    # ---- steps

    def active(self) -> list[int]:
        """Numbers of the workers that are not over: targets, then drafters."""
        return [code for code, worker in enumerate(self.workers) if worker.at is not At.OVER]

    def train(self, drafter: int, row_id: int) -> None:
        """Put a row into a drafter's weights. Raises BrokenPromiseError if living weights hold it already."""
        bit = 1 << row_id
        if not self.core.failure and any(self.weights[d] & bit for d in self.live):
            raise BrokenPromiseError(f"row {row_id} is trained twice")
        self.weights[drafter] |= bit

    def average(self, meeting: Meeting) -> None:
        """What the members' weights shall become: the rows of all of them."""
        union = 0
        for d in meeting.members:
            union |= self.weights[d]
        for d in meeting.members:
            self.averages[d] = union

    def commit(self, drafter: int, meeting: Meeting) -> None:
        """Commit a round. Raises BrokenPromiseError if it was called the last and rows are left."""
        result = self.core.commit(drafter, meeting.round_id, meeting.attempt)
        self.sealed = meeting.is_last if result else self.sealed
        for d in self.core.rounds.live - self.live:  # who joins at this commit takes what its leader has
            self.live.add(d)
            self.averages[d] = self.averages[drafter]
        if result and result.is_last and not self.core.stopping and not self._all_settled():
            raise BrokenPromiseError("a meeting was called the last one, but rows are left")

    def take_over(self, drafter: int) -> None:
        """A drafter takes the average into its weights."""
        self.weights[drafter] = self.averages[drafter]

    def apply(self, fault: Fault, index: int) -> bool:
        """Let a fault happen; False if it cannot happen now."""
        if self.core.end is not None:
            return False
        if fault <= Fault.TARGET_BLAMES:
            return self._target_fault(fault, cast(SimTarget, self.workers[index]))
        if fault <= Fault.DRAFTER_BLAMES:
            return self._drafter_fault(fault, cast(SimDrafter, self.workers[self.case.n_targets + index]))
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
        if fault <= Fault.DRAFTER_REPLACED:
            self.live.discard(drafter.index)
            if drafter.asking or drafter.at is not At.JOIN:
                self.core.drafter_lost(drafter.index)
            drafter.at = At.OVER
            if fault is Fault.DRAFTER_REPLACED:
                self.workers[self.workers.index(drafter)] = SimDrafter(len(self.weights), At.JOIN)
                self.weights.append(0)
                self.averages.append(0)
            return True
        if not drafter.hand or drafter.asking:
            return False
        row_id, blame = drafter.hand.pop(0), fault is Fault.DRAFTER_BLAMES
        self.blames[row_id] += blame
        self.core.give_back(drafter_worker(drafter.index), row_id, blame=blame)
        return True

    # ---- checks

    def _mask(self, wanted: RowState) -> int:
        return sum(1 << i for i, state in enumerate(self.core.ledger.states) if state is wanted)

    def _all_settled(self) -> bool:
        states = self.core.ledger.states
        return states.count(COMMITTED) + states.count(SET_ASIDE) == len(states)

    def check(self) -> None:
        """What must hold after every step: slots, their bounds, and commits that tell the truth about the weights."""
        core = self.core
        counts, admission = core.ledger.counts, core.admission
        n_charged = len(admission.charged)
        if n_charged != counts[LEASED] + counts[CAPTURED] + counts[IN_HAND] and not core.failure:
            raise BrokenPromiseError(f"{n_charged} slots are charged, the ledger has {counts}")
        if n_charged > admission.max_rows or admission.n_bytes > self.max_bytes:
            raise BrokenPromiseError(f"the bound is exceeded: {admission.charged}")
        if core.ledger.states.count(COMMITTED) != self.n_committed:
            self.check_ledger()

    def check_ledger(self) -> None:
        """The ledger's figures are those of its rows, and every drafter's average holds what is committed."""
        states, counts, admission = self.core.ledger.states, self.core.ledger.counts, self.core.admission
        found = [states.count(state) for state in RowState]
        if found != counts or admission.n_bytes != sum(admission.charged.values()):
            raise BrokenPromiseError(f"the ledger's counts {counts} are not those of its rows {found}")
        if counts[COMMITTED] == self.n_committed:
            return
        self.n_committed, self.committed = counts[COMMITTED], self._mask(COMMITTED)
        for d in self.live:
            if self.averages[d] != self.committed:
                what = f"the average {self.averages[d]:b} of drafter-{d}"
                raise BrokenPromiseError(f"{what} is not what is committed: {self.committed:b}")

    def check_done(self) -> None:
        """Raises BrokenPromiseError if a target was told DONE too early."""
        if not (self.stopped or self.core.failure or self._all_settled()):
            raise BrokenPromiseError("a target was told DONE with rows left")

    def check_row(self, item: RowItem[None]) -> None:
        """Raises BrokenPromiseError if a round hands out too many rows or the clock is wrong."""
        ledger = self.core.ledger
        handed = ledger.states.count(IN_HAND) + ledger.states.count(TRAINED)
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
        """Raises BrokenPromiseError if a drafter was told the wrong end, or too early."""
        counts = self.core.ledger.counts
        if end is End.FAILED:
            if not self.core.failure:
                raise BrokenPromiseError("a drafter was told FAILED, but nothing failed")
            return
        if self.core.failure or end is not (End.STOPPED if self.stopped else End.CLOSED):
            raise BrokenPromiseError(f"a drafter was told {end}")
        if counts[IN_HAND] or counts[TRAINED] or (end is End.CLOSED and not self._all_settled()):
            raise BrokenPromiseError("a drafter was stopped before the last commit")
        if not self.sealed:
            raise BrokenPromiseError("a drafter was stopped, but no meeting was told that it is the last one")
        if self.weights[drafter] != self.committed:
            raise BrokenPromiseError(f"drafter-{drafter} stops with weights that are not what is committed")

    def check_end(self) -> End:
        """What must hold when all workers are over."""
        core, end = self.core, self.core.end
        if end is None:
            raise BrokenPromiseError("all workers are over, but the run has no end")
        self.check_ledger()
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
        if self._mask(SET_ASIDE) != aside or ledger.set_aside_samples() != 2 * aside.bit_count():
            raise BrokenPromiseError(f"set aside {self._mask(SET_ASIDE):b}, blamed twice {aside:b}")
