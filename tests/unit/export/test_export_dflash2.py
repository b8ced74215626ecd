"""DFlash2 drafters, pruned vocabularies and 8-bit weights: written, read back, and refused where they cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from decoding_kit import tiny_spec, tiny_target
from dflash2_kit import DFLASH2, awake
from draftline.config.drafter_spec import Dflash2Spec, DrafterSpec
from draftline.decode.chain import BoundDrafter, chain_generate
from draftline.drafter.model import Drafter
from draftline.errors import UserError
from draftline.export.check import check_export
from draftline.export.formats import load_drafter_export
from draftline.export.importing import import_checkpoint
from draftline.export.quantize import quantize_weights
from draftline.export.speculators import export_speculators
from draftline.export.speculators_config import Verifier
from draftline.export.zlab import export_zlab, load_export

TARGET = Verifier("org/target", ("Qwen3ForCausalLM",), 4)
KEPT = (0, 2, 3, 7, 8, 11)


def spec2(**changes: Any) -> DrafterSpec:
    return tiny_spec(dflash2=Dflash2Spec(**DFLASH2), **changes)


def drafter2(**changes: Any) -> Drafter:
    return awake(Drafter(spec2(**changes)))


def edit(path: Path, change: Any) -> None:
    content = json.loads((path / "config.json").read_text())
    change(content)
    (path / "config.json").write_text(json.dumps(content))


def same_weights(a: Drafter, b: Drafter) -> bool:
    return all(torch.equal(value, b.state_dict()[name]) for name, value in a.state_dict().items())


def test_dflash2_goes_through_both_formats_without_a_changed_bit(tmp_path: Path) -> None:
    drafter = drafter2(eos_token_id=3)
    zlab = export_zlab(drafter, tmp_path / "zlab", "float32")
    spec = export_speculators(load_export(zlab), tmp_path / "spec", TARGET, "float32")
    imported = import_checkpoint(spec, tmp_path / "mine").path
    for path in (zlab, spec, imported):
        for foreign in (False, True):
            if foreign:
                (path / "draftline.json").unlink()
            found = load_drafter_export(path, num_target_layers=4)
            assert found.spec.dflash2 == drafter.spec.dflash2
            assert same_weights(drafter, found)
    assert "kind: dflash2" in (imported / "drafter.yaml").read_text()
    assert json.loads((spec / "config.json").read_text())["speculators_model_type"] == "dflash2"
    assert check_export(zlab).good_for == ("dflash", "vllm", "sglang")


def test_codebooks_are_read_under_both_names_and_written_bare(tmp_path: Path) -> None:
    path = export_zlab(drafter2(), tmp_path / "x", "float32")
    weights = load_file(path / "model.safetensors")
    names = [f"candidate_selector.{kind}_codebook" for kind in ("predecessor", "successor")]
    assert all(name in weights for name in names)
    save_file({(f"{n}.weight" if n in names else n): t for n, t in weights.items()}, path / "model.safetensors")
    assert same_weights(load_export(path), drafter2())


@pytest.mark.parametrize("key", list(DFLASH2))
def test_a_missing_size_is_an_error_in_both_formats(tmp_path: Path, key: str) -> None:
    for path in (
        export_zlab(drafter2(), tmp_path / "zlab"),
        export_speculators(drafter2(), tmp_path / "spec", TARGET),
    ):
        edit(path, lambda c: (c.get("dflash_config") or c).pop(key))
        with pytest.raises(UserError, match=f"{key} is missing"):
            load_drafter_export(path, num_target_layers=4)


def test_the_wrong_architecture_is_refused_for_it_would_drop_weights_silently(tmp_path: Path) -> None:
    path = export_zlab(drafter2(), tmp_path / "x")
    edit(path, lambda c: c.update(architectures=["DFlashDraftModel"]))
    with pytest.raises(UserError, match="would leave DFlash2's weights out"):
        check_export(path)
    plain = export_zlab(Drafter(tiny_spec()), tmp_path / "y")
    edit(plain, lambda c: c.update(architectures=["DFlash2DraftModel"]))
    with pytest.raises(UserError, match="conv_kernel_size is missing"):
        check_export(plain)


def test_factors_on_the_logits_have_no_place_in_speculators_format_and_are_refused_for_vllm(tmp_path: Path) -> None:
    drafter = drafter2(output_multiplier=0.5, final_logit_softcapping=20.0)
    with pytest.raises(UserError, match="adds to logits behind multiplier and soft cap"):
        export_speculators(drafter, tmp_path / "spec", TARGET)
    assert check_export(export_zlab(drafter, tmp_path / "zlab")).good_for == ("dflash", "sglang")


def pruned(path: Path) -> tuple[Drafter, Path]:
    drafter = Drafter(tiny_spec(draft_vocabulary=KEPT, eos_token_id=3))
    head_VH = tiny_target(2).head.weight_VH
    return drafter, export_speculators(drafter, path, TARGET, "float32", head_DH=head_VH[list(KEPT)])


def test_a_pruned_vocabulary_is_written_as_offsets_flags_and_rows_of_the_head(tmp_path: Path) -> None:
    drafter, path = pruned(tmp_path / "x")
    weights = load_file(path / "model.safetensors")
    assert (weights["d2t"] + torch.arange(6)).tolist() == list(KEPT)
    assert weights["t2d"].nonzero().flatten().tolist() == list(KEPT) and weights["t2d"].dtype == torch.bool
    assert torch.equal(weights["lm_head.weight"], tiny_target(2).head.weight_VH[list(KEPT)])
    config = json.loads((path / "config.json").read_text())
    assert (config["draft_vocab_size"], config["transformer_layer_config"]["vocab_size"]) == (6, 13)
    for _ in range(2):
        found = load_drafter_export(path, num_target_layers=4)
        assert found.spec.draft_vocabulary == KEPT and same_weights(drafter, found)
        (path / "draftline.json").unlink(missing_ok=True)
    report = check_export(path, num_target_layers=4)
    assert report.good_for == ("vllm",)
    assert any("drafts 6 of 13 tokens" in finding.what for finding in report.findings)


def test_a_pruned_drafter_drafts_kept_tokens_alone_and_decodes_without_loss() -> None:
    target = tiny_target(2)
    bound = BoundDrafter(Drafter(tiny_spec(draft_vocabulary=KEPT)).eval(), target)
    whole = BoundDrafter(Drafter(tiny_spec()).eval(), target)
    hidden = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))
    logits, wanted = bound.head(hidden), whole.head(hidden)
    torch.testing.assert_close(logits[:, list(KEPT)], wanted[:, list(KEPT)])
    assert torch.isinf(logits).sum(-1).tolist() == [7, 7, 7]
    options: dict[str, Any] = {"max_new_tokens": 20, "stop_token_ids": ()}
    chains = [chain_generate(target, one, [4, 8], **options).output_ids for one in (bound, whole)]
    assert chains[0] == chains[1]


def test_what_a_pruned_vocabulary_cannot_be_is_refused(tmp_path: Path) -> None:
    drafter, path = pruned(tmp_path / "x")
    with pytest.raises(UserError, match="a head of 6 tokens: z-lab's class drafts from the whole"):
        export_zlab(drafter, tmp_path / "zlab")
    with pytest.raises(UserError, match="needs its rows of the target's head"):
        export_speculators(drafter, tmp_path / "y", TARGET)
    with pytest.raises(ValueError, match="drafts from the whole vocabulary"):
        spec2(draft_vocabulary=KEPT)
    for bad in ((3, 2), (0, 13), (2, 2)):
        with pytest.raises(ValueError, match="must rise within"):
            tiny_spec(draft_vocabulary=bad)
    imported = import_checkpoint(path, tmp_path / "mine")
    assert imported.spec.draft_vocabulary is None and "pruned to 6 tokens" in imported.mended[0]
    file = path / "model.safetensors"
    good = load_file(file)
    broken = [
        ({n: t for n, t in good.items() if n != "d2t"}, "no map d2t"),
        ({**good, "d2t": good["d2t"].flip(0)}, "t2d and d2t tell different"),
        ({**good, "d2t": good["d2t"][:4], "t2d": torch.zeros(13, dtype=torch.bool)}, "tell different"),
    ]
    for weights, message in broken:
        save_file(weights, file)
        with pytest.raises(UserError, match=message):
            load_drafter_export(path, num_target_layers=4)
    save_file({n: t for n, t in good.items() if n != "lm_head.weight"}, file)
    assert any("lm_head.weight is missing" in f.what for f in check_export(path, num_target_layers=4).findings)


def test_8_bit_weights_are_rounded_by_row_and_read_back_as_they_are_computed_with(tmp_path: Path) -> None:
    drafter = Drafter(tiny_spec())
    path = export_zlab(drafter, tmp_path / "x", "fp8")
    stored = load_file(path / "model.safetensors")
    kinds = {name: tensor.dtype for name, tensor in stored.items()}
    assert kinds["layers.0.mlp.up_proj.weight"] == kinds["layers.1.self_attn.o_proj.weight"] == torch.float8_e4m3fn
    assert stored["layers.0.mlp.up_proj.weight_scale"].shape == (24, 1)
    for name in ("layers.0.self_attn.k_proj.weight", "fc.weight", "norm.weight"):
        assert kinds[name] == torch.bfloat16
    found = load_export(path).state_dict()
    for name, value in drafter.state_dict().items():
        limit = 0.07 if f"{name}_scale" in stored else 0.01
        assert (found[name].float() - value).norm() <= limit * value.norm(), name
    assert check_export(path).good_for == ("dflash", "vllm", "sglang")
    config = json.loads((path / "config.json").read_text())
    assert config["quantization_config"]["format"] == "float-quantized" and config["dtype"] == "bfloat16"


def test_8_bit_weights_that_would_be_served_otherwise_are_refused(tmp_path: Path) -> None:
    path = export_zlab(Drafter(tiny_spec()), tmp_path / "x", "fp8")
    file = path / "model.safetensors"
    good = load_file(file)
    save_file({n: t for n, t in good.items() if n != "layers.0.mlp.up_proj.weight_scale"}, file)
    with pytest.raises(UserError, match="has no scale for its rows"):
        load_export(path)
    rounded = quantize_weights({"layers.0.self_attn.o_proj.weight": good["layers.0.self_attn.k_proj.weight"]})
    weight, scale = rounded.values()
    keys = "layers.0.self_attn.k_proj.weight"
    save_file({**good, keys: weight, f"{keys}_scale": scale}, file)
    assert any("join the raw key and value weights" in f.what for f in check_export(path).findings)
    edit(path, lambda c: c["quantization_config"].update(format="pack-quantized"))
    with pytest.raises(UserError, match="is quantised"):
        load_export(path)
    with pytest.raises(UserError, match="fp8 weights are not possible"):
        export_speculators(Drafter(tiny_spec()), tmp_path / "s", TARGET, "fp8")
