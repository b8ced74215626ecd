"""fp32 master weights, their AdamW or Muon, and the compute copies that the drafter runs with.

Per row the drafter adds the gradient of the loss NUMERATOR to its compute parameters. `absorb` moves it into the fp32
gradient of the masters, `step` divides once by the denominator of the whole optimizer step, clips, and updates. A
step whose gradient is not finite, or whose denominator is 0 (no valid anchor), changes nothing: not the weights, not
the moments, not the weight decay. On a GPU that decision is taken on the device; Muon, whose steps torch cannot call
off there, waits for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from draftline.config.schema import OptimizerConfig
from draftline.drafter.adamw import FusedAdamW


class MasterOptimizer:
    """AdamW, or Muon for matrices and AdamW for the rest, over fp32 masters of one drafter replica.

    Muon (Keller Jordan, 2024) is torch's; `match_rms_adamw` gives its steps the size of AdamW's (arXiv 2502.16982), so
    that one learning rate serves both.

    Args:
        module: the drafter; parameters in its compute dtype (fp32 parameters are their own masters).
        config: optimizer section.
        without_loss: names of parameters that no loss reaches. They stay as they are: decay alone would shrink them.
    """

    def __init__(self, module: nn.Module, config: OptimizerConfig, *, without_loss: Collection[str] = ()) -> None:
        self.names = [name for name, _ in module.named_parameters()]
        self._compute = list(module.parameters())
        self.device = self._compute[0].device
        self.masters = [p if p.dtype == torch.float32 else p.detach().float().clone() for p in self._compute]
        self._on_gpu = self.device.type == "cuda"
        self._clip_norm = config.clip_norm
        self._gradients: list[Tensor] = []  # of the step in the making; empty before its first row
        self._denominator = torch.zeros((), dtype=torch.float64, device=self.device)
        for master in self.masters:
            master.requires_grad_(True)
        named = [(name, m) for name, m in zip(self.names, self.masters, strict=True) if m.ndim == 2]
        matrices = [m for name, m in named if name not in without_loss]
        still = [m for name, m in named if name in without_loss]
        self.muon = _make_muon(matrices, still, config) if config.kind == "muon" else None
        decay, undecayed = (matrices, still) if self.muon is None else ([], [])
        plain = [*undecayed, *(m for m in self.masters if m.ndim != 2)]  # nor are norm weights and base kernels
        # All moments are made now, so that memory is known and a checkpoint always holds all of them.
        self.adamw = FusedAdamW([(decay, config.weight_decay), (plain, 0.0)], config.betas, config.eps)
        if self.muon is not None:
            for master in matrices + still:
                self.muon.state[master]["momentum_buffer"] = torch.zeros_like(master)

    @torch.no_grad()
    def absorb(self, denominator: Tensor) -> None:
        """Adds the compute parameters' gradients and this row's denominator (0-dim) to the step in the making.

        Takes the gradients away from the parameters; the first fp32 ones of a step are kept as they are, not copied.
        fp32 gradients exist from here to the end of the step only: not while the first row's activations do.
        A denominator that is not finite marks a row whose loss was not: the step it goes into changes nothing.
        """
        is_first = not self._gradients
        for i, parameter in enumerate(self._compute):
            gradient, parameter.grad = parameter.grad, None
            if is_first:
                self._gradients.append(torch.zeros_like(self.masters[i]) if gradient is None else gradient.float())
            elif gradient is not None:
                self._gradients[i].add_(gradient)
        self._denominator += denominator.detach().to(self._denominator)

    @property
    def gradients(self) -> list[Tensor]:
        """fp32 sums of numerator gradients of the step in the making, in the order and shapes of `masters`."""
        if not self._gradients:
            self._gradients = [torch.zeros_like(master) for master in self.masters]
        return self._gradients

    @property
    def denominator(self) -> Tensor:
        """0-dim fp64: sum of denominators of the step in the making."""
        return self._denominator

    @torch.no_grad()
    def step(self, learning_rate: float) -> tuple[Tensor, Tensor]:
        """One optimizer step over everything absorbed since the last one.

        Returns:
            (gradient norm before clipping, skipped): device scalars; `skipped` is 1.0 if a non-finite gradient or loss
            was met and 0.0 otherwise (a step without any supervised slot is not counted as skipped).
        """
        inverse = torch.where(self._denominator > 0, 1.0 / self._denominator, 0.0).float()
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(self.gradients))) * inverse
        finite = torch.isfinite(norm) & torch.isfinite(self._denominator)
        scale = inverse if self._clip_norm is None else inverse * (self._clip_norm / (norm + 1e-6)).clamp(max=1.0)
        blocked = ~finite | (self._denominator <= 0)
        self._apply(learning_rate, scale, blocked)
        self.clear()
        return norm, (~finite).float()

    def _apply(self, learning_rate: float, scale: Tensor, blocked: Tensor) -> None:
        """A step with gradients times `scale`, or nothing at all where `blocked`."""
        if (self.muon is not None or not self._on_gpu) and bool(blocked):
            return
        for master, gradient in zip(self.masters, self._gradients, strict=True):
            master.grad = gradient
        # The fused kernel divides by grad_scale, and leaves weights, moments and step count alone where found_inf is 1:
        # no pass of its own for the scale, and no host sync on a GPU.
        self.adamw.step(learning_rate, 1.0 / scale, blocked.float())
        if self.muon is not None:
            for group in self.muon.param_groups:
                group["lr"] = learning_rate
            torch._foreach_mul_([g for g in self._gradients if g.ndim == 2], scale)
            self.muon.step()
        for master in self.masters:
            master.grad = None
        self.refresh()

    def clear(self) -> None:
        """Forgets everything absorbed."""
        self._gradients = []
        self._denominator.zero_()

    @torch.no_grad()
    def refresh(self) -> None:
        """Writes the masters into the compute parameters, in place."""
        pairs = [(p, m) for p, m in zip(self._compute, self.masters, strict=True) if p is not m]
        if pairs:
            torch._foreach_copy_([p for p, _ in pairs], [m for _, m in pairs])

    def moments(self) -> Iterator[tuple[str, Tensor]]:
        """(key, tensor) of the optimizer's state: `NAME.exp_avg`, `NAME.exp_avg_sq`, `NAME.step` (0-dim); of a matrix
        under Muon `NAME.momentum_buffer`. Otherwise in the parameter's shape."""
        for name, master in zip(self.names, self.masters, strict=True):
            state = self.adamw.state if self.muon is None or master.ndim != 2 else self.muon.state
            for key, value in state[master].items():
                yield f"{name}.{key}", value

    @torch.no_grad()
    def load_moments(self, tensors: dict[str, Tensor]) -> None:
        """Inverse of `moments`: the same keys and shapes. KeyError: one is missing."""
        for key, value in self.moments():
            value.copy_(tensors[key])

    @torch.no_grad()
    def load_masters(self, tensors: dict[str, Tensor]) -> None:
        """Sets masters (and compute copies), each from the tensor of its name and shape. KeyError: one is missing."""
        for name, master in zip(self.names, self.masters, strict=True):
            master.copy_(tensors[name])
        self.refresh()

    @torch.no_grad()
    def reset_moments(self) -> None:
        """Zero moments and step counts, as at the start."""
        for _, value in self.moments():
            value.zero_()


def _make_muon(matrices: list[Tensor], undecayed: list[Tensor], config: OptimizerConfig) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": undecayed, "weight_decay": 0.0}]
    return torch.optim.Muon(
        [g for g in groups if g["params"]],
        lr=config.learning_rate,
        weight_decay=config.weight_decay,
        momentum=config.muon_momentum,
        adjust_lr_fn="match_rms_adamw",
    )
