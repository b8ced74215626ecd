"""Runs over several raylets of one machine: what is committed, and what each kind of loss costs."""

from __future__ import annotations

import pytest
import torch
from cluster_kit import (
    LOSSY,
    Meanwhile,
    check_committed_once,
    kill_one,
    node_with,
    processes,
    samples_of,
    wait_until_whole,
)
from held import HeldTarget, Hold
from host_kit import possible

from draftline.cluster import crew
from draftline.cluster.control import scale
from draftline.cluster.joining import spilled_bytes
from draftline.cluster.train import cluster_plan, train_on_cluster
from draftline.pipeline.checkpoint import list_checkpoints, read_checkpoint
from draftline.pipeline.coordinator import train
from draftline.pipeline.runplan import make_run_plan

# Where hosts with addresses of their own can be made, those show the same in `make cluster-test`.
RARELY = [pytest.mark.long] if possible() else []
pytestmark = [*RARELY, pytest.mark.timeout(1200)]  # on a busy machine; a free one needs a tenth of it


def run(config, cluster, **options):
    return train_on_cluster(cluster_plan(config), cluster.address, **options)


def alive():
    return len(processes("HeldTarget")), len(processes("DrafterActor"))


def final_weights(config):
    return read_checkpoint(list_checkpoints(config.output)[-1]).weights


@pytest.mark.long
def test_one_drafter_ends_with_the_bits_of_the_thread_pipeline(cluster, make_run):
    ordered = ("pipeline.target_devices=[cpu,cpu]", "pipeline.ordered=true", "epochs=2")
    hosts, threads = make_run(*ordered, name="hosts"), make_run(*ordered, name="threads")
    run(hosts, cluster)
    train(make_run_plan(threads))
    a, b = final_weights(hosts), final_weights(threads)
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_run_with_every_kind_of_loss_commits_what_an_unbroken_one_of_threads_commits(
    cluster, make_run, samples_of_threads, monkeypatch
):
    """A target and a whole raylet are killed, then a drafter, and a target is added; at last one is let go."""
    monkeypatch.setattr(crew, "TargetActor", HeldTarget)
    config = make_run(*LOSSY, name="hosts")
    folder, hold = config.output, Hold(config.output)
    extra = cluster.add_node(**node_with("extra"))
    meanwhile = Meanwhile(
        folder,
        (8, hold.on),
        (8, lambda: kill_one("HeldTarget")),
        (8, lambda: cluster.remove_node(extra, allow_graceful=False)),
        (8, lambda: wait_until_whole(folder, hold, alive, (3, 2))),
        (8, lambda: kill_one("DrafterActor")),
        (8, lambda: scale(folder, 1)),
        (8, lambda: wait_until_whole(folder, hold, alive, (4, 2))),
        (8, lambda: scale(folder, -1)),
        (8, hold.let_go),
    )
    meanwhile.start()
    result = run(config, cluster)
    meanwhile.check()
    ledger = result.ledger
    assert ledger.planned == ledger.committed and ledger.set_aside == ledger.in_flight == ledger.remaining == 0
    check_committed_once(config)
    assert samples_of(config) == samples_of_threads
    assert all(stats.admitted_rows <= stats.max_rows for stats in meanwhile.stats)
    assert spilled_bytes() == 0
    assert (result.export / "model.safetensors").exists() and not (folder / "cluster.json").exists()
    for process in [p for name in ("QueueActor", "HeldTarget", "DrafterActor") for p in processes(name)]:
        process.wait(20)  # they are told to end, and do
