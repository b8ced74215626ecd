"""Fake workers on real threads: targets that put, drafters whose weights are the rows that went into them."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable

from draftline.errors import RunFailedError
from draftline.pipeline.core import CoreSettings, End, Meeting, ProtocolError, RowItem, StopItem, SyncItem
from draftline.pipeline.threads import RowExchange
from draftline.records import PlannedRow

ROW_BYTES = 10
JOIN_TIMEOUT_S = 60.0


class Payload:
    """What a fake target captures."""

    def __init__(self, row_id: int) -> None:
        self.row_id = row_id


def make_plan(n: int) -> list[PlannedRow]:
    return [PlannedRow(i, 0, (i,), 8, 4) for i in range(n)]


class FakeRun:
    """A run of fake workers. Hooks may raise, wait or sleep.

    Args:
        on_capture: called as (target, row_id) between lease and put.
        on_step: called as (drafter, row_id) between get and trained.
        on_average: called as (meeting) by the leader before it averages.
        lost: what a worker's exception means; the default reports the worker lost.
    """

    def __init__(
        self,
        n_rows: int,
        sizes: CoreSettings,
        *,
        on_capture: Callable[[int, int], None] = lambda target, row_id: None,
        on_step: Callable[[int, int], None] = lambda drafter, row_id: None,
        on_average: Callable[[Meeting], None] = lambda meeting: None,
        stall_timeout_s: float = 60.0,
        state=None,
    ) -> None:
        self.sizes, self.n_rows = sizes, n_rows
        self.on_capture, self.on_step, self.on_average = on_capture, on_step, on_average
        self.exchange: RowExchange[Payload] = RowExchange(
            make_plan(n_rows), [ROW_BYTES] * n_rows, sizes, stall_timeout_s=stall_timeout_s, state=state
        )
        self.weights: list[Counter[int]] = [Counter() for _ in range(sizes.n_drafters)]
        self.averages: dict[int, Counter[int]] = {}
        self.trained = [0] * sizes.n_drafters
        self.ends: list[End | None] = [None] * sizes.n_drafters
        self.meetings: list[Meeting] = []
        self.errors: dict[str, Exception] = {}
        self.threads: list[threading.Thread] = []

    def run(self) -> End:
        """Start all, wait for the end, and make sure that every thread ends by itself."""
        self.start()
        end = self.exchange.wait_end()
        self.join()
        return end

    def start(self) -> None:
        for role, n in ((self.target, self.sizes.n_targets), (self.drafter, self.sizes.n_drafters)):
            self.threads += [threading.Thread(target=self._guard, args=(role, i), daemon=True) for i in range(n)]
        for thread in self.threads:
            thread.start()

    def join(self) -> None:
        deadline = time.monotonic() + JOIN_TIMEOUT_S
        for thread in self.threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        assert not any(thread.is_alive() for thread in self.threads), "threads are left"

    def _guard(self, role: Callable[[int], None], index: int) -> None:
        try:
            role(index)
        except (RunFailedError, ProtocolError) as error:
            self.errors[f"{role.__name__}-{index}"] = error
        except (ValueError, MemoryError) as error:
            self.errors[f"{role.__name__}-{index}"] = error
            lost = self.exchange.target_lost if role == self.target else self.exchange.drafter_lost
            lost(index)
        except AssertionError as error:
            self.exchange.fail(f"{role.__name__}-{index}", f"broken promise: {error}")
            raise

    def target(self, target: int) -> None:
        while (lease := self.exchange.lease(target)) is not None:
            self.on_capture(target, lease.row_id)
            self.exchange.put(target, lease.row_id, Payload(lease.row_id))
        self.exchange.producer_done(target)

    def drafter(self, drafter: int) -> None:
        hand: list[RowItem[Payload]] = []
        while True:
            item = self.exchange.get(drafter)
            if isinstance(item, RowItem):
                hand.append(item)
                if len(hand) <= self.sizes.prefetch_rows:
                    continue
                self.step(drafter, hand.pop(0))
            elif isinstance(item, SyncItem):
                while hand:
                    self.step(drafter, hand.pop(0))
                self.meet(drafter, item.round_id)
            else:
                assert isinstance(item, StopItem) and not hand
                self.ends[drafter] = item.end
                return

    def step(self, drafter: int, item: RowItem[Payload]) -> None:
        assert item.payload.row_id == item.row_id
        self.on_step(drafter, item.row_id)
        self.weights[drafter][item.row_id] += 1
        self.trained[drafter] += 1
        self.exchange.trained(drafter, item.row_id)

    def meet(self, drafter: int, round_id: int) -> None:
        meeting = self.exchange.meet(drafter, round_id, self.average)
        assert drafter in meeting.members
        self.weights[drafter] = self.averages[drafter].copy()
        if drafter == meeting.leader:
            self.meetings.append(meeting)

    def average(self, meeting: Meeting) -> None:
        self.on_average(meeting)
        before = Counter(row_id for done in self.meetings for rows in done.rows.values() for row_id in _ids(rows))
        new = Counter(row_id for rows in meeting.rows.values() for row_id in _ids(rows))
        for member in meeting.members:  # each member brings what is committed, and its own rows of the round
            assert self.weights[member] == before + Counter(_ids(meeting.rows[member]))
        self.averages = dict.fromkeys(meeting.members, before + new)

    def check_all_committed(self) -> None:
        """Every planned row is in the weights of every drafter that is left, exactly once."""
        assert self.exchange.stats().ledger.committed == self.n_rows
        assert self.exchange.stats().admitted_rows == 0
        survivors = [d for d, end in enumerate(self.ends) if end is not None]
        assert survivors
        for drafter in survivors:
            assert self.weights[drafter] == Counter(range(self.n_rows))


def _ids(rows) -> list[int]:
    return [row.row_id for row in rows]
