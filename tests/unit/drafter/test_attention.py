"""The attention forms against attention written out by hand: masks with holes, grouped heads, groups of blocks."""

from __future__ import annotations

import pytest
import torch
from drafter_rows import blocks_at, make_row, tiny_spec

from draftline.drafter import masks as masks_module
from draftline.drafter.attention import attend, masked_attention, plain_flex
from draftline.drafter.masks import AttentionPath, BlockwiseMask, build_masks

N_HEADS, N_KV, HEAD_DIM = 6, 2, 16


def by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """Softmax attention one head at a time, hidden keys left out."""
    out = torch.zeros_like(q)
    for head in range(q.shape[1]):
        kv = head * k.shape[1] // q.shape[1]
        for query in range(q.shape[0]):
            keys = visible[query].nonzero().flatten()
            weights = torch.softmax(k[keys, kv] @ q[query, head] / q.shape[-1] ** 0.5, dim=0)
            out[query, head] = weights @ v[keys, kv]
    return out


def tensors(n_queries: int, n_context: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    heads = [(n_queries, N_HEADS), (n_queries, N_KV), (n_queries, N_KV), (n_context, N_KV), (n_context, N_KV)]
    return [torch.randn(n, h, HEAD_DIM, generator=generator, dtype=torch.float64) for n, h in heads]


@pytest.mark.parametrize("path", ["dense", "blockwise", "flex"])
def test_every_form_is_attention_over_the_visible_keys(path: AttentionPath) -> None:
    spec, row = tiny_spec(), make_row((9, 5, 12))
    blocks = blocks_at(row, spec, [0, 4, 5, 11, 20, 25], padding=2)
    n_queries, n_context = 8 * spec.block_size, 26
    q, k, v, context_k, context_v = tensors(n_queries, n_context)
    where = (spec, row.document_ids_T, blocks.anchors_A, blocks.document_A)
    masks, dense = build_masks(*where, attention=path), build_masks(*where, attention="dense")
    for kind in ("full_attention", "sliding_attention"):
        out = attend(masks[kind], q, k, v, context_k, context_v, plain_flex)
        keys, values = torch.cat((context_k, k)), torch.cat((context_v, v))
        torch.testing.assert_close(out, by_hand(q, keys, values, dense[kind].visible_QS), atol=1e-12, rtol=0)


def test_bool_and_additive_masks_with_holes_agree() -> None:
    q, k, v, *_ = tensors(12, 1)
    visible = torch.rand(12, 12, generator=torch.Generator().manual_seed(1)) > 0.5
    visible |= torch.eye(12, dtype=torch.bool)
    ours = masked_attention(q, k, v, visible)
    additive = torch.where(visible, 0.0, float("-inf")).double()
    repeated = (x.repeat_interleave(N_HEADS // N_KV, dim=1).transpose(0, 1) for x in (k, v))
    theirs = torch.nn.functional.scaled_dot_product_attention(q.transpose(0, 1), *repeated, attn_mask=additive)
    torch.testing.assert_close(ours, theirs.transpose(0, 1), atol=1e-12, rtol=0)
    torch.testing.assert_close(ours, by_hand(q, k, v, visible), atol=1e-12, rtol=0)
    assert not torch.allclose(ours, masked_attention(q, k, v, None))


def test_blockwise_work_follows_documents_and_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks_module, "GROUP_SLOTS", 8)
    spec, row = tiny_spec(), make_row((30, 10))
    blocks = blocks_at(row, spec, [2, 3, 20, 25, 33, 36], padding=1)
    masks = build_masks(spec, row.document_ids_T, blocks.anchors_A, blocks.document_A, attention="blockwise")
    full, sliding = masks["full_attention"], masks["sliding_attention"]
    assert isinstance(full, BlockwiseMask) and isinstance(sliding, BlockwiseMask)
    assert [(g.first, g.last, g.start, g.stop) for g in full.groups] == [
        (0, 2, 0, 3),
        (2, 4, 0, 25),
        (4, 6, 30, 36),
        (6, 7, 0, 0),
    ]
    assert [(g.start, g.stop) for g in sliding.groups] == [(0, 3), (16, 25), (30, 36), (0, 0)]


def test_small_groups_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, row = tiny_spec(), make_row((30, 10))
    blocks = blocks_at(row, spec, [2, 3, 20, 25, 33, 36], padding=3)
    inputs = tensors(9 * spec.block_size, 40)
    outs = []
    for slots in (512, 4):
        monkeypatch.setattr(masks_module, "GROUP_SLOTS", slots)
        masks = build_masks(spec, row.document_ids_T, blocks.anchors_A, blocks.document_A, attention="blockwise")
        outs.append(attend(masks["full_attention"], *inputs, plain_flex))
    torch.testing.assert_close(outs[0], outs[1], atol=1e-12, rtol=0)
