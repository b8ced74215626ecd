"""States as numbers on disk: as they are, or in fp8 with a scale for each token and tap."""

from __future__ import annotations

import torch

FP8 = torch.float8_e4m3fn
_SMALLEST_SCALE = 1e-12  # of a token whose states are all zero


def quantize(taps_TF: torch.Tensor, n_taps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(fp8 [T, L * H], fp32 scales [T, L]): each tap of each token uses the whole range of e4m3."""
    x_TLH = taps_TF.float().unflatten(-1, (n_taps, -1))
    scales_TL = (x_TLH.abs().amax(-1) / torch.finfo(FP8).max).clamp(min=_SMALLEST_SCALE)
    return (x_TLH / scales_TL[..., None]).to(FP8).flatten(1), scales_TL


def dequantize(fp8_TF: torch.Tensor, scales_TL: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """States [T, L * H] in `dtype`."""
    x_TLH = fp8_TF.float().unflatten(-1, (scales_TL.shape[-1], -1))
    return (x_TLH * scales_TL[..., None]).flatten(1).to(dtype)


def relative_error(rounded_TF: torch.Tensor, exact_TF: torch.Tensor) -> float:
    """|a - b| / |b| over all numbers of a sample; 0.0 where b is zero."""
    exact = exact_TF.float()
    size = float(exact.norm())
    return float((rounded_TF.float() - exact).norm()) / size if size else 0.0


def token_bytes(n_taps: int, hidden_size: int, dtype: str, compute_dtype: str, *, with_final: bool) -> int:
    """Bytes of one token on disk. With fp8 the last hidden state stays in 16 bits: a teacher's logits feel it."""
    sizes = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}
    taps = n_taps * hidden_size * sizes[dtype] + (4 * n_taps if dtype == "fp8" else 0)
    return taps + (hidden_size * sizes[final_dtype(dtype, compute_dtype)] if with_final else 0)


def final_dtype(dtype: str, compute_dtype: str) -> str:
    """What the last hidden state is kept in."""
    if dtype != "fp8":
        return dtype
    return "float16" if compute_dtype == "float16" else "bfloat16"
