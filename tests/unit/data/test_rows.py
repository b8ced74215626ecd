"""Promises of the plan: every sample once per epoch, rows within their bound, a seeded order alike everywhere."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftline.data.rows import plan_fill, plan_rows, seeded_order
from draftline.errors import UserError

LENGTHS = st.lists(st.integers(1, 64), min_size=1, max_size=400)


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(0, 2**31), st.integers(1, 3), st.integers(64, 300))
def test_every_sample_exactly_once_per_epoch_and_no_row_too_long(
    lengths: list[int], seed: int, epochs: int, row_tokens: int
) -> None:
    supervised = [max(1, n // 2) for n in lengths]
    rows = plan_rows(lengths, supervised, row_tokens=row_tokens, seed=seed, epochs=epochs)
    assert [row.row_id for row in rows] == list(range(len(rows)))
    assert [row.epoch for row in rows] == sorted(row.epoch for row in rows)
    for epoch in range(epochs):
        seen = Counter(i for row in rows if row.epoch == epoch for i in row.samples)
        assert seen == Counter(range(len(lengths)))
    for row in rows:
        assert row.n_tokens == sum(lengths[i] for i in row.samples) <= row_tokens
        assert row.n_supervised == sum(supervised[i] for i in row.samples)


@settings(max_examples=30, deadline=None)
@given(LENGTHS, st.integers(0, 2**31))
def test_same_arguments_same_plan(lengths: list[int], seed: int) -> None:
    def plan() -> list:
        return plan_rows(np.asarray(lengths, np.int32), lengths, row_tokens=128, seed=seed, epochs=2)

    assert plan() == plan()


def test_order_differs_between_epochs_and_seeds() -> None:
    orders = {tuple(seeded_order(50, seed=s, epoch=e)) for s in range(3) for e in range(4)}
    assert len(orders) == 12


def test_order_is_pinned_so_that_no_platform_or_release_changes_it() -> None:
    assert seeded_order(10, seed=0, epoch=0).tolist() == [0, 9, 3, 7, 6, 8, 4, 1, 2, 5]
    assert seeded_order(10, seed=7, epoch=1).tolist() == [8, 3, 1, 4, 2, 7, 6, 9, 0, 5]


def test_max_rows_keeps_the_first_rows_of_the_same_plan() -> None:
    lengths = [10] * 100
    whole = plan_rows(lengths, lengths, row_tokens=40, seed=3, epochs=4)
    assert plan_rows(lengths, lengths, row_tokens=40, seed=3, epochs=4, max_rows=30) == whole[:30]
    assert plan_rows(lengths, lengths, row_tokens=40, seed=3, epochs=4, max_rows=10_000) == whole


def test_fill_is_at_least_98_percent_on_chat_like_lengths() -> None:
    lengths = np.random.default_rng(0).lognormal(6.0, 0.9, 4000).clip(16, 4096).astype(np.int32)
    rows = plan_rows(lengths, lengths, row_tokens=4096, seed=0, epochs=1)
    assert plan_fill(rows, 4096) > 0.98


def test_length_does_not_decide_when_a_sample_is_trained() -> None:
    lengths = np.random.default_rng(1).integers(8, 512, 4000)
    rows = plan_rows(lengths, lengths, row_tokens=1024, seed=0, epochs=1)
    place = np.empty(4000)
    for row in rows:
        place[list(row.samples)] = row.row_id
    assert abs(np.corrcoef(place, lengths)[0, 1]) < 0.05


def test_a_sample_longer_than_a_row_is_refused_with_both_numbers() -> None:
    with pytest.raises(UserError, match=r"sample 1 has 99 tokens, more than data.row_tokens 64; set data.row_tokens"):
        plan_rows([5, 99], [1, 1], row_tokens=64, seed=0, epochs=1)


def test_no_samples_is_refused() -> None:
    with pytest.raises(UserError, match="no samples"):
        plan_rows([], [], row_tokens=64, seed=0, epochs=1)
