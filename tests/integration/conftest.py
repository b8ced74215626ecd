"""A tiny data set and run configuration for whole-pipeline tests on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftline.config.load import load_config
from draftline.config.schema import RunConfig
from draftline.data.manifest import DatasetFacts
from draftline.data.shards import ShardWriter

MakeRun = Callable[..., RunConfig]
TINY_YAML = """
output: {output}
seed: 3
target: {{model: "{model}"}}
data: {{path: "{data}", row_tokens: 64}}
drafter: {{num_layers: 2, block_size: 4, taps: [0, 2], mask_token_id: 500, intermediate_size: 64}}
objective: {{anchors: 16, decay: {{kind: exponential, gamma: 4}}}}
optimizer: {{learning_rate: 1e-3}}
pipeline: {{target_devices: [cpu], drafter_devices: [cpu], stall_timeout_s: 120}}
sync: {{kind: average, every_rows: 3}}
checkpoint: {{every_rounds: 1, keep: 3}}
"""


def write_dataset(path: Path, *, n_samples: int = 40, seed: int = 0) -> Path:
    """Random samples of 12 to 30 tokens, the first six of each a prompt."""
    rng = np.random.default_rng(seed)
    with ShardWriter(path) as writer:
        for i in range(n_samples):
            n = int(rng.integers(12, 31))
            mask = [False] * 6 + [True] * (n - 6)
            writer.add(f"sample-{i}", rng.integers(3, 400, n).tolist(), mask)
        writer.finish(DatasetFacts(tokenizer_fingerprint="tiny", template_hash="tiny", vocab_size=400, max_tokens=64))
    return path


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
        file = tmp_path / f"{name}.yaml"
        values = {"output": tmp_path / name, "model": tiny_target_dir, "data": tiny_data, **paths}
        file.write_text(TINY_YAML.format(**values), encoding="utf-8")
        return load_config([file], overrides)

    return make
