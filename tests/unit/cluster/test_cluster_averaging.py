"""Averaging over processes gives what averaging in one process gives; a member that is gone breaks it, at once."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from draftline.cluster.averaging import reduce_together
from draftline.cluster.group import CollectiveBrokenError, QueueStore, ReductionGroup, _buckets
from draftline.config.schema import AverageSync, CopySync, GradientSync, OptimizerConfig, OuterSync
from draftline.drafter.optimizer import MasterOptimizer
from draftline.drafter.sync import Replica, Synchronizer

CPU = torch.device("cpu")


class Keys:
    """Keys of one attempt for members that are threads."""

    def __init__(self):
        self.changed, self.values, self.void = threading.Condition(), {}, False

    def set(self, key, value):
        with self.changed:
            self.values[key] = value
            self.changed.notify_all()

    def get(self, key):
        with self.changed:
            self.changed.wait_for(lambda: key in self.values or self.void, 20)
            return None if self.void else self.values.get(key)

    def end(self):
        with self.changed:
            self.void = True
            self.changed.notify_all()

    def store(self):
        return QueueStore(self.set, self.get, lambda keys: all(key in self.values for key in keys))


def replica(number, tokens):
    torch.manual_seed(number)
    module = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    optimizer = MasterOptimizer(module, OptimizerConfig())
    module(torch.randn(6, 5)).square().sum().backward()
    optimizer.absorb(torch.tensor(3.0 + number))
    optimizer.step(1e-2)
    module(torch.randn(6, 5)).square().sum().backward()
    optimizer.absorb(torch.tensor(2.0 + number))
    return Replica(number, optimizer, supervised_tokens=tokens)


def together(members, work):
    """`work(rank, group)` in one thread for each member; results by rank."""
    keys, results, errors = Keys(), {}, []

    def run(rank):
        try:
            group = ReductionGroup(keys.store(), rank, members, CPU, 20.0, "127.0.0.1")
            results[rank] = work(rank, group)
            group.close()
        except Exception as error:  # noqa: BLE001  raised again below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(members)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(members)]


def results_of(reduced):
    return reduced.weights if reduced.step is None else reduced.step.gradients


KINDS = [
    AverageSync(),
    AverageSync(moments="keep"),
    AverageSync(moments="reset"),
    CopySync(),
    GradientSync(),
    OuterSync(),
]


@pytest.mark.parametrize("config", KINDS, ids=lambda c: f"{c.kind}-{getattr(c, 'moments', '')}")
def test_members_in_other_processes_become_what_members_in_one_process_become(config):
    tokens = [30, 0, 10]
    here = [replica(n, t) for n, t in enumerate(tokens)]
    alone = Synchronizer(config)
    alone.begin(here)
    expected = alone.reduce(here, 1e-3)
    elsewhere = [replica(n, t) for n, t in enumerate(tokens)]  # not in the threads: they share one generator
    synchronizers = [Synchronizer(config) for _ in tokens]
    for own in synchronizers:
        own.begin([replica(0, 0)])

    def work(rank, group):
        mine, own = elsewhere[rank], synchronizers[rank]
        reduced = reduce_together(group, mine, own, 1e-3)
        own.apply(mine, reduced)
        return reduced, [m.detach().clone() for m in mine.optimizer.masters], dict(mine.optimizer.moments())

    found = together(3, work)
    for member in here:
        alone.apply(member, expected)
    for rank, (reduced, masters, moments) in enumerate(found):
        assert (reduced.weights is None) == (expected.weights is None)
        assert reduced.resets_moments == expected.resets_moments
        for got, want in zip(masters, here[rank].optimizer.masters, strict=True):
            torch.testing.assert_close(got, want.detach(), rtol=1e-6, atol=1e-7)
        for key, want in here[rank].optimizer.moments():
            torch.testing.assert_close(moments[key], want, rtol=1e-6, atol=1e-9)
        for mine, first in zip(results_of(reduced), results_of(found[0][0]), strict=True):
            assert torch.equal(mine, first)  # the same bits on every member


def test_one_member_alone_needs_no_group_and_keeps_its_bits():
    mine = replica(0, 12)
    before = [m.detach().clone() for m in mine.optimizer.masters]
    group = ReductionGroup(Keys().store(), 0, 1, CPU, 5.0, "127.0.0.1")
    reduced = reduce_together(group, mine, Synchronizer(AverageSync()), 1e-3)
    assert reduced.weights is not None
    assert all(torch.equal(a, b) for a, b in zip(reduced.weights, before, strict=True))


def test_what_nobody_trained_is_not_averaged():
    results = together(
        2, lambda rank, group: reduce_together(group, replica(rank, 0), Synchronizer(AverageSync()), 1.0)
    )
    assert [r.weights for r in results] == [None, None]


def test_a_member_that_never_comes_is_not_waited_for_once_the_attempt_is_void():
    keys = Keys()
    threading.Timer(0.3, keys.end).start()
    with pytest.raises(CollectiveBrokenError):
        ReductionGroup(keys.store(), 0, 2, CPU, 20.0, "127.0.0.1")


def test_a_member_that_goes_away_inside_breaks_the_reduction_for_the_others():
    both_connected = threading.Barrier(2)

    def work(rank, group):
        both_connected.wait(60)
        if rank == 1:
            group._group = None  # its connections are closed with it
            return None
        with pytest.raises(CollectiveBrokenError):
            group.sum([torch.ones(1000)])
        return "broken"

    assert together(2, work) == ["broken", None]


def test_buckets_hold_neighbours_of_one_dtype(monkeypatch):
    monkeypatch.setattr("draftline.cluster.group.BUCKET_BYTES", 64)
    tensors = [torch.zeros(8), torch.zeros(8), torch.zeros(1), torch.zeros(2, dtype=torch.int64), torch.zeros(100)]
    assert [[t.numel() for t in bucket] for bucket in _buckets(tensors)] == [[8, 8], [1], [2], [100]]
