"""Random-weight targets of the Qwen3.6-27B shape, made on their device; nothing is downloaded or read.

`hybrid` is the architecture as transformers has it: three of four layers linear attention (gated delta rule), one of
four full attention. Without the kernel package `fla` transformers runs a slow reference of the linear layers, so there
`dense` stands in: full attention everywhere, with heads chosen so that parameters and FLOPs of a layer are those of a
hybrid one. The drafter is the same for both.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from draftline.config.schema import TargetConfig
from draftline.target.backend import resolve_attention
from draftline.target.facts import facts_from_hf
from draftline.target.load import LoadedTarget, resolve_dtype, wrap_model

LAYERS = 64
_BIG = {
    "hidden_size": 5120,
    "intermediate_size": 17_408,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 248_320,
    "max_position_embeddings": 32_768,
}
_TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 512,
}
# Heads of the hybrid's full-attention layers; what a drafter of this target takes over.
HEADS, TINY_HEADS = 24, 2
# 40 heads give a dense layer the 115 M attention parameters of a linear one.
_DENSE_HEADS, _TINY_DENSE_HEADS = 40, 4


def choose_kind(kind: str) -> str:
    """`auto` is hybrid where its kernels are installed, else dense."""
    if kind != "auto":
        return kind
    return "hybrid" if find_spec("fla") is not None else "dense"


def write_config(folder: Path, kind: str, layers: int, *, tiny: bool) -> None:
    """Writes config.json of such a target; its sizes are then known like those of any other."""
    sizes: dict[str, Any] = {**(_TINY if tiny else _BIG), "num_hidden_layers": layers, "tie_word_embeddings": False}
    sizes |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "rms_norm_eps": 1e-6}
    if kind == "hybrid":
        sizes |= _hybrid(tiny) | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e7}}
    else:
        heads = _TINY_DENSE_HEADS if tiny else _DENSE_HEADS
        sizes |= {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "num_attention_heads": heads}
        sizes |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e7}}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(sizes, indent=2), encoding="utf-8")


def _hybrid(tiny: bool) -> dict[str, Any]:
    return {
        "model_type": "qwen3_5_text",
        "architectures": ["Qwen3_5ForCausalLM"],
        "num_attention_heads": TINY_HEADS if tiny else HEADS,
        "linear_num_key_heads": 2 if tiny else 16,
        "linear_num_value_heads": 4 if tiny else 48,
        "linear_key_head_dim": 16 if tiny else 128,
        "linear_value_head_dim": 16 if tiny else 128,
    }


def build_target(config: TargetConfig, device: str) -> LoadedTarget:
    """The target of a folder written by `write_config`, with random weights, on a device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    hf_config = AutoConfig.from_pretrained(config.model)
    place = torch.device(device)
    dtype = resolve_dtype(config, place)
    with place, torch.random.fork_rng(devices=[place] if place.type == "cuda" else []):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            hf_config, dtype=dtype, attn_implementation=resolve_attention(config, place, dtype, hf_config)
        )
    model.eval().requires_grad_(False)
    return wrap_model(model, config=config, facts=facts_from_hf(hf_config))
