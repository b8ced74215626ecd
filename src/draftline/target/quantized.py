"""Targets whose linear weights are quantised: when they are loaded (torchao), or as a checkpoint brings them.

What a drafter borrows or copies is plain numbers: a quantised head or projection is expanded once.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from draftline.config.schema import TargetConfig
from draftline.errors import UserError


def quantization_kwargs(config: TargetConfig) -> dict[str, Any]:
    """Arguments of `from_pretrained` for `target.quantization`; none for a target that is loaded as it is.

    Raises:
        UserError: torchao is not installed.
    """
    if config.quantization is None:
        return {}
    if importlib.util.find_spec("torchao") is None:
        raise UserError(
            "torchao is not installed", where="target.quantization", mend="pip install 'draftline[quantized]'"
        )
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    kinds = {"int8": Int8WeightOnlyConfig, "int8_dynamic": Int8DynamicActivationInt8WeightConfig}
    return {"quantization_config": TorchAoConfig(quant_type=kinds[config.quantization]())}


def plain(weight: torch.Tensor) -> torch.Tensor:
    """The weight as a plain tensor of its shape; a quantised one is expanded, a plain one is not copied.

    Raises:
        UserError: a kind of quantised weight that cannot be expanded.
    """
    data = weight.detach()
    if type(data) is torch.Tensor:
        return data
    expand = getattr(data, "dequantize", None)
    if expand is None:
        raise UserError(f"weights of type {type(data).__name__} cannot be expanded", where="target", mend="use another")
    expanded = expand()
    assert isinstance(expanded, torch.Tensor)
    return expanded


def kind_of(weight: torch.Tensor) -> list[str]:
    """How a weight, of any shape, is stored, for fingerprints; empty for a plain one."""
    kind = type(weight.detach())
    return [] if kind is torch.Tensor else [kind.__name__]
