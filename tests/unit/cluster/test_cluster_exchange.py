"""The queue of a run on a cluster: what a lost worker, buffer or link costs, without any Ray."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from cluster_fakes import DiesError, FakeCluster, FakeSender, breaks, make_queue, row_ref

from draftline.cluster.messages import Batch, Call, CheckpointOrder
from draftline.pipeline.core import CoreSettings, End, ProtocolError, drafter_worker, target_worker

SETTINGS = CoreSettings(n_targets=3, n_drafters=2, rows_per_drafter=3)


def first_time(action):
    """`action(...)` the first time only."""
    lock = threading.Lock()
    return lambda *arguments: action(*arguments) if lock.acquire(blocking=False) else None


def dies(*_):
    raise DiesError


def test_every_row_is_committed_once_and_slots_never_collide():
    cluster = FakeCluster(40, SETTINGS)
    assert cluster.run() is End.CLOSED
    cluster.check_all_committed()
    used = [slot for sender in cluster.senders.values() for slot in sender.slots]
    assert len(used) == 40 and max(used) < SETTINGS.max_rows


def test_a_target_lost_with_a_row_leaves_its_slot_alone():
    has_a_row = threading.Event()

    def capture(target: int, _row_id: int) -> None:
        if target == 1:
            has_a_row.set()
            dies()
        assert has_a_row.wait(60)  # the others would have taken all rows before it woke

    cluster = FakeCluster(30, SETTINGS, on_capture=capture)
    assert cluster.run() is End.CLOSED
    cluster.check_all_committed()
    exchange = cluster.queue._exchange
    assert len(exchange._left_alone) == 1
    assert sorted([*exchange._free_slots, *exchange._left_alone]) == list(range(exchange.n_slots))


def test_a_lost_drafter_costs_its_uncommitted_rows_alone():
    cluster = FakeCluster(30, SETTINGS, on_row=lambda d, row: dies() if d == 1 and row > 10 else None)
    assert cluster.run() is End.CLOSED
    cluster.check_all_committed()
    assert cluster.queue._exchange._core.ledger.captures().returned <= 1 + SETTINGS.rows_per_drafter


def test_rows_whose_buffers_are_lost_are_captured_again():
    cluster = FakeCluster(20, SETTINGS)
    cluster.lost_rows = {3, 7, 8}
    assert cluster.run() is End.CLOSED
    cluster.check_all_committed()
    assert cluster.queue._exchange._core.ledger.captures().returned == 3
    assert not cluster.lost_rows


def test_a_broken_link_repeats_the_round_with_everybody():
    cluster = FakeCluster(12, SETTINGS, on_reduce=first_time(breaks))
    assert cluster.run() is End.CLOSED
    cluster.check_all_committed()
    assert all(len(meeting.members) == 2 for meeting in cluster.meetings)


def test_a_member_lost_inside_a_reduction_is_not_waited_for():
    """The others notice that their collective broke, and repeat it without the member and its rows."""

    def on_reduce(drafter, meeting):
        if drafter == 1 and meeting.round_id == 1:
            raise DiesError
        if len(meeting.members) == 2 and meeting.round_id == 1:
            assert is_told.wait(60)  # a real link breaks after the death, and as often as is allowed at most
            breaks()

    cluster, is_told = FakeCluster(24, SETTINGS, on_reduce=on_reduce), threading.Event()
    tell = cluster.queue.lost
    cluster.queue.lost = lambda worker: (tell(worker), is_told.set())[0]
    assert cluster.run() is End.CLOSED
    cluster.check_all_committed()


def test_a_link_that_never_holds_fails_the_run_by_round():
    cluster = FakeCluster(12, SETTINGS, on_reduce=breaks)
    assert cluster.run() is End.FAILED
    _, failure = cluster.queue.wait_end()
    assert failure is not None and "round 0 could not be averaged" in failure.reason


def joined_by_a_third_drafter():
    """Drafter 1 has died, drafter 2 has joined, and drafter 0 waits for the event that is returned."""
    ready = threading.Event()

    def on_row(drafter, row_id):
        if drafter == 1 and row_id > 6:
            raise DiesError
        if drafter == 0 and row_id > 12:
            ready.wait(10)

    cluster = FakeCluster(40, SETTINGS, on_row=on_row)
    cluster.start()
    while cluster.queue._exchange._core.is_live(1):
        ready.wait(0.01)
    assert cluster.queue.joined(drafter_worker(2))
    return cluster, ready


def test_a_new_drafter_takes_part_with_the_weights_of_the_commit_at_which_it_joins():
    cluster, ready = joined_by_a_third_drafter()
    cluster.spawn(cluster.drafter, 2, True)
    ready.set()
    assert cluster.finish() is End.CLOSED
    cluster.check_all_committed()
    assert any(2 in meeting.members for meeting in cluster.meetings)


def test_a_drafter_that_comes_after_the_last_row_is_told_so():
    cluster = FakeCluster(6, SETTINGS)
    assert cluster.run() is End.CLOSED
    with pytest.raises(ProtocolError, match="one too many"):
        make_queue(6, SETTINGS).joined(drafter_worker(2))
    cluster.queue._exchange._core.rounds.live.discard(1)
    assert cluster.queue.joined(drafter_worker(2)) is False


def test_targets_come_and_go_while_the_run_goes_on():
    enough = threading.Event()
    cluster = FakeCluster(60, SETTINGS, on_row=lambda d, row: enough.wait(10) if row > 5 else None)
    cluster.start()
    assert cluster.queue.joined(target_worker(3))
    cluster.spawn(cluster.target, 3)
    cluster.queue.leave(0)
    enough.set()
    assert cluster.finish() is End.CLOSED
    cluster.check_all_committed()
    assert 0 not in cluster.queue._exchange._core._leases


def test_a_target_that_was_let_go_is_needed_until_its_rows_are_trained():
    queue = make_queue(9, SETTINGS)
    for call, target in ((1, 0), (1, 1)):
        lease = queue.ask(Call(f"target-{target}", call, (("lease_slot", (target,)),))).value.lease
        assert (
            queue.ask(Call(f"target-{target}", 2, (("put", (target, lease.row_id, row_ref(lease.row_id))),))).kind
            == "ok"
        )
    queue.leave(0)
    assert queue.ask(Call("target-0", 3, (("lease_slot", (0,)),))).value is False
    idle = threading.Thread(target=queue.await_idle, args=(0,), daemon=True)
    idle.start()
    for call, steps in enumerate(((("get", (0,)),), (("trained", (0, 0)), ("get", (0,))), (("trained", (0, 1)),))):
        assert idle.is_alive() or call == 2
        assert queue.ask(Call("drafter-0", call + 1, steps)).kind == "ok"
    idle.join(30)
    assert not idle.is_alive()
    assert queue.stats().admitted_rows == 0


def test_a_run_that_fails_leaves_nobody_waiting_for_an_idle_target():
    queue = make_queue(4, SETTINGS)
    lease = queue.ask(Call("target-0", 1, (("lease_slot", (0,)),))).value.lease
    queue.ask(Call("target-0", 2, (("put", (0, lease.row_id, row_ref(lease.row_id))),)))
    answers = []
    idle = threading.Thread(target=lambda: answers.append(queue.await_idle(0)), daemon=True)
    idle.start()
    queue.fail("drafter-0", "made up")
    idle.join(30)
    assert answers == [False]


def test_a_newcomer_whose_leader_dies_before_it_gave_the_weights_is_told_so():
    joined = threading.Event()

    def on_row(drafter, row_id):
        if drafter == 2 and row_id > 6:
            raise DiesError
        if row_id > 12:
            joined.wait(10)

    cluster = FakeCluster(60, CoreSettings(n_targets=3, n_drafters=3, rows_per_drafter=3), on_row=on_row)
    take_over = cluster.take_over

    def take_over_or_die(drafter, exchange):
        if exchange.turn.joined and exchange.turn.meeting.leader == drafter:
            raise DiesError
        take_over(drafter, exchange)

    cluster.take_over = take_over_or_die
    cluster.start()
    while cluster.queue._exchange._core.is_live(2):
        joined.wait(0.01)
    assert cluster.queue.joined(drafter_worker(3))
    joined.set()
    assert cluster.queue.wait(Call("drafter-3", 1, (("await_weights", (3,)),))).kind == "gone"
    assert cluster.finish() is End.CLOSED
    cluster.check_all_committed()
    assert len(cluster.queue._exchange._core.rounds.live) == 1


def test_a_newcomer_that_dies_while_it_waits_for_weights_costs_nothing():
    cluster, ready = joined_by_a_third_drafter()
    cluster.queue.lost(drafter_worker(2))
    assert cluster.queue.wait(Call("drafter-2", 1, (("await_weights", (2,)),))).kind == "gone"
    ready.set()
    assert cluster.finish() is End.CLOSED
    cluster.check_all_committed()


def test_the_last_checkpoint_goes_over_when_its_leader_is_lost():
    cluster = FakeCluster(6, SETTINGS)
    write, died = cluster.write, []

    def write_or_die(drafter, exchange, round_id):
        if not died and exchange.turn.meeting.is_last:
            died.append(drafter)
            raise DiesError
        write(drafter, exchange, round_id)

    cluster.write = write_or_die
    assert cluster.run() is End.CLOSED
    orders = [event for event in cluster.queue.take_events() if isinstance(event, CheckpointOrder)]
    assert died and orders[-1].turn.meeting.is_last and orders[-1].ledger["n_committed"] == 6
    assert orders[-1].weights == list(range(6))


def test_a_run_whose_drafters_all_die_before_its_last_checkpoint_owes_it():
    cluster = FakeCluster(6, SETTINGS)
    write = cluster.write

    def write_or_die(drafter, exchange, round_id):
        if exchange.call("is_complete"):
            raise DiesError
        write(drafter, exchange, round_id)

    cluster.write = write_or_die
    assert cluster.run() is End.CLOSED
    assert cluster.queue.owes_checkpoint()
    written = FakeCluster(6, SETTINGS)
    assert written.run() is End.CLOSED and not written.queue.owes_checkpoint()


def test_a_checkpoint_lost_in_the_middle_of_a_run_is_made_up_for_at_the_next_meeting():
    cluster = FakeCluster(30, SETTINGS, checkpoint_every=3)
    write, died = cluster.write, []

    def write_or_die(drafter, exchange, round_id):
        if not died:
            died.append(round_id)
            raise DiesError
        write(drafter, exchange, round_id)

    cluster.write = write_or_die
    assert cluster.run() is End.CLOSED
    cluster.check_all_committed()
    rounds = [e.turn.meeting.round_id for e in cluster.queue.take_events() if isinstance(e, CheckpointOrder)]
    assert died == [2] and rounds[0] == 3


def test_a_call_that_comes_twice_is_done_once():
    queue = make_queue(4, SETTINGS)
    call = Call("target-0", 1, (("lease_slot", (0,)),))
    first, again = queue.ask(call), queue.ask(call)
    assert first.kind == "ok" and again is first
    assert queue.stats().admitted_rows == 1
    late = queue.ask(replace(call, number=0))
    assert late.kind == "gone"


def test_a_lost_worker_that_comes_back_is_told_that_it_is_gone():
    queue = make_queue(4, SETTINGS)
    queue.lost(target_worker(0))
    queue.lost(drafter_worker(1))
    assert queue.ask(Call("target-0", 1, (("lease_slot", (0,)),))).kind == "gone"
    assert queue.ask(Call("drafter-1", 1, (("get", (1,)),))).kind == "gone"


def test_a_row_that_is_not_what_was_planned_is_stopped_at_the_door_and_captured_again():
    spoiled = []

    def change(ref):
        if ref.row_id == 5 and not spoiled:
            spoiled.append(ref)
            return replace(ref, lengths=(7,))
        return ref

    cluster = FakeCluster(12, SETTINGS)
    cluster.senders = {t: FakeSender(change) for t in range(3)}
    assert cluster.run() is End.CLOSED
    cluster.check_all_committed()
    assert spoiled and cluster.queue._exchange._core.ledger.failures == {5: 1}


def test_captures_that_always_fail_at_the_door_fail_the_run_by_name():
    cluster = FakeCluster(12, SETTINGS)
    cluster.senders = {t: FakeSender(lambda ref: replace(ref, run_id="an older run")) for t in range(3)}
    assert cluster.run() is End.FAILED
    _, failure = cluster.queue.wait_end()
    assert failure is not None and "run is an older run, planned run" in failure.reason


def test_events_reach_the_driver_in_order():
    queue = make_queue(4, SETTINGS)
    for number in range(3):
        queue.tell(Batch(f"target-{number}"))
    assert [event.worker for event in queue.next_events()] == ["target-0", "target-1", "target-2"]
    assert queue.take_events() == []
