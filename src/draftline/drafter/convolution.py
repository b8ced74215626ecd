"""DFlash2's short convolutions along the slots of a block, around attention and MLP of each layer.

    d = kernel_projection(x)                                               from the normed input x of the sublayer
    conv_s(y)_t[c] = sum_{o < m} (base_kernel[s, o, c] + d_t[s, o, c // g]) * y_{t-o}[c],     y_{<0} = 0

s = 0 goes in front of the sublayer, s = 1 behind it; both take their coefficients from x. Only slots of one block are
mixed, and only with earlier ones. Context keys and values are not convolved. Parameter names are those of `dflash`.

Shape letters: Q block tokens, H hidden size, m taps, g channels of a group, G = H / g groups.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from draftline.config.drafter_spec import Dflash2Spec
from draftline.drafter.modules import Linear

# Standard deviation of what starts at random in DFlash2's own modules.
_ADDED_RANGE = 0.02


class ShortConvolution(nn.Module):
    """The two convolutions of one sublayer."""

    def __init__(self, hidden_size: int, spec: Dflash2Spec) -> None:
        super().__init__()
        n_groups = hidden_size // spec.conv_group_size
        self.base_kernel = nn.Parameter(torch.empty(2, spec.conv_kernel_size, hidden_size))
        self.kernel_projection = Linear(hidden_size, 2 * spec.conv_kernel_size * n_groups)

    def dynamic(self, x_QH: torch.Tensor) -> torch.Tensor:
        """Coefficients [2, Q, m, G] for a sublayer with the normed input x: in front of it, and behind it."""
        sides, n_taps = self.base_kernel.shape[:2]
        return self.kernel_projection(x_QH).unflatten(-1, (sides, n_taps, -1)).movedim(1, 0)

    def before(self, x_QH: torch.Tensor, dynamic_2QmG: torch.Tensor, slots_Q: torch.Tensor) -> torch.Tensor:
        """What goes into the sublayer [Q, H]; `slots_Q` is each token's place in its own block."""
        return convolve(x_QH, self.base_kernel[0], dynamic_2QmG[0], slots_Q)

    def after(self, y_QH: torch.Tensor, dynamic_2QmG: torch.Tensor, slots_Q: torch.Tensor) -> torch.Tensor:
        """What comes out of it [Q, H]."""
        return convolve(y_QH, self.base_kernel[1], dynamic_2QmG[1], slots_Q)


def convolve(
    y_QH: torch.Tensor, base_mH: torch.Tensor, dynamic_QmG: torch.Tensor, slots_Q: torch.Tensor
) -> torch.Tensor:
    """One convolution, [Q, H], by the module's formula: the s-th of its two, with these coefficients."""
    n_groups = dynamic_QmG.shape[-1]
    y_QGg = y_QH.unflatten(-1, (n_groups, -1))
    base_mGg = base_mH.unflatten(-1, (n_groups, -1)).to(y_QH.dtype)
    total_QGg = (base_mGg[0] + dynamic_QmG[:, 0, :, None]) * y_QGg
    for back in range(1, base_mH.shape[0]):
        # Shifted along the flat axis; what comes from another block is dropped, not multiplied: it may be anything.
        shifted_QGg = nn.functional.pad(y_QGg, (0, 0, 0, 0, back, 0))[: y_QGg.shape[0]]
        earlier_QGg = torch.where((slots_Q >= back)[:, None, None], shifted_QGg, 0.0)
        total_QGg = total_QGg + (base_mGg[back] + dynamic_QmG[:, back, :, None]) * earlier_QGg
    return total_QGg.flatten(-2)


def is_added(name: str) -> bool:
    """True for parameters that a DFlash2 drafter has and a DFlash one has not."""
    return "_conv." in name or name.startswith("candidate_selector.")


@torch.no_grad()
def init_added(named: Mapping[str, nn.Parameter], generator: torch.Generator) -> None:
    """Sets DFlash2's own parameters so that the drafter drafts as if it had none: convolutions that pass each slot
    through, and a selector whose scores add nothing.

    Of the selector two factors are drawn and one is zero, so that all of it learns from the second step on.
    """
    for name, parameter in named.items():
        if not is_added(name):
            continue
        if name.endswith(("predecessor_codebook", "hidden_projection.weight")):
            drawn = torch.empty(parameter.shape, device="cpu", dtype=torch.float32)
            parameter.copy_(drawn.normal_(0.0, _ADDED_RANGE, generator=generator))
            continue
        parameter.zero_()
        if name.endswith("base_kernel"):
            parameter[:, 0] = 1.0
