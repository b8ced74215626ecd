"""Tiny drafter specifications and packed rows for the drafter's tests."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention.flex_attention import create_mask

from draftline.config.drafter_spec import DrafterSpec
from draftline.drafter.blocks import BlockBatch, make_blocks
from draftline.drafter.masks import AttentionPath, DenseMask, FlexMask, LayerMask
from draftline.drafter.model import Drafter
from draftline.records import HiddenStateRow
from spec_kit import small_spec

VOCAB, HIDDEN, MASK_ID = 50, 32, 49


def tiny_spec(**changes: Any) -> DrafterSpec:
    """Two layers, the first one sliding with a window of 5, grouped heads."""
    own: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "vocab_size": VOCAB,
        "mask_token_id": MASK_ID,
        "layer_types": ("sliding_attention", "full_attention"),
        "sliding_window": 5,
    }
    return small_spec(**(own | changes))


def make_row(
    lengths: tuple[int, ...], *, seed: int = 0, spec: DrafterSpec | None = None, dtype: torch.dtype = torch.float32
) -> HiddenStateRow:
    """A random packed row; about four tokens in five are supervised; sample i is called `s<i>`."""
    spec = spec or tiny_spec()
    generator = torch.Generator().manual_seed(seed)
    n_tokens, n_features = sum(lengths), len(spec.taps) * spec.hidden_size
    return HiddenStateRow(
        row_id=0,
        epoch=0,
        sample_ids=tuple(f"s{i}" for i in range(len(lengths))),
        lengths=lengths,
        input_ids_T=torch.randint(0, MASK_ID, (n_tokens,), generator=generator),
        loss_mask_T=torch.rand(n_tokens, generator=generator) > 0.2,
        document_ids_T=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).int(),
        position_ids_T=torch.cat([torch.arange(n) for n in lengths]),
        taps_TF=torch.randn(n_tokens, n_features, generator=generator, dtype=torch.float64).to(dtype),
        final_hidden_TH=None,
        final_hidden_norm="pre",
        tap_layer_ids=spec.taps,
    )


def blocks_at(row: HiddenStateRow, spec: DrafterSpec, anchors: list[int], padding: int = 0) -> BlockBatch:
    """Blocks at given row indices, then `padding` blocks that are not kept."""
    anchors_A = torch.tensor(anchors + [0] * padding)
    return make_blocks(row, spec, anchors_A, torch.arange(len(anchors_A)) < len(anchors))


def embedding(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The frozen embedding (VOCAB, HIDDEN)."""
    return torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(dtype)


def tiny_drafter(
    spec: DrafterSpec, attention: AttentionPath = "blockwise", *, dtype: torch.dtype = torch.float32, seed: int = 3
) -> Drafter:
    """A drafter with random weights and norms away from 1."""
    drafter = Drafter(spec, attention=attention)
    generator = torch.Generator().manual_seed(seed)
    drafter.init_weights(generator)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return drafter.to(dtype)


def _materialised(mask: LayerMask, n_context: int, blocks: BlockBatch) -> DenseMask:
    """The flex rule as a dense mask: running flex_attention itself on the CPU compiles for each shape."""
    assert isinstance(mask, FlexMask)
    n_queries = blocks.block_ids_AB.numel()
    rule = mask.block_mask.mask_mod
    return DenseMask(create_mask(rule, None, None, n_queries, n_context + n_queries, device="cpu")[0, 0])


def packed_hidden(drafter: Drafter, row: HiddenStateRow, blocks: BlockBatch) -> torch.Tensor:
    """Packed forward: (A, B, H). Attention "flex" without compiled kernels takes flex's rule through `create_mask`."""
    masks = drafter.build_masks(row.document_ids_T, blocks.anchors_A, blocks.document_A)
    if drafter.attention == "flex" and drafter.kernels is None:
        masks = {kind: _materialised(mask, len(row.document_ids_T), blocks) for kind, mask in masks.items()}
    table_VH = embedding(drafter.fc.weight.dtype)
    hidden_QH = drafter(
        table_VH[blocks.block_ids_AB.flatten()],
        row.taps_TF,
        masks,
        row.position_ids_T,
        blocks.position_ids_AB.flatten(),
    )
    return hidden_QH.unflatten(0, blocks.block_ids_AB.shape)


def document_start(row: HiddenStateRow, document: int) -> int:
    """Row index of a document's first token."""
    return sum(row.lengths[:document])
