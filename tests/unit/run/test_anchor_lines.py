"""What a plan says about anchors that are not there."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from draftline.pipeline.anchors import anchor_lines, count_anchors
from draftline.records import PlannedRow


@pytest.mark.parametrize(
    ("mask", "block_size", "expected"),
    [
        ("0011111", 4, (5, 3)),
        ("0011111", 6, (5, 1)),
        ("0011111", 7, (5, 0)),
        ("1111", 3, (3, 2)),  # nothing comes before the first token
        ("0101011", 2, (4, 4)),
        ("0101011", 3, (4, 1)),
        ("0000", 4, (0, 0)),
        ("1", 2, (0, 0)),
    ],
)
def test_anchors_and_whole_blocks_are_counted(mask: str, block_size: int, expected: tuple[int, int]) -> None:
    flags = np.array([c == "1" for c in mask])
    assert count_anchors(flags, block_size) == expected
    brute = [p for p in range(len(mask) - 1) if flags[p + 1]]
    whole = [p for p in brute if p + block_size <= len(mask) and flags[p + 1 : p + block_size].all()]
    assert (len(brute), len(whole)) == expected


def test_too_many_anchors_and_too_long_blocks_are_told_and_fitting_ones_are_not() -> None:
    flags = np.array([False] * 3 + [True] * 9)
    dataset = SimpleNamespace(sample=lambda index: SimpleNamespace(loss_mask=flags))
    rows = [PlannedRow(i, 0, (0,) * (i + 1), 12 * (i + 1), 9 * (i + 1)) for i in range(2)]
    assert anchor_lines(dataset, rows, 18, 4) == []
    (line,) = anchor_lines(dataset, rows, 19, 4)
    assert "19 wanted, rows hold 9 to 18" in line
    (line,) = anchor_lines(dataset, rows, 18, 9)
    assert "6 of 27 anchors start a whole block of 9" in line
