"""Promises of the capacity model: who limits, what waiting costs, and what the old scheme loses."""

from __future__ import annotations

import pytest

from draftline.capacity import (
    Rates,
    Rounds,
    averaging_bytes,
    best_split,
    expect,
    expect_sharing,
    partition,
    ranked_splits,
    row_traffic_bytes_per_s,
)

QUIET = Rounds(row_tokens=100, rows_per_drafter=50)


def test_the_slower_side_limits_and_the_other_waits():
    by_targets = expect(Rates(10, 100), 2, 3, QUIET)
    assert by_targets.tokens_per_s == pytest.approx(20)
    assert by_targets.drafter_waiting == pytest.approx(1 - 20 / 300) and by_targets.target_waiting == 0
    by_drafters = expect(Rates(100, 10), 2, 3, QUIET)
    assert by_drafters.tokens_per_s == pytest.approx(30)
    assert by_drafters.target_waiting == pytest.approx(0.85) and by_drafters.drafter_waiting == 0


def test_the_partitioned_scheme_loses_what_uneven_groups_cannot_share():
    """Five targets, three drafters of 5/3 the rate: two drafters get two targets each, one gets one and starves."""
    rates = Rates(3, 5)
    shared, old = expect(rates, 5, 3, QUIET), expect(rates, 5, 3, QUIET, "partitioned")
    assert partition(5, 3) == [2, 2, 1]
    assert shared.tokens_per_s == pytest.approx(15) and old.tokens_per_s == pytest.approx(5 + 5 + 3)
    assert old.drafter_waiting == pytest.approx(1 - 13 / 15)


def test_the_schemes_are_alike_where_groups_are_even():
    rates = Rates(3, 5)
    assert expect(rates, 4, 2, QUIET, "partitioned").tokens_per_s == expect(rates, 4, 2, QUIET).tokens_per_s


def test_averaging_takes_its_time_from_the_drafters_when_they_limit():
    """A round is 50 rows of 100 tokens at 10 tokens/s: 500 s; an averaging of 50 s makes it 550 s."""
    slow = expect(Rates(100, 10), 2, 2, Rounds(100, 50, averaging_s=50, queue_rows=1000))
    assert slow.tokens_per_s == pytest.approx(20 / 1.1) and slow.averaging == pytest.approx(50 / 550)


def test_averaging_costs_starved_drafters_nothing_as_long_as_the_queue_takes_what_comes():
    """Targets deliver 0.5 rows/s; in 10 s of averaging they fill 5 rows of the queue."""
    rates = Rates(25, 500)
    assert expect(rates, 2, 2, Rounds(100, 50, 10, queue_rows=8)).tokens_per_s == pytest.approx(50)
    assert expect(rates, 2, 2, Rounds(100, 50, 10, queue_rows=2)).tokens_per_s < 49


def test_scatter_costs_most_where_the_sides_are_equal_and_a_longer_queue_takes_it_up():
    def loss(target: float, queue_rows: int) -> float:
        rounds = Rounds(100, 10**6, queue_rows=queue_rows)
        expected = expect(Rates(target, 5, jitter=0.5), 5, 3, rounds)
        return 1 - expected.tokens_per_s / min(5 * target, 15)

    assert loss(3, 8) > loss(3, 32) > 0
    assert loss(3, 8) > loss(6, 8) and loss(3, 8) > loss(1.5, 8)
    # v / (2 K) of 15 tokens/s in rows of 100: v = 0.25 * 2 * 0.15, K = 8
    assert loss(3, 8) == pytest.approx(0.25 * 2 / (2 * 8), rel=0.05)


def test_one_device_is_shared_in_turns():
    expected = expect_sharing(Rates(30, 60), QUIET)
    assert expected.tokens_per_s == pytest.approx(20)
    assert expected.target_waiting == pytest.approx(1 / 3) and expected.drafter_waiting == pytest.approx(2 / 3)


def test_splits_are_ranked_and_the_best_lets_most_tokens_through():
    assert best_split(10, 10, 8) == (4, 4)
    assert best_split(30, 10, 8) == (2, 6)
    assert best_split(1, 100, 8) == (7, 1)
    assert best_split(5, 5, 2) == (1, 1)
    ranked = ranked_splits(Rates(3, 5), 8, lambda _t, _d: QUIET)
    assert (ranked[0].targets, ranked[0].drafters) == (5, 3) and len(ranked) == 7
    assert ranked[0].tokens_per_s >= ranked[-1].tokens_per_s


def test_bytes_between_devices():
    assert row_traffic_bytes_per_s(1000, 50.0) == 50_000
    assert averaging_bytes(10, 3, with_moments=True) == 2 * 2 * 3 * 4 * 10
    assert averaging_bytes(10, 1, with_moments=True) == 0


@pytest.mark.parametrize(("targets", "drafters", "scheme"), [(0, 1, "shared"), (1, 0, "shared"), (1, 2, "partitioned")])
def test_impossible_splits_are_refused(targets, drafters, scheme):
    with pytest.raises(ValueError, match=r"at least one|cannot feed"):
        expect(Rates(1, 1), targets, drafters, QUIET, scheme)
