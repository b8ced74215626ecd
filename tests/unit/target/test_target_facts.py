"""Facts of a target come from its configuration alone, and bad targets are refused in one clear line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from draftline.config.schema import TargetConfig
from draftline.errors import UserError
from draftline.target import facts as facts_module
from draftline.target.facts import target_facts


def read(folder: Path) -> facts_module.TargetFacts:
    return target_facts(TargetConfig(model=str(folder)))


def test_sizes_and_rope_are_read_without_weights(tiny_target_dir: Path, tmp_path: Path) -> None:
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_bytes((tiny_target_dir / name).read_bytes())
    facts = read(tmp_path)
    assert (facts.num_layers, facts.hidden_size, facts.intermediate_size) == (4, 64, 96)
    assert (facts.num_heads, facts.num_kv_heads, facts.head_dim, facts.vocab_size) == (6, 2, 16, 512)
    assert facts.rope_parameters == {"rope_type": "default", "rope_theta": 1e6}
    assert facts.layer_types == ("full_attention",) * 4 and not facts.has_recurrent_layers
    assert (facts.bos_token_id, facts.eos_token_ids, facts.pad_token_id) == (1, (2,), 0)
    assert (facts.embedding_scale, facts.logit_multiplier, facts.final_logit_softcapping) == (1.0, 1.0, None)
    assert facts.architectures == ("Qwen3ForCausalLM",) and facts.rope_types == {"default"}


def test_stop_ids_of_both_configurations_are_joined(tiny_target_dir: Path, tmp_path: Path) -> None:
    config = json.loads((tiny_target_dir / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2, 9]}))
    assert read(tmp_path).eos_token_ids == (2, 7, 9)


def test_gemma_facts_hold_its_embedding_scale_and_cap(make_tiny_target: Callable[..., Path]) -> None:
    facts = read(make_tiny_target("gemma2"))
    assert facts.embedding_scale == 8.0  # sqrt(64)
    assert facts.final_logit_softcapping == 3.0


def test_the_text_model_inside_a_multimodal_one_is_described(make_tiny_target: Callable[..., Path]) -> None:
    facts = read(make_tiny_target("gemma3_multimodal"))
    assert (facts.model_type, facts.num_layers, facts.hidden_size) == ("gemma3_text", 4, 64)
    assert facts.architectures == ("Gemma3ForConditionalGeneration",)
    assert set(facts.rope_parameters) == {"full_attention", "sliding_attention"}  # nested by layer type
    assert facts.rope_types == {"default"}


def test_recurrent_layers_are_seen(make_tiny_target: Callable[..., Path]) -> None:
    assert read(make_tiny_target("qwen3_next")).has_recurrent_layers
    assert read(make_tiny_target("mistral_sliding")).layer_types == ("sliding_attention",) * 4


def test_granite_like_scales_are_read() -> None:
    import transformers as hf

    config = hf.GraniteConfig(embedding_multiplier=12.0, logits_scaling=8.0, num_hidden_layers=2)
    facts = facts_module.facts_from_hf(config)
    assert (facts.embedding_scale, facts.logit_multiplier) == (12.0, 0.125)


@pytest.mark.parametrize(
    ("model", "what"),
    [
        ("/nowhere/at/all", "no such folder"),
        ("./missing.gguf", "no such file"),
    ],
)
def test_a_missing_model_is_one_line_that_names_it(model: str, what: str) -> None:
    with pytest.raises(UserError, match=what) as caught:
        target_facts(TargetConfig(model=model))
    assert model in str(caught.value) and "\n" not in str(caught.value)


def test_a_folder_without_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no config\.json"):
        read(tmp_path)


def test_a_file_that_is_not_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(UserError, match=r"not a \.gguf"):
        read(tmp_path / "model.bin")


def test_a_damaged_gguf_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"not gguf at all" * 10)
    with pytest.raises(UserError, match="cannot read the model's configuration"):
        read(tmp_path / "model.gguf")


def test_the_missing_gguf_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(facts_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"draftline\[gguf\]"):
        read(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    "config", [{"model_type": "vit"}, {"model_type": "t5", "is_encoder_decoder": True}, {"model_type": "no-such"}, {}]
)
def test_what_is_not_a_causal_lm_is_refused(tmp_path: Path, config: dict[str, object]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError):
        read(tmp_path)


def test_importing_facts_does_not_import_torch() -> None:
    code = "import sys, draftline.target.facts, draftline.target.conventions; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0
