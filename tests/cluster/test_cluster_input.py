"""Bad input to `train --cluster`: one line, before anything is written."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

import pytest
from cluster_kit import MEMORY

from draftline.cluster import joining, train
from draftline.cluster.joining import connected
from draftline.cluster.probe import HostFacts
from draftline.cluster.train import cluster_plan, train_on_cluster
from draftline.errors import DraftlineError, UserError

pytestmark = pytest.mark.timeout(1200)  # on a busy machine; a free one needs a tenth of it


def refusal(config, cluster) -> str:
    """The one line that refuses a run; nothing is written."""
    with pytest.raises(UserError) as caught:
        train_on_cluster(cluster_plan(config), cluster.address)
    assert not config.output.exists()
    return str(caught.value)


def is_one_line(pattern: str, text: str) -> bool:
    return "\n" not in text and re.search(pattern, text) is not None


def test_no_cluster_at_the_address_is_one_line(make_run):
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    config = make_run("max_rows=2")
    file = config.output.parent / "run.yaml"
    for address, told in (("127.0.0.1:9", "no Ray cluster at 127.0.0.1:9"), ("ray://x:1", "Ray client address")):
        command = [sys.executable, "-m", "draftline.cli", "train", "-c", str(file), "--cluster", address]
        code = "import sys; from draftline.cli import main; sys.argv[0] = 'draftline'; main()"
        command[1:3] = ["-c", code]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == 2, done.stderr
        assert done.stderr.startswith("draftline: --cluster: ") and told in done.stderr
        assert len(done.stderr.splitlines()) == 1 and "Traceback" not in done.stderr
        assert not config.output.exists()


def test_fewer_resources_than_workers_says_what_is_missing_where(cluster, make_run):
    config = make_run("pipeline.target_devices=[cuda]", "cluster.worker_cpus=2")
    told = refusal(config, cluster)
    assert is_one_line(r"no host has room for target-0 \(2 CPU, 1 GPU\); free: .* has 2 CPU, 0 GPU", told), told
    crowd = make_run(f"pipeline.target_devices=[{','.join(['cpu'] * 9)}]", name="crowd")
    told = refusal(crowd, cluster)
    assert is_one_line("no host has room for .*; add hosts, name fewer devices, or set cluster.wait_s", told), told


def test_missing_hosts_are_waited_for_only_if_told_to(cluster, make_run):
    config = make_run("cluster.target_resources={late: 1}", "cluster.wait_s=2", "max_rows=2")
    told = refusal(config, cluster)
    assert is_one_line("no host has room for target-0 .* after 2 s", told), told
    waiting = make_run("cluster.target_resources={late: 1}", "cluster.wait_s=60", "max_rows=2", name="waiting")
    node = cluster.add_node(num_cpus=1, object_store_memory=MEMORY, resources={"late": 1})
    result = train_on_cluster(cluster_plan(waiting), cluster.address)
    cluster.remove_node(node)
    assert result.ledger.committed == 2


def test_mixed_versions_and_a_model_that_one_host_lacks_name_the_host(cluster, make_run, monkeypatch):
    config = make_run("max_rows=2")
    monkeypatch.setattr(joining, "host_facts", lambda host, paths: HostFacts(host, {"torch": "0.1"}, ()))
    real = joining._answer
    monkeypatch.setattr(joining, "_answer", lambda host, ref: HostFacts(host, {"torch": "0.2"}, ()))
    told = refusal(config, cluster)
    assert is_one_line(r"host .*: torch is 0.2 there and 0.1 on the head node", told), told
    monkeypatch.setattr(joining, "_answer", real)
    monkeypatch.undo()
    monkeypatch.setattr(train, "_paths", lambda config: ["/nowhere/model"])
    told = refusal(config, cluster)
    assert is_one_line("host .*: /nowhere/model is there on the head node, but not on this host", told), told


def test_an_object_store_that_is_too_small_says_how_large_it_must_be(cluster, make_run):
    config = make_run("pipeline.hs_queue_depth=20000")
    told = refusal(config, cluster)
    assert is_one_line("its object store has .* MiB are needed .*--object-store-memory=", told), told


def test_a_target_that_cannot_be_loaded_is_one_line_with_its_host(cluster, make_run, tiny_target_dir, tmp_path):
    broken = shutil.copytree(tiny_target_dir, tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:200])
    config = make_run(model=broken)
    with pytest.raises(DraftlineError, match=r"target-0 on .*model.safetensors|drafter-0 on ") as caught:
        train_on_cluster(cluster_plan(config), cluster.address)
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)
    assert not config.output.exists()


def test_what_only_one_host_can_do_is_refused(make_run, tmp_path):
    with pytest.raises(UserError, match=r"states.mode cache keeps states on one host's disk"):
        cluster_plan(make_run("states.mode=cache", f"states.path={tmp_path / 'states'}"))


def test_a_running_cluster_is_used_and_left_alone(cluster):
    with connected("auto", store_bytes=0, cpus=1) as address:
        assert address == cluster.address
