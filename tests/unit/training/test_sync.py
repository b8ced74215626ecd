"""Promises of the synchronizer, against calculations by hand."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from draftline.config.schema import AverageSync, CopySync, GradientSync, OptimizerConfig, OuterSync
from draftline.drafter.optimizer import MasterOptimizer
from draftline.drafter.sync import Replica, Synchronizer, averaging_shares
from draftline.errors import RunFailedError


def replicas(n: int, **config: object) -> tuple[list[nn.Linear], list[Replica]]:
    torch.manual_seed(1)
    first = nn.Linear(3, 2, bias=False)
    modules = [copy.deepcopy(first) for _ in range(n)]
    settings = OptimizerConfig.model_validate({"clip_norm": None, **config})
    return modules, [Replica(i, MasterOptimizer(m, settings)) for i, m in enumerate(modules)]


def train(
    module: nn.Linear, replica: Replica, gradient: torch.Tensor, *, denominator: float = 1.0, step: bool = True
) -> None:
    module.weight.grad = gradient.clone()
    replica.optimizer.absorb(torch.tensor(denominator))
    if step:
        replica.optimizer.step(0.1)


def test_averaging_weights_by_supervised_tokens():
    modules, reps = replicas(3)
    for i, (module, replica) in enumerate(zip(modules, reps, strict=True)):
        with torch.no_grad():
            module.weight.fill_(float(i))
        replica.supervised_tokens = (10, 30, 0)[i]
    Synchronizer(AverageSync()).run(reps, 0.0)
    for module, replica in zip(modules, reps, strict=True):
        torch.testing.assert_close(module.weight, torch.full((2, 3), 0.75))
        assert replica.supervised_tokens == 0


def test_a_round_in_which_nobody_trained_leaves_weights_alone():
    modules, reps = replicas(2)
    before = modules[0].weight.detach().clone()
    Synchronizer(AverageSync()).run(reps, 0.0)
    assert torch.equal(modules[0].weight, before)
    assert averaging_shares([0, 0]) is None


@pytest.mark.parametrize("moments", ["keep", "average", "reset"])
def test_moments_are_kept_averaged_or_reset(moments):
    modules, reps = replicas(2)
    for i, (module, replica) in enumerate(zip(modules, reps, strict=True)):
        train(module, replica, torch.full((2, 3), float(i + 1)))
        replica.supervised_tokens = 5
    before = [{k: v.clone() for k, v in r.optimizer.moments()} for r in reps]
    Synchronizer(AverageSync(moments=moments)).run(reps, 0.0)
    after = [dict(r.optimizer.moments()) for r in reps]
    key = "weight.exp_avg"
    if moments == "keep":
        assert all(torch.equal(after[i][key], before[i][key]) for i in (0, 1))
    elif moments == "average":
        torch.testing.assert_close(after[0][key], (before[0][key] + before[1][key]) / 2)
        assert torch.equal(after[0][key], after[1][key])
        assert float(after[0]["weight.step"]) == 1.0
    else:
        assert float(after[0][key].abs().sum()) == 0.0 and float(after[1]["weight.step"]) == 0.0


@pytest.mark.parametrize("rows_of_second", [1, 0])
def test_gradient_sync_equals_one_drafter_with_the_joint_batch(rows_of_second):
    """G5-G7: also when one of the two has no row."""
    modules, reps = replicas(2)
    alone, single = replicas(1)
    first, second = torch.randn(2, 3), torch.randn(2, 3)
    for _ in range(3):
        train(modules[0], reps[0], first, denominator=3.0, step=False)
        train(alone[0], single[0], first, denominator=3.0, step=False)
        if rows_of_second:
            train(modules[1], reps[1], second, denominator=4.0, step=False)
            train(alone[0], single[0], second, denominator=4.0, step=False)
        Synchronizer(GradientSync()).run(reps, 0.1)
        single[0].optimizer.step(0.1)
        for module in modules:
            torch.testing.assert_close(module.weight, alone[0].weight, rtol=1e-6, atol=1e-7)


def test_copy_gives_everybody_the_first_drafters_weights():
    modules, reps = replicas(3)
    with torch.no_grad():
        modules[0].weight.fill_(7.0)
    Synchronizer(CopySync()).run(reps, 0.0)
    assert all(bool((m.weight == 7.0).all()) for m in modules)


def test_g2_outer_step_has_the_right_sign_and_equals_the_hand_calculation():
    modules, reps = replicas(2)
    sync = Synchronizer(OuterSync(outer_learning_rate=0.5, outer_momentum=0.9))
    sync.begin(reps)
    weight = modules[0].weight.detach().clone()
    velocity = torch.zeros_like(weight)
    for round_number in range(2):
        for i, (module, replica) in enumerate(zip(modules, reps, strict=True)):
            with torch.no_grad():
                module.weight.sub_(0.1 * (i + 1))
            replica.supervised_tokens = 1
        delta = torch.full_like(weight, 0.15)  # the mean step, downwards
        velocity = 0.9 * velocity + delta
        weight = weight - 0.5 * (delta + 0.9 * velocity)
        sync.run(reps, 0.0)
        torch.testing.assert_close(modules[0].weight.detach(), weight, msg=f"round {round_number}")
        torch.testing.assert_close(modules[1].weight.detach(), weight)


def test_outer_state_survives_a_resume_between_rounds():
    modules, reps = replicas(1)
    sync = Synchronizer(OuterSync())
    sync.begin(reps)
    with torch.no_grad():
        modules[0].weight.add_(1.0)
    reps[0].supervised_tokens = 1
    sync.run(reps, 0.0)
    saved = {k: v.clone() for k, v in sync.state().items()}
    resumed_modules, resumed = replicas(1)
    resumed[0].optimizer.load_masters({"weight": modules[0].weight.detach()})
    other = Synchronizer(OuterSync())
    other.begin(resumed)
    other.load_state(saved)
    for m, r, s in ((modules[0], reps[0], sync), (resumed_modules[0], resumed[0], other)):
        with torch.no_grad():
            m.weight.sub_(0.3)
        r.supervised_tokens = 1
        s.run([r], 0.0)
    assert torch.equal(modules[0].weight, resumed_modules[0].weight)


@pytest.mark.parametrize("config", [AverageSync(), OuterSync(), CopySync()])
def test_nothing_is_applied_when_a_reduced_value_is_not_finite(config):
    modules, reps = replicas(2)
    sync = Synchronizer(config)
    sync.begin(reps)
    with torch.no_grad():
        modules[0].weight[0, 0] = float("nan")
    before = modules[1].weight.detach().clone()
    for replica in reps:
        replica.supervised_tokens = 1
    with pytest.raises(RunFailedError, match="not finite"):
        sync.run(reps, 0.0)
    assert torch.equal(modules[1].weight, before)


def test_one_drafter_is_left_bit_for_bit():
    modules, reps = replicas(1)
    train(modules[0], reps[0], torch.randn(2, 3))
    reps[0].supervised_tokens = 3
    before = modules[0].weight.detach().clone()
    Synchronizer(AverageSync()).run(reps, 0.0)
    assert torch.equal(modules[0].weight, before)
