"""A run on a cluster without Ray: the real queue actor in this process, workers as threads, links as plain calls."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from draftline.cluster.group import CollectiveBrokenError
from draftline.cluster.link import GoneError
from draftline.cluster.messages import Call, QueueSetup
from draftline.cluster.queue import QueueActor
from draftline.cluster.refs import DOCUMENTS, IDS, MASK, POSITIONS, TAPS, Layout, ObjectPlace, RowContract, RowRef
from draftline.cluster.remote import DrafterExchange, TargetExchange
from draftline.cluster.transport import RowLostError
from draftline.errors import RunFailedError
from draftline.pipeline.core import CoreSettings, End, Meeting, RowItem, SyncItem, drafter_worker, target_worker
from draftline.records import PlannedRow

TOKENS, HIDDEN, TAP_IDS, RUN_ID = 8, 4, (0, 2), "run"
ROW_BYTES = TOKENS * (len(TAP_IDS) * HIDDEN * 4 + 21)
CONTRACT = RowContract(RUN_ID, TAP_IDS, HIDDEN, with_final=False)


def planned(row_id: int) -> PlannedRow:
    return PlannedRow(row_id, 0, (row_id,), TOKENS, 4)


def row_layout() -> Layout:
    n = (TOKENS,)
    taps = (TAPS, "float32", (TOKENS, len(TAP_IDS) * HIDDEN))
    rest = [(IDS, "int64", n), (MASK, "bool", n), (DOCUMENTS, "int32", n), (POSITIONS, "int64", n)]
    return Layout.of([taps, *rest])


def row_ref(row_id: int, place: Any = None, **changes: Any) -> RowRef:
    facts: dict[str, Any] = {
        "version": 1,
        "run_id": RUN_ID,
        "row_id": row_id,
        "epoch": 0,
        "sample_ids": (f"s{row_id}",),
        "lengths": (TOKENS,),
        "final_hidden_norm": "post",
        "tap_layer_ids": TAP_IDS,
        "layout": row_layout(),
        "place": place or ObjectPlace(row_id),
    }
    return RowRef(**{**facts, **changes})


def make_queue(n_rows: int, settings: CoreSettings, **changes: Any) -> QueueActor:
    setup: dict[str, Any] = {
        "plan": [planned(i) for i in range(n_rows)],
        "row_bytes": [ROW_BYTES] * n_rows,
        "settings": settings,
        "contract": CONTRACT,
        "stall_timeout_s": 30.0,
        "state": None,
        "spare_slots": 4,
        "checkpoint_every": 1,
        "allowed_failures": 4,
    }
    return QueueActor(QueueSetup(**{**setup, **changes}))


class PlainLink:
    """What `QueueLink` does, without a network in between."""

    def __init__(self, queue: QueueActor, worker: str) -> None:
        self.queue, self.worker, self.number = queue, worker, 0

    def call(self, *steps: Any) -> Any:
        self.number += 1
        reply = self.queue.ask(Call(self.worker, self.number, steps))
        if reply.kind == "failed":
            raise RunFailedError(reply.value[1], origin=reply.value[0])
        if reply.kind == "gone":
            raise GoneError(reply.value)
        return reply.value


class FakeSender:
    """Keeps the slot that each row came with, and may send something else than was planned."""

    def __init__(self, change: Callable[[RowRef], RowRef] = lambda ref: ref) -> None:
        self.change = change
        self.slots: list[int] = []

    def send(self, row: Any, slot: int) -> RowRef:
        self.slots.append(slot)
        return self.change(row_ref(row, ObjectPlace((row, slot))))

    def close(self) -> None:
        """Nothing to close."""


class FakeReceiver:
    """Gives the row id; rows named in `lost` are lost once."""

    def __init__(self, lost: set[int]) -> None:
        self.lost = lost

    def receive(self, ref: RowRef) -> int:
        if ref.row_id in self.lost:
            self.lost.discard(ref.row_id)
            raise RowLostError("its owner died")
        return ref.row_id


class FakeCluster:
    """Threads as workers; drafters' weights are the sets of rows in them.

    Args:
        on_reduce: called as (drafter, meeting) by each member inside a reduction; may raise.
        on_row: called as (drafter, row id) before a row counts as trained; may raise Dies.
    """

    def __init__(
        self,
        n_rows: int,
        settings: CoreSettings,
        *,
        on_reduce: Callable[[int, Meeting], None] = lambda drafter, meeting: None,
        on_row: Callable[[int, int], None] = lambda drafter, row_id: None,
        on_capture: Callable[[int, int], None] = lambda target, row_id: None,
        **setup: Any,
    ) -> None:
        self.n_rows, self.settings = n_rows, settings
        self.on_reduce, self.on_row, self.on_capture = on_reduce, on_row, on_capture
        self.queue = make_queue(n_rows, settings, **setup)
        self.weights: dict[int, list[int]] = {}
        self.reduced: dict[int, list[int]] = {}
        self.lost_rows: set[int] = set()
        self.senders: dict[int, FakeSender] = {}
        self.threads: list[threading.Thread] = []
        self.meetings: list[Meeting] = []
        self.lock = threading.Lock()

    def start(self) -> None:
        for target in range(self.settings.n_targets):
            self.spawn(self.target, target)
        for drafter in range(self.settings.n_drafters):
            self.weights[drafter] = []
            self.spawn(self.drafter, drafter)

    def spawn(self, program: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=self.guarded, args=(program, *arguments), daemon=True)
        self.threads.append(thread)
        thread.start()

    def finish(self) -> End:
        end, _ = self.queue.wait_end()
        for thread in list(self.threads):
            thread.join(30)
        assert not [thread for thread in self.threads if thread.is_alive()]
        return end

    def run(self) -> End:
        self.start()
        return self.finish()

    def guarded(self, program: Callable[..., None], number: int, *arguments: Any) -> None:
        try:
            program(number, *arguments)
        except DiesError:
            is_target = program == self.target
            self.queue.lost(target_worker(number) if is_target else drafter_worker(number))
        except (GoneError, RunFailedError):
            return

    def target(self, number: int) -> None:
        sender = self.senders.setdefault(number, FakeSender())
        exchange = TargetExchange(PlainLink(self.queue, f"target-{number}"), sender)  # type: ignore[arg-type]
        while (lease := exchange.lease(number)) is not None:
            self.on_capture(number, lease.row_id)
            exchange.put(number, lease.row_id, lease.row_id)  # type: ignore[arg-type]
        exchange.producer_done(number)

    def drafter(self, number: int, joins: bool = False) -> None:
        link = PlainLink(self.queue, f"drafter-{number}")
        if joins:
            gift = link.call(("await_weights", (number,)))
            if gift is None:
                return
            self.weights[number] = list(gift)
        receiver = FakeReceiver(self.lost_rows)
        exchange = DrafterExchange(link, receiver, lambda: self.after_stop(number, exchange))  # type: ignore[arg-type]
        while True:
            item = exchange.get(number)
            if isinstance(item, RowItem):
                self.on_row(number, item.row_id)
                self.weights[number].append(item.row_id)
                exchange.trained(number, item.row_id)
            elif isinstance(item, SyncItem):
                exchange.meet(number, item.round_id, lambda meeting: self.reduce(number, meeting))
                self.take_over(number, exchange)
            else:
                return

    def reduce(self, drafter: int, meeting: Meeting) -> None:
        self.on_reduce(drafter, meeting)
        trained = {d: list(rows) for d, rows in self.queue._exchange._core.rounds.trained.items()}
        base = [row for row in self.weights[drafter] if row not in trained[drafter]]
        self.reduced[drafter] = sorted([*base, *(row for d in meeting.members for row in trained.get(d, []))])

    def take_over(self, drafter: int, exchange: DrafterExchange) -> None:
        turn = exchange.turn
        assert turn is not None and turn.committed
        self.weights[drafter] = list(self.reduced[drafter])
        if turn.meeting.leader != drafter:
            return
        with self.lock:
            self.meetings.append(turn.meeting)
        if turn.joined:
            exchange.call("give_weights", turn.meeting.round_id, list(self.weights[drafter]))
        if turn.is_due:
            self.write(drafter, exchange, turn.meeting.round_id)

    def write(self, drafter: int, exchange: DrafterExchange, round_id: int) -> None:
        exchange.call("order_checkpoint", round_id, list(self.weights[drafter]), None, None)
        self.queue.checkpoint_written(round_id)
        exchange.call("await_checkpoint", drafter, round_id)

    def after_stop(self, drafter: int, exchange: DrafterExchange) -> None:
        turn = exchange.call("next_duty", drafter)
        if turn is not None:
            self.write(drafter, exchange, turn.meeting.round_id)

    def check_all_committed(self) -> None:
        """Every planned row is in the weights of every drafter that is left, exactly once."""
        counts = self.queue.stats().ledger
        assert (counts.planned, counts.committed) == (self.n_rows, self.n_rows)
        assert self.queue.stats().admitted_rows == 0
        live = self.queue._exchange._core.rounds.live
        assert live and all(sorted(self.weights[d]) == list(range(self.n_rows)) for d in live)


class DiesError(Exception):
    """The worker is gone from here on."""


def breaks(*_: Any) -> None:
    raise CollectiveBrokenError("the link broke")
