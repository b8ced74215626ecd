"""The pure core: plan, ledger, admission, queue, rounds and stop as one state machine.

Consumes calls of targets (lease, put, producer_done) and drafters (get, trained, arrive, begin_average, commit) and
reports of failures; produces Lease, RowItem, SyncItem, StopItem, or WAIT. No threads, clocks, tensors or payloads, and
no call waits: whoever gets WAIT asks again. pipeline/threads.py puts a lock around it; the simulator drives it too.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence

from draftline.errors import UserError
from draftline.pipeline.core.admission import Admission, CoreSettings, check_settings
from draftline.pipeline.core.items import (
    DONE,
    WAIT,
    End,
    Failure,
    Lease,
    Meeting,
    ProtocolError,
    RowItem,
    Signal,
    StopItem,
    SyncItem,
    Worker,
    drafter_worker,
    target_worker,
)
from draftline.pipeline.core.ledger import Ledger, LedgerState, RowState
from draftline.pipeline.core.rounds import Rounds
from draftline.pipeline.core.waiting import WaitingRows
from draftline.records import PlannedRow

PLANNED, LEASED, CAPTURED, IN_HAND, TRAINED, COMMITTED, SET_ASIDE = RowState
FAILURES_TO_SET_ASIDE = 2


class PipelineCore:
    """State machine of a run. A call that the protocol does not allow raises ProtocolError: a fault of draftline.

    Args:
        plan: rows with ids 0..n-1 in plan order, over all epochs.
        row_bytes: bytes of each row between lease and the end of its step.
        settings: sizes and rules.
        state: the ledger of a checkpoint; its committed rows are not handed out again.

    Raises:
        UserError: an empty plan, a state of another plan, or bounds too small to make progress.
    """

    def __init__(
        self,
        plan: Sequence[PlannedRow],
        row_bytes: Sequence[int],
        settings: CoreSettings,
        state: LedgerState | None = None,
    ) -> None:
        if not plan:
            raise UserError("the plan has no rows", mend="check data.path and max_rows")
        if len(plan) != len(row_bytes):
            raise ProtocolError(f"{len(plan)} rows but {len(row_bytes)} sizes")
        self.settings, self.row_bytes = settings, row_bytes
        self.ledger = Ledger(plan, state)
        self._planned = [i for i, where in enumerate(self.ledger.states) if where is PLANNED]
        check_settings(settings, (row_bytes[i] for i in self._planned))
        self.admission = Admission(settings.max_rows, settings.queue_bytes)
        self.rounds = Rounds(range(settings.n_drafters), settings.rows_per_drafter, self.ledger.rounds)
        self._waiting = WaitingRows(settings.ordered)
        self._hands: dict[int, set[int]] = {d: set() for d in range(settings.n_drafters)}
        self._stopped: set[int] = set()  # drafters that took their Stop
        self._leases: dict[int, int | None] = dict.fromkeys(range(settings.n_targets))  # live targets
        self._absent: set[int] = set()  # lost targets that are being restarted
        self._told_done, self._reported = set[int](), set[int]()
        self._n_done = 0
        self.stopping = self.closed = False
        self.failure: Failure | None = None

    # ---- what others may read

    @property
    def round_id(self) -> int:
        """Of the open round."""
        return self.rounds.round_id

    @property
    def leader(self) -> int | None:
        """The drafter that has to average now, or None."""
        return self.rounds.leader

    @property
    def end(self) -> End | None:
        """How the run ended; None until every drafter that is left has taken its Stop."""
        if self.failure:
            return End.FAILED
        if self.closed and self._stopped >= self.rounds.live:
            return self.good_end
        return None

    @property
    def good_end(self) -> End:
        """How the run ends if nothing fails: STOPPED if that was asked for, else CLOSED."""
        return End.STOPPED if self.stopping else End.CLOSED

    @property
    def _is_over(self) -> bool:
        """No further row will be leased or handed out."""
        return self.stopping or self.ledger.is_complete

    def is_live(self, drafter: int) -> bool:
        """True if the drafter takes part."""
        return drafter in self.rounds.live

    @property
    def waiting_rows(self) -> Collection[int]:
        """Captured rows in no drafter's hands, in order of arrival."""
        return self._waiting.rows.keys()

    def unfinished(self) -> list[Worker]:
        """Live workers that have not finished; those that hold a row first, targets before drafters."""
        targets = [(self._leases[t] is None, target_worker(t)) for t in sorted(self._leases.keys() - self._reported)]
        drafters = [(not self._hands[d], drafter_worker(d)) for d in sorted(self.rounds.live - self._stopped)]
        return [worker for _, worker in sorted(targets + drafters, key=lambda item: item[0])]

    def snapshot(self) -> LedgerState:
        """What a checkpoint stores of the ledger."""
        return self.ledger.snapshot()

    # ---- targets

    def lease(self, target: int) -> Lease | Signal:
        """The next row for a target; WAIT while no slot is free or rows may still come back; DONE at the end.

        DONE means that every planned row is committed or set aside, or that the run stops or failed: the target then
        calls `producer_done` once.
        """
        if self._lease_of(target) is not None and not self.failure:
            raise ProtocolError(f"target-{target} holds row {self._leases[target]} already")
        if self.failure or self._is_over:
            self._told_done.add(target)
            return DONE
        if not self._planned or not self.admission.fits(self.row_bytes[self._planned[0]]):
            return WAIT
        row_id = heapq.heappop(self._planned)
        n_bytes = self.row_bytes[row_id]
        self.ledger.move(row_id, PLANNED, LEASED, to=target)
        self.admission.charge(row_id, n_bytes)
        self._leases[target] = row_id
        return Lease(self.ledger.plan[row_id], n_bytes)

    def put(self, target: int, row_id: int) -> None:
        """A captured row enters the queue; its slot was charged at the lease, so this never waits."""
        if self.failure:
            return
        if self._lease_of(target) != row_id:
            raise ProtocolError(f"target-{target} holds row {self._leases[target]}, not row {row_id}")
        self._leases[target] = None
        self.ledger.move(row_id, LEASED, CAPTURED, holder=target)
        self.ledger.produced += 1
        if self.stopping:
            self._discard(row_id)
        else:
            self._waiting.add(row_id)

    def producer_done(self, target: int) -> None:
        """A target that was told DONE reports it, once; the last one closes the queue."""
        self._lease_of(target)
        if target not in self._told_done or target in self._reported:
            raise ProtocolError(f"target-{target} reports done a second time, or before it was told so")
        self._reported.add(target)
        self._n_done += 1
        self._settle()

    # ---- drafters

    def get(self, drafter: int) -> RowItem[None] | SyncItem | StopItem | Signal:
        """What a drafter does next: a row, the meeting of a round, its one Stop, or WAIT."""
        hand = self._hand_of(drafter)
        rounds, ledger = self.rounds, self.ledger
        if drafter in self._stopped:
            raise ProtocolError(f"drafter-{drafter} has taken its Stop")
        if self.failure:
            self._stopped.add(drafter)
            return StopItem(End.FAILED)
        if drafter in rounds.called or len(hand) > self.settings.prefetch_rows:
            raise ProtocolError(f"drafter-{drafter} has its hands full, or was called to a meeting")
        handed = ledger.handed
        if rounds.closing or (handed and (self.stopping or handed >= rounds.limit)):
            return SyncItem(rounds.call(drafter))
        if (row_id := self._waiting.take(ledger.states)) is not None:
            ledger.move(row_id, CAPTURED, IN_HAND, to=drafter)
            hand.add(row_id)
            clock_rows = ledger.counts[COMMITTED] + handed
            return RowItem(ledger.plan[row_id], clock_rows, rounds.round_id, None)
        if (handed and self._nothing_left()) or (self._is_over and not rounds.sealed):
            return SyncItem(rounds.call(drafter))
        if self.closed and not handed:
            self._stopped.add(drafter)
            return StopItem(self.good_end)
        return WAIT

    def trained(self, drafter: int, row_id: int) -> None:
        """The training step of a row has really finished: its slot is free."""
        if self.failure:
            return
        self.ledger.move(row_id, IN_HAND, TRAINED, holder=drafter, to=drafter)
        self._hand_of(drafter).remove(row_id)
        self.rounds.trained[drafter].append(row_id)
        self.admission.release(row_id)

    def arrive(self, drafter: int, round_id: int) -> None:
        """A drafter with empty hands is at the meeting. The last to arrive leads it (see `leader`)."""
        if self.failure:
            return
        if self._hand_of(drafter):
            raise ProtocolError(f"drafter-{drafter} arrives with rows {sorted(self._hands[drafter])} in hand")
        self.rounds.arrive(drafter, round_id)

    def begin_average(self, drafter: int, round_id: int) -> Meeting:
        """The leader learns who meets. It averages out of place: members' weights change only after `commit`."""
        self.rounds.begin(drafter, round_id)
        meeting = self._meeting(drafter)
        self.rounds.announced_last = meeting.is_last
        return meeting

    def commit(self, drafter: int, round_id: int, attempt: int) -> Meeting | None:
        """The leader has averaged: commit the round's rows and release everybody.

        Returns:
            The meeting that counts (`is_last` may have become true); None if somebody was lost meanwhile, and the
            leader has to call `begin_average` again, or if the run failed.
        """
        if self.failure or not self.rounds.finish(drafter, round_id, attempt):
            return None
        meeting = self._meeting(drafter)
        for member, rows in meeting.rows.items():
            for row in rows:
                self.ledger.move(row.row_id, TRAINED, COMMITTED, holder=member)
        self.rounds.close(admits=not self._is_over)
        self._hands = {d: set() for d in self.rounds.live}  # at a commit nobody has any row in hand
        self.ledger.rounds = self.rounds.round_id
        self._settle()
        return meeting

    # ---- failures, stop

    def give_back(self, worker: Worker, row_id: int, *, blame: bool, reason: str = "it failed") -> None:
        """A worker that lives on gives a row back. A row blamed twice is set aside with its samples."""
        if self.failure:
            return
        before, holder = self._drop(worker, row_id)
        if blame:
            self.ledger.failures[row_id] = self.ledger.failures.get(row_id, 0) + 1
        if self.ledger.failures.get(row_id, 0) >= FAILURES_TO_SET_ASIDE:
            self._set_aside(worker, row_id, before, holder, reason)
        else:
            self._return(row_id, before, holder)
        self._settle()

    def target_lost(self, target: int, *, returns: bool = False) -> None:
        """A target is gone; the row it leased goes back, what it put stays. `returns`: it is being restarted."""
        if self.failure:
            return
        if target in self._absent:
            self._absent.discard(target)
        else:
            row_id = self._lease_of(target)
            del self._leases[target]
            if row_id is not None:
                self._return(row_id, LEASED, target)
            self._n_done -= target in self._reported
            self._told_done.discard(target)
            self._reported.discard(target)
        if returns:
            self._absent.add(target)
        self._settle()

    def target_joined(self, target: int) -> bool:
        """A new or restarted target. False if it comes too late: the queue is closed or the run failed."""
        if target in self._leases:
            raise ProtocolError(f"target-{target} is here already")
        self._absent.discard(target)
        if self.closed or self.failure:
            return False
        self._leases[target] = None
        return True

    def drafter_lost(self, drafter: int) -> None:
        """A drafter is gone with its weights: rows in its hand and those it trained in this round are captured again.

        The round goes on among those left; an averaging under way is repeated by them. A second report changes nothing.
        """
        was_lost = drafter not in self.rounds.live and drafter in self.rounds.known
        self.rounds.joining.discard(drafter)
        if self.failure or drafter in self._stopped or was_lost:
            return
        hand = self._hand_of(drafter)
        del self._hands[drafter]
        for row_id in self.rounds.leave(drafter):
            self._return(row_id, TRAINED, drafter)
        for row_id in hand:
            self._return(row_id, IN_HAND, drafter)
        if not self.rounds.live:  # not through `fail`: a closed queue whose last drafter dies has no weights either
            self.failure = Failure(str(drafter_worker(drafter)), "all drafters are lost")
        self._settle()

    def drafter_joined(self, drafter: int) -> bool:
        """A drafter of a new number replaces a lost one from the next commit on (see `is_live`). False: too late."""
        if self.failure or self._is_over:
            return False
        self.rounds.join(drafter)
        return True

    def request_stop(self) -> bool:
        """Stop early: rows in hand finish and are committed, waiting rows are discarded, then everybody gets Stop.

        Returns False if there is nothing to stop: all rows are committed or set aside, or the run has ended.
        """
        if self.failure or self.stopping or self.closed or self.ledger.is_complete:
            return False
        self.stopping = True
        for row_id in self._waiting.take_all():
            self._discard(row_id)
        self._settle()
        return True

    def fail(self, origin: str, reason: str) -> bool:
        """End the run FAILED. The first failure counts; False if the run has ended already."""
        if self.end is not None:
            return False
        self.failure = Failure(origin, reason)
        return True

    # ---- inner parts

    def _lease_of(self, target: int) -> int | None:
        if target not in self._leases:
            raise ProtocolError(f"target-{target} is not among the live targets")
        return self._leases[target]

    def _hand_of(self, drafter: int) -> set[int]:
        if drafter not in self.rounds.live:
            raise ProtocolError(f"drafter-{drafter} is not among the live drafters")
        return self._hands[drafter]

    def _nothing_left(self) -> bool:
        """True when no row can be leased or got until the round that is open is committed."""
        counts = self.ledger.counts
        return not (counts[PLANNED] or counts[LEASED] or counts[CAPTURED])

    def _meeting(self, leader: int) -> Meeting:
        return self.rounds.meeting(leader, self.ledger, stopping=self.stopping)

    def _drop(self, worker: Worker, row_id: int) -> tuple[RowState, int]:
        """Take a row out of a worker's hands; returns its state and holder."""
        is_target = worker.role == "target"
        if row_id not in ({self._lease_of(worker.index)} if is_target else self._hand_of(worker.index)):
            raise ProtocolError(f"{worker} does not hold row {row_id}")
        if is_target:
            self._leases[worker.index] = None
            return LEASED, worker.index
        self._hands[worker.index].remove(row_id)
        return IN_HAND, worker.index

    def _return(self, row_id: int, before: RowState, holder: int) -> None:
        """A row goes back to planned and will be captured again."""
        self.ledger.move(row_id, before, PLANNED, holder=holder)
        heapq.heappush(self._planned, row_id)
        self.ledger.returned += before is not LEASED
        if before is not TRAINED:
            self.admission.release(row_id)

    def _discard(self, row_id: int) -> None:
        """A captured row that nobody will train, because the run stops."""
        self.ledger.move(row_id, CAPTURED, PLANNED)
        self.admission.release(row_id)
        self.ledger.discarded += 1

    def _set_aside(self, worker: Worker, row_id: int, before: RowState, holder: int, reason: str) -> None:
        self.ledger.move(row_id, before, SET_ASIDE, holder=holder)
        self.ledger.failures.pop(row_id, None)
        self.ledger.set_aside_captured += before is IN_HAND
        self.admission.release(row_id)
        n_samples, allowed = self.ledger.set_aside_samples(), self.settings.max_set_aside
        if n_samples > allowed:
            samples = ", ".join(map(str, self.ledger.plan[row_id].samples))
            what = f"row {row_id} (samples {samples}) failed {FAILURES_TO_SET_ASIDE} times: {reason}"
            self.fail(str(worker), f"{what}; {n_samples} samples are set aside, max_set_aside is {allowed}")

    def _settle(self) -> None:
        """Close the queue after the last `producer_done`, and fail when rows are left that no target can capture."""
        if self.failure or self.closed:
            return
        if self._is_over and self._n_done == len(self._leases):
            self.closed = True
            self.rounds.joining.clear()  # there may be no further commit that would tell them that they are late
        elif not self._is_over and self.ledger.counts[PLANNED] and not self._leases and not self._absent:
            self.fail("pipeline", f"all targets are lost with {self.ledger.counts[PLANNED]} rows left to capture")
