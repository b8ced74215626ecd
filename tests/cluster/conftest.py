"""A Ray cluster of several raylets on this machine, a tiny data set, and runs on both."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from cluster_kit import MEMORY
from host_kit import possible
from ray.cluster_utils import Cluster

from draftline.cluster.joining import NAMESPACE
from draftline.config.load import load_config
from draftline.config.schema import RunConfig
from draftline.data.manifest import DatasetFacts
from draftline.data.shards import ShardWriter

TINY_YAML = """
output: {output}
seed: 3
target: {{model: "{model}"}}
data: {{path: "{data}", row_tokens: 64}}
drafter: {{num_layers: 2, block_size: 4, taps: [0, 2], mask_token_id: 500, intermediate_size: 64}}
objective: {{anchors: 16, decay: {{kind: exponential, gamma: 4}}}}
optimizer: {{learning_rate: 1e-3}}
pipeline: {{target_devices: [cpu], drafter_devices: [cpu], stall_timeout_s: 120, max_restarts: 8}}
sync: {{kind: average, every_rows: 3}}
checkpoint: {{every_rounds: 1, keep: 1000}}
cluster: {{averaging_timeout_s: 20}}
"""
# Where no network namespaces may be made, hosts are raylets of one address only.
collect_ignore = [] if possible() else ["test_cluster_hosts.py"]
# A node that falls silent counts as dead after three missed seconds; Ray's own defaults need half a minute.
QUICK_DEATH = {
    "health_check_initial_delay_ms": 3000,
    "health_check_period_ms": 1000,
    "health_check_failure_threshold": 3,
}


def write_dataset(path: Path, n_samples: int = 40) -> Path:
    rng = np.random.default_rng(0)
    with ShardWriter(path) as writer:
        for i in range(n_samples):
            n = int(rng.integers(12, 31))
            writer.add(f"sample-{i}", rng.integers(3, 400, n).tolist(), [False] * 6 + [True] * (n - 6))
        writer.finish(DatasetFacts(tokenizer_fingerprint="tiny", template_hash="tiny", vocab_size=400, max_tokens=64))
    return path


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "tiny")


@pytest.fixture
def make_run(tmp_path: Path, tiny_target_dir: Path, tiny_data: Path) -> Callable[..., RunConfig]:
    """`make_run("key=value", ..., name="run")`: a configuration whose output is a new folder of the test."""

    def make(*overrides: str, name: str = "run", **paths: Any) -> RunConfig:
        file = tmp_path / f"{name}.yaml"
        values = {"output": tmp_path / name, "model": tiny_target_dir, "data": tiny_data, **paths}
        file.write_text(TINY_YAML.format(**values), encoding="utf-8")
        return load_config([file], overrides)

    return make


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head node without room for workers, and three nodes with room for two each."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    head = {"num_cpus": 0, "object_store_memory": MEMORY, "_system_config": QUICK_DEATH, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args=head)
    for name in ("first", "second", "third"):
        made.add_node(num_cpus=2, object_store_memory=MEMORY, resources={name: 8})
    ray.init(address=made.address, namespace=NAMESPACE, log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()
