"""Our chain decoding and z-lab's `dflash_generate` agree on every token and every acceptance length."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dflash.model
import pytest
import torch

from decoding_kit import random_prompt, tiny_spec, tiny_target
from draftline.config.schema import DrafterConfig, SlidingWindowConfig, TargetConfig
from draftline.decode.chain import BoundDrafter, chain_generate
from draftline.decode.plain import plain_generate
from draftline.drafter.model import Drafter
from draftline.drafter.spec import build_spec
from draftline.export.zlab import export_zlab, load_export
from draftline.target.load import LoadedTarget, load_target

pytestmark = pytest.mark.interop


@pytest.fixture(autouse=True)
def _clock_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its timer waits for a CUDA device; everything else runs on the CPU."""
    monkeypatch.setattr(dflash.model, "_cuda_time", time.perf_counter)


class Pair:
    """One export, loaded by both sides."""

    def __init__(self, target: LoadedTarget, path: Path) -> None:
        self.target = target
        self.theirs = dflash.model.DFlashDraftModel.from_pretrained(path, dtype=torch.float32).eval()
        self.ours = BoundDrafter(load_export(path, dtype=torch.float32), target)

    def decode(
        self, prompt: Sequence[int], limit: int, stops: Sequence[int]
    ) -> tuple[tuple[list[int], list[int]], tuple[list[int], list[int]]]:
        """Output ids and acceptance lengths: ours, theirs."""
        stats: Any = dflash.model.dflash_generate(
            self.theirs, self.target.model, torch.tensor([prompt]), limit, list(stops), return_stats=True
        )
        ours = chain_generate(self.target, self.ours, prompt, max_new_tokens=limit, stop_token_ids=stops)
        return (
            (ours.output_ids, ours.acceptance_lengths),
            (stats.output_ids[0, len(prompt) :].tolist(), stats.acceptance_lengths),
        )


def _trained_a_little(target: LoadedTarget, spec: Any, prompts: Sequence[Sequence[int]], steps: int) -> Drafter:
    """A drafter that gets some slots right: trained on the target's own greedy text, one block at a time."""
    drafter = Drafter(spec)
    optimizer = torch.optim.Adam(drafter.parameters(), lr=3e-3)
    bound = BoundDrafter(drafter, target)
    texts = [[*p, *plain_generate(target, p, max_new_tokens=24, stop_token_ids=()).output_ids] for p in prompts]
    with torch.no_grad():
        states = [target.model(torch.tensor([t]), output_hidden_states=True).hidden_states for t in texts]
    taps = [torch.cat([state[tap + 1][0] for tap in spec.taps], dim=-1) for state in states]
    for step in range(steps):
        text, taps_TF = texts[step % len(texts)], taps[step % len(texts)]
        start = len(prompts[0]) + step % 12
        block = torch.tensor([text[start], *[spec.mask_token_id] * (spec.block_size - 1)])
        hidden_BH = _block_with_gradient(drafter, bound.embed(block), taps_TF[:start], start)
        labels = torch.tensor(text[start + 1 : start + spec.block_size])
        loss = torch.nn.functional.cross_entropy(bound.head(hidden_BH[1:]), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return drafter.eval()


def _block_with_gradient(drafter: Drafter, block_BH: torch.Tensor, taps_TF: torch.Tensor, start: int) -> torch.Tensor:
    n_slots = block_BH.shape[0]
    document_T = torch.zeros(taps_TF.shape[0], dtype=torch.int32)
    masks = drafter.build_masks(document_T, torch.tensor([start]), torch.zeros(1, dtype=torch.int32))
    return drafter(block_BH, taps_TF, masks, torch.arange(taps_TF.shape[0]), torch.arange(start, start + n_slots))


SLIDING = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 6}


@pytest.mark.parametrize("variant", [{}, SLIDING, {"in_block_attention": "causal"}])
def test_ids_and_acceptance_lengths_agree_on_a_tiny_pair(tmp_path: Path, variant: dict[str, Any]) -> None:
    target = tiny_target(2)
    prompts = [random_prompt(seed, 6) for seed in range(4)]
    path = export_zlab(
        _trained_a_little(target, tiny_spec(block_size=5, **variant), prompts, 150), tmp_path / "export", "float32"
    )
    pair, lengths = Pair(target, path), []
    for seed, prompt in enumerate(prompts):
        for limit in (1 + 4 * 5, 2, 19, 24):  # the first is 1 modulo the block size
            for stops in ((), (seed,)):
                ours, theirs = pair.decode(prompt, limit, stops)
                assert ours == theirs
                lengths += ours[1]
    # The comparison must have met rejections as well as accepted drafts.
    assert len(set(lengths)) >= 3


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path) -> LoadedTarget:
    return load_target(TargetConfig(model=str(smollm2_gguf)), "cpu")


def test_ids_and_acceptance_lengths_agree_on_smollm2_with_a_random_drafter(
    tmp_path: Path, smollm2: LoadedTarget
) -> None:
    config = DrafterConfig(
        num_layers=2, block_size=8, mask_token_id=5, sliding=SlidingWindowConfig(layers=(0,), window_tokens=12)
    )
    drafter = Drafter(build_spec(config, smollm2.facts))
    path = export_zlab(drafter, tmp_path / "export", "float32")
    prompt = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
    pair = Pair(smollm2, path)
    for limit, stops in ((17, ()), (11, smollm2.stop_token_ids)):
        ours, theirs = pair.decode(prompt, limit, sorted(stops))
        assert ours == theirs
        plain = plain_generate(smollm2, prompt, max_new_tokens=limit, stop_token_ids=stops)
        assert ours[0] == plain.output_ids
