"""One small drafter specification; each kit says only what is different about its own."""

from __future__ import annotations

from typing import Any

from draftline.config.drafter_spec import DrafterSpec

SMALL: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_layers": 2,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 8,
    "vocab_size": 41,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "max_position_embeddings": 512,
    "block_size": 4,
    "mask_token_id": 40,
    "taps": (1, 2),
    "num_target_layers": 6,
    "layer_types": ("full_attention", "full_attention"),
    "initializer_range": 0.2,
}


def small_spec(**changes: Any) -> DrafterSpec:
    """Two layers of full attention, hidden 16, vocabulary 41, blocks of 4, two taps of a target of six layers."""
    return DrafterSpec(**(SMALL | changes))
