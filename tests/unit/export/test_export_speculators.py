"""speculators' format: the same drafter as z-lab's, or a refusal that says why vLLM could not serve it as trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from decoding_kit import tiny_spec
from draftline.drafter.model import Drafter
from draftline.errors import UserError
from draftline.export.formats import detect_format, load_drafter_export, read_drafter_spec
from draftline.export.importing import import_checkpoint
from draftline.export.speculators import export_speculators, load_speculators
from draftline.export.speculators_config import Verifier, spec_from_speculators, speculators_config
from draftline.export.zlab import export_zlab

TARGET = Verifier("org/target", ("Qwen3ForCausalLM",))
ALL_SLIDING = {"layer_types": ("sliding_attention", "sliding_attention"), "sliding_window": 6}
MIXED = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 6}
EXPRESSIBLE: dict[str, dict[str, Any]] = {
    "full": {},
    "full, said otherwise": {"in_block_attention": "bidirectional"},
    "sliding, causal": ALL_SLIDING,
    "sliding, bidirectional": {**ALL_SLIDING, "in_block_attention": "bidirectional"},
    "mixed, bidirectional": {**MIXED, "in_block_attention": "bidirectional"},
    "yarn": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}},
    "logit factors": {"output_multiplier": 0.5, "final_logit_softcapping": 30.0},
}


def _config(**changes: Any) -> dict[str, Any]:
    return speculators_config(tiny_spec(**changes), "bfloat16", TARGET)


@pytest.mark.parametrize("variant", EXPRESSIBLE)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_zlab_to_speculators_to_zlab_changes_no_bit(tmp_path: Path, variant: str, dtype: str) -> None:
    drafter = Drafter(tiny_spec(**EXPRESSIBLE[variant]))
    first = export_zlab(drafter, tmp_path / "first", dtype)
    one = import_checkpoint(first, tmp_path / "one")
    middle = export_speculators(load_drafter_export(one.path), tmp_path / "middle", TARGET, dtype)
    two = import_checkpoint(middle, tmp_path / "two")
    assert one.spec == two.spec == drafter.spec
    assert one.mended == two.mended == ()
    wanted = load_file(first / "model.safetensors")
    for folder in (one.path, middle, two.path):
        weights = load_file(folder / "model.safetensors")
        assert weights.keys() == wanted.keys()
        assert all(torch.equal(weights[name], wanted[name]) for name in wanted), folder


def test_the_file_says_what_vllm_reads() -> None:
    config = _config(**ALL_SLIDING)
    assert config["aux_hidden_state_layer_ids"] == [2, 3]  # ours are 1 and 2: one higher
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": "org/target",
        "architectures": ["Qwen3ForCausalLM"],
    }
    assert config["sliding_window_non_causal"] is False
    assert _config()["sliding_window_non_causal"] is True  # absent or false would make full layers causal
    inner = config["transformer_layer_config"]
    assert inner["rope_theta"] == inner["rope_parameters"]["rope_theta"] == 1e6
    assert (inner["use_sliding_window"], inner["sliding_window"], inner["head_dim"]) == (True, 6, 8)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (MIXED, "would make all layers causal"),
        ({"in_block_attention": "causal"}, "causal full layers"),
        ({**ALL_SLIDING, "window_origin": "anchor"}, "measures the window from the query"),
        (
            {**ALL_SLIDING, "in_block_attention": "bidirectional", "sliding_window": 3},
            "window of 3 below the block size 4",
        ),
        ({"input_embedding_scale": 4.0}, "input_embedding_scale 4"),
    ],
)
def test_what_vllm_would_serve_otherwise_is_refused(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        export_speculators(Drafter(tiny_spec(**changes)), tmp_path / "export", TARGET)
    assert not (tmp_path / "export").exists()


def test_a_target_without_a_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--target"):
        export_speculators(Drafter(tiny_spec()), tmp_path / "export", Verifier(""))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"speculators_model_type": "eagle3"}, "'eagle3', expected 'dflash'"),
        ({"sample_from_anchor": True}, "shifted by one"),
        ({"aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids is missing"),
        ({"aux_hidden_state_layer_ids": [0, 2]}, "0 is the embedding"),
        ({"aux_hidden_state_layer_ids": [2, 4]}, "4 is the state after the last layer"),
        ({"mask_token_id": None}, "mask_token_id is missing"),
        ({"block_size": None}, "block_size is missing"),
        ({"draft_vocab_size": 7}, "draft_vocab_size is 7, the target's vocabulary has 13 tokens"),
        ({"target_hidden_size": 32}, "target_hidden_size is 32"),
        ({"transformer_layer_config": None}, "transformer_layer_config is missing"),
    ],
)
def test_files_of_others_that_would_be_guessed_at_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        spec_from_speculators({**_config(), **change}, "config.json", {"num_target_layers": 4})


def test_files_of_others_are_read_as_speculators_trains() -> None:
    """Full layers bidirectional whatever the switch says, windows from the anchor, an absent switch is causal."""
    known = {"num_target_layers": 4}
    full = {**_config(), "sliding_window_non_causal": False}
    assert spec_from_speculators(full, "c", known).in_block_attention == "zlab"
    mixed = _config(**MIXED, in_block_attention="bidirectional")
    assert spec_from_speculators(mixed, "c", known).in_block_attention == "bidirectional"
    mixed.pop("sliding_window_non_causal")
    spec = spec_from_speculators(mixed, "c", known)
    assert (spec.in_block_attention, spec.window_origin, spec.sliding_window) == ("zlab", "anchor", 6)
    with pytest.raises(UserError, match="number of layers"):
        spec_from_speculators(mixed, "c", {})


def test_copies_of_the_targets_embedding_and_head_are_left_out(tmp_path: Path) -> None:
    path = export_speculators(Drafter(tiny_spec()), tmp_path / "export", TARGET, "float32")
    weights = load_file(path / "model.safetensors")
    extra = {"embed_tokens.weight": torch.ones(13, 16), "lm_head.weight": torch.ones(13, 16)}
    save_file({**weights, **extra}, path / "model.safetensors")
    loaded = load_speculators(path).state_dict()
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)


def test_the_window_of_a_foreign_drafter_is_mended_and_said(tmp_path: Path) -> None:
    path = export_speculators(Drafter(tiny_spec(**ALL_SLIDING)), tmp_path / "export", TARGET)
    (path / "draftline.json").unlink()
    assert read_drafter_spec(path, num_target_layers=4).window_origin == "anchor"
    imported = import_checkpoint(path, tmp_path / "mine", num_target_layers=4)
    assert imported.spec.window_origin == "query"
    assert "it was trained from the anchor" in imported.mended[0]
    assert imported.mended[0] in json.loads((tmp_path / "mine" / "draftline.json").read_text())["provenance"]["mended"]


def test_formats_are_told_apart_and_others_refused(tmp_path: Path) -> None:
    drafter = Drafter(tiny_spec())
    assert detect_format(export_zlab(drafter, tmp_path / "a")) == "zlab"
    assert detect_format(export_speculators(drafter, tmp_path / "b", TARGET)) == "speculators"
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]}))
    with pytest.raises(UserError, match="no drafter"):
        detect_format(tmp_path / "c")


def test_importing_over_itself_is_refused(tmp_path: Path) -> None:
    path = export_zlab(Drafter(tiny_spec()), tmp_path / "export")
    with pytest.raises(UserError, match="is the checkpoint itself"):
        import_checkpoint(path, path)
    assert load_drafter_export(path).spec == tiny_spec()
