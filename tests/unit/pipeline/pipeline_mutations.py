"""Seeded faults of the core: each class breaks one rule, in the way a slip of the pen would."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from draftline.pipeline.core import DONE, WAIT, End, Lease, PipelineCore, RowItem, RowState, StopItem
from draftline.pipeline.core.simworkers import At, SimTarget
from draftline.pipeline.core.simworld import Case, World


class DoneOneRowEarly(PipelineCore):
    def lease(self, target):
        counts = self.ledger.counts
        settled = counts[RowState.COMMITTED] + counts[RowState.SET_ASIDE]
        if settled == len(self.ledger.plan) - 1 and self._leases.get(target, 0) is None:
            self._told_done.add(target)
            return DONE
        return super().lease(target)


class DoneWhenNothingIsPlanned(PipelineCore):
    """Forgets that rows of others may come back."""

    def lease(self, target):
        answer = super().lease(target)
        if answer is WAIT and not self._planned:
            self._told_done.add(target)
            return DONE
        return answer

    def _settle(self):
        super()._settle()
        self.closed = self.closed or self._n_done == len(self._leases) > 0


class SlotNeverFreed(PipelineCore):
    def trained(self, drafter, row_id):
        n_bytes = self.row_bytes[row_id]
        super().trained(drafter, row_id)
        self.admission.charge(row_id, n_bytes)


class SlotFreedWhenHandedOut(PipelineCore):
    """Frees a slot at the launch of the step, not at its end."""

    def get(self, drafter):
        answer = super().get(drafter)
        if isinstance(answer, RowItem):
            self.admission.release(answer.row_id)
        return answer

    def trained(self, drafter, row_id):
        self.admission.charge(row_id, 0)
        super().trained(drafter, row_id)

    def _return(self, row_id, before, holder):
        if before is RowState.IN_HAND:
            self.admission.charge(row_id, 0)
        super()._return(row_id, before, holder)


class CommitBeforeAverage(PipelineCore):
    def arrive(self, drafter, round_id):
        super().arrive(drafter, round_id)
        if self.leader is not None:
            self.rounds.begin(self.leader, round_id)
            self.commit(self.leader, round_id, self.rounds.attempt)


class ReturnedRowDropped(PipelineCore):
    def _return(self, row_id, before, holder):
        super()._return(row_id, before, holder)
        self._planned.remove(row_id)
        heapq.heapify(self._planned)


class RowHandedTwice(PipelineCore):
    """A row of a lost drafter that was trained stays in the queue as well."""

    def put(self, target, row_id):
        super().put(target, row_id)
        self.twice = row_id

    def get(self, drafter):
        answer = super().get(drafter)
        if isinstance(answer, RowItem) and getattr(self, "twice", None) == answer.row_id:
            self.twice = None
            self._waiting.add(answer.row_id)
        return answer


class RowLeasedTwice(PipelineCore):
    def lease(self, target):
        answer = super().lease(target)
        if isinstance(answer, Lease) and len(self._leases) > 1:
            heapq.heappush(self._planned, answer.row_id)
        return answer


class LastSyncSkipped(PipelineCore):
    """The rows of a round that never gets full are simply called committed."""

    def get(self, drafter):
        if self._nothing_left() and not self.rounds.closing and not any(self._hands.values()):
            for d, rows in self.rounds.trained.items():
                for row_id in rows:
                    self.ledger.move(row_id, RowState.TRAINED, RowState.COMMITTED, holder=d)
            self.rounds.close()
        return super().get(drafter)


class NoMeetingForTheTail(PipelineCore):
    def _nothing_left(self):
        return False


class LastMeetingUnannounced(PipelineCore):
    """A stop right after a meeting lets everybody go, without a meeting that knows that it is the last one."""

    def commit(self, drafter, round_id, attempt):
        meeting = super().commit(drafter, round_id, attempt)
        self.rounds.sealed = True
        return meeting


class StopReleasedTwice(PipelineCore):
    def get(self, drafter):
        answer = super().get(drafter)
        if isinstance(answer, StopItem):
            self._stopped.discard(drafter)
        return answer

    @property
    def end(self):
        return self.good_end if self.closed and not self.failure else super().end


class LostDrafterKeepsItsRows(PipelineCore):
    """Rows that a lost drafter trained are still committed with the round."""

    def drafter_lost(self, drafter):
        kept = self.rounds.trained.get(drafter, [])
        others = [d for d in self.rounds.live if d != drafter]
        if others and drafter not in self._stopped and not self.failure:
            for row_id in kept:
                self.ledger.move(row_id, RowState.TRAINED, RowState.TRAINED, holder=drafter, to=others[0])
            self.rounds.trained[others[0]] += kept
            self.rounds.trained[drafter] = []
        super().drafter_lost(drafter)


class LostDrafterForgotten(PipelineCore):
    """Rows that a lost drafter trained go nowhere."""

    def drafter_lost(self, drafter):
        if drafter in self.rounds.trained:
            self.rounds.trained[drafter] = []
        super().drafter_lost(drafter)


class ByteBoundIgnored(PipelineCore):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.admission.fits = lambda _: len(self.admission.charged) < self.admission.max_rows


class LeaderLossCommits(PipelineCore):
    """A leader that dies in the middle of averaging leaves a committed round behind."""

    def drafter_lost(self, drafter):
        if drafter == self.leader and self.rounds.averaging and not self.failure:
            self.commit(drafter, self.round_id, self.rounds.attempt)
        super().drafter_lost(drafter)


class AverageNotRepeated(PipelineCore):
    """A member that dies during the averaging goes unnoticed: the average holds its rows."""

    def drafter_lost(self, drafter):
        rounds = self.rounds
        averaging = rounds.averaging and drafter != rounds.leader
        super().drafter_lost(drafter)
        rounds.averaging = rounds.averaging or averaging


class DiscardedCountedAsCommitted(PipelineCore):
    def _discard(self, row_id):
        super()._discard(row_id)
        self.ledger.move(row_id, RowState.PLANNED, RowState.COMMITTED)


class StopWithoutLastMeeting(PipelineCore):
    """A stop that throws the open round away."""

    def request_stop(self):
        stopped = super().request_stop()
        if stopped and not self.rounds.closing:
            self.closed = True
            for d, rows in self.rounds.trained.items():
                for row_id in rows:
                    self.ledger.move(row_id, RowState.TRAINED, RowState.PLANNED, holder=d)
                rows.clear()
        return stopped


class StopKeepsWaitingRows(PipelineCore):
    def request_stop(self):
        waiting = dict(self._waiting.rows)
        self._waiting.rows.clear()
        stopped = super().request_stop()
        self._waiting.rows.update(waiting)
        return stopped


class FailureLooksLikeTheEnd(PipelineCore):
    def get(self, drafter):
        answer = super().get(drafter)
        return StopItem(End.CLOSED) if answer == StopItem(End.FAILED) else answer


class BlameNotCounted(PipelineCore):
    def give_back(self, worker, row_id, *, blame, reason=""):
        super().give_back(worker, row_id, blame=False, reason=reason)


class MeetingForgetsMember(PipelineCore):
    """The meeting starts when the round's busy drafters are there, without those that trained no row."""

    def arrive(self, drafter, round_id):
        super().arrive(drafter, round_id)
        rounds = self.rounds
        if rounds.leader is None and all(d in rounds.arrived for d, rows in rounds.trained.items() if rows):
            rounds.leader = drafter


class OrderForgotten(PipelineCore):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self._waiting.ordered = False


class RoundOneRowTooLong(PipelineCore):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.rounds.rows_per_drafter += 1


class ReturnedRowKeepsItsSlot(PipelineCore):
    def _return(self, row_id, before, holder):
        n_bytes = self.row_bytes[row_id]
        super()._return(row_id, before, holder)
        if before is RowState.LEASED:
            self.admission.charge(row_id, n_bytes)


class ClockForgetsTheOpenRound(PipelineCore):
    def get(self, drafter):
        answer = super().get(drafter)
        if isinstance(answer, RowItem):
            return replace(answer, clock_rows=self.ledger.counts[RowState.COMMITTED])
        return answer


class LimitOfSetAsideIgnored(PipelineCore):
    def _set_aside(self, *arguments):
        super()._set_aside(*arguments)
        self.failure = None


class DrafterJoinsAtOnce(PipelineCore):
    """A new drafter takes part in the open round, with whatever weights it has."""

    def drafter_joined(self, drafter):
        joins = super().drafter_joined(drafter)
        if joins:
            self.rounds.live.add(drafter)
            self.rounds.trained[drafter], self._hands[drafter] = [], set()
        return joins


class LateDrafterForgotten(PipelineCore):
    """A new drafter that waits for a commit is not told that there will be none."""

    def _settle(self):
        joining = set(self.rounds.joining)
        super()._settle()
        self.rounds.joining |= joining


class UnlockedTarget(SimTarget):
    """Counts itself done without the lock: reads the count in one step, writes it in the next."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.seen = -1

    def report(self, world: World) -> None:
        core = world.core
        if self.seen < 0:
            self.seen = core._n_done
            return
        core._reported.add(self.index)
        core._n_done = self.seen + 1
        core._settle()
        self.at = At.OVER


def world_of(core_class: type[PipelineCore]) -> Callable[[Case], World]:
    return partial(World, core_class=core_class)


MUTATIONS: dict[str, Callable[[Case], World]] = {
    core_class.__name__: world_of(core_class) for core_class in PipelineCore.__subclasses__()
} | {"CountWithoutItsLock": partial(World, target_class=UnlockedTarget)}
