"""torch's fused AdamW over plain lists. torch.optim.AdamW is the same kernel, but making one imports torch's compiler:
seconds of a processor in every process that trains.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim.adamw import adamw


class FusedAdamW:
    """AdamW (Loshchilov and Hutter, 2019), one pass over weights and moments instead of a dozen.

    Args:
        groups: (fp32 parameters of any shape, weight decay) each; they are updated in place.
        betas: decay of the two moments.
        eps: added to the root of the second one.

    Attributes:
        state: of each parameter: `step`, 0-dim fp32, and `exp_avg`, `exp_avg_sq` in its shape.
    """

    def __init__(self, groups: Sequence[tuple[list[Tensor], float]], betas: tuple[float, float], eps: float) -> None:
        self._groups, self._betas, self._eps = [g for g in groups if g[0]], betas, eps
        self.state: dict[Tensor, dict[str, Tensor]] = {}
        for parameters, _ in self._groups:
            for parameter in parameters:
                self.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                    "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                }

    @torch.no_grad()
    def step(self, learning_rate: float, divisor: Tensor, blocked: Tensor) -> None:
        """One step by the parameters' gradients divided by `divisor`.

        Args:
            divisor, blocked: 0-dim, on the parameters' device; where `blocked` is 1.0 weights, moments and step counts
                stay as they are, without a host sync.
        """
        for parameters, weight_decay in self._groups:
            states = [self.state[parameter] for parameter in parameters]
            adamw(
                parameters,
                [parameter.grad for parameter in parameters if parameter.grad is not None],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [state["step"] for state in states],
                fused=True,
                grad_scale=divisor,
                found_inf=blocked,
                amsgrad=False,
                beta1=self._betas[0],
                beta2=self._betas[1],
                lr=learning_rate,
                weight_decay=weight_decay,
                eps=self._eps,
                maximize=False,
            )
