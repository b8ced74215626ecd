"""The exchange as a worker on another host sees it: what TargetForwardLoop and DrafterTrainLoop call.

Put goes with the next lease and trained with the next get, so a row costs one call on either side. Bytes never pass
here: a target's sender writes them, a drafter's receiver maps them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from draftline.cluster.group import CollectiveBrokenError
from draftline.cluster.link import QueueLink
from draftline.cluster.messages import Step
from draftline.cluster.refs import Packed, RowRef
from draftline.cluster.transport import RowLostError, RowReceiver, RowSender
from draftline.cluster.turns import SlotLease, Turn
from draftline.pipeline.core import Lease, Meeting, RowItem, StopItem, SyncItem, Worker, drafter_worker
from draftline.records import HiddenStateRow


class TargetExchange:
    """A target's side; see `RowExchange` for the methods.

    Args:
        link: to the queue.
        sender: of this target's rows.
    """

    def __init__(self, link: QueueLink, sender: RowSender) -> None:
        self._link, self._sender = link, sender
        self._pending: list[Step] = []
        self._slot = 0
        self.was_asked_to_leave = False

    def lease(self, target: int) -> Lease | None:
        """The next row to capture; None at the end, or if this target was asked to leave."""
        answer: SlotLease | bool | None = self._call(("lease_slot", (target,)))
        if answer is False:
            self.was_asked_to_leave = True
        if not isinstance(answer, SlotLease):
            return None
        self._slot = answer.slot
        return answer.lease

    def put(self, target: int, row_id: int, row: HiddenStateRow) -> None:
        """Sends the row's bytes; the queue learns of it with this target's next call, which follows at once."""
        ref = self._sender.send(row, self._slot)
        self._pending.append(("put", (target, row_id, ref)))

    def give_back(self, worker: Worker, row_id: int, *, blame: bool, reason: str = "it failed") -> None:
        """See `RowExchange.give_back`."""
        self._call(("give_back", (worker, row_id, blame, reason)))

    def producer_done(self, target: int) -> None:
        """See `RowExchange.producer_done`; a target that was asked to leave has nothing to report."""
        if not self.was_asked_to_leave:
            self._call(("producer_done", (target,)))

    def _call(self, step: Step) -> Any:
        steps, self._pending = [*self._pending, step], []
        return self._link.call(*steps)


class DrafterExchange:
    """A drafter's side; see `RowExchange` for the methods.

    Args:
        link: to the queue.
        receiver: of rows.
        on_stop: called once when this drafter has been given its Stop, before it ends.
    """

    def __init__(self, link: QueueLink, receiver: RowReceiver, on_stop: Callable[[], None]) -> None:
        self._link, self._receiver, self._on_stop = link, receiver, on_stop
        self._pending: list[Step] = []
        self.turn: Turn | None = None
        self.kept: Packed | None = None  # what the seat gives to the checkpoint of the open reduction

    def get(self, drafter: int) -> RowItem[HiddenStateRow] | SyncItem | StopItem:
        """See `RowExchange.get`. A row whose buffers are lost goes back, to be captured again, and another is asked
        for."""
        while True:
            item = self._call(("get", (drafter,)))
            if isinstance(item, StopItem):
                self._on_stop()
                return item
            if isinstance(item, SyncItem):
                return item
            row = self._received(drafter, item)
            if row is not None:
                return RowItem(item.row, item.clock_rows, item.round_id, row)

    def _received(self, drafter: int, item: RowItem[RowRef]) -> HiddenStateRow | None:
        try:
            return self._receiver.receive(item.payload)
        except RowLostError as error:
            self._pending.append(("give_back", (drafter_worker(drafter), item.row_id, False, str(error))))
            return None

    def trained(self, drafter: int, row_id: int) -> None:
        """The queue learns of it with this drafter's next call, which follows at once."""
        self._pending.append(("trained", (drafter, row_id)))

    def give_back(self, worker: Worker, row_id: int, *, blame: bool, reason: str = "it failed") -> None:
        """See `RowExchange.give_back`."""
        self._call(("give_back", (worker, row_id, blame, reason)))

    def meet(self, drafter: int, round_id: int, average: Callable[[Meeting], None]) -> Meeting:
        """Arrives, and takes part in reductions until one is committed.

        Args:
            average: reduces together with the other members, beside the weights; raises CollectiveBrokenError if
                it broke off, and is called again then, with those who are left.
        """
        self._call(("arrive", (drafter, round_id)))
        attempt = 0
        while True:
            turn: Turn = self._call(("await_turn", (drafter, round_id, attempt)))
            self.turn = turn
            if turn.committed:
                return turn.meeting
            attempt, self.kept = turn.meeting.attempt, None
            try:
                average(turn.meeting)
            except CollectiveBrokenError as error:
                self._call(("reduce_broke", (drafter, round_id, attempt, str(error))))
            else:
                self._call(("reduced", (drafter, round_id, attempt, self.kept)))

    @contextmanager
    def busy(self, worker: Worker, doing: str) -> Iterator[None]:
        """See `RowExchange.busy`."""
        self._call(("begin_busy", (str(worker), doing)))
        try:
            yield
        finally:
            self._call(("end_busy", (str(worker),)))

    def call(self, name: str, *arguments: Any) -> Any:
        """Any other step of the queue."""
        return self._call((name, arguments))

    def _call(self, step: Step) -> Any:
        steps, self._pending = [*self._pending, step], []
        return self._link.call(*steps)
