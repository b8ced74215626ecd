"""Exports in 8 bits load in `dflash` 0.1.0's class through compressed-tensors and compute the same there as here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from dflash.model import DFlashDraftModel

from decoding_kit import tiny_spec
from draftline.drafter.model import Drafter
from draftline.export.zlab import export_zlab, load_export

pytestmark = pytest.mark.interop


@torch.no_grad()
def test_their_class_computes_with_our_rounded_weights(tmp_path: Path) -> None:
    path = export_zlab(Drafter(tiny_spec()), tmp_path / "x", "fp8")
    theirs, ours = DFlashDraftModel.from_pretrained(path, dtype=torch.float32).eval(), load_export(path)
    ours = ours.float()
    generator = torch.Generator().manual_seed(1)
    taps, block = torch.randn(7, 32, generator=generator), torch.randn(4, 16, generator=generator)
    got = theirs(target_hidden=taps[None], noise_embedding=block[None], position_ids=torch.arange(11)[None])[0]
    hidden = ours.forward_block(block, taps, ours.new_cache(), 7)
    torch.testing.assert_close(got.float(), hidden, rtol=1e-4, atol=1e-4)
    plain = load_export(export_zlab(Drafter(tiny_spec()), tmp_path / "y", "float32"))
    assert not torch.allclose(hidden, plain.forward_block(block, taps, plain.new_cache(), 7), rtol=1e-3, atol=1e-3)
