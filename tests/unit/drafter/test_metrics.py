"""Metrics are additive sums, and acceptance length is counted per block before anything is averaged."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor

from draftline.drafter.head import SlotValues
from draftline.drafter.metrics import RowOutcome, StepStats, accepted_run, sum_row


def outcome(
    rank_AB: list[list[int]], valid_AK: list[list[int]], *, numerator: float = 2.0, confidence: float = 0.65
) -> RowOutcome:
    """A row whose slots have these ranks (slot 0 included, ignored) and validity (slots 1..)."""
    rank = torch.tensor(rank_AB, dtype=torch.float32)
    mask = torch.tensor([[0, *row] for row in valid_AK], dtype=torch.bool)
    flat = mask.flatten().float()
    zeros = torch.zeros_like(flat)
    values = SlotValues(
        ce=0.5 * flat,
        kl=zeros,
        tv=zeros,
        reverse_kl=zeros,
        cap=zeros,
        rank=rank.flatten() * flat,
        confidence=confidence * flat,
        agrees=flat,
    )
    weight = mask.float() * 0.5
    return RowOutcome(mask, weight, values, torch.tensor(numerator), weight.sum(), torch.tensor(1.0))


def test_runs_are_counted_per_block_not_multiplied_from_averages() -> None:
    """Runs of 3 and 0 drafts: 1 + 1.5. Averaging slots first would give 1 + 0.5 + 0.25 + 0.125."""
    stats = sum_row(outcome([[9, 0, 0, 0], [9, 5, 0, 0]], [[1, 1, 1], [1, 1, 1]]))
    assert stats.summary()["acceptance_length"] == 2.5
    correct = torch.tensor([[True, True, True], [False, True, True]])
    assert accepted_run(correct, torch.ones_like(correct)).tolist() == [3, 0]


def test_an_unsupervised_slot_ends_a_run_and_cut_blocks_are_reported_apart() -> None:
    stats = sum_row(outcome([[9, 0, 0, 0], [9, 0, 0, 0], [9, 0, 0, 0]], [[1, 1, 1], [1, 1, 0], [0, 0, 0]]))
    summary = stats.summary()
    assert summary["acceptance_length"] == 4.0
    assert summary["truncated_acceptance_length"] == 3.0
    assert summary["counts"]["blocks"] == 2
    assert summary["counts"]["supervised_slots"] == 5


@pytest.mark.parametrize(("ranks", "expected"), [([9, 0, 0, 0], 4.0), ([9, 1, 0, 0], 1.0), ([9, 0, 0, 3], 3.0)])
def test_oracle_drafts_give_exactly_their_length(ranks: list[int], expected: float) -> None:
    assert sum_row(outcome([ranks] * 5, [[1, 1, 1]] * 5)).summary()["acceptance_length"] == expected


def test_recall_counts_the_label_among_the_best_k() -> None:
    stats = sum_row(outcome([[0, 0, 1, 3], [0, 7, 8, 16]], [[1, 1, 1], [1, 1, 1]]))
    recall = stats.summary()["recall"]
    assert recall == {
        "1": [0.5, 0.0, 0.0],
        "2": [0.5, 0.5, 0.0],
        "4": [0.5, 0.5, 0.5],
        "8": [1.0, 0.5, 0.5],
        "16": [1.0, 1.0, 0.5],
    }


def test_calibration_error_is_the_gap_between_confidence_and_accuracy() -> None:
    half_right = outcome([[0, 0, 1, 0], [0, 1, 0, 1]], [[1, 1, 1], [1, 1, 1]], confidence=0.65)
    assert sum_row(half_right).summary()["calibration_error"] == pytest.approx(0.15)
    sure = outcome([[0, 0, 0, 0]], [[1, 1, 1]], confidence=1.0)
    assert sum_row(sure).summary()["calibration_error"] == pytest.approx(0.0)


def test_sums_of_rows_add_up_to_the_sums_of_all_blocks() -> None:
    ranks, valid = [[9, 0, 0, 0], [9, 5, 0, 0], [9, 0, 2, 0]], [[1, 1, 1], [1, 1, 0], [1, 1, 1]]
    together = sum_row(outcome(ranks, valid, numerator=3.0))
    parts = [sum_row(outcome([r], [v], numerator=1.0)) for r, v in zip(ranks, valid, strict=True)]
    total = parts[0] + parts[1] + parts[2]
    assert total.scalar("rows") == 3
    total.scalar("rows").fill_(1.0)
    torch.testing.assert_close(total.vector, together.vector)


def test_a_row_that_is_not_finite_spoils_nothing_but_is_counted() -> None:
    good = sum_row(outcome([[9, 0, 0, 0]], [[1, 1, 1]]))
    bad = sum_row(outcome([[9, 0, 0, 0]], [[1, 1, 1]], numerator=float("nan")))
    assert bool(good.finite)
    assert not bool(bad.finite)
    total = good + bad
    assert not bool(total.finite)
    assert float(total.numerator) == float(good.numerator)
    assert total.summary()["counts"]["nonfinite_rows"] == 1
    assert total.summary()["counts"]["rows"] == 2


def test_a_gradient_that_is_not_finite_is_seen_too() -> None:
    row = outcome([[9, 0, 0, 0]], [[1, 1, 1]])
    broken = RowOutcome(
        row.mask_AB, row.weight_AB, row.values, row.numerator, row.denominator, torch.tensor(float("inf"))
    )
    assert not bool(sum_row(broken).finite)


def test_nothing_counted_reads_as_nothing_not_as_zero() -> None:
    summary = StepStats.of_empty_row(4, "cpu").summary()
    assert summary["loss"] is None
    assert summary["acceptance_length"] is None
    assert summary["recall"]["1"] == [None, None, None]
    assert summary["counts"]["empty_rows"] == summary["counts"]["rows"] == 1


def test_summary_is_json_and_terms_share_the_divisor() -> None:
    stats = sum_row(outcome([[9, 0, 0, 0]], [[1, 1, 1]]))
    assert json.loads(json.dumps(stats.summary())) == stats.summary()
    divisors: set[float] = {float(d) for _, d in stats.terms.values()}
    assert divisors == {1.5}
    numerator: Tensor = stats.terms["ce"][0]
    assert float(numerator) == pytest.approx(3 * 0.5 * 0.5)


def test_block_sizes_do_not_mix() -> None:
    with pytest.raises(ValueError, match="block size"):
        StepStats.zeros(4) + StepStats.zeros(5)
