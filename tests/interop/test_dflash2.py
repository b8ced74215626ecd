"""Our DFlash2 exports in `dflash` 0.1.0's and speculators 0.9.0's own classes: weights, states, walks, rounds."""

from __future__ import annotations

import json
import time
from functools import cache
from pathlib import Path
from typing import Any

import dflash.model
import pytest
import torch
from speculators import SpeculatorModel
from transformers import Qwen3Config, Qwen3ForCausalLM

from decoding_kit import random_prompt, tiny_spec, tiny_target, wrap
from dflash2_kit import DFLASH2, awake, greedy_row, trained_a_little
from draftline.config.drafter_spec import Dflash2Spec, DrafterSpec
from draftline.decode.chain import BoundDrafter, chain_generate
from draftline.decode.sampling import Sampling
from draftline.drafter.model import Drafter
from draftline.drafter.selector import PathScores
from draftline.export.formats import load_drafter_export
from draftline.export.importing import import_checkpoint
from draftline.export.speculators import export_speculators
from draftline.export.speculators_config import Verifier
from draftline.export.zlab import export_zlab, load_export
from draftline.target.load import LoadedTarget

pytestmark = pytest.mark.interop
PROMPTS = [random_prompt(seed, 6) for seed in range(4)]
SLIDING = {"layer_types": ("sliding_attention", "sliding_attention"), "sliding_window": 6}
VARIANTS: list[dict[str, Any]] = [
    {},
    {**SLIDING, "in_block_attention": "bidirectional"},
    {"output_multiplier": 0.4, "final_logit_softcapping": 3.0},
]


def spec2(**changes: Any) -> DrafterSpec:
    return tiny_spec(block_size=5, dflash2=Dflash2Spec(**DFLASH2), **changes)


def theirs(path: Path) -> Any:
    """Their class from an export; every weight must have found its place."""
    model, told = dflash.model.DFlash2DraftModel.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"] and not told["mismatched_keys"]
    return model.eval()


@cache
def target() -> LoadedTarget:
    return tiny_target(2)


@pytest.fixture(autouse=True)
def _clock_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its timer waits for a CUDA device; everything else runs on the CPU."""
    monkeypatch.setattr(dflash.model, "_cuda_time", time.perf_counter)


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_hidden_states_walk_and_probabilities_are_theirs(tmp_path: Path, variant: dict[str, Any]) -> None:
    path = export_zlab(awake(Drafter(spec2(**variant))), tmp_path / "x", "float32")
    model, ours = theirs(path), BoundDrafter(load_export(path), target())
    generator, start = torch.Generator().manual_seed(1), 9
    taps = torch.randn(start, 32, generator=generator)
    for seed in range(5):
        anchor = seed % 12
        block = torch.tensor([anchor, 12, 12, 12, 12])
        hidden = ours.drafter.forward_block(ours.embed(block), taps, ours.drafter.new_cache(), start)
        got = model(
            target_hidden=taps[None],
            noise_embedding=target().embedding.weight_VH[block][None],
            position_ids=torch.arange(start + 5)[None],
        )
        torch.testing.assert_close(hidden, got[0], rtol=1e-5, atol=1e-5)
        assert isinstance(own := ours.draft(hidden[1:], anchor), PathScores)
        paths = ours.draft(got[0, 1:], anchor)  # the same numbers in, so that probabilities compare closely
        assert isinstance(paths, PathScores)
        walk, candidates, _ = model.propose(got[:, 1:], torch.tensor([anchor]), target().model.lm_head, 0.0)
        assert own.chain().tolist() == paths.chain().tolist() == walk.tolist()
        drawn, candidates, probs = model.propose(got[:, 1:], torch.tensor([anchor]), target().model.lm_head, 0.7)
        _same_probabilities(paths, drawn[0].tolist(), candidates[0], probs[0])
        taps = taps + 0.3 * torch.randn(taps.shape, generator=generator)


def _same_probabilities(paths: PathScores, drawn: list[int], candidates_KC: Any, probs_KC: Any) -> None:
    """Along the path that they drew, candidate by candidate: the order of candidates is nobody's promise."""
    at = 0
    for k, token in enumerate(drawn):
        own = dict(
            zip(paths.tokens_AKC[0, k].tolist(), (paths.scores_AKCC[0, k, at] / 0.7).softmax(-1).tolist(), strict=True)
        )
        assert own == pytest.approx(dict(zip(candidates_KC[k].tolist(), probs_KC[k].tolist(), strict=True)), abs=1e-6)
        at = paths.tokens_AKC[0, k].tolist().index(token)


@pytest.mark.parametrize("variant", VARIANTS[:2])
def test_ids_and_acceptance_lengths_agree_behind_a_round_trip(tmp_path: Path, variant: dict[str, Any]) -> None:
    """draftline -> z-lab -> draftline -> speculators -> draftline, not a bit changed, then rounds in `dflash`."""
    spec = spec2(**variant)
    drafter = trained_a_little(spec, target(), greedy_row(target(), spec, PROMPTS, 24), steps=50)
    first = import_checkpoint(export_zlab(drafter, tmp_path / "x", "float32"), tmp_path / "one").path
    middle = export_speculators(load_export(first), tmp_path / "middle", Verifier("a/b"), "float32")
    path = import_checkpoint(middle, tmp_path / "last").path
    last = load_export(path).state_dict()
    assert all(torch.equal(value, last[name]) for name, value in drafter.state_dict().items())
    model, ours, lengths = theirs(path), BoundDrafter(load_export(path), target()), []
    for seed, prompt in enumerate(PROMPTS):
        for limit, stops in ((21, ()), (2, ()), (19, (seed,))):
            stats = dflash.model.dflash_generate(
                model, target().model, torch.tensor([prompt]), limit, list(stops), return_stats=True
            )
            found = chain_generate(target(), ours, prompt, max_new_tokens=limit, stop_token_ids=stops)
            assert found.output_ids == stats.output_ids[0, len(prompt) :].tolist()
            assert found.acceptance_lengths == stats.acceptance_lengths
            lengths += found.acceptance_lengths
    assert len(set(lengths)) >= 4


def test_drawn_drafts_are_accepted_as_often_as_theirs(tmp_path: Path) -> None:
    """Mean tokens a round at temperature 1, both drawing their drafts: equal within what 4.5 deviations allow."""
    spec = spec2()
    drafter = trained_a_little(spec, target(), greedy_row(target(), spec, PROMPTS, 24), steps=40)
    path = export_zlab(drafter, tmp_path / "x", "float32")
    model, ours = theirs(path), BoundDrafter(load_export(path), target())
    own, other = [], []
    torch.manual_seed(0)
    for seed in range(24):
        prompt = PROMPTS[seed % 4]
        sampling = Sampling(temperature=1.0, seed=seed, proposals="sampled")
        found = chain_generate(target(), ours, prompt, max_new_tokens=21, stop_token_ids=(), sampling=sampling)
        own += found.acceptance_lengths
        stats = dflash.model.dflash_generate(
            model, target().model, torch.tensor([prompt]), 21, [], temperature=1.0, return_stats=True
        )
        other += stats.acceptance_lengths
    a, b = torch.tensor(own).double(), torch.tensor(other).double()
    assert abs(a.mean() - b.mean()) <= 4.5 * (a.var() / len(a) + b.var() / len(b)).sqrt()


def test_their_own_save_is_read_back_and_a_v1_checkpoint_starts_a_dflash2_one(tmp_path: Path) -> None:
    drafter = awake(Drafter(spec2()))
    model = theirs(export_zlab(drafter, tmp_path / "x", "float32"))
    model.save_pretrained(tmp_path / "theirs")
    read = load_export(tmp_path / "theirs").state_dict()
    assert all(torch.equal(value, read[name]) for name, value in drafter.state_dict().items())
    v1 = Drafter(spec2().model_copy(update={"dflash2": None}))
    grown = Drafter(spec2())
    missing = grown.load_state_dict(v1.state_dict(), strict=False).missing_keys
    assert all("_conv" in name or "selector" in name for name in missing)
    path = export_zlab(grown, tmp_path / "grown", "float32")
    old, new = BoundDrafter(v1, target()), theirs(path)
    for prompt in PROMPTS:
        stats = dflash.model.dflash_generate(new, target().model, torch.tensor([prompt]), 21, [], return_stats=True)
        found = chain_generate(target(), old, prompt, max_new_tokens=21, stop_token_ids=())
        assert found.acceptance_lengths == stats.acceptance_lengths


@torch.no_grad()
def test_speculators_class_has_the_same_weights_and_scores(tmp_path: Path) -> None:
    torch.manual_seed(2)
    sizes = {"vocab_size": 13, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "initializer_range": 0.3}
    tokens = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": False}
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, **tokens))
    model.save_pretrained(tmp_path / "target")
    drafter = awake(Drafter(spec2()))
    verifier = Verifier(str(tmp_path / "target"), ("Qwen3ForCausalLM",), 4)
    path = export_speculators(drafter, tmp_path / "x", verifier, "float32")
    config = json.loads((path / "config.json").read_text())
    config["transformer_layer_config"]["_attn_implementation"] = "eager"
    (path / "config.json").write_text(json.dumps(config))
    other = SpeculatorModel.from_pretrained(str(path), dtype=torch.float32).eval()
    their_weights = other.state_dict()
    for name, value in drafter.state_dict().items():
        assert torch.equal(their_weights[name], value), name
    bound = BoundDrafter(load_drafter_export(path), wrap(model))
    hidden = torch.randn(4, 16, generator=torch.Generator().manual_seed(3))
    paths = bound.draft(hidden, 7)
    assert isinstance(paths, PathScores)
    chain = paths.chain()[0].tolist()
    scores = other.candidate_selector.score_candidates(
        model.lm_head(hidden)[None], hidden[None], torch.tensor([[7, *chain[:-1]]]), paths.tokens_AKC
    )
    best = paths.tokens_AKC[0].gather(-1, scores[0].argmax(-1, keepdim=True))[:, 0]
    assert best.tolist() == chain
