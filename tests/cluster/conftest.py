"""A Ray cluster of several raylets on this machine, a tiny data set, and runs on both."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from cluster_kit import DEFAULTS, LOSSY, node_with, samples_of
from host_kit import possible
from ray.cluster_utils import Cluster

from draftline.cluster.joining import NAMESPACE
from draftline.config.schema import RunConfig
from draftline.pipeline.coordinator import train
from draftline.pipeline.runplan import make_run_plan
from tiny_run_kit import tiny_config, write_dataset

# Where no network namespaces may be made, hosts are raylets of one address only.
collect_ignore = [] if possible() else ["test_cluster_hosts.py"]
# A node that falls silent counts as dead after three missed seconds; Ray's own defaults need half a minute.
RAYLETS = {
    "health_check_initial_delay_ms": 3000,
    "health_check_period_ms": 1000,
    "health_check_failure_threshold": 3,
    "prestart_worker_first_driver": False,  # each costs seconds of a core, and few are needed
}
# Of the processes that Ray starts beside each head, those that no test needs.
LEAN = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "tiny")


@pytest.fixture
def make_run(tmp_path: Path, tiny_target_dir: Path, tiny_data: Path) -> Callable[..., RunConfig]:
    """`make_run("key=value", ..., name="run")`: a configuration whose output is a new folder of the test."""

    def make(*overrides: str, name: str = "run", **paths: Any) -> RunConfig:
        found = {"model": tiny_target_dir, "data": tiny_data, **paths}
        return tiny_config(tmp_path, name, (*DEFAULTS, *overrides), **found)

    return make


@pytest.fixture(scope="session")
def samples_of_threads(
    tmp_path_factory: pytest.TempPathFactory, tiny_target_dir: Path, tiny_data: Path
) -> list[tuple[int, int]]:
    """What an unbroken `LOSSY` run of threads commits."""
    folder = tmp_path_factory.mktemp("threads")
    config = tiny_config(folder, "run", (*DEFAULTS, *LOSSY), model=tiny_target_dir, data=tiny_data)
    train(make_run_plan(config))
    return samples_of(config)


@pytest.fixture(scope="session")
def head() -> Iterator[Cluster]:
    """A cluster of one node with room for three workers. Tests leave it as they found it."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    made = Cluster(initialize_head=True, head_node_args={**node_with("first"), **LEAN, "_system_config": RAYLETS})
    ray.init(address=made.address, namespace=NAMESPACE, log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture(scope="session")
def cluster(head: Cluster) -> Cluster:
    """The same with a second node."""
    head.add_node(**node_with("second"))
    return head
