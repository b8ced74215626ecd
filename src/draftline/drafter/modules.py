"""The small parts that all of a drafter is made of."""

from __future__ import annotations

import torch
from torch import nn


class RMSNorm(nn.Module):
    """w * x / rms(x), the statistics in fp32 at least. `w` starts at 1 (not the zero-centred 1 + w form)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x / rms(x) * weight over the last dimension, in fp32 at least; shape and dtype of x."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Linear(nn.Linear):
    """nn.Linear without bias that leaves initialisation to `Drafter.init_weights`."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__(n_in, n_out, bias=False)

    def reset_parameters(self) -> None:
        """No draw from the global generator."""
