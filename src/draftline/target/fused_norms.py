"""RMS norms of a target in one kernel each, for capture.

transformers spells an RMS norm out in seven kernels that pass over memory in fp32; torch has the same formula in one
(`torch.nn.functional.rms_norm`). It rounds once where the spelled-out form in 16 bits rounds twice, so states differ in
their last bit from norm to norm. Which modules are this formula is found by trial, not by name.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Hashable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from draftline.target.modules import twin

_EPS_NAMES = ("variance_epsilon", "eps")
# Relative, in fp32: the same formula in another order of operations.
_TRIAL_TOLERANCE = 1e-5


class FusedNorm(nn.Module):
    """`rms_norm` with the weight [N] of another module; hidden states are [..., N]."""

    def __init__(self, weight_N: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = weight_N, eps

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [..., N], normed and weighted, [..., N]."""
        return F.rms_norm(hidden, self.weight.shape, self.weight, self.eps)


def with_fused_norms(decoder: Any) -> Any:
    """A shallow twin of a decoder whose RMS norms run in one kernel each; the decoder itself if it has none.

    Weights and all other modules are shared. Norms of another formula (1 + weight, a gate, a bias) stay as they are.
    """
    known: dict[Hashable, bool] = {}

    def fused(module: nn.Module) -> nn.Module:
        eps = _eps_of(module)
        if eps is None:
            return module
        weight_N = module.get_parameter("weight")
        settings = {n: v for n, v in vars(module).items() if isinstance(v, bool | int | float | str)}
        key = (type(module), weight_N.numel(), tuple(sorted(settings.items())))
        if key not in known:
            known[key] = _is_rms_norm(module, eps)
        return FusedNorm(weight_N, eps) if known[key] else module

    return twin(decoder, fused)


def count_fused(decoder: nn.Module) -> int:
    """How many norms of a twin run in one kernel."""
    return sum(isinstance(module, FusedNorm) for module in decoder.modules())


def _eps_of(module: nn.Module) -> float | None:
    """Epsilon of what looks like a norm of one vector: one weight, no bias, no hooks, one argument. None otherwise."""
    eps = next((e for name in _EPS_NAMES if isinstance(e := getattr(module, name, None), float)), None)
    weight = module._parameters.get("weight")
    alone = list(module._parameters) == ["weight"] and not module._buffers and not module._modules
    hooked = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
    if eps is None or weight is None or weight.ndim != 1 or not alone or hooked:
        return None
    return eps if len(inspect.signature(module.forward).parameters) == 1 else None


def _is_rms_norm(module: nn.Module, eps: float) -> bool:
    """Whether the module is `rms_norm` to rounding, for weights and inputs made up on the CPU in fp32.

    One input is so small that the place of epsilon matters. A module that does not take such an input is none.
    """
    generator = torch.Generator().manual_seed(0)
    width = module.get_parameter("weight").numel()
    weight_N, hidden_3N = torch.randn(width, generator=generator), torch.randn(3, width, generator=generator)
    hidden_3N *= torch.tensor([[1.0], [30.0], [eps**0.5]])
    trial = copy.copy(module)
    trial._parameters = {"weight": nn.Parameter(weight_N, requires_grad=False)}
    with torch.no_grad():
        want = F.rms_norm(hidden_3N, (width,), weight_N, eps)
        try:
            got = trial(hidden_3N)
        except (RuntimeError, ValueError, TypeError, LookupError, AttributeError):
            return False
    return (
        isinstance(got, torch.Tensor)
        and got.shape == want.shape
        and bool(((got - want).norm(dim=-1) <= _TRIAL_TOLERANCE * want.norm(dim=-1)).all())
    )
