"""Loaded tiny targets and hand-made samples."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftline.config.schema import TargetConfig
from draftline.records import PlannedRow
from draftline.target.load import LoadedTarget, load_target
from draftline.target.selftest import ProbeSample

LoadTiny = Callable[..., LoadedTarget]


@pytest.fixture(scope="session")
def load_tiny(make_tiny_target: Callable[..., Path], tiny_tokenizer: Any) -> LoadTiny:
    """`load_tiny(kind, **config_changes)`, loaded once a session for each; never change what it returns."""
    loaded: dict[tuple[str, str], LoadedTarget] = {}

    def load(kind: str, **changes: Any) -> LoadedTarget:
        key = (kind, str(sorted(changes.items())))
        if key not in loaded:
            config = TargetConfig(model=str(make_tiny_target(kind)), **changes)
            loaded[key] = load_target(config, "cpu", tokenizer=tiny_tokenizer)
        return loaded[key]

    return load


@pytest.fixture(scope="session")
def make_samples() -> Callable[..., list[ProbeSample]]:
    """`make_samples(lengths, seed=0)`: random samples; the first half of each is the prompt."""

    def make(lengths: tuple[int, ...], seed: int = 0) -> list[ProbeSample]:
        rng = np.random.default_rng(seed)
        return [
            ProbeSample(f"s{i}", rng.integers(0, 512, n).astype(np.int32), np.arange(n) >= n // 2)
            for i, n in enumerate(lengths)
        ]

    return make


@pytest.fixture(scope="session")
def row_of() -> Callable[[list[ProbeSample]], PlannedRow]:
    """`row_of(samples)`: the planned row that packs them."""

    def row(samples: list[ProbeSample]) -> PlannedRow:
        tokens = sum(len(s.input_ids) for s in samples)
        supervised = sum(int(s.loss_mask.sum()) for s in samples)
        return PlannedRow(5, 1, tuple(range(len(samples))), tokens, supervised)

    return row


@pytest.fixture
def samples(make_samples: Callable[..., list[ProbeSample]]) -> list[ProbeSample]:
    return make_samples((17, 33, 1, 30, 25))
