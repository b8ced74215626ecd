"""Each serving trap, set on purpose in a folder: the checker refuses it, or says what to know."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from decoding_kit import tiny_spec, tiny_target
from draftline.drafter.model import Drafter
from draftline.errors import UserError
from draftline.export.check import CheckReport, check_export
from draftline.export.speculators import export_speculators
from draftline.export.speculators_config import Verifier
from draftline.export.zlab import export_zlab

TARGET = Verifier("org/target", ("Qwen3ForCausalLM",))
MIXED = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 6}
ALL_SLIDING = {"layer_types": ("sliding_attention", "sliding_attention"), "sliding_window": 6}
Change = Callable[[dict[str, Any]], Any]


def _edit(path: Path, change: Change, *, foreign: bool = False) -> None:
    content = json.loads((path / "config.json").read_text())
    change(content)
    (path / "config.json").write_text(json.dumps(content))
    if foreign:
        (path / "draftline.json").unlink()


def _check(path: Path, **options: Any) -> CheckReport:
    return check_export(path, num_target_layers=4, **options)


def _refusals(report: CheckReport) -> list[str]:
    return [f.line() for f in report.findings if f.level == "refuse"]


def _zlab(folder: Path, facts: dict[str, Any] | None = None, **changes: Any) -> Path:
    return export_zlab(Drafter(tiny_spec(**changes)), folder / "export", provenance=facts)


def _speculators(folder: Path, **changes: Any) -> Path:
    return export_speculators(Drafter(tiny_spec(**changes)), folder / "export", TARGET)


@pytest.mark.parametrize("variant", [{}, MIXED])
def test_our_own_exports_are_served_as_trained_by_all_three(tmp_path: Path, variant: dict[str, Any]) -> None:
    report = _check(_zlab(tmp_path, **variant))
    assert _refusals(report) == []
    assert report.good_for == ("dflash", "vllm", "sglang")


def test_our_speculators_exports_are_served_as_trained_by_vllm_only(tmp_path: Path) -> None:
    path = _speculators(tmp_path)
    assert _check(path).good_for == ("vllm",)
    report = _check(path, servers=("dflash", "vllm", "sglang"))
    assert report.good_for == ("vllm",)
    assert len(_refusals(report)) == 2


def test_trap_1_one_switch_makes_all_layers_causal(tmp_path: Path) -> None:
    """A full drafter without `sliding_window_non_causal: true`, and mixed layers, which the format cannot tell."""
    full = _speculators(tmp_path / "a")
    _edit(full, lambda c: c.update(sliding_window_non_causal=False))
    assert "trained none, served all" in _refusals(_check(full))[0]
    mixed = _speculators(tmp_path / "b", **MIXED, in_block_attention="bidirectional")
    _edit(mixed, lambda c: c.update(sliding_window_non_causal=False), foreign=True)
    assert any("trained 0, served all" in line for line in _refusals(_check(mixed)))


def test_trap_1_servers_of_zlabs_format_read_different_switches(tmp_path: Path) -> None:
    """`is_causal` alone is not read by vLLM; SGLang reads neither switch."""
    path = _zlab(tmp_path, **ALL_SLIDING, in_block_attention="bidirectional")
    assert _check(path).good_for == ("dflash", "vllm")
    _edit(path, lambda c: c["dflash_config"].pop("causal"))
    assert _check(path).good_for == ("dflash",)


def test_trap_1_mixed_layers_need_the_second_runner_and_it_is_said(tmp_path: Path) -> None:
    path = _zlab(tmp_path, **MIXED)
    assert any("second model runner" in f.what for f in _check(path).findings)
    assert "VLLM_USE_V2_MODEL_RUNNER=1 vllm serve TARGET" in (path / "README.md").read_text()
    other = _speculators(tmp_path / "s", **MIXED, in_block_attention="bidirectional")
    assert "VLLM_USE_V2_MODEL_RUNNER=1 vllm serve PATH-OF" in (other / "README.md").read_text()
    for path in (_zlab(tmp_path / "full"), _speculators(tmp_path / "sliding", **ALL_SLIDING)):
        assert "VLLM_USE_V2_MODEL_RUNNER" not in (path / "README.md").read_text()


def test_trap_2_layers_of_two_shapes_are_refused(tmp_path: Path) -> None:
    path = _zlab(tmp_path)
    weights = load_file(path / "model.safetensors")
    weights["layers.1.self_attn.k_proj.weight"] = torch.zeros(16, 16, dtype=torch.bfloat16)
    save_file(weights, path / "model.safetensors")
    lines = _refusals(_check(path))
    assert any("k_proj differs between layers" in line for line in lines)


def test_trap_2_rotary_parameters_of_two_kinds_of_layers_are_refused(tmp_path: Path) -> None:
    path = _zlab(tmp_path)
    one = {"rope_type": "default", "rope_theta": 1e6}
    _edit(path, lambda c: c.update(rope_parameters={"full_attention": one, "sliding_attention": one}), foreign=True)
    with pytest.raises(UserError, match="rope"):
        _check(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(rope_parameters={"rope_type": "default"}, rope_theta=None), "rope_theta is missing"),
        (lambda c: (c.pop("rope_theta"), c.pop("rope_parameters")), "rope_theta or rope_parameters is missing"),
        (lambda c: c.update(rope_theta=1e4), "rope_theta is 1000000.0 in rope_parameters and 10000.0"),
        (lambda c: c.update(rope_scaling=None, rope_theta=1e6), "factor is 4.0 in rope_parameters and None"),
    ],
)
def test_trap_3_a_rotary_base_or_yarn_that_a_server_would_drop_is_refused(
    tmp_path: Path, change: Change, message: str
) -> None:
    yarn = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}} if "factor" in message else {}
    path = _zlab(tmp_path, **yarn)
    _edit(path, change, foreign=True)
    with pytest.raises(UserError, match=message):
        _check(path)


def _partial_rotary(config: dict[str, Any]) -> None:
    """As newer files have it: in the new schema alone."""
    inner = config.get("transformer_layer_config") or config
    inner["rope_parameters"]["partial_rotary_factor"] = 0.25
    del inner["rope_scaling"]


def test_trap_3_a_copied_partial_rotary_factor_is_refused(tmp_path: Path) -> None:
    for form in (_zlab, _speculators):
        path = form(tmp_path / form.__name__)
        _edit(path, _partial_rotary, foreign=True)
        assert any("partial_rotary_factor 0.25" in line for line in _refusals(_check(path)))


def test_trap_3_frequencies_stored_in_bf16_are_refused(tmp_path: Path) -> None:
    path = _zlab(tmp_path)
    weights = load_file(path / "model.safetensors")
    weights["rotary_emb.inv_freq"] = torch.ones(4, dtype=torch.bfloat16)
    save_file(weights, path / "model.safetensors")
    assert any("inv_freq is stored as bfloat16" in line for line in _refusals(_check(path)))


def test_trap_3_one_rotary_schema_alone_is_said(tmp_path: Path) -> None:
    path = _zlab(tmp_path)
    _edit(path, lambda c: c.pop("rope_parameters"), foreign=True)
    report = _check(path)
    assert _refusals(report) == []
    assert any("rope_theta and rope_scaling only" in f.what for f in report.findings)


@pytest.mark.parametrize("name", ["head_dim", "num_key_value_heads", "intermediate_size", "rms_norm_eps"])
def test_trap_4_a_size_that_servers_would_fill_in_is_refused(tmp_path: Path, name: str) -> None:
    for form in (_zlab, _speculators):
        path = form(tmp_path / form.__name__)
        _edit(path, lambda c: (c.get("transformer_layer_config") or c).pop(name))
        with pytest.raises(UserError, match=f"{name} is missing"):
            _check(path)


def test_trap_4_layer_types_left_to_a_default_are_refused(tmp_path: Path) -> None:
    path = _zlab(tmp_path)
    _edit(path, lambda c: c.pop("layer_types"))
    assert any("layer_types is missing" in line for line in _refusals(_check(path)))


def test_trap_5_prefix_caching_is_off_in_every_command_and_the_reason_is_told(tmp_path: Path) -> None:
    for form, options in ((_zlab, ("--no-enable-prefix-caching", "--disable-radix-cache")), (_speculators, ())):
        path = form(tmp_path / form.__name__)
        card = (path / "README.md").read_text()
        assert "prefix cache" in card
        for option in options or ("--no-enable-prefix-caching",):
            assert option in card
        assert any("prefix cache" in f.what for f in _check(path).findings)


def test_trap_6_a_recurrent_target_is_refused_for_dflash_alone(tmp_path: Path) -> None:
    path = _zlab(tmp_path, {"target_is_recurrent": True})
    report = _check(path)
    assert report.good_for == ("vllm", "sglang")
    assert "wrong text without an error" in _refusals(report)[0]
    assert "recurrent layers" in (path / "README.md").read_text()


def test_trap_7_the_template_arguments_of_training_are_recorded_or_asked_for(tmp_path: Path) -> None:
    known = _zlab(tmp_path / "a", {"chat_template_kwargs": {"enable_thinking": False}})
    assert any("{'enable_thinking': False}" in f.what for f in _check(known).findings)
    assert '`{"enable_thinking": false}`' in (known / "README.md").read_text()
    assert any("not recorded: the chat template" in f.what for f in _check(_zlab(tmp_path / "b")).findings)


def test_a_window_from_the_anchor_is_refused_where_it_is_known_and_said_where_it_is_likely(tmp_path: Path) -> None:
    path = _speculators(tmp_path, **ALL_SLIDING)
    assert _refusals(_check(path)) == []
    (path / "draftline.json").unlink()  # as somebody else's: speculators trains from the anchor
    report = _check(path)
    assert report.good_for == ("vllm",)
    assert any("not from the anchor" in f.what for f in report.findings)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["speculators_config"]["proposal_methods"][0].update(speculative_tokens=4), "drafts 3"),
        (lambda c: c["speculators_config"]["verifier"].update(name_or_path=None), "name_or_path is missing"),
        (lambda c: c.update(dtype="float32"), "dtype is float32, the weights are bfloat16"),
    ],
)
def test_what_vllm_takes_from_the_speculators_config_is_checked(tmp_path: Path, change: Change, message: str) -> None:
    path = _speculators(tmp_path)
    _edit(path, change)
    assert any(message in line for line in _refusals(_check(path)))


def test_a_mask_token_that_ends_text_is_refused(tmp_path: Path) -> None:
    path = _zlab(tmp_path, eos_token_id=[3, 12])
    assert any("end-of-text" in line for line in _refusals(_check(path)))


def test_a_mask_token_that_ends_the_targets_text_is_refused_where_the_file_names_no_end(tmp_path: Path) -> None:
    """As speculators writes its files; the target tells."""
    path = _speculators(tmp_path)
    (path / "draftline.json").unlink()
    for name, ids in (("end-of-text", {"eos_token_id": [3, 12]}), ("padding", {"pad_token_id": 12})):
        facts = tiny_target(**ids).facts
        assert any(name in line for line in _refusals(check_export(path, target=facts)))
    assert not any("mask_token_id" in line for line in _refusals(check_export(path, target=tiny_target().facts)))


def test_embedding_and_logit_factors_are_said_for_vllm(tmp_path: Path) -> None:
    path = _zlab(tmp_path, input_embedding_scale=4.0, output_multiplier=0.5)
    what = " ".join(f.what for f in _check(path, servers=("vllm",)).findings)
    assert "input_embedding_scale 4" in what and "logit multiplier" in what
    scaled = _speculators(tmp_path / "s")
    card = json.loads((scaled / "draftline.json").read_text())
    card["spec"]["input_embedding_scale"] = 4.0
    (scaled / "draftline.json").write_text(json.dumps(card))
    assert any("input_embedding_scale 4" in line for line in _refusals(_check(scaled)))


def test_another_activation_than_the_one_that_all_know_is_refused(tmp_path: Path) -> None:
    path = _zlab(tmp_path)
    _edit(path, lambda c: c.update(hidden_act="gelu"), foreign=True)
    assert any("gelu" in line for line in _refusals(_check(path)))


def test_block_size_in_one_place_is_said(tmp_path: Path) -> None:
    path = _zlab(tmp_path)
    _edit(path, lambda c: c.pop("block_size"))
    assert any("in one place only" in f.what for f in _check(path).findings)


def test_weights_that_are_not_finite_or_missing_are_refused(tmp_path: Path) -> None:
    path = _zlab(tmp_path)
    weights = load_file(path / "model.safetensors")
    del weights["fc.weight"]
    save_file(weights, path / "model.safetensors")
    assert any("1 missing weights" in line for line in _refusals(_check(path)))


def test_another_format_than_expected_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is in zlab format, not speculators"):
        check_export(_zlab(tmp_path), form="speculators")
