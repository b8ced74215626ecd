"""Bad input to `train --cluster`: one line, before anything is written."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import threading

import pytest
from cluster_kit import MEMORY
from ray._private import services
from ray.util.placement_group import remove_placement_group

from draftline.cluster import crew, joining, train
from draftline.cluster.demand import Seat
from draftline.cluster.joining import connected, place
from draftline.cluster.probe import HostFacts
from draftline.cluster.train import cluster_plan, train_on_cluster
from draftline.cluster.workers import TargetActor
from draftline.errors import DraftlineError, UserError

pytestmark = pytest.mark.timeout(1200)  # on a busy machine; a free one needs a tenth of it


@pytest.fixture
def cluster(head):
    """One node is enough here."""
    return head


def refusal(config, cluster) -> str:
    """The one line that refuses a run; nothing is written."""
    with pytest.raises(UserError) as caught:
        train_on_cluster(cluster_plan(config), cluster.address)
    assert not config.output.exists()
    return str(caught.value)


def is_one_line(pattern: str, text: str) -> bool:
    return "\n" not in text and re.search(pattern, text) is not None


def test_no_cluster_at_the_address_is_one_line(make_run):
    config = make_run("max_rows=2")
    file = config.output.parent / "run.yaml"
    code = "import sys; from draftline.cli import main; sys.argv[0] = 'draftline'; main()"
    command = [sys.executable, "-c", code, "train", "-c", str(file), "--cluster", "127.0.0.1:9"]
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("draftline: --cluster: no Ray cluster at 127.0.0.1:9 ")
    assert len(done.stderr.splitlines()) == 1 and "Traceback" not in done.stderr
    assert not config.output.exists()


def refused_address(address: str) -> str:
    """The line that refuses an address, before Ray itself tries to connect, which takes minutes."""
    with pytest.raises(UserError) as caught:
        joining._connect(address, 0, 1)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_is_no_address_of_a_head_node_is_said_at_once(monkeypatch):
    for address in ("head", "", "head:", ":6379", "head:port"):
        assert f"{address!r} is no address; give HOST:PORT" in refused_address(address)
    assert "ray://head:1 is a Ray client address" in refused_address("ray://head:1")
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        monkeypatch.setattr(joining, "CONNECT_S", 1.0)
        assert f"no Ray cluster at {address} (what listens there is something else)" in refused_address(address)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    assert "no Ray cluster at 127.0.0.1:9 (Connection refused)" in refused_address("auto")


def test_the_note_of_a_cluster_that_is_gone_is_passed_over_unless_ray_runs_here_for_it(monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr(services, "find_gcs_addresses", set)
    assert joining._cluster_of_this_host() == "local"
    (tmp_path / "ray").mkdir()
    for note in ("", "half", "127.0.0.1:9"):
        (tmp_path / "ray" / "ray_current_cluster").write_text(note)
        assert joining._cluster_of_this_host() == "local"
    monkeypatch.setattr(services, "find_gcs_addresses", lambda: {"127.0.0.1:9"})
    assert re.search(r"no Ray cluster at \S+:9 \(Connection refused\)", refused_address("auto"))


def test_more_than_shared_memory_holds_is_refused_before_ray_is_started(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "local")
    with pytest.raises(UserError, match=r"/dev/shm: \d+ MiB are needed .*, \d+ MiB are free; lower pipeline.hs_queue"):
        joining._connect("auto", 1 << 60, 1)


def test_fewer_resources_than_workers_says_what_is_missing_where(cluster, make_run):
    config = make_run("pipeline.target_devices=[cuda]", "cluster.worker_cpus=2")
    told = refusal(config, cluster)
    assert is_one_line(r"no host has room for target-0 \(2 CPU, 1 GPU\); free: .* has 3 CPU, 0 GPU", told), told
    crowd = make_run(f"pipeline.target_devices=[{','.join(['cpu'] * 9)}]", name="crowd")
    told = refusal(crowd, cluster)
    assert is_one_line("no host has room for .*; add hosts, name fewer devices, or set cluster.wait_s", told), told


def test_missing_hosts_are_waited_for_only_if_told_to(cluster, make_run):
    config = make_run("cluster.target_resources={late: 1}", "cluster.wait_s=2", "max_rows=2")
    told = refusal(config, cluster)
    assert is_one_line("no host has room for target-0 .* after 2 s", told), told
    seats, places = [Seat("target-0", "cpu", {"CPU": 1.0, "late": 1.0})], []
    waiting = threading.Thread(target=lambda: places.append(place(seats, strategy="PACK", wait_s=60)), daemon=True)
    waiting.start()
    node = cluster.add_node(num_cpus=1, object_store_memory=MEMORY, resources={"late": 1})
    waiting.join(60)
    assert places[0].nodes == (node.node_id,)
    remove_placement_group(places[0].group)
    cluster.remove_node(node)


def test_mixed_versions_and_a_model_that_one_host_lacks_name_the_host(cluster, make_run, monkeypatch):
    config = make_run("max_rows=2")
    monkeypatch.setattr(crew, "host_facts", lambda host, paths: HostFacts(host, {"torch": "0.1"}, ()))
    monkeypatch.setattr(crew, "_told_facts", lambda member, host, ref: HostFacts(host, {"torch": "0.2"}, ()))
    told = refusal(config, cluster)
    assert is_one_line(r"host .*: torch is 0.2 there and 0.1 on the head node", told), told
    monkeypatch.undo()
    monkeypatch.setattr(train, "_paths", lambda config: ["/nowhere/model"])
    told = refusal(config, cluster)
    assert is_one_line("host .*: /nowhere/model is there on the head node, but not on this host", told), told


class NotThere(TargetActor):
    """Of a module that workers cannot import, as if draftline were not installed on their hosts."""


def test_a_host_without_draftline_is_named(cluster, make_run, monkeypatch):
    monkeypatch.setattr(crew, "TargetActor", NotThere)
    told = refusal(make_run("max_rows=2"), cluster)
    assert is_one_line(r"host [\d.]+: draftline does not run there \(ModuleNotFoundError: .*install the same", told), (
        told
    )


def test_an_object_store_that_is_too_small_says_how_large_it_must_be(cluster, make_run):
    config = make_run("pipeline.hs_queue_depth=20000")
    told = refusal(config, cluster)
    assert is_one_line("its object store has .* MiB are needed .*--object-store-memory=", told), told


@pytest.mark.long
def test_a_target_that_cannot_be_loaded_is_one_line_with_its_host(cluster, make_run, tiny_target_dir, tmp_path):
    broken = shutil.copytree(tiny_target_dir, tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:200])
    config = make_run(model=broken)
    with pytest.raises(DraftlineError, match=r"^(target|drafter)-0 on [\d.]+: .*broken") as caught:
        train_on_cluster(cluster_plan(config), cluster.address)
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)
    assert not config.output.exists()


def test_what_only_one_host_can_do_is_refused(make_run, tmp_path):
    with pytest.raises(UserError, match=r"states.mode cache keeps states on one host's disk"):
        cluster_plan(make_run("states.mode=cache", f"states.path={tmp_path / 'states'}"))


def test_a_running_cluster_is_used_and_left_alone(cluster):
    with connected("auto", store_bytes=0, cpus=1) as address:
        assert address == cluster.address
