"""Export weights in 8 bits: fp8 (e4m3) with a scale for each output row, in the layout that `compressed-tensors` names.

Only `o_proj` and the MLP are rounded, which are most of a drafter. Queries, keys and values stay in bf16, because
servers join the context projections of all layers into one product of raw weights; so do `fc`, the norms and all that
DFlash2 adds. Scales are powers of two: a product of fp8 and scale is then exact in bf16, and every reader computes with
the same numbers. Weights only: activations are not rounded, so what is measured with such weights is what is served.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from draftline.errors import UserError

_FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(_FP8).max
ROUNDED = ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_SCALE = "_scale"
_SCALES = (torch.bfloat16, torch.float16, torch.float32)
_SMALLEST = 1e-30  # of a row that is all zero


def quantize_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """bf16 weights with those of `ROUNDED` as fp8, each beside `NAME_scale` [rows, 1]: w = fp8 * scale."""
    found: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if not name.endswith(tuple(f"{part}.weight" for part in ROUNDED)):
            found[name] = tensor
            continue
        wide = tensor.float()
        largest = wide.abs().amax(dim=1, keepdim=True).clamp(min=_SMALLEST)
        scale = torch.exp2(torch.ceil(torch.log2(largest / _LARGEST)))
        found[name] = (wide / scale).to(_FP8)
        found[name + _SCALE] = scale.to(torch.bfloat16)
    return found


def quantization_config() -> dict[str, Any]:
    """`quantization_config` of config.json for `quantize_weights`."""
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "ignore": ["re:.*(q_proj|k_proj|v_proj|fc|kernel_projection|hidden_projection)$", "lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 8,
                    "type": "float",
                    "strategy": "channel",
                    "symmetric": True,
                    "dynamic": False,
                },
                "input_activations": None,
                "output_activations": None,
            }
        },
    }


def unquantized(weights: Mapping[str, Tensor], config: Mapping[str, Any], where: str) -> dict[str, Tensor]:
    """Weights as they are computed with: fp8 ones [out, in] times their scale [out, 1], in bf16; others unchanged.

    Raises:
        UserError: a quantisation that is not the one described here.
    """
    told = config.get("quantization_config")
    if told is None:
        return dict(weights)
    form = told.get("format") if isinstance(told, Mapping) else None
    if form != "float-quantized":
        raise UserError(
            f"is quantised ({form or 'in an unknown way'})", where=where, mend="give the drafter in bf16, or in fp8"
        )
    found: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        scale = weights.get(name + _SCALE)
        if tensor.dtype == _FP8:
            if tensor.ndim != 2 or scale is None or scale.shape not in ((tensor.shape[0], 1), (tensor.shape[0],), (1,)):
                raise UserError(f"{name} has no scale for its rows", where=where, mend="export it again")
            if scale.dtype not in _SCALES:
                kind = str(scale.dtype).removeprefix("torch.")
                raise UserError(f"the scale of {name} is {kind}", where=where, mend="export it again")
            tensor = (tensor.float() * scale.float().reshape(-1, 1)).to(torch.bfloat16)
        if not name.endswith(".weight" + _SCALE):
            found[name] = tensor
    return found
