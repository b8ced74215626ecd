"""The exchange of a run over several hosts: the thread driver of the same core, with what other hosts need besides.

Lives in the queue actor; its methods are called by that actor's threads on behalf of workers elsewhere. Beyond
`RowExchange` it hands out slots of shared memory with leases, lets targets and drafters come and go, and holds meetings
in which every member works, as a collective needs it:

    arrive -> await_turn -> (reduce, beside the weights) -> reduced -> await_turn -> apply

A reduction begins when every member of the meeting waits in `await_turn`, so a member that is gone is never waited for
inside a collective that was begun without it. The round is committed once every member has told `reduced`; if one is
lost, or a link breaks, before that, the next turn repeats it among those left. All wait on the one condition variable.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from draftline.cluster.refs import RowContract, RowRef, check_ref
from draftline.cluster.turns import SlotLease, Turn
from draftline.pipeline.core import (
    DONE,
    WAIT,
    CoreSettings,
    Lease,
    LedgerState,
    Meeting,
    ProtocolError,
    Signal,
    drafter_worker,
    target_worker,
)
from draftline.pipeline.threads import BUSY_LIMIT_S, RowExchange
from draftline.records import PlannedRow

MOST_BROKEN_TURNS = 10  # of one round, without anybody being lost


@dataclass(slots=True)
class _Reduction:
    """The reduction under way."""

    turn: Turn
    core_attempt: int
    done: dict[int, Any] = field(default_factory=dict)  # member -> what it gives for the checkpoint
    broken: bool = False


class ClusterExchange(RowExchange[RowRef]):
    """RowExchange for workers on several hosts.

    Args:
        plan, row_bytes, settings, stall_timeout_s, state: see `RowExchange`.
        contract: what every row must be.
        spare_slots: slots beyond those of the admitted rows. One is left alone whenever a target is lost in the middle
            of a row: it may still be writing.
        checkpoint_every: rounds between two checkpoints.
    """

    def __init__(
        self,
        plan: Sequence[PlannedRow],
        row_bytes: Sequence[int],
        settings: CoreSettings,
        *,
        contract: RowContract,
        stall_timeout_s: float,
        state: LedgerState | None = None,
        spare_slots: int = 8,
        checkpoint_every: int = 1,
    ) -> None:
        super().__init__(plan, row_bytes, settings, stall_timeout_s=stall_timeout_s, state=state)
        self._contract, self._every = contract, checkpoint_every
        self.n_slots = settings.max_rows + spare_slots
        self._free_slots = list(range(self.n_slots))
        self._slots: dict[int, int] = {}
        self._left_alone: deque[int] = deque()
        self._captured_by: dict[int, int] = {}  # row -> the target whose buffers it lies in; some are long trained
        self._leaving: set[int] = set()
        self._at_door: dict[int, int] = {}
        self._reduction: _Reduction | None = None
        self._attempts = self._broken_turns = 0
        self._committed = Turn(Meeting(-1, 0, (), -1, {}, 0, False), committed=True)
        self._gifts: dict[int, Any] = {}  # round -> the leader's weights for those who join
        self._group: dict[str, bytes] = {}  # where members of the open reduction find each other
        self._duty: Turn | None = None  # a checkpoint that somebody still has to write
        self._duty_holder: int | None = None
        self._force_due = False
        self.kept_moments: dict[int, Any] = {}

    # ---- targets

    def lease_slot(self, target: int) -> SlotLease | bool | None:
        """`lease` with a slot; None at the end, False if this target was asked to leave and is gone now."""
        with self._lock:
            ask = partial(self._lease_or_leave, target)
            answer = self._wait(target_worker(target), "a row to capture", ask)
            if not isinstance(answer, Lease):
                return False if answer is False else None
            slot = heapq.heappop(self._free_slots) if self._free_slots else self._left_alone.popleft()
            self._slots[answer.row_id] = slot
            return SlotLease(answer, slot)

    def _lease_or_leave(self, target: int) -> Lease | Signal | bool:
        if target not in self._leaving:
            return self._core.lease(target)
        self._leaving.discard(target)
        self._core.target_lost(target)
        return False

    def put(self, target: int, row_id: int, payload: RowRef) -> None:
        """`RowExchange.put` for a row by reference, checked at the door.

        Raises:
            RunFailedError: the record is not that of the planned row; the row is still the target's.
        """
        with self._lock:
            planned, charged = self._core.ledger.plan[row_id], self._core.row_bytes[row_id]
        check_ref(payload, planned, self._contract, charged)
        with self._lock:
            self._captured_by[row_id] = target
            if len(self._captured_by) > 2 * self.n_slots:
                admitted = self._core.admission.charged
                self._captured_by = {r: t for r, t in self._captured_by.items() if r in admitted}
        super().put(target, row_id, payload)

    def await_idle(self, target: int) -> None:
        """Waits until a target that takes no more rows is not needed for those that it captured either."""
        with self._lock:

            def ask() -> Signal:
                charged = self._core.admission.charged
                is_needed = any(t == target and r in charged for r, t in self._captured_by.items())
                return WAIT if is_needed else DONE

            self._wait(target_worker(target), "its rows to be trained", ask)

    def leave(self, target: int) -> None:
        """Asks a target to go once it holds no row."""
        with self._report():
            self._leaving.add(target)

    def target_lost(self, target: int, *, returns: bool = False) -> None:
        """See `RowExchange.target_lost`; the slot of a row that it was writing is left alone."""
        with self._report():
            row_id = self._core._leases.get(target)
            if row_id is not None and row_id in self._slots:
                self._left_alone.append(self._slots.pop(row_id))
            self._core.target_lost(target, returns=returns)

    # ---- meetings

    def arrive(self, drafter: int, round_id: int) -> None:
        """At the meeting, with empty hands."""
        with self._transition():
            self._core.arrive(drafter, round_id)

    def await_turn(self, drafter: int, round_id: int, after: int) -> Turn:
        """Waits for the next reduction of the round, or for its commit.

        Args:
            after: attempt of the reduction that this member took part in last; 0 for none.
        """
        with self._lock:
            self._at_door[drafter] = after
            try:
                answer = self._wait(drafter_worker(drafter), "the meeting", partial(self._turn, drafter, round_id))
            finally:
                self._at_door.pop(drafter, None)
            assert isinstance(answer, Turn)
            return answer

    def _turn(self, drafter: int, round_id: int) -> Turn | Signal:
        core = self._core
        if not core.is_live(drafter):
            raise ProtocolError(f"drafter-{drafter} waits at a meeting, but was reported lost")
        if core.round_id != round_id:
            return self._committed
        self._begin_if_all_are_here()
        current = self._reduction
        if current is None or drafter not in current.turn.meeting.members:
            return WAIT
        return current.turn if current.turn.meeting.attempt > self._at_door[drafter] else WAIT

    def _begin_if_all_are_here(self) -> None:
        core, current = self._core, self._reduction
        if core.leader is None or not core.rounds.live <= self._at_door.keys():
            return
        if current is not None and core.rounds.averaging and not current.broken:
            return
        if core.rounds.averaging and current is not None:  # a link broke, everybody is still here
            meeting, core_attempt = current.turn.meeting, current.core_attempt
        else:
            meeting = core.begin_average(core.leader, core.round_id)
            core_attempt = meeting.attempt
        self._attempts += 1
        self._group.clear()
        self._reduction = _Reduction(
            Turn(replace(meeting, attempt=self._attempts, rows={}), False, self._is_due(meeting)), core_attempt
        )

    def _is_due(self, meeting: Meeting) -> bool:
        return self._force_due or meeting.is_last or (meeting.round_id + 1) % self._every == 0

    def reduced(self, drafter: int, round_id: int, attempt: int, kept: Any = None) -> None:
        """A member holds the result beside its weights; the last one to say so commits the round for all.

        Args:
            kept: what the checkpoint needs of this member alone.
        """
        with self._transition():
            current = self._reduction
            if current is None or current.broken or current.turn.meeting.attempt != attempt:
                return
            current.done[drafter] = kept
            members = current.turn.meeting.members
            all_done = self._core.round_id == round_id and set(members) <= current.done.keys()
            if all_done and self._core.rounds.averaging and self._core.leader is not None:
                self._commit(current, self._core.leader)

    def _commit(self, current: _Reduction, leader: int) -> None:
        before = set(self._core.rounds.live)
        meeting = self._core.commit(leader, self._core.round_id, current.core_attempt)
        self._reduction = None
        if meeting is None:
            return
        self._last_meeting, self._broken_turns = meeting, 0
        is_due = current.turn.is_due  # a meeting that became the last one meanwhile is followed by another
        joined = tuple(sorted(self._core.rounds.live - before))
        self._committed = Turn(replace(meeting, rows={}), True, is_due, joined)
        if is_due:
            self._duty, self._duty_holder, self._force_due = self._committed, meeting.leader, False
            self.kept_moments = dict(current.done)

    def reduce_broke(self, drafter: int, round_id: int, attempt: int, why: str) -> None:
        """A member's collective broke off. The reduction is void and is repeated once everybody is back at the door."""
        with self._transition():
            current = self._reduction
            if current is None or current.broken or current.turn.meeting.attempt != attempt:
                return
            current.broken = True
            self._broken_turns += 1
            if self._broken_turns > MOST_BROKEN_TURNS:
                what = f"round {round_id} could not be averaged in {self._broken_turns} attempts: {why}"
                self._core.fail(str(drafter_worker(drafter)), what)

    def group_set(self, attempt: int, key: str, value: bytes) -> None:
        """A member tells the others of its reduction something: where it can be reached."""
        with self._transition():
            if self._is_open(attempt):
                self._group[key] = value

    def group_get(self, drafter: int, attempt: int, key: str) -> bytes | None:
        """Waits for what another member tells; None once the reduction is void, for then nobody will."""
        with self._lock:

            def ask() -> bytes | Signal:
                return self._group.get(key, WAIT) if self._is_open(attempt) else DONE

            answer = self._wait(drafter_worker(drafter), "the other members", ask)
            return answer if isinstance(answer, bytes) else None

    def group_has(self, attempt: int, keys: Sequence[str]) -> bool:
        """Whether all of these have been told."""
        with self._lock:
            return self._is_open(attempt) and all(key in self._group for key in keys)

    def _is_open(self, attempt: int) -> bool:
        current = self._reduction
        averaging = self._core.rounds.averaging and not self._core.failure
        return bool(current and averaging and not current.broken and current.turn.meeting.attempt == attempt)

    # ---- checkpoints

    def next_duty(self, drafter: int) -> Turn | None:
        """Called by a drafter that was given its Stop: the last checkpoint, if its leader was lost before it was
        written. Waits while another drafter is at it."""
        with self._lock:

            def ask() -> Turn | Signal:
                if self._duty is None:
                    return DONE
                if self._duty_holder is None:
                    self._duty_holder = drafter
                return self._duty if self._duty_holder == drafter else WAIT

            answer = self._wait(drafter_worker(drafter), "the last checkpoint", ask)
            return answer if isinstance(answer, Turn) else None

    def duty(self, round_id: int) -> tuple[Turn | None, dict[int, Any]]:
        """The commit whose checkpoint is still to be written, and what its members gave for it; None if it is not."""
        with self._lock:
            duty = self._duty if self._duty is not None and self._duty.meeting.round_id == round_id else None
            return duty, dict(self.kept_moments)

    def owes_checkpoint(self) -> bool:
        """Whether a commit's checkpoint is due and not on the disk."""
        with self._lock:
            return self._duty is not None

    def checkpoint_written(self, round_id: int) -> None:
        """The checkpoint of a round is on the disk."""
        with self._report():
            if self._duty is not None and self._duty.meeting.round_id == round_id:
                self._duty = self._duty_holder = None
                self.kept_moments = {}

    def await_checkpoint(self, drafter: int, round_id: int) -> None:
        """Waits until the round's checkpoint is on the disk."""
        with self._lock:

            def ask() -> Signal:
                return WAIT if self._duty is not None and self._duty.meeting.round_id == round_id else DONE

            self._wait(drafter_worker(drafter), "its checkpoint", ask)

    def is_complete(self) -> bool:
        """True once every planned row is committed or set aside."""
        with self._lock:
            return self._core.ledger.is_complete

    # ---- drafters that come and go

    def drafter_lost(self, drafter: int) -> None:
        """See `RowExchange.drafter_lost`. Its duties go over: an unwritten checkpoint to the next meeting, or, after
        the last one, to whoever is left; drafters that were to get their weights from it are lost too."""
        with self._report():
            self._core.drafter_lost(drafter)
            self._at_door.pop(drafter, None)
            if self._committed.meeting.leader == drafter and self._committed.meeting.round_id not in self._gifts:
                for joined in self._committed.joined:
                    self._core.drafter_lost(joined)
            if self._duty is not None and self._duty_holder == drafter:
                if self._duty.meeting.is_last:
                    self._duty_holder = None
                else:
                    self._duty = self._duty_holder = None
                    self._force_due = True

    def join_drafter(self, drafter: int) -> bool:
        """A new drafter is ready; it takes part from the next commit on. False if it comes too late."""
        with self._report():
            return self._core.drafter_joined(drafter)

    def await_weights(self, drafter: int) -> Any | None:
        """Waits for the commit at which a new drafter joins, and for its leader's weights; None: it came too late.

        Raises:
            ProtocolError: that leader was lost before it gave them.
        """
        with self._lock:

            def ask() -> Any:
                if self._core.is_live(drafter):
                    return self._gifts.get(self._joined_at(drafter), WAIT)
                if drafter in self._core.rounds.joining:
                    return WAIT
                if self._core.stopping or self._core.ledger.is_complete:
                    return DONE
                raise ProtocolError(f"drafter-{drafter} was reported lost before it was given weights")

            answer = self._wait(drafter_worker(drafter), "the weights of a commit", ask)
            return None if answer is DONE else answer

    def _joined_at(self, drafter: int) -> int:
        """Nobody can commit again before the newcomer has arrived, so it joined at the last commit."""
        assert drafter in self._committed.joined
        return self._committed.meeting.round_id

    def give_weights(self, round_id: int, gift: Any) -> None:
        """The leader's weights after a commit, for those who joined at it."""
        with self._transition():
            self._gifts = {round_id: gift}

    def begin_busy(self, worker: str, doing: str) -> None:
        """See `RowExchange.busy`; here its two ends are two calls."""
        with self._report():
            self._busy[worker] = (self._clock() + BUSY_LIMIT_S, doing)

    def end_busy(self, worker: str) -> None:
        """The other end."""
        with self._report():
            self._busy.pop(worker, None)

    # ---- inner parts

    def _progress(self) -> None:
        charged = self._core.admission.charged
        if len(self._slots) > len(charged) or not self._slots.keys() <= charged.keys():
            for row_id in [r for r in self._slots if r not in charged]:
                heapq.heappush(self._free_slots, self._slots.pop(row_id))
        super()._progress()
