"""Our exports load in z-lab's own class, which then computes the same hidden states as our model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from dflash.model import DFlashDraftModel
from transformers import DynamicCache

from decoding_kit import tiny_spec
from draftline.drafter.model import Drafter
from draftline.export.zlab import export_zlab, load_export

pytestmark = pytest.mark.interop
SLIDING = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 5}
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "mixed sliding, zlab": SLIDING,
    "sliding, causal": {**SLIDING, "in_block_attention": "causal"},
    "sliding, bidirectional": {**SLIDING, "in_block_attention": "bidirectional"},
    "full, causal": {"in_block_attention": "causal"},
    "window shorter than the block": {**SLIDING, "sliding_window": 3, "in_block_attention": "bidirectional"},
    "yarn": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}, "block_size": 5},
}


def _theirs(path: Path) -> Any:
    model, info = DFlashDraftModel.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    return model.eval()


def _perturbed(spec: Any) -> Drafter:
    """Norm weights away from one, so that a norm in the wrong place shows."""
    drafter = Drafter(spec).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return drafter


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_rounds_with_a_growing_cache_give_the_same_hidden_states(tmp_path: Path, variant: str, dtype: str) -> None:
    spec = tiny_spec(block_size=6, **VARIANTS[variant]) if "yarn" not in variant else tiny_spec(**VARIANTS[variant])
    path = export_zlab(_perturbed(spec), tmp_path / "export", dtype)
    ours, theirs = load_export(path, dtype=torch.float32), _theirs(path)
    assert theirs.block_size == spec.block_size
    assert theirs.mask_token_id == spec.mask_token_id
    assert tuple(theirs.target_layer_ids) == spec.taps

    generator = torch.Generator().manual_seed(0)
    cache, their_cache = ours.new_cache(), DynamicCache(config=theirs.config)
    their_cache.activate_past_recording()
    start = 0
    for new_tokens, slots in ((9, spec.block_size), (1, spec.block_size), (4, spec.block_size), (2, 3)):
        taps_SF = torch.randn(new_tokens, len(spec.taps) * spec.hidden_size, generator=generator)
        block_BH = torch.randn(slots, spec.hidden_size, generator=generator)
        positions = torch.arange(start, start + new_tokens + slots)
        hidden = theirs(
            position_ids=positions[None],
            noise_embedding=block_BH[None],
            target_hidden=taps_SF[None],
            past_key_values=their_cache,
            use_cache=True,
        )[0]
        their_cache.crop(-slots)
        start += new_tokens
        ours_BH = ours.forward_block(block_BH, taps_SF, cache, start)
        torch.testing.assert_close(ours_BH, hidden, atol=1e-5, rtol=1e-5)


def test_a_bf16_export_loads_bitwise(tmp_path: Path) -> None:
    path = export_zlab(_perturbed(tiny_spec()), tmp_path / "export")
    ours = load_export(path).state_dict()
    theirs = DFlashDraftModel.from_pretrained(path, dtype=torch.bfloat16).state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def test_what_z_lab_saves_is_read_back(tmp_path: Path) -> None:
    """A checkpoint written by z-lab's class from our export (newest transformers schema) gives the same drafter."""
    path = export_zlab(_perturbed(tiny_spec(**SLIDING)), tmp_path / "export", "float32")
    _theirs(path).save_pretrained(tmp_path / "theirs")
    ours, again = load_export(path), load_export(tmp_path / "theirs")
    assert again.spec == ours.spec
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
