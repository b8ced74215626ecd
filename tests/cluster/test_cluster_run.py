"""Runs over several raylets of one machine: what is committed, and what each kind of loss costs."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from cluster_kit import MEMORY, Meanwhile, kill_one, processes, wait_until_whole

from draftline.cluster.control import scale
from draftline.cluster.joining import spilled_bytes
from draftline.cluster.train import cluster_plan, train_on_cluster
from draftline.pipeline.checkpoint import latest_checkpoint, list_checkpoints, read_checkpoint
from draftline.pipeline.coordinator import train
from draftline.pipeline.runplan import make_run_plan

T3_D2 = ("pipeline.target_devices=[cpu,cpu,cpu]", "pipeline.drafter_devices=[cpu,cpu]")
pytestmark = pytest.mark.timeout(1200)  # on a busy machine; a free one needs a tenth of it


def run(config, cluster, **options):
    return train_on_cluster(cluster_plan(config), cluster.address, **options)


def committed_rows(folder):
    state = read_checkpoint(folder).state["ledger"]
    return {row for start, stop in state["committed"] for row in range(start, stop)}


def committed_samples(config):
    """(epoch, sample) of everything committed, as the last checkpoint tells."""
    rows = committed_rows(latest_checkpoint(config.output)[0])
    plan = make_run_plan(config)
    return sorted((plan.rows[i].epoch, sample) for i in rows for sample in plan.rows[i].samples)


def final_weights(config):
    return read_checkpoint(latest_checkpoint(config.output)[0]).weights


def check_ledger(config, result):
    """Every planned row is committed, and no round commits one that an earlier round has committed."""
    ledger = result.ledger
    assert ledger.planned == ledger.committed == len(make_run_plan(config).rows)
    assert ledger.set_aside == ledger.in_flight == ledger.remaining == 0
    history = [committed_rows(folder) for folder in list_checkpoints(config.output)]
    assert all(before < after for before, after in pairwise(history))
    assert history[-1] == set(range(ledger.planned))


def test_one_drafter_ends_with_the_bits_of_the_thread_pipeline(cluster, make_run):
    ordered = ("pipeline.target_devices=[cpu,cpu]", "pipeline.ordered=true", "epochs=2")
    hosts, threads = make_run(*ordered, name="hosts"), make_run(*ordered, name="threads")
    run(hosts, cluster)
    train(make_run_plan(threads))
    a, b = final_weights(hosts), final_weights(threads)
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_run_with_every_kind_of_loss_commits_what_an_unbroken_one_of_threads_commits(cluster, make_run):
    """A target and a drafter are killed, a target is added and one let go, a whole raylet is killed."""
    lossy = (*T3_D2, "epochs=80", "sync.every_rows=10", "checkpoint.every_rounds=3")
    config, threads = make_run(*lossy, "cluster.strategy=SPREAD", name="hosts"), make_run(*lossy, name="threads")
    extra = cluster.add_node(num_cpus=3, object_store_memory=MEMORY, resources={"extra": 8})
    meanwhile = Meanwhile(
        config.output,
        (40, lambda: kill_one("TargetActor")),
        (40, lambda: wait_until_whole(config.output)),
        (80, lambda: cluster.remove_node(extra, allow_graceful=False)),
        (80, lambda: wait_until_whole(config.output)),
        (80, lambda: kill_one("DrafterActor")),
        (80, lambda: scale(config.output, 1)),
        (80, lambda: scale(config.output, -1)),
    )
    meanwhile.start()
    result = run(config, cluster)
    meanwhile.check()
    check_ledger(config, result)
    assert all(stats.admitted_rows <= stats.max_rows for stats in meanwhile.stats)
    assert spilled_bytes() == 0
    train(make_run_plan(threads))
    assert committed_samples(config) == committed_samples(threads)
    assert (result.export / "model.safetensors").exists() and not (config.output / "cluster.json").exists()
    for process in [p for name in ("QueueActor", "TargetActor", "DrafterActor") for p in processes(name)]:
        process.wait(20)  # they are told to end, and do
