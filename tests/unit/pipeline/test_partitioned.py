"""The old partitioned scheme, kept for comparison in benchmarks: groups share no rows, and a run still ends whole."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

from draftline.errors import UserError
from draftline.pipeline.core import CoreSettings, End, RowItem, StopItem
from draftline.pipeline.threads import RowExchange
from draftline.records import PlannedRow

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def core_class(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from partitioned import PartitionedCore

    yield PartitionedCore
    sys.modules.pop("partitioned", None)


def plan_of(n_rows):
    return [PlannedRow(i, 0, (i,), 10, 5) for i in range(n_rows)]


def test_a_drafter_trains_rows_of_its_own_targets_only_and_the_run_ends_whole(core_class):
    settings = CoreSettings(n_targets=5, n_drafters=3, rows_per_drafter=4)
    exchange = RowExchange(plan_of(60), [1] * 60, settings, stall_timeout_s=60, core_class=core_class)
    trained: list[tuple[int, int]] = []

    def target(number):
        while (lease := exchange.lease(number)) is not None:
            exchange.put(number, lease.row_id, number)
        exchange.producer_done(number)

    def drafter(number):
        while not isinstance(item := exchange.get(number), StopItem):
            if isinstance(item, RowItem):
                trained.append((number, item.payload))
                exchange.trained(number, item.row_id)
            else:
                exchange.meet(number, item.round_id, lambda _: None)

    threads = [threading.Thread(target=target, args=(i,)) for i in range(5)]
    threads += [threading.Thread(target=drafter, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    assert exchange.wait_end() is End.CLOSED
    for thread in threads:
        thread.join()
    assert len(trained) == 60 and exchange.stats().ledger.committed == 60
    assert all(by_target % 3 == number for number, by_target in trained)


def test_a_full_queue_of_one_group_leaves_the_others_their_slots(core_class):
    core = core_class(plan_of(20), [1] * 20, CoreSettings(2, 2, 10, prefetch_rows=0, queue_depth=1))
    taken = [core.lease(0)]
    while hasattr(taken[-1], "row_id"):
        core.put(0, taken[-1].row_id)
        taken.append(core.lease(0))
    assert len(taken) - 1 == 3  # a target, a drafter's hand, a waiting row
    assert hasattr(core.lease(1), "row_id")


def test_each_drafter_needs_a_target(core_class):
    with pytest.raises(UserError, match="1 targets cannot feed 2 drafters"):
        core_class(plan_of(4), [1] * 4, CoreSettings(1, 2, 2))
