"""Runs over several raylets of one machine: what is committed, and what each kind of loss costs."""

from __future__ import annotations

import threading
from itertools import pairwise

import pytest
import ray
import torch
from cluster_kit import MEMORY, Meanwhile, kill_one, processes, queue_of

from draftline.cluster.control import scale
from draftline.cluster.train import cluster_plan, train_on_cluster
from draftline.errors import RunStoppedError
from draftline.pipeline.checkpoint import latest_checkpoint, list_checkpoints, read_checkpoint
from draftline.pipeline.coordinator import train
from draftline.pipeline.runplan import make_run_plan

T3_D2 = ("pipeline.target_devices=[cpu,cpu,cpu]", "pipeline.drafter_devices=[cpu,cpu]")


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


def test_three_targets_and_two_drafters_on_several_hosts_commit_what_threads_commit(cluster, make_run):
    config, threads = make_run(*T3_D2, "epochs=3", name="hosts"), make_run(*T3_D2, "epochs=3", name="threads")
    result = run(config, cluster)
    check_ledger(config, result)
    train(make_run_plan(threads))
    assert committed_samples(config) == committed_samples(threads)
    assert (result.export / "model.safetensors").exists() and sum(result.rows_by_drafter) == result.ledger.planned
    assert not (config.output / "cluster.json").exists()
    assert not processes("QueueActor") and not processes("TargetActor") and not processes("DrafterActor")


def test_one_drafter_ends_with_the_bits_of_the_thread_pipeline(cluster, make_run):
    ordered = ("pipeline.target_devices=[cpu,cpu]", "pipeline.ordered=true", "epochs=2")
    hosts, threads = make_run(*ordered, name="hosts"), make_run(*ordered, name="threads")
    run(hosts, cluster)
    train(make_run_plan(threads))
    a, b = final_weights(hosts), final_weights(threads)
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_every_kind_of_loss_in_one_run_costs_captures_and_nothing_else(cluster, make_run):
    """A target and a drafter are killed, a target is added and one let go, a whole raylet is killed."""
    config = make_run(
        *T3_D2, "epochs=150", "cluster.strategy=SPREAD", "checkpoint.every_rounds=10", "cluster.wait_s=60"
    )
    extra = cluster.add_node(num_cpus=3, object_store_memory=MEMORY, resources={"extra": 8})
    meanwhile = Meanwhile(
        config.output,
        (60, lambda: kill_one("TargetActor")),
        (150, lambda: kill_one("DrafterActor")),
        (300, lambda: scale(config.output, 1)),
        (450, lambda: cluster.remove_node(extra, allow_graceful=False)),
        (900, lambda: scale(config.output, -1)),
    )
    meanwhile.start()
    result = run(config, cluster)
    meanwhile.check()
    check_ledger(config, result)
    stats = meanwhile.stats[-1]
    assert stats.admitted_rows <= stats.max_rows


def test_a_stopped_run_and_a_resumed_one_commit_every_row_once(cluster, make_run):
    config = make_run(*T3_D2, "epochs=40")
    stop = Meanwhile(config.output, (60, lambda: ray.get(queue_of(config.output).request_stop.remote())))
    stop.start()
    with pytest.raises(RunStoppedError):
        run(config, cluster)
    stop.check()
    before = committed_rows(latest_checkpoint(config.output)[0])
    assert 60 <= len(before) < len(make_run_plan(config).rows)
    result = run(config, cluster, resume=True)
    check_ledger(config, result)
    assert sum(result.rows_by_drafter) == result.ledger.planned - len(before)


def test_nobody_is_left_behind(cluster):
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith(("checkpoints", "monitor"))]
