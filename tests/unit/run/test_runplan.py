"""Memory that a plan tells, card by card."""

from __future__ import annotations

import pytest

from draftline.pipeline.runplan import _cards, compute_dtype


@pytest.mark.parametrize(
    ("gigabytes", "words"), [(20, "24 GB"), (80, "96 GB"), (95, "141 GB"), (120, "141 GB"), (300, "more than")]
)
def test_the_smallest_card_that_fits_is_named(gigabytes, words):
    assert words in _cards(int(gigabytes * 1e9))


def test_auto_dtype_is_fp32_on_the_cpu_and_bf16_on_a_gpu():
    assert (compute_dtype("auto", "cpu"), compute_dtype("auto", "cuda:1")) == ("float32", "bfloat16")
    assert compute_dtype("float16", "cpu") == "float16"
