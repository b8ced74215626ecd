"""Promises of the optimizer: exact scaling by the global denominator; steps that must change nothing do not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from draftline.config.schema import OptimizerConfig
from draftline.drafter.optimizer import MasterOptimizer


def make(dtype: torch.dtype = torch.float32, **config: object) -> tuple[nn.Linear, MasterOptimizer]:
    torch.manual_seed(0)
    module = nn.Linear(4, 3, bias=False).to(dtype)
    return module, MasterOptimizer(module, OptimizerConfig.model_validate({"clip_norm": None, **config}))


def absorb(module: nn.Linear, optimizer: MasterOptimizer, gradient: torch.Tensor, denominator: float) -> None:
    module.weight.grad = gradient.to(module.weight.dtype).clone()
    optimizer.absorb(torch.tensor(denominator))


def test_a_step_divides_by_the_denominator_of_all_its_rows():
    module, optimizer = make()
    reference, plain = make()
    first, second = torch.randn(3, 4), torch.randn(3, 4)
    absorb(module, optimizer, first, 3.0)
    absorb(module, optimizer, second, 5.0)
    optimizer.step(0.1)
    absorb(reference, plain, (first + second) / 8.0, 1.0)
    plain.step(0.1)
    torch.testing.assert_close(module.weight, reference.weight)


def test_it_is_adamw():
    module, optimizer = make(weight_decay=0.1)
    twin = nn.Parameter(module.weight.detach().clone())
    adamw = torch.optim.AdamW([twin], lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
    for _ in range(3):
        gradient = torch.randn(3, 4)
        absorb(module, optimizer, gradient, 1.0)
        optimizer.step(0.01)
        twin.grad = gradient
        adamw.step()
    torch.testing.assert_close(module.weight.detach(), twin.detach())


def test_clipping_uses_the_norm_after_division():
    module, optimizer = make(clip_norm=1.0)
    reference, plain = make()
    gradient = torch.randn(3, 4) * 50
    absorb(module, optimizer, gradient, 2.0)
    norm, skipped = optimizer.step(0.1)
    assert float(norm) == pytest.approx(float((gradient / 2).norm()), rel=1e-6)
    assert not bool(skipped)
    absorb(reference, plain, gradient / gradient.norm(), 1.0)
    plain.step(0.1)
    torch.testing.assert_close(module.weight, reference.weight, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_non_finite_gradient_changes_nothing_and_is_counted(bad):
    module, optimizer = make(weight_decay=0.1)
    before = module.weight.detach().clone()
    moments = {k: v.clone() for k, v in optimizer.moments()}
    gradient = torch.randn(3, 4)
    gradient[0, 0] = bad
    absorb(module, optimizer, gradient, 1.0)
    _, skipped = optimizer.step(0.1)
    assert bool(skipped)
    assert torch.equal(module.weight, before)
    assert all(torch.equal(v, moments[k]) for k, v in optimizer.moments())
    absorb(module, optimizer, torch.ones(3, 4), 1.0)
    _, skipped = optimizer.step(0.1)
    assert not bool(skipped) and torch.isfinite(module.weight).all()


def test_g12_a_step_without_supervised_slots_changes_nothing_not_even_by_decay():
    module, optimizer = make(weight_decay=0.5)
    before = module.weight.detach().clone()
    absorb(module, optimizer, torch.zeros(3, 4), 0.0)
    _, skipped = optimizer.step(0.1)
    assert torch.equal(module.weight, before)
    assert not bool(skipped)


def test_bf16_compute_keeps_fp32_masters():
    module, optimizer = make(torch.bfloat16)
    for _ in range(20):  # each step is far below the resolution of bf16 around 1
        absorb(module, optimizer, torch.ones(3, 4), 1.0)
        optimizer.step(1e-5)
    assert optimizer.masters[0].dtype == torch.float32
    moved = (optimizer.masters[0] - make(torch.bfloat16)[0].weight.float()).abs().mean()
    assert 1.5e-4 < float(moved) < 2.5e-4
    assert torch.equal(module.weight, optimizer.masters[0].to(torch.bfloat16))


def test_moments_survive_a_round_trip():
    module, optimizer = make()
    absorb(module, optimizer, torch.randn(3, 4), 1.0)
    optimizer.step(0.1)
    saved = {k: v.clone() for k, v in optimizer.moments()}
    other_module, other = make()
    other.load_masters({"weight": module.weight.detach()})
    other.load_moments(saved)
    gradient = torch.randn(3, 4)
    for m, o in ((module, optimizer), (other_module, other)):
        absorb(m, o, gradient, 1.0)
        o.step(0.1)
    assert torch.equal(module.weight, other_module.weight)


def make_muon(**config: object) -> tuple[nn.Sequential, MasterOptimizer]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))
    settings = {"kind": "muon", "clip_norm": None, **config}
    return module, MasterOptimizer(module, OptimizerConfig.model_validate(settings))


def absorb_all(
    module: nn.Module, optimizer: MasterOptimizer, gradients: list[torch.Tensor], denominator: float
) -> None:
    for parameter, gradient in zip(module.parameters(), gradients, strict=True):
        parameter.grad = gradient.clone()
    optimizer.absorb(torch.tensor(denominator))


def test_muon_moves_matrices_and_adamw_the_rest():
    module, optimizer = make_muon(weight_decay=0.1, muon_momentum=0.9)
    twins = [nn.Parameter(p.detach().clone()) for p in module.parameters()]
    muon = torch.optim.Muon([twins[0]], lr=0.01, momentum=0.9, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(twins[1:], lr=0.01, betas=(0.9, 0.95), weight_decay=0.0)
    for _ in range(3):
        gradients = [torch.randn_like(p) for p in twins]
        absorb_all(module, optimizer, [4 * g for g in gradients], 4.0)
        optimizer.step(0.01)
        for twin, gradient in zip(twins, gradients, strict=True):
            twin.grad = gradient
        muon.step()
        adamw.step()
    for found, wanted in zip(module.parameters(), twins, strict=True):
        torch.testing.assert_close(found.detach(), wanted.detach())


def test_a_step_of_muon_that_is_not_finite_or_has_no_anchor_changes_nothing():
    module, optimizer = make_muon(weight_decay=0.1)
    absorb_all(module, optimizer, [torch.ones_like(p) for p in module.parameters()], 1.0)
    optimizer.step(0.01)
    before = [v.clone() for _, v in optimizer.moments()] + [p.detach().clone() for p in module.parameters()]
    for bad, denominator in ((float("nan"), 1.0), (1.0, 0.0), (1.0, float("inf"))):
        absorb_all(module, optimizer, [torch.full_like(p, bad) for p in module.parameters()], denominator)
        optimizer.step(0.01)
        after = [v for _, v in optimizer.moments()] + [p.detach() for p in module.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_muons_momentum_survives_a_checkpoint():
    module, optimizer = make_muon()
    other, resumed = make_muon()
    gradients = [torch.randn_like(p) for p in module.parameters()]
    absorb_all(module, optimizer, gradients, 1.0)
    optimizer.step(0.01)
    assert "0.weight.momentum_buffer" in dict(optimizer.moments())
    resumed.load_masters(dict(zip(optimizer.names, optimizer.masters, strict=True)))
    resumed.load_moments({key: value.clone() for key, value in optimizer.moments()})
    for m, o in ((module, optimizer), (other, resumed)):
        absorb_all(m, o, gradients, 1.0)
        o.step(0.01)
    for found, wanted in zip(other.parameters(), module.parameters(), strict=True):
        assert torch.equal(found, wanted)
