"""The queue actor: the one state machine of a run, for workers on all hosts. Metadata only; imports no torch.

consumes     calls of targets and drafters (see link.py), reports of the driver about who is lost or new
produces     leases, rows by reference, turns of meetings, one Stop a drafter; events for the driver
waits for    in `wait`, one thread a waiting worker: woken by any transition, a failure, or the deadline
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from draftline.cluster.exchange import ClusterExchange
from draftline.cluster.messages import Call, CheckpointOrder, QueueSetup, Reply
from draftline.cluster.refs import Packed, RowRef
from draftline.errors import RunFailedError
from draftline.pipeline.core import End, Failure, LedgerState, ProtocolError, Worker, target_worker
from draftline.pipeline.exchange_stats import ExchangeStats

EVENTS_WAIT_S = 30.0


class Once:
    """Each worker's last call and its reply, so that a call that comes again is not done again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: dict[str, tuple[int, threading.Event, list[Reply]]] = {}

    def reply(self, call: Call, act: Callable[[], Reply]) -> Reply:
        """The reply of this call: from `act`, or from the first time that it came."""
        with self._lock:
            number, done, kept = self._last.get(call.worker, (-1, threading.Event(), []))
            is_new = call.number > number
            if is_new:
                done, kept = threading.Event(), []
                self._last[call.worker] = (call.number, done, kept)
            elif call.number < number:
                return Reply("gone", f"{call.worker}: call {call.number} comes after call {number}")
        if not is_new:
            done.wait()
            return kept[0]
        try:
            kept.append(act())
        except BaseException as error:
            kept.append(Reply("gone", f"{type(error).__name__}: {error}"))
            raise
        finally:
            done.set()
        return kept[0]


class Mailbox:
    """Events for the driver, in order."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._events: list[Any] = []

    def add(self, event: Any) -> None:
        """One more."""
        with self._changed:
            self._events.append(event)
            self._changed.notify_all()

    def take(self, wait_s: float) -> list[Any]:
        """All there are; waits until there is one, or for so long."""
        with self._changed:
            if not self._events:
                self._changed.wait(wait_s)
            events, self._events = self._events, []
            return events


class QueueActor:
    """See the module's text. Made by the driver, one for a run.

    Args:
        setup: of the exchange.
    """

    def __init__(self, setup: QueueSetup) -> None:
        self._exchange = exchange = ClusterExchange(
            setup.plan,
            setup.row_bytes,
            setup.settings,
            contract=setup.contract,
            stall_timeout_s=setup.stall_timeout_s,
            state=setup.state,
            spare_slots=setup.spare_slots,
            checkpoint_every=setup.checkpoint_every,
        )
        self._once, self._mailbox = Once(), Mailbox()
        self._lock, self._failures, self._allowed_failures = threading.Lock(), 0, setup.allowed_failures
        self._steps: dict[str, Callable[..., Any]] = {
            "lease_slot": exchange.lease_slot,
            "put": self._put,
            "producer_done": exchange.producer_done,
            "give_back": self._give_back,
            "spend": self._spend,
            "get": exchange.get,
            "trained": exchange.trained,
            "arrive": exchange.arrive,
            "await_turn": exchange.await_turn,
            "reduced": exchange.reduced,
            "reduce_broke": exchange.reduce_broke,
            "group_set": exchange.group_set,
            "group_get": exchange.group_get,
            "group_has": exchange.group_has,
            "order_checkpoint": self._order_checkpoint,
            "await_checkpoint": exchange.await_checkpoint,
            "next_duty": exchange.next_duty,
            "await_weights": exchange.await_weights,
            "give_weights": exchange.give_weights,
            "begin_busy": exchange.begin_busy,
            "end_busy": exchange.end_busy,
            "tell": self._mailbox.add,
            "is_complete": exchange.is_complete,
        }

    # ---- workers

    def ask(self, call: Call) -> Reply:
        """Steps that do not wait."""
        return self._once.reply(call, lambda: self._act(call))

    def wait(self, call: Call) -> Reply:
        """Steps of which the last one may wait; runs in a pool of its own, with a thread for every worker."""
        return self._once.reply(call, lambda: self._act(call))

    def tell(self, event: Any) -> None:
        """An event for the driver; nobody waits for an answer."""
        self._mailbox.add(event)

    def _act(self, call: Call) -> Reply:
        value = None
        try:
            for name, arguments in call.steps:
                value = self._steps[name](*arguments)
        except RunFailedError as error:
            return Reply("failed", (error.origin, error.reason))
        except ProtocolError as error:
            return Reply("gone", str(error))
        return Reply("ok", value)

    def _put(self, target: int, row_id: int, ref: RowRef) -> None:
        """A row that is not what was planned is stopped here and counted as a failed capture."""
        try:
            self._exchange.put(target, row_id, ref)
        except RunFailedError as error:
            if error.origin != "queue door":
                raise
            self._spend(str(target_worker(target)), str(error))
            self._exchange.give_back(target_worker(target), row_id, blame=True, reason=str(error))

    def _give_back(self, worker: Worker, row_id: int, blame: bool, reason: str) -> None:
        self._exchange.give_back(worker, row_id, blame=blame, reason=reason)

    def _spend(self, worker: str, line: str) -> None:
        """Counts one failed capture of the whole run. Past what is allowed the run fails by name."""
        with self._lock:
            self._failures += 1
            spent = self._failures
        if spent > self._allowed_failures:
            reason = f"{line} (failure {spent}, {self._allowed_failures} allowed)"
            self._exchange.fail(worker, reason)
            raise RunFailedError(reason, origin=worker)

    def _order_checkpoint(self, round_id: int, weights: Packed, moments: Packed | None, sync: Packed | None) -> None:
        turn, kept = self._exchange.duty(round_id)
        if turn is not None:
            ledger = self._exchange.snapshot().to_json()
            self._mailbox.add(CheckpointOrder(turn, ledger, weights, moments, sync, kept))

    # ---- the driver

    def next_events(self) -> list[Any]:
        """Waits until there are events, or for half a minute."""
        return self._mailbox.take(EVENTS_WAIT_S)

    def take_events(self) -> list[Any]:
        """Events that are there now."""
        return self._mailbox.take(0.0)

    def checkpoint_written(self, round_id: int) -> None:
        """See `ClusterExchange.checkpoint_written`."""
        self._exchange.checkpoint_written(round_id)

    def owes_checkpoint(self) -> bool:
        """See `ClusterExchange.owes_checkpoint`."""
        return self._exchange.owes_checkpoint()

    def lost(self, worker: Worker, returns: bool = False) -> None:
        """A worker is gone; `returns`: another target is being started in its place."""
        if worker.role == "target":
            self._exchange.target_lost(worker.index, returns=returns)
        else:
            self._exchange.drafter_lost(worker.index)

    def joined(self, worker: Worker) -> bool:
        """A new worker is ready. False if it comes too late."""
        if worker.role == "target":
            return self._exchange.target_joined(worker.index)
        return self._exchange.join_drafter(worker.index)

    def leave(self, target: int) -> None:
        """See `ClusterExchange.leave`."""
        self._exchange.leave(target)

    def await_idle(self, target: int) -> bool:
        """See `ClusterExchange.await_idle`. False if the run failed meanwhile."""
        try:
            self._exchange.await_idle(target)
        except RunFailedError:
            return False
        return True

    def request_stop(self) -> bool:
        """See `RowExchange.request_stop`."""
        return self._exchange.request_stop()

    def fail(self, origin: str, reason: str) -> bool:
        """See `RowExchange.fail`."""
        return self._exchange.fail(origin, reason)

    def wait_end(self) -> tuple[End, Failure | None]:
        """How the run ended, and why if it failed."""
        end = self._exchange.wait_end()
        return end, self._exchange.failure

    def stats(self) -> ExchangeStats:
        """See `RowExchange.stats`."""
        return self._exchange.stats()

    def snapshot(self) -> LedgerState:
        """See `RowExchange.snapshot`."""
        return self._exchange.snapshot()
