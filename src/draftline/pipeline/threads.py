"""The thread driver: one lock and one condition variable around the pure core, and the payloads of waiting rows.

Consumes calls of target threads (lease, put) and drafter threads (get, trained, meet); hands out leases, rows with
payloads, meetings and stops. `lease`, `get`, `meet` and `wait_end` wait; what wakes them is any transition of the core
by anybody, a failure, or the deadline: no progress anywhere for `stall_timeout_s` fails the run and names who waits
for whom.
Time in a declared `busy` section (compiling) does not count, nor does time in which the whole process stood still (a
stopped process, a suspended machine): whoever is woken long behind the deadline gives everybody a new one.
`average` runs without the lock.

Not for signal handlers: a handler that interrupts a thread inside the lock would wait for itself. Let it start a
thread that calls `request_stop`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Generic, TypeVar

from draftline.errors import RunFailedError
from draftline.pipeline.core import (
    WAIT,
    CoreSettings,
    End,
    Failure,
    Lease,
    LedgerCounts,
    LedgerState,
    Meeting,
    PipelineCore,
    ProtocolError,
    RowItem,
    Signal,
    StopItem,
    SyncItem,
    Worker,
    drafter_worker,
    target_worker,
)
from draftline.pipeline.exchange_stats import ExchangeStats
from draftline.records import PlannedRow

P = TypeVar("P")
R = TypeVar("R")
BUSY_LIMIT_S = 3600.0
FROZEN_S, FROZEN_SHARE = 1.0, 0.1  # woken so much behind the deadline, in seconds and in shares of the stall timeout
OWNER = "coordinator"


class RowExchange(Generic[P]):
    """Exchange of captured rows between target threads and drafter threads.

    Args:
        plan, row_bytes, settings, state: see `PipelineCore`.
        stall_timeout_s: no progress anywhere for so long, while somebody waits, fails the run.
        on_stall: called once with the reason when that happens, before anybody is woken; it runs under the lock, so it
            must not call the exchange.
        clock: seconds that only go forward.
        core_class: another set of rules; benchmarks compare with it.

    Every method may raise RunFailedError, with origin and reason, once the run has failed; those that report a failure
    or look at the state never do.
    """

    def __init__(
        self,
        plan: Sequence[PlannedRow],
        row_bytes: Sequence[int],
        settings: CoreSettings,
        *,
        stall_timeout_s: float,
        state: LedgerState | None = None,
        on_stall: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        core_class: type[PipelineCore] = PipelineCore,
    ) -> None:
        self._core = core_class(plan, row_bytes, settings, state)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._stall_timeout_s = stall_timeout_s
        self._on_stall = on_stall
        self._clock = clock
        self._last_progress = clock()
        self._payloads: dict[int, P] = {}
        self._last_meeting: Meeting | None = None
        self._waits: dict[str, tuple[float, str]] = {}  # who -> since when, for what
        self._waited_s: dict[str, float] = {}
        self._busy: dict[str, tuple[float, str]] = {}  # who -> until when at most, with what

    # ---- targets

    def lease(self, target: int) -> Lease | None:
        """Wait for the next row to capture; None when there is none any more: call `producer_done` then."""
        with self._lock:
            ask = partial(self._core.lease, target)
            answer = self._wait(target_worker(target), "a row to capture", ask)
            return answer if isinstance(answer, Lease) else None

    def put(self, target: int, row_id: int, payload: P) -> None:
        """Hand over a captured row; never waits."""
        with self._transition():
            self._core.put(target, row_id)
            if row_id in self._core.waiting_rows:  # not when the run stops: then the row is discarded
                self._payloads[row_id] = payload

    def producer_done(self, target: int) -> None:
        """Report, once, that `lease` returned None."""
        with self._transition():
            self._core.producer_done(target)

    # ---- drafters

    def get(self, drafter: int) -> RowItem[P] | SyncItem | StopItem:
        """Wait for what comes next: a row with its payload, the call to a meeting, or the one Stop.

        A drafter may call it again with up to `prefetch_rows` rows in hand. After SyncItem it trains what is in its
        hand, then calls `meet`.
        """
        with self._lock:
            ask = partial(self._core.get, drafter)
            answer = self._wait(drafter_worker(drafter), "a row to train", ask)
            return self._deliver(answer)

    def try_get(self, drafter: int) -> RowItem[P] | SyncItem | StopItem | None:
        """`get` without waiting; None if there is nothing now."""
        with self._lock:
            self._raise_if_failed()
            answer = self._core.get(drafter)
            if answer is WAIT:
                return None
            self._progress()
            return self._deliver(answer)

    def trained(self, drafter: int, row_id: int) -> None:
        """The training step of a row has really finished (not only been launched): frees its slot."""
        with self._transition():
            self._core.trained(drafter, row_id)

    def meet(self, drafter: int, round_id: int, average: Callable[[Meeting], None]) -> Meeting:
        """Arrive at the meeting of a round, with empty hands, and wait until the round is committed.

        The last to arrive leads: its thread runs `average(meeting)` outside the lock, then the rows are committed and
        all are released. `average` must put its result beside the members' weights, not into them; each member takes
        it over when `meet` returns. If a member is lost while it runs, the leader calls it again for those left. If it
        raises, the exception leaves `meet` in the leader's thread, which then reports itself lost or the run failed.

        Returns:
            The meeting that was committed.
        """
        with self._transition():
            self._core.arrive(drafter, round_id)
        while True:
            meeting, leads = self._await_turn(drafter, round_id)
            if not leads:
                return meeting
            average(meeting)
            with self._transition():
                committed = self._core.commit(drafter, round_id, meeting.attempt)
                self._last_meeting = committed or self._last_meeting

    # ---- failures, stop, end

    def give_back(self, worker: Worker, row_id: int, *, blame: bool, reason: str = "it failed") -> None:
        """A worker that lives on gives back the row in its hands; see `PipelineCore.give_back`."""
        with self._transition():
            self._core.give_back(worker, row_id, blame=blame, reason=reason)

    def target_lost(self, target: int, *, returns: bool = False) -> None:
        """A target is gone for good, or (`returns`) until `target_joined`."""
        with self._report():
            self._core.target_lost(target, returns=returns)

    def target_joined(self, target: int) -> bool:
        """A restarted or new target; False if it comes too late and must not start."""
        with self._report():
            return self._core.target_joined(target)

    def drafter_lost(self, drafter: int) -> None:
        """A drafter is gone with its weights; its uncommitted rows go back."""
        with self._report():
            self._core.drafter_lost(drafter)

    def request_stop(self) -> bool:
        """Stop early, after a last meeting; False if there is nothing to stop."""
        with self._report():
            stopped = self._core.request_stop()
            if stopped:
                self._payloads.clear()
            return stopped

    def fail(self, origin: str, reason: str) -> bool:
        """End the run FAILED and wake everybody; False if it has ended already."""
        with self._report():
            return self._core.fail(origin, reason)

    @contextmanager
    def busy(self, worker: Worker, doing: str, *, limit_s: float = BUSY_LIMIT_S) -> Iterator[None]:
        """Declare work, such as compiling, whose time does not count as a stall; for at most `limit_s`."""
        with self._lock:
            self._busy[str(worker)] = (self._clock() + limit_s, doing)
            self._progress()
        try:
            yield
        finally:
            with self._lock:
                self._busy.pop(str(worker), None)
                self._progress()

    def wait_end(self) -> End:
        """Wait until the run has ended; never raises. After FAILED, `failure` tells why."""
        with self._lock:
            self._waits[OWNER] = (self._clock(), "the end of the run")
            while (end := self._core.end) is None:
                self._wait_once()
            self._waits.pop(OWNER, None)
            return end

    @property
    def end(self) -> End | None:
        """How the run ended; None while it goes on."""
        with self._lock:
            return self._core.end

    @property
    def failure(self) -> Failure | None:
        """What failed the run, if anything did."""
        with self._lock:
            return self._core.failure

    def snapshot(self) -> LedgerState:
        """What a checkpoint stores. A drafter sees the same committed rows from one of its meetings to the next."""
        with self._lock:
            return self._core.snapshot()

    def epochs(self) -> tuple[LedgerCounts, ...]:
        """The ledger's identity for each epoch."""
        with self._lock:
            return self._core.ledger.epochs()

    def stats(self) -> ExchangeStats:
        """Counts of this moment, and how long each worker has waited, in seconds."""
        with self._lock:
            core, now = self._core, self._clock()
            waiting = {who: now - since for who, (since, _) in self._waits.items()}
            waited = dict(self._waited_s)
            for who, seconds in waiting.items():
                waited[who] = waited.get(who, 0.0) + seconds
            return ExchangeStats(
                waiting_rows=len(core.waiting_rows),
                waiting_bytes=sum(core.row_bytes[row_id] for row_id in core.waiting_rows),
                admitted_rows=len(core.admission.charged),
                admitted_bytes=core.admission.n_bytes,
                max_rows=core.admission.max_rows,
                max_bytes=core.admission.max_bytes,
                waiting_for={who: what for who, (_, what) in self._waits.items()},
                waiting_for_s=waiting,
                waited_s=waited,
                busy={who: doing for who, (_, doing) in self._busy.items()},
                round_id=core.round_id,
                handed_rows=core.ledger.handed,
                ledger=core.ledger.identity(),
                captures=core.ledger.captures(),
            )

    # ---- inner parts; with the lock held, except `_await_turn` and the context managers

    def _await_turn(self, drafter: int, round_id: int) -> tuple[Meeting, bool]:
        """The meeting that this drafter has to average now and True, or the committed meeting and False."""
        core = self._core

        def ask() -> tuple[Meeting, bool] | Signal:
            if not core.is_live(drafter):
                raise ProtocolError(f"drafter-{drafter} waits at a meeting, but was reported lost")
            if core.round_id != round_id:
                assert self._last_meeting is not None
                return self._last_meeting, False
            return (core.begin_average(drafter, round_id), True) if core.leader == drafter else WAIT

        with self._lock:
            answer = self._wait(drafter_worker(drafter), "the meeting", ask)
            assert not isinstance(answer, Signal)
            return answer

    def _deliver(self, answer: RowItem[None] | SyncItem | StopItem | Signal) -> RowItem[P] | SyncItem | StopItem:
        if isinstance(answer, RowItem):
            payload = self._payloads.pop(answer.row_id)
            return RowItem(answer.row, answer.clock_rows, answer.round_id, payload)
        assert not isinstance(answer, Signal)
        return answer

    def _wait(self, worker: Worker, what: str, ask: Callable[[], R]) -> R:
        """Ask the core until it answers something else than WAIT."""
        self._raise_if_failed()
        answer = ask()
        if answer is WAIT:
            who, since = str(worker), self._clock()
            self._waits[who] = (since, what)
            try:
                while answer is WAIT:
                    self._wait_once()
                    self._raise_if_failed()
                    answer = ask()
            finally:
                del self._waits[who]
                self._waited_s[who] = self._waited_s.get(who, 0.0) + self._clock() - since
        self._progress()
        return answer

    def _wait_once(self) -> None:
        """Sleep until the next transition; at the deadline fail the run instead."""
        remaining_s = self._deadline() - self._clock()
        if remaining_s > 0:
            self._changed.wait(min(remaining_s, threading.TIMEOUT_MAX))
        elif -remaining_s > max(FROZEN_S, FROZEN_SHARE * self._stall_timeout_s):
            self._progress()  # the process itself stood still
        else:
            self._stalled()

    def _deadline(self) -> float:
        return max([self._last_progress + self._stall_timeout_s, *(until for until, _ in self._busy.values())])

    def _progress(self) -> None:
        """Something changed: whoever waits asks again."""
        self._last_progress = self._clock()
        if self._core.failure:
            self._payloads.clear()
        self._changed.notify_all()

    def _raise_if_failed(self) -> None:
        if self._core.failure:
            raise RunFailedError(self._core.failure.reason, origin=self._core.failure.origin)

    @contextmanager
    def _transition(self) -> Iterator[None]:
        with self._lock:
            self._raise_if_failed()
            yield
            self._progress()
            self._raise_if_failed()

    @contextmanager
    def _report(self) -> Iterator[None]:
        with self._lock:
            yield
            self._progress()

    def _stalled(self) -> None:
        """Fail the run, naming who waits for what and who gives no sign meanwhile."""
        culprits = [name for name in map(str, self._core.unfinished()) if name not in self._waits]
        waiting = ", ".join(f"{name} for {wanted}" for name, (_, wanted) in sorted(self._waits.items()))
        silent = f"no sign of {', '.join(culprits)}" if culprits else "nobody is at work"
        reason = f"no progress for {self._stall_timeout_s:g} s: {silent}; waiting: {waiting}"
        failed_now = self._core.fail(culprits[0] if culprits else "pipeline", reason)
        if failed_now and self._on_stall is not None:
            self._on_stall(reason)
        self._progress()
