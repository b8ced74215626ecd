"""Promises of the run's metrics: token-weighted smoothing, rates of the recent window, gauges called without a lock."""

from __future__ import annotations

import math
import threading

import pytest
from monitor_fakes import FakeClock, spend, work

from draftline.monitor.metrics import LOSS_HALF_LIFE_ROWS, RunMetrics, TrainingStats, ValidationLengths
from draftline.monitor.run import tracked_numbers
from draftline.monitor.status import LedgerCounts, QueueGauge, StatusSnapshot, Wait


def stats(numerator: float, denominator: float, rows: int = 1, **more: float) -> TrainingStats:
    return TrainingStats(
        rows=rows,
        tokens=100,
        supervised_tokens=50,
        numerator=numerator,
        denominator=denominator,
        **more,  # type: ignore[arg-type]
    )


def test_loss_is_weighted_by_its_denominators(clock: FakeClock) -> None:
    metrics = RunMetrics(clock=clock)
    metrics.record_training(stats(10.0, 1.0, rows=0))
    metrics.record_training(stats(100.0, 99.0, rows=0))
    assert metrics.snapshot().loss == pytest.approx(1.1)


def test_old_rows_fade_with_the_half_life(clock: FakeClock) -> None:
    metrics = RunMetrics(clock=clock)
    metrics.record_training(stats(4.0, 1.0))
    metrics.record_training(stats(0.0, 1.0, rows=int(LOSS_HALF_LIFE_ROWS)))
    assert metrics.snapshot().loss == pytest.approx(4.0 * 0.5 / 1.5)


def test_acceptance_counts_the_bonus_token(clock: FakeClock) -> None:
    metrics = RunMetrics(clock=clock)
    assert metrics.snapshot().acceptance is None
    metrics.record_training(stats(1, 1, acceptance_sum=6, acceptance_blocks=4))
    assert metrics.snapshot().acceptance == pytest.approx(2.5)


def test_non_finite_sums_are_counted_and_left_out(clock: FakeClock) -> None:
    metrics = RunMetrics(clock=clock)
    metrics.record_training(stats(2.0, 1.0))
    metrics.record_training(stats(math.nan, 1.0))
    metrics.record_training(TrainingStats(1, 1, 1, 2.0, 1.0, terms={"ce": (math.inf, 1.0), "kl": (3.0, 2.0)}))
    snapshot = metrics.snapshot()
    assert (snapshot.loss, snapshot.nonfinite_updates) == (2.0, 1)
    assert snapshot.terms == {"kl": 1.5}


def test_validation_is_the_newest_scores_and_each_length_has_a_curve(clock: FakeClock) -> None:
    metrics = RunMetrics(clock=clock)
    assert not any(name.startswith("validation/") for name in tracked_numbers(metrics.snapshot()))
    metrics.record_validation(loss=9.0, lengths=ValidationLengths({"chain": 1.0}))
    metrics.record_validation(
        loss=3.0,
        lengths=ValidationLengths({"chain": 2.0, "tree@16": 2.5}, {"chain": 1.9, "tree@16": 2.25}),
    )
    snapshot = metrics.snapshot()
    assert (snapshot.validation_loss, snapshot.validation_acceptance) == (3.0, 2.0)
    curves = {k: v for k, v in tracked_numbers(snapshot).items() if k.startswith("validation/")}
    assert curves == {
        "validation/loss": 3.0,
        "validation/acceptance": 2.0,
        "validation/acceptance_tree_16": 2.5,
        "validation/acceptance_walk": 1.9,
        "validation/acceptance_walk_tree_16": 2.25,
    }


def test_capacity_sums_over_workers_and_leaves_the_dead_out(clock: FakeClock) -> None:
    metrics = RunMetrics(clock=clock)
    targets = [metrics.worker(f"target-{i}") for i in range(3)]
    for target in targets:
        work(clock, target, seconds=2, tokens=1000)
    work(clock, metrics.worker("drafter-0"), seconds=4, tokens=1000)
    targets[2].end("gone")
    capacities = metrics.snapshot().capacities
    assert (capacities.targets, capacities.drafters) == (2, 1)
    assert (capacities.target_tokens_per_s, capacities.drafter_tokens_per_s) == (1000, 250)


def test_time_left_follows_the_rate_of_rows(clock: FakeClock) -> None:
    metrics = RunMetrics(clock=clock)
    metrics.watch(ledger=lambda: LedgerCounts(planned=100, committed=30, set_aside=4, trained=6))
    drafter = metrics.worker("drafter-0")
    for _ in range(10):
        work(clock, drafter, seconds=2, tokens=500)
    snapshot = metrics.snapshot()
    assert snapshot.time_left_s == pytest.approx(120)
    assert snapshot.tokens_per_s == pytest.approx(250)
    assert (snapshot.rows_trained, snapshot.tokens_trained) == (10, 5000)


def test_rates_forget_what_is_older_than_the_window(clock: FakeClock) -> None:
    metrics = RunMetrics(clock=clock, window_s=60)
    drafter = metrics.worker("drafter-0")
    spend(clock, drafter, "working", 1000)
    for _ in range(60):
        work(clock, drafter, seconds=1, tokens=500)
    assert metrics.snapshot().tokens_per_s == pytest.approx(500, rel=0.05)


def test_data_loading_has_a_capacity_of_its_own(clock: FakeClock) -> None:
    metrics = RunMetrics(clock=clock)
    target = metrics.worker("target-0")
    for _ in range(3):
        spend(clock, target, "waiting", 5, Wait.SAMPLES)
        work(clock, target, seconds=1, tokens=1000)
    capacities = metrics.snapshot().capacities
    assert capacities.data_tokens_per_s == pytest.approx(200)
    assert capacities.target_tokens_per_s == pytest.approx(1000)


def test_gauges_may_use_the_metrics_themselves(clock: FakeClock) -> None:
    metrics = RunMetrics(clock=clock)

    def gauge() -> QueueGauge:
        metrics.worker("target-0").done()
        metrics.record_training(stats(1, 1))
        return QueueGauge(rows=2, bytes=2048, max_rows=4)

    metrics.watch(queue=gauge)
    found: list[StatusSnapshot] = []
    thread = threading.Thread(target=lambda: found.append(metrics.snapshot()), daemon=True)
    thread.start()
    thread.join(timeout=30)
    assert found and found[0].queue == QueueGauge(rows=2, bytes=2048, max_rows=4)


def test_a_snapshot_survives_json(clock: FakeClock) -> None:
    metrics = RunMetrics(clock=clock)
    work(clock, metrics.worker("target-0"), 1)
    work(clock, metrics.worker("drafter-0"), 1)
    snapshot = metrics.snapshot()
    assert StatusSnapshot.model_validate_json(snapshot.model_dump_json()) == snapshot
