"""The frozen head's two products in fp8 (e4m3), on GPUs that have it: faster, at a measured price in exactness.

    logits     X8 W8^T     one scale for the chunk's hidden states, one for W; fp32 sums and results
    gradient   G8 W8       each row of G scaled by its largest entry but one; that largest entry (the label's, or a
                           confident wrong token's) takes no part: its row of W is added in the compute dtype

What is left in fp8 is the tail of the distribution, whose rounding errors (2.6 % each) are independent. W is kept
twice in fp8, row by row and column by column, because fp8 products want both factors along the summed axis: 2 V H
bytes beside W. Teacher logits and validation stay in the compute dtype. Near q = P the divergences' gradients
drown in fp8 rounding: use it for CE, not where KL or TV carry the weight.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from draftline.drafter.mlp_fp8 import FP8, FP8_MAX
from draftline.errors import UserError
from draftline.records import FrozenHead

_FIRST_CAPABILITY = (8, 9)
_ALIGNMENT = 16
# Rows quantised at a time by the plain form: bounds its temporaries.
_ROWS = 256


@dataclass(frozen=True, slots=True)
class Fp8Head(FrozenHead):
    """A frozen head with its weight in fp8 as well.

    Attributes:
        rows8_VH, columns8_HV: W / scale, stored by row and by column.
        scale: fp32 scalar.
    """

    rows8_VH: Tensor = field(kw_only=True)
    columns8_HV: Tensor = field(kw_only=True)
    scale: Tensor = field(kw_only=True)


def require_fp8(device: torch.device) -> None:
    """Raises UserError if the device has no fp8 products."""
    where, mend = "objective", "set head_dtype and mlp_dtype to compute"
    if device.type != "cuda":
        raise UserError(f"fp8 needs a GPU, but the drafter is on {device}", where=where, mend=mend)
    capability = torch.cuda.get_device_capability(device)
    if capability < _FIRST_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        found = ".".join(map(str, capability))
        raise UserError(f"fp8 needs compute capability 8.9 or newer; {name} has {found}", where=where, mend=mend)


def quantize_head(head: FrozenHead) -> Fp8Head:
    """The head with fp8 copies of its weight. Sizes must be multiples of 16 (UserError)."""
    weight_VH = head.weight_VH.detach()
    if any(n % _ALIGNMENT for n in weight_VH.shape):
        sizes = " x ".join(map(str, weight_VH.shape))
        raise UserError(
            f"fp8 needs a head whose sizes are multiples of {_ALIGNMENT}; this one is {sizes}",
            where="objective.head_dtype",
            mend="set it to compute",
        )
    scale = weight_VH.abs().amax().float() / FP8_MAX
    rows8_VH = torch.empty_like(weight_VH, dtype=FP8)
    for part8, part in zip(rows8_VH.split(8192), weight_VH.split(8192), strict=True):
        part8.copy_(part.float() / scale)
    columns8_HV = rows8_VH.view(torch.uint8).t().contiguous().view(FP8)
    return Fp8Head(
        head.weight_VH,
        head.bias_V,
        head.multiplier,
        head.softcap,
        rows8_VH=rows8_VH,
        columns8_HV=columns8_HV,
        scale=scale,
    )


def project_fp8(x_CH: Tensor, head: Fp8Head) -> Tensor:
    """x W^T [C, V] in fp32."""
    scale = (x_CH.abs().amax().float() / FP8_MAX).clamp(min=1e-12)
    x8_CH = (x_CH.float() / scale).to(FP8)
    return _scaled_product(x8_CH, head.rows8_VH.t(), scale, head.scale)


def gradient_product_fp8(gradient_CV: Tensor, head: Fp8Head) -> Tensor:
    """G W [C, H] in fp32."""
    g8_CV, scale_C, largest_C, value_C = quantize_rows(gradient_CV)
    out_CH = _scaled_product(g8_CV, head.columns8_HV.t(), torch.ones_like(head.scale), head.scale)
    out_CH.mul_(scale_C.unsqueeze(-1))
    return out_CH.addcmul_(value_C.unsqueeze(-1), head.weight_VH[largest_C].to(out_CH.dtype))


def quantize_rows(gradient_CV: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(G8 [C, V] without each row's largest entry, scale [C], where that entry is [C], its value [C])."""
    if gradient_CV.is_cuda:
        from draftline.drafter.head_gpu import quantize_rows_kernel_form

        return quantize_rows_kernel_form(gradient_CV, FP8, FP8_MAX)
    parts = [_quantize_few(part) for part in gradient_CV.split(_ROWS)]
    g8, scale, largest, value = zip(*parts, strict=True)
    return (
        torch.cat([p.view(torch.uint8) for p in g8]).view(FP8),
        torch.cat(scale),
        torch.cat(largest),
        torch.cat(value),
    )


def _quantize_few(gradient_CV: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wide_CV = gradient_CV.float()
    largest_C = wide_CV.abs().argmax(-1)
    value_C = wide_CV.gather(-1, largest_C.unsqueeze(-1)).squeeze(-1)
    rest_CV = wide_CV.scatter(-1, largest_C.unsqueeze(-1), 0.0)
    scale_C = (rest_CV.abs().amax(-1) / FP8_MAX).clamp(min=1e-30)
    return (rest_CV / scale_C.unsqueeze(-1)).to(FP8), scale_C, largest_C, value_C


def _scaled_product(a8: Tensor, b8: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    return torch._scaled_mm(a8, b8, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.float32, use_fast_accum=False)
