"""An export says everything about its drafter; what is missing or contradicts itself is refused on reading."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from decoding_kit import tiny_spec
from draftline.drafter.model import Drafter
from draftline.errors import UserError
from draftline.export.zlab import export_zlab, load_export
from draftline.export.zlab_config import spec_from_config, zlab_config

SLIDING = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 4}


def _export(folder: Path, dtype: str = "float32", **changes: Any) -> tuple[Drafter, Path]:
    drafter = Drafter(tiny_spec(**changes))
    return drafter, export_zlab(drafter, folder / "export", dtype)


def _edit(path: Path, change: Callable[[dict[str, Any]], None], file: str = "config.json") -> None:
    content = json.loads((path / file).read_text())
    change(content)
    (path / file).write_text(json.dumps(content))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        SLIDING,
        {**SLIDING, "in_block_attention": "causal"},
        {"in_block_attention": "bidirectional", **SLIDING},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}},
        {"input_embedding_scale": 4.0, "output_multiplier": 0.5, "final_logit_softcapping": 30.0},
        {"eos_token_id": [2, 5], "pad_token_id": 0, "bos_token_id": 1},
    ],
)
def test_reading_back_gives_the_same_spec_and_bitwise_the_same_weights(tmp_path: Path, changes: dict[str, Any]) -> None:
    drafter, path = _export(tmp_path, **changes)
    loaded = load_export(path)
    assert loaded.spec == drafter.spec
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    # config.json alone must be enough: servers do not know the card.
    (path / "draftline.json").unlink()
    assert load_export(path).spec.model_dump() == {
        **drafter.spec.model_dump(),
        "rope_parameters": {"rope_type": "default", **drafter.spec.rope_parameters},
    }


def test_a_bf16_export_holds_the_rounded_masters(tmp_path: Path) -> None:
    drafter, path = _export(tmp_path, "bfloat16")
    for name, tensor in load_file(path / "model.safetensors").items():
        assert torch.equal(tensor, drafter.state_dict()[name].bfloat16())
    assert next(load_export(path).parameters()).dtype == torch.bfloat16
    assert next(load_export(path, dtype=torch.float32).parameters()).dtype == torch.float32


def test_e2_e3_e22_keys_stand_in_every_place_that_servers_read() -> None:
    """Block size twice, both RoPE schemas agreeing, layout and mask semantics."""
    yarn = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}
    config = zlab_config(tiny_spec(rope_parameters=yarn, **SLIDING), "bfloat16")
    assert config["block_size"] == config["dflash_config"]["block_size"] == 4
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 1e6
    assert config["rope_scaling"] == {"rope_type": "yarn", "factor": 4.0}
    assert config["dflash_config"]["block_layout"] == "same"
    assert (config["use_sliding_window"], config["sliding_window"]) == (True, 4)
    assert config["num_target_layers"] == 4
    assert config["auto_map"] == {"AutoModel": "dflash.DFlashDraftModel"}


def test_is_causal_is_written_for_uniform_choices_only() -> None:
    assert "is_causal" not in zlab_config(tiny_spec(**SLIDING), "float32")
    for choice, value in (("causal", True), ("bidirectional", False)):
        config = zlab_config(tiny_spec(in_block_attention=choice), "float32")
        assert config["is_causal"] is config["dflash_config"]["causal"] is value


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({**SLIDING, "window_origin": "anchor"}, "window_origin"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_theta"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "dynamic"}}, "rope_type 'dynamic'"),
    ],
)
def test_what_the_format_cannot_serve_is_refused_with_the_reason(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        zlab_config(tiny_spec(**changes), "float32")


def _drop(key: str, *, inner: bool = False, top: bool = False) -> Callable[[dict[str, Any]], None]:
    def change(config: dict[str, Any]) -> None:
        if inner:
            config["dflash_config"].pop(key, None)
        if top:
            config.pop(key, None)

    return change


def _set(key: str, value: Any, *, inner: bool = False) -> Callable[[dict[str, Any]], None]:
    return lambda config: (config["dflash_config"] if inner else config).update({key: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_drop("target_layer_ids", inner=True), "target_layer_ids is missing"),  # E5
        (_set("target_layer_ids", [0, 1]), r"target_layer_ids is \[1, 2\] in dflash_config and \[0, 1\]"),
        (_set("target_layer_ids", [1, 3], inner=True), r"taps \[3\] are outside"),  # E6
        (_set("target_layer_ids", [1, -1], inner=True), r"taps \[-1\] are outside"),  # E6
        (_drop("mask_token_id", inner=True), "mask_token_id is missing"),  # E9
        (_set("mask_token_id", None, inner=True), "mask_token_id is missing"),
        (_set("mask_token_id", 99, inner=True), "outside the vocabulary"),  # E9
        (_set("mask_token_id", 3), "mask_token_id is 12 in dflash_config and 3"),  # E9
        (_drop("block_size", inner=True, top=True), "block_size is missing"),
        (_set("block_size", 7), "block_size is 4 in dflash_config and 7"),  # E22
        (_set("architectures", ["DFlash2DraftModel"]), "conv_kernel_size is missing"),
        (_set("architectures", ["Qwen3DFlashDraftModel"]), "architecture Qwen3DFlashDraftModel"),
        (_set("is_causal", False, inner=True), "in dflash_config, where no server reads it"),
        (lambda c: c.update(block_size=None) or c["dflash_config"].update(block_size=None), "block_size is missing"),
        (_set("block_size", None, inner=True), "block_size is None in dflash_config and 4"),
        (_drop("architectures", top=True), "no architecture"),  # E4
        (_set("block_layout", "shifted", inner=True), "block_layout 'shifted'"),  # E4
        (_set("sample_from_anchor", True), "shifted by one"),  # E4
        (_set("rope_theta", 10_000.0), "rope_theta is 1000000.0 in rope_parameters and 10000.0"),  # E2
        (_set("rope_scaling", {"type": "yarn", "factor": 2.0}), "factor is None in rope_parameters and 2.0"),  # E3
        (_drop("num_target_layers", top=True), "num_target_layers is missing"),
        (_drop("head_dim", top=True), "head_dim is missing"),
        (_set("is_causal", True), None),
        (lambda c: c.update(is_causal=True) or c["dflash_config"].update(causal=False), "is_causal is True but"),
        (_set("causal", True, inner=True), "causal is True without is_causal"),
        (_set("use_swa", True, inner=True), "use_swa is set"),
        (_set("layer_types", ["sliding_attention"] * 2), "sliding_window or use_sliding_window"),
        (_set("dflash_config", None), "dflash_config is not an object"),
    ],
)
def test_missing_and_contradicting_keys_are_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str | None
) -> None:
    _, path = _export(tmp_path)
    (path / "draftline.json").unlink()
    _edit(path, change)
    if message is None:
        load_export(path)
        return
    with pytest.raises(UserError, match=message) as caught:
        load_export(path)
    assert str(path / "config.json") in str(caught.value)


def test_e4_a_card_without_layout_or_with_another_one_is_refused(tmp_path: Path) -> None:
    _, path = _export(tmp_path)
    _edit(path, lambda card: card["spec"].pop("block_layout"), "draftline.json")
    with pytest.raises(UserError, match="block_layout is missing"):
        load_export(path)


def test_e9_a_card_and_a_config_that_name_two_mask_tokens_are_refused(tmp_path: Path) -> None:
    _, path = _export(tmp_path)
    _edit(path, _set("mask_token_id", 5, inner=True))
    with pytest.raises(UserError, match=r"mask_token_id is 12, but config.json says 5"):
        load_export(path)


def test_older_and_newer_files_of_others_are_read(tmp_path: Path) -> None:
    """April 2026: block size at the top level. Later: inside only, and only the new RoPE schema."""
    spec, path = _export(tmp_path)[0].spec, tmp_path / "export"
    (path / "draftline.json").unlink()
    original = (path / "config.json").read_text()
    older = ("rope_parameters", "layer_types", "num_attention_bias")
    newer = ("block_size", "rope_theta", "rope_scaling")
    for dropped in (older, newer):
        config = json.loads(original)
        for key in dropped:
            config.pop(key, None)
        for key in ("block_layout", "window_origin", "input_embedding_scale", "output_multiplier"):
            config["dflash_config"].pop(key)
        if dropped is older:
            del config["dflash_config"]["block_size"]
            config.update(config.pop("dflash_config"))
        read = spec_from_config(config, "config.json")
        assert read.model_copy(update={"rope_parameters": spec.rope_parameters}) == spec
        assert read.rope_parameters["rope_theta"] == 1e6


def test_weights_that_do_not_fit_the_config_are_refused(tmp_path: Path) -> None:
    _, path = _export(tmp_path)
    file = path / "model.safetensors"
    good = load_file(file)
    bad_sets: list[tuple[dict[str, torch.Tensor], str]] = [
        ({k: v for k, v in good.items() if k != "fc.weight"}, "1 missing weights"),
        ({**good, "lm_head.weight": torch.zeros(2)}, "1 unexpected"),
        ({**good, "fc.weight": torch.zeros(16, 16)}, r"fc.weight has shape \(16, 16\)"),
        ({**good, "norm.weight": torch.full((16,), torch.nan)}, "norm.weight holds NaN"),
    ]
    for weights, message in bad_sets:
        save_file(weights, file)
        with pytest.raises(UserError, match=message):
            load_export(path)
    file.write_bytes(b"not safetensors")
    with pytest.raises(UserError, match="broken file"):
        load_export(path)
    file.unlink()
    with pytest.raises(UserError, match="no such file"):
        load_export(path)


def test_a_foreign_folder_is_not_overwritten_and_an_earlier_export_is(tmp_path: Path) -> None:
    drafter, path = _export(tmp_path)
    with torch.no_grad():
        drafter.fc.weight.zero_()
    export_zlab(drafter, path, "float32")
    assert not load_export(path).fc.weight.any()
    foreign = tmp_path / "notes"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="is not empty"):
        export_zlab(drafter, foreign)
    assert sorted(p.name for p in foreign.iterdir()) == ["thesis.txt"]


def test_an_export_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    drafter = Drafter(tiny_spec())
    with torch.no_grad():
        drafter.norm.weight.fill_(torch.inf)
    with pytest.raises(UserError, match="NaN or infinity"):
        export_zlab(drafter, tmp_path / "export")
    with pytest.raises(UserError, match="dtype 'float16'"):
        export_zlab(drafter, tmp_path / "export", "float16")
    assert list(tmp_path.iterdir()) == []


def test_rope_frequencies_stay_exact_in_a_bf16_export(tmp_path: Path) -> None:
    drafter, path = _export(tmp_path, "bfloat16")
    loaded = load_export(path)
    assert loaded.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.equal(loaded.rotary_emb.inv_freq, drafter.rotary_emb.inv_freq)
