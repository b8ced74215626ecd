"""From configuration and target facts to a specification, and the mistakes that are met on the way."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from draftline.config.schema import DrafterConfig, SlidingWindowConfig
from draftline.drafter.spec import build_spec, check_target, drafter_rope
from draftline.errors import UserError
from draftline.target.facts import TargetFacts


def facts(**changes: Any) -> TargetFacts:
    """A Qwen3-8B-like target."""
    fields: dict[str, Any] = {
        "model_type": "qwen3",
        "architectures": ("Qwen3ForCausalLM",),
        "num_layers": 36,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000},
        "max_position_embeddings": 40960,
        "embedding_scale": 1.0,
        "logit_multiplier": 1.0,
        "final_logit_softcapping": None,
        "bos_token_id": 151643,
        "eos_token_ids": (151645,),
        "pad_token_id": 151644,
        "has_recurrent_layers": False,
        "hidden_act": "silu",
        "layer_types": ("full_attention",) * 36,
    }
    return TargetFacts(**{**fields, **changes})


def config(**changes: Any) -> DrafterConfig:
    return DrafterConfig(**{"mask_token_id": 151669, **changes})


def test_null_sizes_come_from_the_target_and_taps_from_the_rule() -> None:
    spec = build_spec(config(), facts())
    assert (spec.hidden_size, spec.intermediate_size, spec.num_heads, spec.num_kv_heads) == (4096, 12288, 32, 8)
    assert (spec.head_dim, spec.vocab_size, spec.rms_norm_eps) == (128, 151936, 1e-6)
    assert spec.taps == (1, 9, 17, 25, 33)
    assert spec.num_target_layers == 36
    assert spec.layer_types == ("full_attention",) * 5
    assert spec.sliding_window is None
    assert spec.eos_token_id == 151645


def test_given_sizes_and_taps_win() -> None:
    spec = build_spec(config(intermediate_size=64, num_heads=4, num_kv_heads=2, head_dim=32, taps=(3, 8)), facts())
    assert (spec.intermediate_size, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (64, 4, 2, 32)
    assert spec.taps == (3, 8)


@pytest.mark.parametrize(("num_taps", "taps"), [(1, (18,)), (3, (1, 17, 33)), (8, (1, 6, 10, 15, 19, 24, 28, 33))])
def test_number_of_taps_is_free(num_taps: int, taps: tuple[int, ...]) -> None:
    assert build_spec(config(num_taps=num_taps), facts()).taps == taps


def test_sliding_layers_and_semantics_are_written_down() -> None:
    sliding = SlidingWindowConfig(window_tokens=2048, layers=(0, 1, 2, 3), in_block="bidirectional", origin="anchor")
    spec = build_spec(config(sliding=sliding), facts())
    assert spec.layer_types == ("sliding_attention",) * 4 + ("full_attention",)
    assert (spec.sliding_window, spec.in_block_attention, spec.window_origin) == (2048, "bidirectional", "anchor")


def test_scales_and_special_tokens_of_the_target_are_kept() -> None:
    given = facts(embedding_scale=64.0, logit_multiplier=0.25, final_logit_softcapping=30.0, eos_token_ids=(1, 106))
    spec = build_spec(config(), given)
    assert (spec.input_embedding_scale, spec.output_multiplier, spec.final_logit_softcapping) == (64.0, 0.25, 30.0)
    assert spec.eos_token_id == [1, 106]


@pytest.mark.parametrize(
    ("token", "word"),
    [
        (151936, "outside the target's vocabulary"),
        (151645, "end-of-text"),
        (151644, "padding"),
        (151643, "begin-of-text"),
        (77, "stop"),
    ],
)
def test_a_mask_token_that_text_uses_is_refused(token: int, word: str) -> None:
    with pytest.raises(UserError, match=rf"^drafter\.mask_token_id: {token} is .*{word}"):
        build_spec(config(mask_token_id=token), facts(), stop_token_ids=(77,))


@pytest.mark.parametrize(
    ("taps", "word"),
    [
        ((1, 35), "tap 35 is the target's last layer"),
        ((1, 40), "not usable for a target of 36 layers"),
        ((-1, 3), "not usable"),
        ((9, 3), "not usable"),
        ((3, 3), "not usable"),
    ],
)
def test_taps_outside_the_model_or_on_its_last_layer_are_refused(taps: tuple[int, ...], word: str) -> None:
    with pytest.raises(UserError, match=word) as caught:
        build_spec(config(taps=taps), facts())
    assert str(caught.value).startswith("drafter.taps: ")


def test_more_taps_than_a_small_target_has_layers_are_refused() -> None:
    with pytest.raises(UserError, match=r"^drafter\.num_taps: 5 taps by rule give .* 4 layers; name rising layers"):
        build_spec(config(), facts(num_layers=4))


def test_heads_that_do_not_divide_are_refused_by_name() -> None:
    with pytest.raises(UserError, match="num_heads 6 is not a multiple of num_kv_heads 4"):
        build_spec(config(num_heads=6, num_kv_heads=4), facts())
    with pytest.raises(UserError, match="head_dim: 33 is odd"):
        build_spec(config(head_dim=33), facts())


def test_a_size_that_nobody_tells_is_asked_for() -> None:
    with pytest.raises(UserError, match=r"drafter\.intermediate_size"):
        build_spec(config(), facts(intermediate_size=0))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"hidden_size": 5120}, "hidden size is 4096, the target's is 5120"),
        ({"vocab_size": 1000}, "vocabulary size is 151936, the target's is 1000"),
        ({"num_layers": 40}, "number of target layers is 36, the target's is 40"),
    ],
)
def test_a_drafter_of_another_target_is_refused_with_both_values(change: dict[str, int], word: str) -> None:
    spec = build_spec(config(), facts())
    check_target(spec, facts())
    with pytest.raises(UserError, match=word):
        check_target(spec, facts(**change))


YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ({}, {"rope_type": "default", "rope_theta": 10_000.0}),
        (YARN, YARN),
        (
            {"type": "linear", "rope_theta": 5e5, "factor": 2.0},
            {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0},
        ),
        (
            {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]},
            {"rope_type": "default", "rope_theta": 1e7},
        ),
        (
            {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
            {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        ),
        (
            {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0], "long_factor": [2.0]},
            {"rope_type": "default", "rope_theta": 1e4},
        ),
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, {"rope_type": "default", "rope_theta": 1e4}),
        (
            {"sliding_attention": {"rope_theta": 1e4}, "full_attention": {"rope_type": "default", "rope_theta": 1e6}},
            {"rope_type": "default", "rope_theta": 1e6},
        ),
        (
            {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "attention_factor": None},
            {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 4096},
        ),
    ],
    ids=["none", "yarn", "old-name", "partial-mrope", "proportional", "longrope", "dynamic", "nested", "llama3"],
)
def test_rope_of_the_target_becomes_the_drafters(given: dict[str, Any], ours: dict[str, Any]) -> None:
    before = repr(given)
    assert drafter_rope(given, 4096) == ours
    assert repr(given) == before


def test_building_a_specification_needs_no_torch() -> None:
    code = "import sys, draftline.drafter.spec; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0
