"""A tiny random target on disk, with its tokenizer, chat template and a list of stop tokens."""

from __future__ import annotations

from pathlib import Path

import data_kit as kit
import pytest

from draftline.config.schema import TargetConfig


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetConfig:
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    folder: Path = tmp_path_factory.mktemp("target")
    tokenizer = kit.tokenizer_with(kit.CHATML)
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            max_position_embeddings=256,
            initializer_range=0.2,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=None,
        )
    )
    # What a model's own settings ask for must not leak into its answers; its list of stop tokens must.
    model.generation_config = GenerationConfig(
        eos_token_id=[tokenizer.eos_token_id, *kit.STOPS], repetition_penalty=5.0, do_sample=True, temperature=0.3
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return TargetConfig(model=str(folder))
