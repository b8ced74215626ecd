"""Products with a head's weight on a CPU, whose long side a BLAS call handles badly.

For 24 to 400 rows and a vocabulary of 49,152, one call reaches 20 to 60 GFLOP/s on two cores where the same rows and
1,024 words at a time reach 50 to 100: each part of the weight then stays in the cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_BLOCK_COLUMNS = 1024
_MIN_COLUMNS = 8 * _BLOCK_COLUMNS
_MIN_ROWS = 8  # fewer rows are bound by reading the weight once, however it is cut


def wide_product(a_NK: Tensor, b_KV: Tensor) -> Tensor:
    """a @ b [N, V], without a graph; in parts of V on a CPU where V is large."""
    n_rows, n_columns = a_NK.shape[0], b_KV.shape[1]
    if a_NK.device.type != "cpu" or n_columns < _MIN_COLUMNS or n_rows < _MIN_ROWS:
        return a_NK @ b_KV
    out_NV = a_NK.new_empty(n_rows, n_columns)
    for start in range(0, n_columns, _BLOCK_COLUMNS):
        columns = slice(start, start + _BLOCK_COLUMNS)
        torch.mm(a_NK, b_KV[:, columns], out=out_NV[:, columns])
    return out_NV


class WideLinear(nn.Linear):
    """A linear layer whose output is wide, such as a head; its parameters are those of the layer it stands for."""

    @classmethod
    def in_place_of(cls, layer: nn.Linear) -> WideLinear:
        """Shares the parameters of `layer`."""
        with torch.device("meta"):
            wide = cls(layer.in_features, layer.out_features, bias=layer.bias is not None, dtype=layer.weight.dtype)
        wide.weight, wide.bias = layer.weight, layer.bias
        return wide.train(layer.training)

    def forward(self, input: Tensor) -> Tensor:
        """input [..., in] -> [..., out]."""
        if torch.is_grad_enabled() and (input.requires_grad or self.weight.requires_grad):
            return super().forward(input)
        output = wide_product(input.reshape(-1, self.in_features), self.weight.t())
        if self.bias is not None:
            output += self.bias
        return output.view(*input.shape[:-1], self.out_features)


def widen_head(model: Any) -> None:
    """Exchanges a causal LM's plain fp32 head on the CPU for a `WideLinear` of the same parameters."""
    head = model.get_output_embeddings()
    if type(head) is nn.Linear and head.weight.device.type == "cpu" and head.weight.dtype == torch.float32:
        model.set_output_embeddings(WideLinear.in_place_of(head))
