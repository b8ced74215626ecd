"""Products of a trained layer in fp8 (e4m3), on GPUs that have it: faster, at a measured price in exactness.

    forward             Y = X8 W8^T     rows of X and rows of W have a scale of their own
    gradient of X       dX = G8 W8      rows of G and columns of W have a scale of their own
    gradient of W       dW = G^T X      compute dtype: its sums run over all tokens, whose scales differ

A scale of its own for each row costs one pass fused into whatever wrote the row, and keeps one large value from
flushing all others to zero. Weights are quantised anew in every call, since every step changes them.
Two of a layer's three products run at the fp8 rate. Training only: validation and decoding stay in the compute dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
# Below this largest value a row counts as zero; its scale must not become zero or denormal.
_TINY = 1e-12


def quantize_rows(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """(x / scale in fp8 [M, K], fp32 scale [M, 1])."""
    scale_M1 = x_MK.abs().amax(-1, keepdim=True).float().clamp(min=_TINY) / FP8_MAX
    return (x_MK.float() / scale_M1).clamp(-FP8_MAX, FP8_MAX).to(FP8), scale_M1


def product(a8_MK: Tensor, b8_NK: Tensor, scale_M1: Tensor, scale_N1: Tensor, dtype: torch.dtype) -> Tensor:
    """a b^T [M, N] of two row-wise quantised factors."""
    return torch._scaled_mm(
        a8_MK, b8_NK.t(), scale_a=scale_M1, scale_b=scale_N1.t(), out_dtype=dtype, use_fast_accum=True
    )


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, weight_NK: Tensor) -> Tensor:
        ctx.save_for_backward(x_MK, weight_NK)
        x8, x_scale = quantize_rows(x_MK)
        w8, w_scale = quantize_rows(weight_NK)
        return product(x8, w8, x_scale, w_scale, x_MK.dtype)

    @staticmethod
    def backward(ctx: Any, gradient_MN: Tensor) -> tuple[Tensor, Tensor]:
        x_MK, weight_NK = ctx.saved_tensors
        g8, g_scale = quantize_rows(gradient_MN)
        columns8_KN, column_scale = quantize_rows(weight_NK.t())
        return product(g8, columns8_KN.contiguous(), g_scale, column_scale, x_MK.dtype), gradient_MN.t() @ x_MK


def linear_fp8(x_MK: Tensor, weight_NK: Tensor) -> Tensor:
    """x W^T [M, N] in fp8, differentiable. Sizes must be multiples of 16."""
    output: Tensor = _Fp8Linear.apply(x_MK, weight_NK)
    return output
