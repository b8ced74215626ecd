"""Real threads with fake workers around the core: every row once, every thread ends by itself, nobody hangs."""

from __future__ import annotations

import gc
import json
import sys
import threading
import time
import weakref
from collections import Counter

import pytest
from pipeline_fakes import FakeRun, Payload, make_plan

from draftline.errors import RunFailedError
from draftline.pipeline.core import CoreSettings, End, LedgerState, RowItem, SyncItem, drafter_worker, target_worker
from draftline.pipeline.threads import RowExchange


@pytest.fixture
def fast_switches():
    """Threads change places far more often than usual."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(usual)


def once(action):
    """A hook that does its thing the first time only."""
    first = threading.Lock()
    return lambda *arguments: action(*arguments) if first.acquire(blocking=False) else None


def fail_with(error: Exception):
    def act(*_):
        raise error

    return act


def test_five_targets_and_three_drafters_commit_every_row_once_and_share_the_work():
    run = FakeRun(
        300,
        CoreSettings(5, 3, rows_per_drafter=10, prefetch_rows=0),
        on_capture=lambda *_: time.sleep(0.001),
        on_step=lambda *_: time.sleep(0.005),
    )
    assert run.run() is End.CLOSED
    run.check_all_committed()
    assert run.ends == [End.CLOSED] * 3
    assert [len(meeting.members) for meeting in run.meetings] == [3] * 10
    assert [meeting.is_last for meeting in run.meetings] == [False] * 9 + [True]
    assert all(abs(rows - 100) <= 20 for rows in run.trained), run.trained


def test_a_drafter_three_times_slower_does_a_third_of_the_rows_of_a_fast_one():
    fast_steps: list[float] = [0.012]

    def step(drafter: int, _row_id: int) -> None:
        started = time.perf_counter()
        if drafter == 0:  # three times what the fast ones really took, sleeps being longer than asked for
            recent = fast_steps[-20:]
            time.sleep(3 * sum(recent) / len(recent))
        else:
            time.sleep(0.012)
            fast_steps.append(time.perf_counter() - started)

    run = FakeRun(350, CoreSettings(2, 3, rows_per_drafter=50, prefetch_rows=0), on_step=step)
    assert run.run() is End.CLOSED
    run.check_all_committed()
    fast = (run.trained[1] + run.trained[2]) / 2
    assert 0.28 <= run.trained[0] / fast <= 0.40, run.trained


@pytest.mark.usefixtures("fast_switches")
@pytest.mark.parametrize("n_drafters", range(1, 9))
@pytest.mark.parametrize("prefetch_rows", [0, 1])
def test_smallest_allowed_capacity_never_deadlocks(n_drafters: int, prefetch_rows: int):
    for n_targets in range(1, 9):
        bounds = CoreSettings(n_targets, n_drafters, 2, prefetch_rows=prefetch_rows)
        sizes = CoreSettings(
            n_targets,
            n_drafters,
            rows_per_drafter=2,
            prefetch_rows=prefetch_rows,
            admitted_rows=bounds.least_rows,
            queue_bytes=bounds.least_bytes([10] * 30),
            ordered=n_targets % 2 == 0,
        )
        run = FakeRun(30, sizes)
        assert run.run() is End.CLOSED
        run.check_all_committed()


@pytest.mark.usefixtures("fast_switches")
def test_a_target_that_raises_is_replaced_by_the_others():
    run = FakeRun(40, CoreSettings(3, 2, 3), on_capture=once(fail_with(ValueError("broken"))))
    assert run.run() is End.CLOSED
    run.check_all_committed()
    assert [str(error) for error in run.errors.values()] == ["broken"]


@pytest.mark.usefixtures("fast_switches")
def test_rows_of_a_drafter_that_raises_are_trained_by_the_others():
    steps = Counter()

    def step(drafter: int, _row_id: int) -> None:
        steps[drafter] += 1
        if drafter == 1 and steps[1] == 2:  # one row trained and not committed, one in hand
            raise MemoryError("no memory")
        time.sleep(0.001)

    run = FakeRun(60, CoreSettings(2, 3, 4), on_step=step)
    assert run.run() is End.CLOSED
    run.check_all_committed()
    assert run.ends[1] is None and len(run.meetings[-1].members) == 2


def test_a_leader_that_raises_while_it_averages_is_replaced():
    run = FakeRun(40, CoreSettings(2, 3, 4), on_average=once(fail_with(ValueError("averaging failed"))))
    assert run.run() is End.CLOSED
    run.check_all_committed()
    assert len(run.errors) == 1 and len(run.meetings[0].members) == 2


def test_a_member_lost_during_the_average_makes_the_leader_repeat_it():
    attempts = []

    def lose_a_member(meeting) -> None:
        attempts.append(meeting.members)
        if len(attempts) == 1:
            gone = next(member for member in meeting.members if member != meeting.leader)
            run.exchange.drafter_lost(gone)

    run = FakeRun(20, CoreSettings(2, 3, 4), on_average=lose_a_member)
    assert run.run() is End.CLOSED
    assert len(attempts[0]) == 3 and len(attempts[1]) == 2
    run.check_all_committed()
    assert "reported lost" in str(*run.errors.values())


def test_the_last_target_that_raises_fails_the_run_by_name_and_all_threads_end():
    run = FakeRun(40, CoreSettings(1, 3, 4), on_capture=once(fail_with(ValueError("broken"))))
    assert run.run() is End.FAILED
    assert "rows left" in run.exchange.failure.reason
    assert {f"drafter-{d}" for d in range(3)} <= set(run.errors)
    assert all(isinstance(error, RunFailedError) for name, error in run.errors.items() if name != "target-0")


def test_the_last_drafter_that_raises_fails_the_run_and_targets_do_not_wait_for_it():
    run = FakeRun(40, CoreSettings(3, 1, 4), on_step=fail_with(ValueError("broken")))
    assert run.run() is End.FAILED
    assert run.exchange.failure.origin == "drafter-0"
    assert all(run.errors[f"target-{t}"].origin == "drafter-0" for t in range(3))


def test_a_poisoned_sample_is_given_back_twice_and_set_aside():
    run = FakeRun(30, CoreSettings(2, 2, 4, max_set_aside=1))
    poisoned = 7

    def target(index: int) -> None:
        while (lease := run.exchange.lease(index)) is not None:
            if lease.row_id == poisoned:
                run.exchange.give_back(target_worker(index), poisoned, blame=True, reason="not finite")
            else:
                run.exchange.put(index, lease.row_id, Payload(lease.row_id))
        run.exchange.producer_done(index)

    run.target = target
    assert run.run() is End.CLOSED
    ledger = run.exchange.stats().ledger
    assert (ledger.committed, ledger.set_aside) == (29, 1)
    assert poisoned not in run.weights[0]


def test_a_failure_wakes_every_kind_of_wait():
    exchange: RowExchange[int] = RowExchange(
        make_plan(9), [10] * 9, CoreSettings(1, 3, 1, prefetch_rows=0, admitted_rows=1), stall_timeout_s=60
    )
    exchange.put(0, exchange.lease(0).row_id, 0)
    exchange.trained(0, exchange.get(0).row_id)
    held = exchange.lease(0).row_id
    exchange.put(0, held, 0)
    assert isinstance(exchange.get(1), RowItem)
    outcomes: dict[str, object] = {}

    def wait(name: str, call) -> None:
        try:
            outcomes[name] = call()
        except RunFailedError as error:
            outcomes[name] = (error.origin, error.reason)

    waits = {"lease": lambda: exchange.lease(0), "get": lambda: exchange.get(2), "end": exchange.wait_end}
    threads = [threading.Thread(target=wait, args=item, daemon=True) for item in waits.items()]
    for thread in threads:
        thread.start()
    while len(exchange.stats().waiting_for) < 3:
        time.sleep(0.001)
    exchange.fail("drafter-1", "the device is gone")
    for thread in threads:
        thread.join(30)
    failure = ("drafter-1", "the device is gone")
    assert outcomes == {"lease": failure, "get": failure, "end": End.FAILED}
    with pytest.raises(RunFailedError):
        exchange.trained(1, held)


def test_a_drafter_at_a_meeting_is_woken_by_a_failure():
    def step(drafter: int, _row_id: int) -> None:
        other = f"drafter-{1 - drafter}"
        while run.exchange.stats().waiting_for.get(other) != "the meeting":
            time.sleep(0.001)
        run.exchange.fail(f"drafter-{drafter}", "broken")

    run = FakeRun(1, CoreSettings(1, 2, 1), on_step=step)
    assert run.run() is End.FAILED
    assert {f"drafter-{d}" for d in range(2)} <= set(run.errors)


def test_a_stop_in_the_middle_commits_what_was_trained_and_a_resumed_run_does_the_rest():
    def step(_drafter: int, row_id: int) -> None:
        time.sleep(0.001)
        if row_id == 30:
            assert run.exchange.request_stop()

    run = FakeRun(200, CoreSettings(3, 2, 8), on_step=step)
    assert run.run() is End.STOPPED
    assert run.ends == [End.STOPPED] * 2
    stats = run.exchange.stats()
    assert stats.ledger.in_flight == stats.waiting_rows == stats.admitted_rows == 0
    assert 31 <= stats.ledger.committed < 200
    first = run.weights[0]
    assert first == run.weights[1] and len(first) == stats.ledger.committed

    state = LedgerState.from_json(json.loads(json.dumps(run.exchange.snapshot().to_json())))
    run = FakeRun(200, CoreSettings(1, 3, 8), state=state)
    assert run.run() is End.CLOSED
    assert first + run.weights[0] == Counter(range(200))
    assert run.meetings[0].round_id == state.rounds


def test_a_stop_lets_go_of_the_payloads_of_waiting_rows():
    exchange: RowExchange[Payload] = RowExchange(make_plan(4), [10] * 4, CoreSettings(2, 1, 4), stall_timeout_s=60)
    waiting, late = Payload(0), Payload(1)
    watched = [weakref.ref(waiting), weakref.ref(late)]
    exchange.put(0, exchange.lease(0).row_id, waiting)
    row_id = exchange.lease(1).row_id
    exchange.request_stop()
    exchange.put(1, row_id, late)
    del waiting, late
    gc.collect()
    assert [ref() for ref in watched] == [None, None]


def test_a_stalled_target_is_named_with_those_who_wait_for_it():
    release = threading.Event()
    run = FakeRun(9, CoreSettings(1, 2, 1), on_capture=lambda *_: release.wait(60), stall_timeout_s=0.3)
    run.start()
    assert run.exchange.wait_end() is End.FAILED
    release.set()
    run.join()
    failure = run.exchange.failure
    assert failure.origin == "target-0"
    for part in ("no progress for 0.3 s", "no sign of target-0", "drafter-0 for a row", "drafter-1 for a row"):
        assert part in failure.reason
    assert "drafter-0" in run.errors


def test_a_drafter_that_never_comes_to_the_meeting_is_named():
    release = threading.Event()

    def step(drafter: int, _row_id: int) -> None:
        if drafter == 1:
            release.wait(60)

    run = FakeRun(20, CoreSettings(2, 2, 2, prefetch_rows=0), on_step=step, stall_timeout_s=0.3)
    run.start()
    assert run.exchange.wait_end() is End.FAILED
    release.set()
    run.join()
    assert run.exchange.failure.origin == "drafter-1"
    assert "drafter-0 for the meeting" in run.exchange.failure.reason


def test_compiling_is_not_stalling():
    def step(drafter: int, _row_id: int) -> None:
        with run.exchange.busy(drafter_worker(drafter), "compiling"):
            assert run.exchange.stats().busy == {"drafter-0": "compiling"}
            time.sleep(1.5)

    run = FakeRun(1, CoreSettings(1, 1, 1), on_step=step, stall_timeout_s=0.7)
    assert run.run() is End.CLOSED


def test_compiling_for_ever_is_stalling():
    release = threading.Event()

    def step(drafter: int, _row_id: int) -> None:
        with run.exchange.busy(drafter_worker(drafter), "compiling", limit_s=0.5):
            release.wait(60)

    run = FakeRun(1, CoreSettings(1, 1, 1), on_step=step, stall_timeout_s=0.2)
    run.start()
    assert run.exchange.wait_end() is End.FAILED
    release.set()
    run.join()
    assert run.exchange.failure.origin == "drafter-0"


def test_time_in_which_the_process_was_stopped_is_no_stall():
    """A process that was stopped, or a machine that was suspended, goes on with a clock that is hours further."""
    stopped_s = [0.0]
    exchange: RowExchange[int] = RowExchange(
        make_plan(1), [10], CoreSettings(1, 2, 1), stall_timeout_s=60, clock=lambda: time.monotonic() + stopped_s[0]
    )
    got: list[object] = []

    def wait_for_a_row(drafter: int) -> None:
        got.append(exchange.get(drafter))

    for drafter in (0, 1):
        threading.Thread(target=wait_for_a_row, args=(drafter,), daemon=True).start()
        while f"drafter-{drafter}" not in exchange.stats().waiting_for and exchange.failure is None:
            time.sleep(0.001)
        stopped_s[0] = 7200.0
    assert exchange.failure is None
    exchange.put(0, exchange.lease(0).row_id, 5)
    while not got:
        time.sleep(0.001)
    assert isinstance(got[0], RowItem)


def test_averaging_runs_outside_the_lock():
    looked = []
    run = FakeRun(8, CoreSettings(1, 2, 2), on_average=lambda _: looked.append(run.exchange.stats().round_id))
    assert run.run() is End.CLOSED
    assert looked == [0, 1]


def test_getting_without_waiting_says_when_there_is_nothing():
    exchange: RowExchange[int] = RowExchange(make_plan(2), [10] * 2, CoreSettings(1, 1, 1), stall_timeout_s=60)
    assert exchange.try_get(0) is None
    exchange.put(0, exchange.lease(0).row_id, 5)
    item = exchange.try_get(0)
    assert isinstance(item, RowItem) and item.payload == 5
    assert isinstance(exchange.try_get(0), SyncItem)


def test_stats_tell_rows_bytes_and_who_waits():
    exchange: RowExchange[int] = RowExchange(
        make_plan(9), [10] * 9, CoreSettings(2, 1, 4, admitted_rows=3), stall_timeout_s=60
    )
    for _ in range(2):
        exchange.put(0, exchange.lease(0).row_id, 0)
    exchange.lease(0)
    thread = threading.Thread(target=lambda: exchange.lease(1), daemon=True)
    thread.start()
    while not (stats := exchange.stats()).waiting_for:
        time.sleep(0.001)
    assert stats.waiting_for == {"target-1": "a row to capture"} and stats.waited_s["target-1"] >= 0
    assert (stats.waiting_rows, stats.waiting_bytes) == (2, 20)
    assert (stats.admitted_rows, stats.admitted_bytes, stats.max_rows) == (3, 30, 3)
    exchange.trained(0, exchange.get(0).row_id)
    thread.join(30)
    assert not thread.is_alive() and exchange.stats().waiting_for_s == {}
    assert exchange.stats().waited_s["target-1"] > 0
