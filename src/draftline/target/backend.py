"""Which attention backend a target runs with: the fastest that computes what the model means."""

from __future__ import annotations

from typing import Any

import torch

from draftline.config.schema import TargetConfig
from draftline.errors import UserError
from draftline.target.facts import load_hf_config


def resolve_attention(config: TargetConfig, device: torch.device, dtype: torch.dtype, hf_config: Any = None) -> str:
    """`auto` is flash_attention_2 where that package, a CUDA device and a 16-bit dtype meet, else sdpa; eager for a
    model with soft-capped attention scores, which sdpa would leave out without a word, and for one whose own code does
    not take sdpa (attention sinks).

    Raises:
        UserError: sdpa was asked for by name for a model with soft caps.
    """
    capped = hf_config is not None and _is_capped(hf_config)
    if config.attention == "sdpa" and capped:
        raise UserError(
            "the model caps its attention scores, which sdpa leaves out",
            where="target.attention",
            mend="use auto, eager or flash_attention_2",
        )
    if config.attention != "auto":
        return config.attention
    if hf_config is not None and not _takes_sdpa(hf_config):
        return "eager"
    from transformers.utils import is_flash_attn_2_available

    if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16) and is_flash_attn_2_available():
        return "flash_attention_2"
    return "eager" if capped else "sdpa"


def masked_attention(config: TargetConfig) -> str:
    """A backend that takes any attention mask, as trees need it, and that computes what the model means."""
    hf_config = load_hf_config(config)
    return "eager" if _is_capped(hf_config) or not _takes_sdpa(hf_config) else "sdpa"


def _is_capped(hf_config: Any) -> bool:
    return getattr(hf_config.get_text_config(decoder=True), "attn_logit_softcapping", None) is not None


def _takes_sdpa(hf_config: Any) -> bool:
    """False if transformers' class of this model refuses sdpa. A class that it does not know may take it."""
    from transformers.models.auto import modeling_auto

    mappings = (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING, modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)
    known = next((mapping[type(hf_config)] for mapping in mappings if type(hf_config) in mapping), None)
    return bool(getattr(known, "_supports_sdpa", True))
