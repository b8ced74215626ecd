"""Muon on matrices, AdamW on norms, over the same fp32 masters.

Muon (Keller Jordan, 2024): momentum, then the nearest semi-orthogonal matrix by five Newton-Schulz steps. Those of one
shape are treated together: a small drafter's step waits for launches, not for products. The update is scaled to the
size of AdamW's (0.2 sqrt(longer side), arXiv 2502.16982), so that one learning rate serves both.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftline.config.schema import OptimizerConfig
from draftline.drafter.optimizer import MasterOptimizer

MOMENTUM, STEPS = 0.95, 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalized(x_GRC: Tensor, dtype: torch.dtype) -> Tensor:
    """About the nearest semi-orthogonal matrix of each of G matrices, singular values between 0.7 and 1.2."""
    a, b, c = COEFFICIENTS
    x = x_GRC.to(dtype)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(STEPS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return (x.mT if tall else x).to(x_GRC.dtype)


class MuonMasters(MasterOptimizer):
    """As MasterOptimizer, with Muon for all matrices."""

    def __init__(self, module: torch.nn.Module, config: OptimizerConfig) -> None:
        super().__init__(module, config)
        by_shape: dict[torch.Size, list[int]] = {}
        for place, master in enumerate(self.masters):
            if master.ndim == 2:
                by_shape.setdefault(master.shape, []).append(place)
        self._groups = list(by_shape.values())
        self._momenta = [torch.zeros_like(torch.stack([self.masters[i] for i in g])).detach() for g in self._groups]
        self._dtype = torch.float32 if self.device.type == "cpu" else torch.bfloat16

    def _apply(self, scale: Tensor, blocked: Tensor) -> None:
        """A step that is not finite gives Muon zeros; AdamW leaves everything alone then."""
        shown = torch.where(blocked, torch.zeros_like(scale), scale)
        rate = float(self.adamw.param_groups[0]["lr"])
        for places, momentum in zip(self._groups, self._momenta, strict=True):
            gradient = torch.stack([self._gradients[i] for i in places]).nan_to_num() * shown
            momentum.lerp_(gradient, 1 - MOMENTUM)
            update = orthogonalized(gradient.lerp(momentum, MOMENTUM), self._dtype)
            size = rate * 0.2 * max(update.shape[-2:]) ** 0.5
            torch._foreach_add_([self.masters[i] for i in places], list(update.unbind()), alpha=-size)
        for place, master in enumerate(self.masters):
            master.grad = None if master.ndim == 2 else self._gradients[place]
        self.adamw.grad_scale = 1.0 / scale  # type: ignore[attr-defined]
        self.adamw.found_inf = blocked.float()  # type: ignore[attr-defined]
        self.adamw.step()
        for master in self.masters:
            master.grad = None
        self.refresh()
