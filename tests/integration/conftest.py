"""A tiny data set and run configuration for whole-pipeline tests on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftline.config.schema import RunConfig
from tiny_run_kit import TINY_YAML, tiny_config, write_dataset

MakeRun = Callable[..., RunConfig]


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "tiny")


@pytest.fixture(scope="session")
def make_data() -> Callable[..., Path]:
    """`write_dataset`, for tests that need another data set."""
    return write_dataset


@pytest.fixture(scope="session")
def tiny_yaml() -> str:
    """TINY_YAML, for fixtures that live longer than one test."""
    return TINY_YAML


@pytest.fixture
def make_run(tmp_path: Path, tiny_target_dir: Path, tiny_data: Path) -> MakeRun:
    """`make_run("key=value", ..., name="run")`: a configuration whose output is a new folder of the test."""

    def make(*overrides: str, name: str = "run", **paths: Any) -> RunConfig:
        return tiny_config(tmp_path, name, overrides, **{"model": tiny_target_dir, "data": tiny_data, **paths})

    return make
