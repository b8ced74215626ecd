"""Promises of worker clocks: every second is booked once, an unfinished wait counts, capacity is per working second."""

from __future__ import annotations

import random

import pytest
from monitor_fakes import FakeClock, spend, work

from draftline.monitor.clock import RECENT_PIECES, RecentCounts
from draftline.monitor.metrics import RunMetrics
from draftline.monitor.status import Wait


def test_time_is_booked_per_activity(clock: FakeClock) -> None:
    worker = RunMetrics(clock=clock).worker("target-0")
    spend(clock, worker, "working", 6)
    spend(clock, worker, "waiting", 2, Wait.SLOT)
    clock.move(2)
    status = worker.status(clock(), 60)
    assert status.seconds == {"working": 6, "waiting": 2}
    assert status.shares == pytest.approx({"working": 0.6, "waiting": 0.2})
    assert status.wait_shares == pytest.approx({"a free slot": 0.2})
    assert status.activity is None


def test_an_inner_span_takes_its_time_from_the_outer_one(clock: FakeClock) -> None:
    worker = RunMetrics(clock=clock).worker("drafter-0")
    with worker.span("working", "row 1"):
        clock.move(1)
        with worker.span("compiling"):
            clock.move(7)
        clock.move(2)
        worker.done(rows=1, tokens=300)
    status = worker.status(clock(), 60)
    assert status.seconds == {"working": 3, "compiling": 7}
    assert status.tokens_per_s == 100


def test_an_unfinished_wait_counts(clock: FakeClock) -> None:
    worker = RunMetrics(clock=clock).worker("drafter-0")
    spend(clock, worker, "working", 5)
    with worker.span("waiting", Wait.ROW):
        clock.move(15)
        status = worker.status(clock(), 60)
    assert status.wait_shares == pytest.approx({"a row": 0.75})
    assert (status.activity, status.what, status.since_s) == ("waiting", "a row", 15)


def test_shares_are_of_the_recent_window_only(clock: FakeClock) -> None:
    worker = RunMetrics(clock=clock).worker("drafter-0")
    spend(clock, worker, "waiting", 100, Wait.ROW)
    spend(clock, worker, "working", 9)
    assert worker.status(clock(), 10).shares == pytest.approx({"working": 0.9, "waiting": 0.1})


def test_capacity_leaves_waiting_out(clock: FakeClock) -> None:
    worker = RunMetrics(clock=clock).worker("target-0")
    for _ in range(4):
        work(clock, worker, seconds=2, tokens=1000)
        spend(clock, worker, "waiting", 50, Wait.SLOT)
    status = worker.status(clock(), 60)
    assert (status.tokens_per_s, status.row_s, status.rows) == (500, 2, 4)


def test_an_error_in_a_span_is_noted_and_passed_on(clock: FakeClock) -> None:
    seen = []

    class Log:
        def span(self, *args: object) -> None:
            seen.append(args)

    worker = RunMetrics(clock=clock, events=Log()).worker("target-0")  # type: ignore[arg-type]
    with pytest.raises(KeyError), worker.span("working", "row 3", tokens=5) as span:
        span.facts["bytes"] = 9
        raise KeyError("x")
    assert seen == [("target-0", "working", "row 3", 100.0, 100.0, {"tokens": 5, "bytes": 9, "error": "KeyError"})]


def test_a_restarted_worker_is_alive_again(clock: FakeClock) -> None:
    metrics = RunMetrics(clock=clock)
    metrics.worker("target-0").end("out of memory")
    assert metrics.snapshot().workers[0].state == "failed"
    metrics.worker("target-0")
    assert metrics.snapshot().workers[0].state == "running"


def test_shares_that_are_kept_up_are_those_that_are_counted_anew(clock: FakeClock) -> None:
    """Looked at again and again, while pieces of every length enter and leave the window."""
    draw = random.Random(5)
    worker = RunMetrics(clock=clock).worker("drafter-0")
    pieces: list[tuple[float, float, str]] = []
    for _ in range(400):
        activity, seconds = draw.choice(["working", "waiting", "averaging"]), draw.choice([0.0, 0.1, 3.0, 70.0])
        pieces.append((clock(), clock() + seconds, activity))
        spend(clock, worker, activity, seconds, Wait.ROW)
        clock.move(draw.choice([0.0, 0.5]))
        begin = max(100.0, clock() - 60)
        counted: dict[str, float] = {}
        for t0, t1, name in pieces:
            counted[name] = counted.get(name, 0.0) + max(0.0, t1 - max(t0, begin)) / max(clock() - begin, 1e-9)
        shares = worker.status(clock(), 60).shares
        assert shares == pytest.approx({name: s for name, s in counted.items() if s > 1e-9}, abs=1e-9)


def test_more_changes_than_are_kept_shorten_the_window_and_leave_the_shares_right(clock: FakeClock) -> None:
    worker = RunMetrics(clock=clock).worker("drafter-0")
    for _ in range(RECENT_PIECES):
        worker.past("waiting", Wait.ROW, clock(), clock() + 0.0005, {})
        worker.past("working", "", clock() + 0.0005, clock() + 0.002, {})
        clock.move(0.002)
    status = worker.status(clock(), 60)
    assert status.shares == pytest.approx({"waiting": 0.25, "working": 0.75})
    assert len(worker._pieces) == RECENT_PIECES


def test_recent_counts_forget_what_is_older_and_what_is_too_much() -> None:
    counts = RecentCounts(3)
    for t in range(5):
        counts.add(float(t), 1, 10 * t)
    assert counts.since(-1.0) == (3, 90) and counts.since(3.0) == (1, 40) and counts.since(9.0) == (0, 0)
