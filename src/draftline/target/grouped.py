"""Grouped-query attention with a mask that does not copy keys and values for every query head.

transformers repeats them once there is a mask, which a batch of padded prompts has. On a CPU the repeated cache is then
most of what a decoding step reads: 7.2 ms a layer instead of 1.8 for 64 prompts of 80 tokens with 9 heads on 3.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

_NAME = "sdpa_grouped"


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' interface: query [B, heads, Q, D], key and value [B, kv_heads, S, D] -> [B, Q, heads, D]."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if attention_mask is None or options.get("dropout") or options.get("position_bias") is not None:
        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return output, None
    output = F.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=options.get("scaling"), enable_gqa=True
    )
    return output.transpose(1, 2).contiguous(), None


@contextmanager
def grouped_attention(model: Any, *, wanted: bool) -> Iterator[None]:
    """Inside, a model with sdpa attention attends this way, if `wanted`."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    if not wanted:
        yield
        return
    AttentionInterface.register(_NAME, _attend)
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    model.set_attn_implementation(_NAME)
    try:
        yield
    finally:
        model.set_attn_implementation("sdpa")
