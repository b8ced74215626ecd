"""The core's rules, one by one, without the simulator."""

from __future__ import annotations

import subprocess
import sys

import pytest
from core_kit import ROW_BYTES, capture, commit_round, make_core, train_one

from draftline.errors import UserError
from draftline.pipeline.core import (
    DONE,
    WAIT,
    CoreSettings,
    End,
    Lease,
    ProtocolError,
    RowState,
    StopItem,
    SyncItem,
    drafter_worker,
    target_worker,
)

# ---- bounds


def test_admitted_rows_are_targets_plus_hands_plus_queue_depth():
    assert CoreSettings(5, 3, 10, prefetch_rows=1, queue_depth=2).max_rows == 5 + 3 * 2 + 2 * 3


def test_lease_waits_at_the_row_bound_and_goes_on_when_a_step_has_finished():
    core = make_core(n_rows=9, queue_depth=1)  # 1 + 1 + 1 rows
    capture(core, 3)
    assert core.lease(0) is WAIT
    item = core.get(0)
    assert core.lease(0) is WAIT  # handed out is not finished
    core.trained(0, item.row_id)
    assert isinstance(core.lease(0), Lease)


def test_lease_waits_at_the_byte_bound():
    core = make_core(n_rows=9, queue_bytes=2 * ROW_BYTES + 9)
    capture(core, 2)
    assert core.lease(0) is WAIT
    assert core.admission.n_bytes == 2 * ROW_BYTES


@pytest.mark.parametrize(
    ("rules", "numbers"),
    [
        ({"admitted_rows": 2, "n_drafters": 2, "prefetch_rows": 1}, ["2 rows", "needs 3"]),
        ({"queue_bytes": 9}, ["queue_bytes 9", "largest row of 10"]),
        ({"queue_bytes": 29, "n_drafters": 2, "prefetch_rows": 1}, ["queue_bytes 29", "30 bytes"]),
        ({"n_drafters": 0}, ["n_drafters is 0"]),
        ({"prefetch_rows": -1}, ["prefetch_rows is -1"]),
    ],
)
def test_bounds_without_progress_are_refused_with_the_numbers(rules: dict, numbers: list[str]):
    with pytest.raises(UserError) as error:
        make_core(**rules)
    assert all(number in str(error.value) for number in numbers), str(error.value)


def test_an_empty_plan_is_refused():
    with pytest.raises(UserError, match="no rows"):
        make_core(n_rows=0)


# ---- stop


def test_targets_wait_until_the_last_commit_and_then_each_drafter_gets_one_stop():
    core = make_core(n_rows=2, n_targets=2, n_drafters=2, rows_per_drafter=1)
    capture(core, 2)
    train_one(core, 0)
    train_one(core, 1)
    assert core.lease(0) is WAIT  # a drafter may still be lost
    meeting = commit_round(core, 0, 1)
    assert meeting.is_last
    assert core.lease(0) is DONE
    core.producer_done(0)
    assert core.get(0) is WAIT  # target-1 has not reported
    assert core.lease(1) is DONE
    core.producer_done(1)
    assert [core.get(0), core.end, core.get(1)] == [StopItem(End.CLOSED), None, StopItem(End.CLOSED)]
    assert core.end is End.CLOSED
    with pytest.raises(ProtocolError):
        core.get(0)


def test_a_stop_commits_what_was_trained_and_discards_what_waits():
    core = make_core(n_rows=9, n_targets=2, n_drafters=2, rows_per_drafter=4)
    capture(core, 3)
    held = core.lease(1)
    in_hand = core.get(0)
    assert core.request_stop()
    assert core.lease(0) is DONE
    core.put(1, held.row_id)
    core.trained(0, in_hand.row_id)
    meeting = commit_round(core, 1, 0)
    assert meeting.is_last and [row.row_id for row in meeting.rows[0]] == [0] and meeting.rows[1] == ()
    assert core.lease(1) is DONE
    core.producer_done(0)
    core.producer_done(1)
    assert core.get(0) == core.get(1) == StopItem(End.STOPPED)
    assert core.ledger.captures().discarded_at_stop == 3
    assert str(core.ledger.identity()) == "planned 9 = committed 1 + set aside 0 + in flight 0 + remaining 8"
    assert not core.admission.charged


def test_a_stop_that_comes_after_the_last_commit_changes_nothing():
    core = make_core(n_rows=1)
    capture(core)
    train_one(core)
    commit_round(core, 0)
    assert not core.request_stop()
    core.lease(0)
    core.producer_done(0)
    assert core.get(0) == StopItem(End.CLOSED)


def test_a_failure_is_never_told_as_the_end_of_data():
    core = make_core(n_rows=2)
    capture(core)
    assert core.fail("target-0", "out of memory")
    assert not core.fail("drafter-0", "because of that")
    assert core.get(0) == StopItem(End.FAILED)
    assert core.end is End.FAILED and core.failure.origin == "target-0"


# ---- rounds


def test_a_round_hands_out_its_rows_once_and_the_clock_counts_them():
    core = make_core(n_rows=9, n_drafters=2, rows_per_drafter=2)
    capture(core, 4)
    clocks = []
    for _ in range(3):
        item = core.get(0)
        clocks.append(item.clock_rows)
        core.trained(0, item.row_id)
    item = core.get(1)
    clocks.append(item.clock_rows)
    capture(core)
    assert core.get(0) == SyncItem(0)  # 4 rows are handed out: called while the other still trains
    with pytest.raises(ProtocolError):
        core.get(0)
    core.arrive(0, 0)
    assert core.leader is None
    core.trained(1, item.row_id)
    meeting = commit_round(core, 1)
    assert (meeting.committed_rows, meeting.is_last, clocks) == (4, False, [0, 1, 2, 3])
    assert core.get(1).clock_rows == 4


def test_a_drafter_arrives_with_empty_hands_only():
    core = make_core(n_rows=2, rows_per_drafter=1, prefetch_rows=1, n_drafters=1)
    capture(core)
    item = core.get(0)
    assert core.get(0) == SyncItem(0)
    with pytest.raises(ProtocolError, match="in hand"):
        core.arrive(0, 0)
    core.trained(0, item.row_id)
    core.arrive(0, 0)
    assert core.leader == 0


def test_an_average_with_a_member_that_died_meanwhile_does_not_count():
    core = make_core(n_rows=4, n_drafters=2, rows_per_drafter=1)
    capture(core, 2)
    rows = [train_one(core, 0), train_one(core, 1)]
    for drafter in (1, 0):
        core.get(drafter)
        core.arrive(drafter, 0)
    first = core.begin_average(0, 0)
    core.drafter_lost(1)
    assert core.commit(0, 0, first.attempt) is None
    second = core.begin_average(0, 0)
    assert (first.members, second.members) == ((0, 1), (0,))
    core.commit(0, 0, second.attempt)
    assert core.ledger.states[rows[0]] is RowState.COMMITTED
    assert core.ledger.states[rows[1]] is RowState.PLANNED


def test_a_leader_that_dies_is_replaced_and_its_rows_go_back():
    core = make_core(n_rows=4, n_drafters=2, rows_per_drafter=1)
    capture(core, 2)
    train_one(core, 0)
    lost = train_one(core, 1)
    for drafter in (0, 1):
        core.get(drafter)
        core.arrive(drafter, 0)
    core.begin_average(1, 0)
    core.drafter_lost(1)
    assert core.leader == 0
    meeting = core.begin_average(0, 0)
    core.commit(0, 0, meeting.attempt)
    assert core.lease(0).row_id == lost


def test_rows_are_handed_out_in_plan_order_when_asked_for():
    core = make_core(n_rows=4, n_targets=2, ordered=True, rows_per_drafter=9)
    first = core.lease(0)
    second = core.lease(1)
    core.put(1, second.row_id)
    assert core.get(0) is WAIT
    core.put(0, first.row_id)
    assert [train_one(core), train_one(core)] == [0, 1]


# ---- failures


def test_a_row_that_fails_twice_is_set_aside_with_its_samples():
    core = make_core(n_rows=2, max_set_aside=2)
    for _ in range(2):
        assert core.lease(0).row_id == 0
        core.give_back(target_worker(0), 0, blame=True)
    assert core.lease(0).row_id == 1
    assert core.ledger.identity().set_aside == 1 and core.failure is None


def test_failures_in_different_hands_add_up():
    core = make_core(n_rows=2, max_set_aside=2)
    core.lease(0)
    core.give_back(target_worker(0), 0, blame=True)
    capture(core)
    core.get(0)
    core.give_back(drafter_worker(0), 0, blame=True)
    assert core.ledger.states[0] is RowState.SET_ASIDE


def test_too_many_samples_set_aside_fail_the_run_naming_row_and_samples():
    core = make_core(n_rows=3, max_set_aside=1)
    for _ in range(2):
        core.lease(0)
        core.give_back(target_worker(0), 0, blame=True, reason="states are not finite")
    assert core.end is End.FAILED and core.failure.origin == "target-0"
    for part in ("row 0", "samples 0, 1", "states are not finite", "max_set_aside is 1"):
        assert part in core.failure.reason


def test_a_row_given_back_without_blame_is_not_counted_as_a_failure():
    core = make_core(n_rows=1)
    for _ in range(5):
        core.lease(0)
        core.give_back(target_worker(0), 0, blame=False)
    assert core.failure is None and isinstance(core.lease(0), Lease)


def test_the_last_target_lost_with_rows_left_fails_the_run():
    core = make_core(n_rows=3, n_targets=2)
    core.target_lost(1)
    assert core.failure is None
    core.target_lost(0)
    assert "3 rows left" in core.failure.reason


def test_a_target_that_restarts_keeps_the_run_alive():
    core = make_core(n_rows=3)
    row = core.lease(0)
    core.target_lost(0, returns=True)
    assert core.failure is None
    assert core.target_joined(0)
    assert core.lease(0) == row


def test_the_last_drafter_lost_fails_the_run_even_after_the_last_commit():
    core = make_core(n_rows=1)
    capture(core)
    train_one(core)
    commit_round(core, 0)
    core.lease(0)
    core.producer_done(0)
    core.drafter_lost(0)
    assert core.end is End.FAILED and core.failure.reason == "all drafters are lost"


def test_a_second_report_of_a_drafters_loss_changes_nothing():
    """Whoever watches it and the drafter itself may both report it."""
    core = make_core(n_rows=3, n_drafters=2)
    capture(core)
    core.get(1)
    core.drafter_lost(1)
    before = core.snapshot()
    core.drafter_lost(1)
    assert core.snapshot() == before and core.failure is None
    with pytest.raises(ProtocolError):
        core.drafter_lost(7)


def test_a_new_drafter_takes_the_place_of_a_lost_one_at_the_next_commit():
    core = make_core(n_rows=4, n_drafters=2, rows_per_drafter=1)
    capture(core, 1)
    core.drafter_lost(1)
    assert core.drafter_joined(2) and not core.is_live(2)
    with pytest.raises(ProtocolError, match="not among the live drafters"):
        core.get(2)
    train_one(core, 0)
    meeting = commit_round(core, 0)
    assert meeting.members == (0,) and core.is_live(2)
    capture(core, 2)
    train_one(core, 0)
    train_one(core, 2)
    assert commit_round(core, 0, 2).members == (0, 2)


def test_a_new_drafter_needs_a_new_number_and_an_empty_place():
    core = make_core(n_rows=4, n_drafters=2)
    with pytest.raises(ProtocolError, match="one too many"):
        core.drafter_joined(2)
    core.drafter_lost(1)
    with pytest.raises(ProtocolError, match="needs a new number"):
        core.drafter_joined(1)
    assert core.drafter_joined(5)
    core.drafter_lost(5)  # while it waits: its place is free again
    assert core.drafter_joined(6)


def test_a_new_drafter_that_comes_after_the_last_row_is_told_so():
    core = make_core(n_rows=1, n_drafters=2)
    core.drafter_lost(1)
    assert core.drafter_joined(2)
    capture(core)
    train_one(core)
    commit_round(core, 0)  # nothing is left: nobody joins any more
    assert not core.is_live(2) and not core.rounds.joining
    assert core.drafter_joined(3) is False
    core.lease(0)
    core.producer_done(0)
    core.get(0)
    assert core.end is End.CLOSED


def test_a_returned_row_reaches_a_target_that_was_idle():
    core = make_core(n_rows=1, n_targets=2)
    core.lease(0)
    assert core.lease(1) is WAIT
    core.target_lost(0)
    assert core.lease(1).row_id == 0


@pytest.mark.parametrize(
    "misuse",
    [
        lambda core: core.put(0, 0),
        lambda core: core.trained(0, 0),
        lambda core: core.arrive(0, 0),
        lambda core: core.begin_average(0, 0),
        lambda core: core.commit(0, 0, 0),
        lambda core: core.producer_done(0),
        lambda core: core.give_back(drafter_worker(0), 0, blame=False),
        lambda core: core.lease(7),
        lambda core: core.get(7),
        lambda core: core.target_joined(0),
        lambda core: (core.lease(0), core.lease(0)),
        lambda core: (core.lease(0), core.put(0, -1)),
    ],
)
def test_misuse_is_refused(misuse):
    with pytest.raises(ProtocolError):
        misuse(make_core())


def test_the_core_does_not_need_torch():
    code = "import sys, draftline.pipeline.core.simulate; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_stop_right_after_a_meeting_calls_one_more_that_knows_it_is_the_last():
    core = make_core(n_rows=9, rows_per_drafter=1)
    capture(core)
    train_one(core)
    assert not commit_round(core, 0).is_last
    core.request_stop()
    core.lease(0)
    core.producer_done(0)
    last = commit_round(core, 0)
    assert last.is_last and last.n_rows == 0 and last.committed_rows == 1
    assert core.get(0) == StopItem(End.STOPPED)
