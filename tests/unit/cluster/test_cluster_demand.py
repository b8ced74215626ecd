"""What a run asks of a cluster: one line that says what is missing where."""

from __future__ import annotations

import pytest

from draftline.cluster.demand import Host, Seat, seat_resources, shortage
from draftline.cluster.joining import connected, require_ray
from draftline.cluster.orders import cluster_place, gpus_of, local_place
from draftline.cluster.probe import HostFacts, host_facts, require_alike
from draftline.config.cluster import ClusterConfig
from draftline.errors import UserError


def seats(n_targets=3, n_drafters=2):
    target, drafter = {"CPU": 1.0, "GPU": 2.0}, {"CPU": 1.0, "GPU": 1.0}
    return [Seat(f"target-{i}", "cuda+cuda", target) for i in range(n_targets)] + [
        Seat(f"drafter-{i}", "cuda", drafter) for i in range(n_drafters)
    ]


def test_what_fits_is_no_shortage():
    assert shortage(seats(), [Host("a", "10.0.0.1", {"CPU": 8.0, "GPU": 8.0})]) is None
    assert (
        shortage(seats(1, 1), [Host("a", "x", {"CPU": 4.0, "GPU": 1.0}), Host("b", "y", {"CPU": 4, "GPU": 2})]) is None
    )


def test_the_shortage_names_the_workers_and_what_is_free_where():
    line = shortage(seats(), [Host("a", "10.0.0.1", {"CPU": 8.0, "GPU": 4.0}), Host("b", "10.0.0.2", {"CPU": 1.0})])
    assert line is not None
    assert "target-2 (1 CPU, 2 GPU)" in line and "drafter-0 (1 CPU, 1 GPU)" in line and "target-1" not in line
    assert "10.0.0.1 has 8 CPU, 4 GPU; 10.0.0.2 has 1 CPU, 0 GPU" in line


def test_gpus_are_not_added_up_over_hosts():
    line = shortage(seats(1, 0), [Host("a", "x", {"CPU": 4, "GPU": 1}), Host("b", "y", {"CPU": 4, "GPU": 1})])
    assert line is not None and "no host has room for target-0" in line


def test_devices_of_one_host_become_kinds_of_devices():
    assert [cluster_place(p) for p in ("cpu", "cuda:3", "auto", "cuda:0+cuda:1")] == [
        "cpu",
        "cuda",
        "cuda",
        "cuda+cuda",
    ]
    assert [gpus_of(p) for p in ("cpu", "cuda", "cuda+cuda")] == [0, 1, 2]
    assert [local_place(p) for p in ("cpu", "cuda", "cuda+cuda")] == ["cpu", "cuda:0", "cuda:0+cuda:1"]


def test_a_seat_takes_cores_gpus_and_what_keeps_it_on_its_hosts():
    cluster = ClusterConfig(worker_cpus=4, target_resources={"big": 1.0})
    assert seat_resources(cluster, "cuda", cluster.target_resources) == {"CPU": 4.0, "GPU": 1.0, "big": 1.0}
    assert seat_resources(cluster, "cpu", {}) == {"CPU": 4.0}


def test_hosts_with_other_versions_are_named_with_both_values():
    head = HostFacts("head", {"draftline": "1", "torch": "2.13"}, ())
    require_alike(head, [HostFacts("10.0.0.2", {"draftline": "1", "torch": "2.13"}, ())])
    with pytest.raises(UserError, match=r"host 10.0.0.2: torch is 2.12 there and 2.13 on the head node"):
        require_alike(head, [HostFacts("10.0.0.2", {"draftline": "1", "torch": "2.12"}, ())])


def test_a_path_that_only_the_head_has_is_named_with_the_host(tmp_path):
    facts = host_facts("10.0.0.2", [str(tmp_path), str(tmp_path / "model")])
    assert facts.missing == (str(tmp_path / "model"),) and "source" in facts.versions["draftline"]
    with pytest.raises(UserError, match=r"host 10.0.0.2: .*model is there on the head node, but not on this host"):
        require_alike(host_facts("head", []), [facts])


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"Ray is not installed; pip install 'draftline\[cluster\]'"):
        require_ray()
    with pytest.raises(UserError, match="Ray is not installed"), connected("auto", store_bytes=0, cpus=1):
        pass
