"""A target loads frozen, complete, with everything a drafter borrows; sharing does not read it again."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftline.config.schema import TargetConfig
from draftline.errors import UserError
from draftline.target import load as load_module
from draftline.target.backend import masked_attention, resolve_attention
from draftline.target.load import (
    LoadedTarget,
    load_target,
    load_tokenizer,
    resolve_dtype,
    tokenizer_stop_ids,
)

LoadTiny = Callable[..., LoadedTarget]


def test_a_target_is_frozen_fp32_on_the_cpu_with_its_parts(load_tiny: LoadTiny) -> None:
    target = load_tiny("qwen3")
    assert not target.model.training and not any(p.requires_grad for p in target.model.parameters())
    assert (target.dtype, target.device.type) == (torch.float32, "cpu")
    assert (target.num_layers, target.hidden_size, target.vocab_size) == (4, 64, 512)
    assert len(target.decoder.layers) == 4 and target.final_norm is target.decoder.norm
    assert target.embedding.weight_VH.shape == (512, 64) and target.head.weight_VH.shape == (512, 64)
    assert target.embedding.weight_VH.data_ptr() != target.head.weight_VH.data_ptr()
    assert target.stop_token_ids == {2}


def test_a_tied_head_is_the_embedding(load_tiny: LoadTiny) -> None:
    target = load_tiny("llama_tied")
    assert target.head.weight_VH.data_ptr() == target.embedding.weight_VH.data_ptr()


def test_the_text_model_inside_a_multimodal_one_is_the_decoder(load_tiny: LoadTiny) -> None:
    target = load_tiny("gemma3_multimodal")
    assert type(target.decoder).__name__ == "Gemma3TextModel" and target.embedding.scale == 8.0


def test_the_embedding_scale_is_rounded_as_the_target_rounds_it() -> None:
    import transformers as hf

    embedding = hf.models.gemma2.modeling_gemma2.Gemma2TextScaledWordEmbedding(4, 8, 0, embed_scale=3072**0.5)
    assert load_module._embedding_scale(embedding.to(torch.bfloat16), facts=None) == 55.5  # type: ignore[arg-type]


def test_same_device_shares_the_target_and_reads_nothing(load_tiny: LoadTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    target = load_tiny("qwen3")
    monkeypatch.setattr(load_module, "_read_model", lambda *args: pytest.fail("read again"))
    assert load_target(target.config, "cpu", share_with=target) is target


def test_another_device_gets_a_copy_with_weights_still_tied(load_tiny: LoadTiny) -> None:
    copied = load_module._copy_to(load_tiny("llama_tied"), torch.device("meta"))
    assert {p.device.type for p in copied.model.parameters()} == {"meta"}
    assert copied.model.lm_head.weight is copied.model.model.embed_tokens.weight
    assert {b.device.type for b in copied.model.buffers()} == {"meta"}


def test_another_configuration_is_not_shared(load_tiny: LoadTiny, tiny_tokenizer: Any) -> None:
    target = load_tiny("qwen3")
    other = target.config.model_copy(update={"attention": "eager"})
    assert load_target(other, "cpu", share_with=target, tokenizer=tiny_tokenizer).model is not target.model


def test_the_fingerprint_tells_targets_apart_but_not_their_dtype(
    load_tiny: LoadTiny, make_tiny_target: Callable[..., Path], tiny_tokenizer: Any
) -> None:
    first = load_tiny("qwen3")
    other = load_target(TargetConfig(model=str(make_tiny_target("qwen3", 1))), "cpu", tokenizer=tiny_tokenizer)
    assert first.fingerprint != other.fingerprint
    assert first.fingerprint == load_tiny("qwen3", dtype="bfloat16").fingerprint


def test_weights_that_are_missing_are_refused_not_made_up(tiny_target_dir: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny_target_dir, broken)
    weights = load_file(broken / "model.safetensors")
    del weights["model.layers.2.mlp.up_proj.weight"]
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"model\.layers\.2\.mlp\.up_proj\.weight"):
        load_target(TargetConfig(model=str(broken)), "cpu")


def test_weight_files_that_are_missing_are_one_line(tiny_target_dir: Path, tmp_path: Path) -> None:
    shutil.copy(tiny_target_dir / "config.json", tmp_path)
    with pytest.raises(UserError, match="cannot load the model") as caught:
        load_target(TargetConfig(model=str(tmp_path)), "cpu")
    assert "\n" not in str(caught.value)


def test_a_model_without_tokenizer_is_one_line(tiny_target_dir: Path, tmp_path: Path) -> None:
    shutil.copy(tiny_target_dir / "config.json", tmp_path)
    with pytest.raises(UserError, match="tokenizer") as caught:
        load_tokenizer(TargetConfig(model=str(tmp_path)))
    assert "\n" not in str(caught.value)


def test_dtype_and_attention_resolve_by_device() -> None:
    config = TargetConfig(model="m")
    assert resolve_dtype(config, torch.device("cpu")) == torch.float32
    assert resolve_dtype(config, torch.device("cuda:0")) == torch.bfloat16
    assert resolve_dtype(TargetConfig(model="m", dtype="float16"), torch.device("cpu")) == torch.float16
    assert resolve_attention(config, torch.device("cpu"), torch.float32) == "sdpa"
    assert resolve_attention(TargetConfig(model="m", attention="eager"), torch.device("cpu"), torch.float32) == "eager"


def test_capped_attention_scores_are_never_left_out_by_sdpa(
    load_tiny: LoadTiny, make_tiny_target: Callable[..., Path], tiny_tokenizer: Any
) -> None:
    assert load_tiny("gemma2").attention == "eager" and load_tiny("gemma3_multimodal").attention == "sdpa"
    config = TargetConfig(model=str(make_tiny_target("gemma2")), attention="sdpa")
    with pytest.raises(UserError, match="caps its attention scores"):
        load_target(config, "cpu", tokenizer=tiny_tokenizer)


def test_a_model_that_refuses_sdpa_runs_in_its_own_code(
    load_tiny: LoadTiny, make_tiny_target: Callable[..., Path]
) -> None:
    """gpt-oss: attention sinks, for which neither sdpa nor flash_attention_2 has a place."""
    target, config = load_tiny("gpt_oss"), TargetConfig(model=str(make_tiny_target("gpt_oss")))
    assert target.attention == masked_attention(config) == "eager"
    assert resolve_attention(config, torch.device("cuda:0"), torch.bfloat16, target.model.config) == "eager"


def test_the_token_that_ends_a_turn_stops_even_if_it_is_not_eos(tiny_tokenizer: Any) -> None:
    import copy

    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.eos_token = "<|endoftext|>"
    assert tokenizer_stop_ids(tokenizer) == {0, 2}
    tokenizer.chat_template = "{{ messages[-1]['content'] }} bye"
    assert tokenizer_stop_ids(tokenizer) == {0}
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    assert tokenizer_stop_ids(tokenizer) == {0}
