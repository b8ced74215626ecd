"""Our speculators exports load in speculators 0.9.0, which then computes what we do; its own saves are read back."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import dflash.model
import pytest
import torch
from speculators import SpeculatorModel
from speculators.convert.dflash.converter import DFlashConverter
from transformers import Qwen3Config, Qwen3ForCausalLM

from decoding_kit import random_prompt, tiny_spec, wrap
from draftline.decode.chain import BoundDrafter, chain_generate
from draftline.drafter.model import Drafter
from draftline.export.check import check_export
from draftline.export.formats import load_drafter_export
from draftline.export.importing import import_checkpoint
from draftline.export.speculators import export_speculators
from draftline.export.speculators_config import Verifier
from draftline.export.zlab import export_zlab

pytestmark = pytest.mark.interop
SIZES = {
    "vocab_size": 13,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
ALL_SLIDING = {"layer_types": ("sliding_attention", "sliding_attention"), "sliding_window": 6}


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that sometimes agrees with a random drafter: its text is far from uniform."""
    torch.manual_seed(2)
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES))
    with torch.no_grad():
        model.lm_head.weight.mul_(6.0)
    folder = tmp_path_factory.mktemp("target")
    model.save_pretrained(folder)
    return folder


def _verifier(target_dir: Path) -> Verifier:
    return Verifier(str(target_dir), ("Qwen3ForCausalLM",), 4)


def _theirs(path: Path) -> Any:
    """Eager attention: the compiled one needs a GPU."""
    config = json.loads((path / "config.json").read_text())
    config["transformer_layer_config"]["_attn_implementation"] = "eager"
    (path / "config.json").write_text(json.dumps(config))
    return SpeculatorModel.from_pretrained(str(path), dtype=torch.float32).eval()


@pytest.mark.parametrize("variant", [{}, {**ALL_SLIDING, "in_block_attention": "bidirectional"}, ALL_SLIDING])
@torch.no_grad()
def test_their_class_drafts_the_same_logits_from_our_export(
    tmp_path: Path, target_dir: Path, variant: dict[str, Any]
) -> None:
    """One block, one document shorter than the window, so that both origins of the window see the same."""
    spec = tiny_spec(block_size=4, **variant)
    path = export_speculators(Drafter(spec), tmp_path / "export", _verifier(target_dir), "float32")
    theirs, target = _theirs(path), wrap(Qwen3ForCausalLM.from_pretrained(target_dir))
    ours = load_drafter_export(path)
    ids = torch.tensor(random_prompt(3, 9))
    states = target.model(ids[None], output_hidden_states=True).hidden_states
    taps_TF = torch.cat([states[tap + 1][0] for tap in spec.taps], dim=-1)
    mask = torch.zeros(1, len(ids), dtype=torch.bool)
    mask[0, 2] = True  # their only choice of an anchor; all before it lies in the window, counted from any slot
    hidden, logits, *_, indices = theirs._backbone_forward(
        taps_TF[None],
        ids[None],
        mask,
        states[-2],
        torch.zeros(1, len(ids), dtype=torch.long),
        max_anchors=1,
    )
    start = int(indices[0])
    block = torch.tensor([int(ids[start]), *[spec.mask_token_id] * (spec.block_size - 1)])
    embedded_BH = target.embedding.weight_VH[block]
    hidden_BH = ours.forward_block(embedded_BH, taps_TF[:start], ours.new_cache(), start)
    torch.testing.assert_close(hidden[0], hidden_BH, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logits[0], hidden_BH @ target.head.weight_VH.T, atol=1e-4, rtol=1e-4)


def test_what_speculators_saves_is_read_back_bit_for_bit(tmp_path: Path, target_dir: Path) -> None:
    path = export_speculators(Drafter(tiny_spec()), tmp_path / "export", _verifier(target_dir), "float32")
    _theirs(path).save_pretrained(tmp_path / "theirs")
    ours, again = load_drafter_export(path), load_drafter_export(tmp_path / "theirs", num_target_layers=4)
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    assert again.spec.taps == ours.spec.taps
    assert (again.spec.block_size, again.spec.mask_token_id) == (ours.spec.block_size, ours.spec.mask_token_id)


@torch.no_grad()
def test_a_pruned_vocabulary_drafts_the_same_tokens_in_their_class(tmp_path: Path, target_dir: Path) -> None:
    kept = (0, 2, 3, 7, 8, 11)
    target, drafter = wrap(Qwen3ForCausalLM.from_pretrained(target_dir)), Drafter(tiny_spec(draft_vocabulary=kept))
    head_DH = target.head.weight_VH[list(kept)]
    path = export_speculators(drafter, tmp_path / "x", _verifier(target_dir), "float32", head_DH=head_DH)
    theirs, bound = _theirs(path), BoundDrafter(load_drafter_export(path), target)
    hidden_KH = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
    drafts_K = theirs.lm_head(hidden_KH).argmax(-1)
    assert (drafts_K + theirs.d2t[drafts_K]).tolist() == bound.head(hidden_KH).argmax(-1).tolist()
    assert torch.equal(theirs.t2d.nonzero().flatten(), torch.tensor(kept))
    theirs.save_pretrained(tmp_path / "theirs")
    again = load_drafter_export(tmp_path / "theirs", num_target_layers=4)
    assert again.spec.draft_vocabulary == kept
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in drafter.state_dict().items())


def test_what_their_converter_makes_of_our_export_is_read_and_its_trap_is_seen(
    tmp_path: Path, target_dir: Path
) -> None:
    """It leaves the causality switch at false, with which vLLM would make full layers causal."""
    drafter = Drafter(tiny_spec())
    path = export_zlab(drafter, tmp_path / "zlab", "float32")
    DFlashConverter().convert(path, tmp_path / "converted", base_model=str(target_dir), validate=False)
    again = load_drafter_export(tmp_path / "converted", num_target_layers=4)
    assert again.spec.taps == drafter.spec.taps
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    report = check_export(tmp_path / "converted", num_target_layers=4)
    assert report.good_for == ()
    assert any("trained none, served all" in f.what for f in report.findings)


def test_the_round_trip_decodes_the_same_rounds_in_dflash(
    tmp_path: Path, target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """draftline -> z-lab -> draftline -> speculators -> draftline: same ids, same acceptance lengths in `dflash`."""
    monkeypatch.setattr(dflash.model, "_cuda_time", time.perf_counter)
    drafter = Drafter(tiny_spec(block_size=4, initializer_range=0.6))
    first = export_zlab(drafter, tmp_path / "first", "float32")
    one = import_checkpoint(first, tmp_path / "one").path
    middle = export_speculators(load_drafter_export(one), tmp_path / "middle", _verifier(target_dir), "float32")
    last = import_checkpoint(middle, tmp_path / "last").path
    target = wrap(Qwen3ForCausalLM.from_pretrained(target_dir))
    rounds = []
    for folder in (first, last):
        theirs = dflash.model.DFlashDraftModel.from_pretrained(folder, dtype=torch.float32).eval()
        ours = BoundDrafter(load_drafter_export(folder), target)
        for seed in range(3):
            prompt = random_prompt(seed, 6)
            stats: Any = dflash.model.dflash_generate(
                theirs, target.model, torch.tensor([prompt]), 25, [], return_stats=True
            )
            mine = chain_generate(target, ours, prompt, max_new_tokens=25, stop_token_ids=())
            assert mine.output_ids == stats.output_ids[0, len(prompt) :].tolist()
            assert mine.acceptance_lengths == stats.acceptance_lengths
            rounds.append(list(stats.acceptance_lengths))
    assert rounds[:3] == rounds[3:]
