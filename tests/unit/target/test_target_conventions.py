"""Tap ids convert in one place, both ways, and refuse the embedding and the last layer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftline.errors import UserError
from draftline.target.conventions import aux_ids_to_taps, check_taps, taps_to_aux_ids


def test_the_published_example_converts() -> None:
    assert taps_to_aux_ids((1, 9, 17, 25, 33), 36) == (2, 10, 18, 26, 34)


@given(st.integers(2, 80).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 2), min_size=1))))
def test_there_and_back_is_the_same(case: tuple[int, set[int]]) -> None:
    layers, taps = case
    assert aux_ids_to_taps(taps_to_aux_ids(sorted(taps), layers), layers) == tuple(sorted(taps))


@pytest.mark.parametrize("taps", [(3,), (-1,), (4,), (0, 9), (), (1, 1), (2, 1)])
def test_bad_taps_are_refused(taps: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match="taps"):
        check_taps(taps, 4)


@pytest.mark.parametrize(("aux", "what"), [((0, 1), "embedding"), ((2, 4), "last layer"), ((9,), "not a layer")])
def test_bad_aux_ids_are_refused(aux: tuple[int, ...], what: str) -> None:
    with pytest.raises(UserError, match=what):
        aux_ids_to_taps(aux, 4)
