"""Promises of the verdict: each trouble, set up on purpose with synthetic spans, is named, with its mend."""

from __future__ import annotations

import pytest
from monitor_fakes import FakeClock, spend, work

from draftline.monitor.clock import WorkerClock
from draftline.monitor.metrics import RunMetrics
from draftline.monitor.status import Capacities, QueueGauge, Verdict, Wait
from draftline.monitor.verdict import bottleneck


class Scene:
    """Two sides whose workers live through rounds of (waiting, working) at the same time."""

    def __init__(self, clock: FakeClock, targets: int = 2, drafters: int = 2) -> None:
        self.clock, self.metrics = clock, RunMetrics(clock=clock)
        self.targets = [self.metrics.worker(f"target-{i}") for i in range(targets)]
        self.drafters = [self.metrics.worker(f"drafter-{i}") for i in range(drafters)]

    def live(self, worker: WorkerClock, rounds: int, *, wait: str, wait_s: float, work_s: float) -> None:
        """Rounds of one worker, from the same start for all: the clock is put back afterwards."""
        start = self.clock.now
        for _ in range(rounds):
            if wait_s:
                spend(self.clock, worker, "waiting", wait_s, wait)
            work(self.clock, worker, work_s)
        self.clock.now = start

    def verdict(self) -> Verdict:
        return self.metrics.snapshot().verdict


def test_drafters_that_wait_for_rows_are_starved(clock: FakeClock) -> None:
    scene = Scene(clock, targets=1, drafters=3)
    for target in scene.targets:
        scene.live(target, 10, wait="", wait_s=0, work_s=4)
    for drafter in scene.drafters:
        scene.live(drafter, 4, wait=Wait.ROW, wait_s=6, work_s=4)
    clock.move(40)
    verdict = scene.verdict()
    assert verdict.cause == "starved_drafters"
    assert "1 target can deliver 250 tok/s, 3 drafters could take 750 tok/s" in verdict.sentence
    assert verdict.split == (2, 2)


def test_targets_that_wait_for_slots_are_held_up_by_drafters(clock: FakeClock) -> None:
    scene = Scene(clock, targets=3, drafters=1)
    for target in scene.targets:
        scene.live(target, 10, wait=Wait.SLOT, wait_s=3, work_s=1)
    for drafter in scene.drafters:
        scene.live(drafter, 40, wait="", wait_s=0, work_s=1)
    clock.move(40)
    verdict = scene.verdict()
    assert verdict.cause == "drafter_bound"
    assert "of 4 workers 2:2 (targets:drafters) would balance best" in verdict.sentence


def test_slow_data_loading_is_told_from_slow_targets(clock: FakeClock) -> None:
    scene = Scene(clock)
    for target in scene.targets:
        scene.live(target, 10, wait=Wait.SAMPLES, wait_s=3, work_s=1)
    for drafter in scene.drafters:
        scene.live(drafter, 10, wait=Wait.ROW, wait_s=2, work_s=2)
    clock.move(40)
    verdict = scene.verdict()
    assert verdict.cause == "slow_data"
    assert "wait for samples 75% of their time" in verdict.sentence


def test_a_little_waiting_for_samples_is_not_blamed_for_what_busy_targets_cannot_deliver(clock: FakeClock) -> None:
    scene = Scene(clock, targets=1, drafters=3)
    scene.live(scene.targets[0], 10, wait=Wait.SAMPLES, wait_s=1, work_s=3)
    for drafter in scene.drafters:
        scene.live(drafter, 4, wait=Wait.ROW, wait_s=7, work_s=3)
    clock.move(40)
    assert scene.verdict().cause == "starved_drafters"


def test_waiting_for_samples_is_blamed_where_the_targets_would_suffice_without_it(clock: FakeClock) -> None:
    scene = Scene(clock, targets=1, drafters=1)
    scene.live(scene.targets[0], 10, wait=Wait.SAMPLES, wait_s=1.5, work_s=2.5)
    scene.live(scene.drafters[0], 10, wait=Wait.ROW, wait_s=1.5, work_s=2.5)
    clock.move(40)
    assert scene.verdict().cause == "slow_data"


def test_no_side_is_called_too_slow_that_is_the_faster_one(clock: FakeClock) -> None:
    """Drafters that were held up by meetings or bursts: the side they keep waiting is slower than they are."""
    for wait, worker in ((Wait.SLOT, "targets"), (Wait.ROW, "drafters")):
        scene = Scene(clock, targets=1, drafters=1)
        waiting, busy = scene.targets[0], scene.drafters[0]
        waiting, busy = (waiting, busy) if worker == "targets" else (busy, waiting)
        scene.live(waiting, 8, wait=wait, wait_s=1, work_s=4)
        scene.live(busy, 8, wait="the end", wait_s=2, work_s=3)
        clock.move(40)
        verdict = scene.verdict()
        assert verdict.sentence.startswith(f"{worker} wait ") and "unevenly" in verdict.sentence
        assert "pipeline.hs_queue_depth" in verdict.sentence and "add a" not in verdict.sentence


def test_a_worker_without_a_row_yet_counts_like_the_others_of_its_side(clock: FakeClock) -> None:
    scene = Scene(clock, targets=1, drafters=4)
    scene.live(scene.targets[0], 10, wait="", wait_s=0, work_s=4)
    for drafter in scene.drafters[:2]:
        scene.live(drafter, 5, wait=Wait.ROW, wait_s=4, work_s=4)
    clock.move(40)
    assert scene.metrics.snapshot().capacities.drafter_tokens_per_s == 4 * 250
    assert scene.verdict().split == (2, 3)


def test_a_worker_that_hangs_in_its_first_row_is_judged_by_its_peers(clock: FakeClock) -> None:
    scene = Scene(clock, targets=2, drafters=1)
    scene.live(scene.targets[0], 5, wait="", wait_s=0, work_s=2)
    scene.live(scene.drafters[0], 5, wait="", wait_s=0, work_s=2)
    with scene.targets[1].span("working", "row 3"):
        clock.move(100)
        verdict = scene.verdict()
    assert verdict.cause == "stuck_worker"
    assert "target-1 is stuck: working on row 3 for 100 s, a row usually takes a target 2 s" in verdict.sentence


def test_one_slow_target_is_named(clock: FakeClock) -> None:
    scene = Scene(clock, targets=3, drafters=1)
    for target, work_s in zip(scene.targets, (1, 8, 1), strict=True):
        scene.live(target, int(40 / work_s), wait="", wait_s=0, work_s=work_s)
    scene.live(scene.drafters[0], 10, wait=Wait.ROW, wait_s=2, work_s=2)
    clock.move(40)
    verdict = scene.verdict()
    assert verdict.cause == "slow_target"
    assert "target-1 delivers 125 tok/s, the other targets 1.0 ktok/s each" in verdict.sentence


def test_a_dead_worker_comes_before_the_starving_it_causes(clock: FakeClock) -> None:
    scene = Scene(clock)
    scene.live(scene.targets[0], 10, wait="", wait_s=0, work_s=4)
    for drafter in scene.drafters:
        scene.live(drafter, 4, wait=Wait.ROW, wait_s=6, work_s=4)
    scene.targets[1].end("CUDA error: device-side assert")
    clock.move(40)
    verdict = scene.verdict()
    assert verdict.cause == "dead_worker"
    assert verdict.sentence == "target-1 is dead (CUDA error: device-side assert); 1 target carries on"


def test_a_long_compile_is_not_called_a_stall(clock: FakeClock) -> None:
    scene = Scene(clock, targets=1, drafters=2)
    with (
        scene.targets[0].span("waiting", Wait.SLOT),
        scene.drafters[0].span("compiling", "the drafter step"),
        scene.drafters[1].span("waiting", Wait.ROW),
    ):
        clock.move(200)
        verdict = scene.verdict()
    assert verdict.cause == "compiling"
    assert "drafter-0 has been compiling the drafter step for 200 s" in verdict.sentence


def test_a_stalled_queue_names_who_waits_for_what(clock: FakeClock) -> None:
    scene = Scene(clock, targets=1, drafters=1)
    scene.metrics.watch(queue=lambda: QueueGauge(rows=4, bytes=1))
    with scene.targets[0].span("waiting", Wait.SLOT), scene.drafters[0].span("waiting", Wait.ROW):
        clock.move(90)
        verdict = scene.verdict()
    assert verdict.cause == "stalled"
    assert "90 s: target-0 waits for a free slot, drafter-0 waits for a row; the queue holds 4 rows" in verdict.sentence


def test_the_coordinator_between_its_tasks_hides_no_stall_and_is_not_listed(clock: FakeClock) -> None:
    scene = Scene(clock, targets=1, drafters=1)
    coordinator = scene.metrics.worker("coordinator")
    with coordinator.span("compiling", "all drafters"):
        assert [w.name for w in scene.metrics.snapshot().workers] == ["target-0", "drafter-0", "coordinator"]
    with scene.targets[0].span("waiting", Wait.SLOT), scene.drafters[0].span("waiting", Wait.ROW):
        clock.move(90)
        snapshot = scene.metrics.snapshot()
    assert snapshot.verdict.cause == "stalled"
    assert [w.name for w in snapshot.workers] == ["target-0", "drafter-0"]


def test_a_side_that_has_ended_is_not_balanced(clock: FakeClock) -> None:
    scene = Scene(clock, targets=1, drafters=1)
    scene.live(scene.targets[0], 3, wait="", wait_s=0, work_s=1)
    scene.live(scene.drafters[0], 3, wait="", wait_s=0, work_s=1)
    scene.drafters[0].end()
    with scene.targets[0].span("working", "row 7"):
        clock.move(3)
        verdict = scene.verdict()
    assert verdict.cause == "ended"
    assert verdict.sentence == "all drafters have ended; still there: target-0 (working row 7)"


def test_a_worker_that_hangs_in_its_work_is_stuck(clock: FakeClock) -> None:
    scene = Scene(clock, targets=1, drafters=1)
    scene.live(scene.targets[0], 5, wait="", wait_s=0, work_s=2)
    clock.move(10)
    with scene.targets[0].span("working", "row 17"), scene.drafters[0].span("waiting", Wait.ROW):
        clock.move(300)
        verdict = scene.verdict()
    assert verdict.cause == "stuck_worker"
    assert "target-0 is stuck: working on row 17 for 300 s, a row usually takes it 2 s" in verdict.sentence


def test_meetings_that_eat_the_time_are_named(clock: FakeClock) -> None:
    scene = Scene(clock)
    start = clock.now
    for drafter in scene.drafters:
        clock.now = start
        for _ in range(5):
            work(clock, drafter, 4)
            spend(clock, drafter, "waiting", 1, Wait.MEETING)
            spend(clock, drafter, "averaging", 3)
    verdict = scene.verdict()
    assert verdict.cause == "overhead"
    assert verdict.sentence == "averaging takes 50% of the drafters' time; raise sync.every_rows"


def test_two_busy_sides_are_balanced(clock: FakeClock) -> None:
    scene = Scene(clock)
    for target in scene.targets:
        scene.live(target, 10, wait=Wait.SLOT, wait_s=0.1, work_s=3.9)
    for drafter in scene.drafters:
        scene.live(drafter, 10, wait=Wait.ROW, wait_s=0.1, work_s=3.9)
    clock.move(40)
    assert scene.verdict().cause == "balanced"


def test_before_the_first_row_it_is_starting(clock: FakeClock) -> None:
    scene = Scene(clock)
    with scene.drafters[0].span("waiting", Wait.ROW), scene.targets[0].span("working", "row 0"):
        clock.move(5)
        assert scene.verdict().cause == "starting"


def test_the_end_is_not_a_stall(clock: FakeClock) -> None:
    scene = Scene(clock)
    for worker in (*scene.targets, *scene.drafters):
        worker.end()
    clock.move(1000)
    assert scene.verdict().cause == "ended"


def test_a_run_that_has_just_ended_tells_what_limited_it(clock: FakeClock) -> None:
    scene = Scene(clock, targets=1, drafters=3)
    scene.live(scene.targets[0], 10, wait="", wait_s=0, work_s=4)
    for drafter in scene.drafters:
        scene.live(drafter, 4, wait=Wait.ROW, wait_s=6, work_s=4)
    clock.move(40)
    for worker in (*scene.targets, *scene.drafters):
        worker.end()
    verdict = scene.verdict()
    assert verdict.cause == "ended" and verdict.split == (2, 2)
    assert verdict.sentence.startswith("all workers have ended; by their speeds, drafters are starved: 1 target can")


@pytest.mark.parametrize(
    ("supply", "demand", "cause"),
    [
        (100.0, 300.0, "starved_drafters"),
        (300.0, 100.0, "drafter_bound"),
        (100.0, 105.0, "balanced"),
        (None, 1.0, "starting"),
    ],
)
def test_a_plan_is_judged_by_capacities_alone(supply: float | None, demand: float, cause: str) -> None:
    capacities = Capacities(targets=2, drafters=2, target_tokens_per_s=supply, drafter_tokens_per_s=demand)
    assert bottleneck(capacities).cause == cause
