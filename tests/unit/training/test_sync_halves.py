"""A meeting in two halves: reducing changes nothing, applying gives every member the same; in between all is old."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from draftline.config.schema import AverageSync, CopySync, GradientSync, OptimizerConfig, OuterSync
from draftline.drafter.optimizer import MasterOptimizer
from draftline.drafter.sync import Replica, Synchronizer

RATE = 0.05
KINDS = {
    "average": AverageSync(),
    "average, moments kept": AverageSync(moments="keep"),
    "average, moments reset": AverageSync(moments="reset"),
    "copy": CopySync(),
    "gradient": GradientSync(),
    "outer": OuterSync(),
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Any:
    return KINDS[request.param]


def members(kind: Any, n: int) -> tuple[list[nn.Linear], list[Replica], Synchronizer]:
    """Drafters that began alike, each having trained a row of its own."""
    torch.manual_seed(2)
    first = nn.Linear(5, 4)
    modules = [copy.deepcopy(first) for _ in range(n)]
    replicas = [Replica(i, MasterOptimizer(m, OptimizerConfig())) for i, m in enumerate(modules)]
    synchronizer = Synchronizer(kind)
    synchronizer.begin(replicas)
    for number, (module, replica) in enumerate(zip(modules, replicas, strict=True)):
        train(module, replica, seed=number, step=not isinstance(kind, GradientSync))
    return modules, replicas, synchronizer


def train(module: nn.Linear, replica: Replica, *, seed: int, step: bool) -> None:
    g = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=g)
    replica.optimizer.absorb(torch.tensor(2.0 + seed))
    replica.supervised_tokens += 3 + seed
    if step:
        replica.optimizer.step(RATE)


def content(replicas: list[Replica], synchronizer: Synchronizer) -> list[torch.Tensor]:
    """A copy of everything that a meeting could change."""
    tensors: list[torch.Tensor] = list(synchronizer.state().values())
    for replica in replicas:
        optimizer = replica.optimizer
        tensors += [*optimizer.masters, *optimizer.gradients, optimizer.denominator]
        tensors += [value for _, value in optimizer.moments()]
        tensors.append(torch.tensor(replica.supervised_tokens))
    return [tensor.detach().clone() for tensor in tensors]


def state_of(replica: Replica) -> list[torch.Tensor]:
    return [*replica.optimizer.masters, *(value for _, value in replica.optimizer.moments())]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_a_meeting_that_breaks_off_before_its_commit_leaves_everything_old(kind: Any):
    _, replicas, synchronizer = members(kind, 3)
    before = content(replicas, synchronizer)
    synchronizer.reduce(replicas, RATE)
    assert same(content(replicas, synchronizer), before)


def test_a_meeting_that_is_repeated_without_a_member_is_one_that_it_never_attended(kind: Any):
    _, replicas, synchronizer = members(kind, 3)
    synchronizer.reduce(replicas, RATE)
    synchronizer.run([replicas[0], replicas[2]], RATE)
    _, others, other = members(kind, 3)
    other.run([others[0], others[2]], RATE)
    assert same(content(replicas, synchronizer), content(others, other))


def test_all_members_apply_the_same_whatever_the_others_did_since(kind: Any):
    """The first to take over trains on before the last one has taken over."""
    modules, replicas, synchronizer = members(kind, 3)
    reduced = synchronizer.reduce(replicas, RATE)
    synchronizer.apply(replicas[0], reduced)
    new = [tensor.detach().clone() for tensor in state_of(replicas[0])]
    train(modules[0], replicas[0], seed=9, step=True)
    for replica in replicas[1:]:
        synchronizer.apply(replica, reduced)
    n_compared = len(new) if synchronizer.leaves_moments_alike else len(replicas[0].optimizer.masters)
    assert not same(new[:n_compared], state_of(replicas[0])[:n_compared])
    for replica in replicas[1:]:
        assert same(state_of(replica)[:n_compared], new[:n_compared])
        assert replica.supervised_tokens == 0


def test_a_step_that_is_not_finite_is_told_by_every_member():
    modules, replicas, synchronizer = members(GradientSync(), 2)
    modules[0].weight.grad = torch.full_like(modules[0].weight, float("nan"))
    modules[0].bias.grad = torch.zeros_like(modules[0].bias)
    replicas[0].optimizer.absorb(torch.tensor(1.0))
    before = [tensor.detach().clone() for tensor in state_of(replicas[1])]
    reduced = synchronizer.reduce(replicas, RATE)
    outcomes = [synchronizer.apply(replica, reduced) for replica in replicas]
    assert all(outcome is not None and bool(outcome[1]) for outcome in outcomes)
    assert same(state_of(replicas[1]), before)
