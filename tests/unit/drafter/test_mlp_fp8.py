"""fp8 products of the MLPs: each row has a scale of its own, and only training uses them."""

from __future__ import annotations

import pytest
import torch
from drafter_rows import tiny_drafter, tiny_spec

from draftline.drafter import model
from draftline.drafter.mlp_fp8 import FP8, FP8_MAX, quantize_rows


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_are_quantised_to_their_own_largest_value(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    x = (torch.randn(7, 48, generator=g) * torch.logspace(-6, 6, 7)[:, None]).to(dtype)
    x8, scale = quantize_rows(x)
    assert x8.dtype == FP8 and scale.shape == (7, 1)
    assert x8.float().abs().amax(-1).tolist() == [FP8_MAX] * 7
    error = (x8.float() * scale - x.float()).abs()
    # e4m3 has 3 bits behind the point: half a step is 1/16 of a value, or of the smallest normal one, 2^-6
    assert bool((error <= x.float().abs() / 16 + scale * 2**-10).all())


def test_a_row_of_zeros_stays_zero_and_finite() -> None:
    x8, scale = quantize_rows(torch.zeros(2, 16))
    assert x8.float().abs().max() == 0 and bool(torch.isfinite(scale).all())


def test_only_training_uses_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        calls.append(weight.shape)
        return x @ weight.t()

    monkeypatch.setattr(model, "linear_fp8", counted)
    drafter = tiny_drafter(tiny_spec())
    mlp, x = drafter.layers[0].mlp, torch.randn(3, drafter.spec.hidden_size)
    mlp.train()(x)
    assert calls == []
    drafter.set_mlp_fp8(True)
    mlp.eval()(x)
    assert calls == []
    mlp.train()(x)
    assert len(calls) == 3
