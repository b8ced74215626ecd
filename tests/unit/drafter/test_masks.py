"""One rule set in three forms: dense, blockwise and flex masks say the same, and say what the semantics say."""

from __future__ import annotations

import itertools

import pytest
import torch
from drafter_rows import blocks_at, make_row, tiny_spec
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from draftline.drafter.blocks import BlockBatch, pad_row
from draftline.drafter.masks import (
    BlockwiseMask,
    DenseMask,
    FlexMask,
    MaskRule,
    blockwise_mask,
    build_masks,
    choose_path,
    dense_mask,
    flex_mask,
    mask_rule,
    visible_stretches,
)
from draftline.records import HiddenStateRow

Case = tuple[HiddenStateRow, BlockBatch, int]


@st.composite
def rules(draw: st.DrawFn) -> MaskRule:
    window = draw(st.none() | st.integers(1, 12))
    return MaskRule(window, causal=draw(st.booleans()), from_anchor=draw(st.booleans()))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    block_size = draw(st.integers(2, 5))
    lengths = tuple(draw(st.lists(st.integers(1, 12), min_size=1, max_size=4)))
    row = make_row(lengths)
    anchors = draw(st.lists(st.integers(0, sum(lengths) - 1), max_size=6, unique=True))
    padding = draw(st.integers(0 if anchors else 1, 3))
    blocks = blocks_at(row, tiny_spec(block_size=block_size), sorted(anchors), padding)
    return pad_row(row, sum(lengths) + draw(st.integers(0, 4))), blocks, block_size


def spelled_out(rule: MaskRule, row: HiddenStateRow, blocks: BlockBatch, block_size: int) -> torch.Tensor:
    """The semantics, one pair at a time, in words of positions: bool (Q, T + Q)."""
    documents, n_blocks = row.document_ids_T.tolist(), len(blocks.anchors_A)
    n_context = len(documents)
    out = torch.zeros(n_blocks * block_size, n_context + n_blocks * block_size, dtype=torch.bool)
    for block, slot in itertools.product(range(n_blocks), range(block_size)):
        anchor, document = int(blocks.anchors_A[block]), int(blocks.document_A[block])
        query = block * block_size + slot
        for c in range(n_context):
            near = rule.window is None or (
                anchor - c <= rule.window if rule.from_anchor else anchor + slot - c < rule.window
            )
            out[query, c] = document >= 0 and documents[c] == document and c < anchor and near
        for key_slot in range(block_size):
            near = rule.window is None or rule.from_anchor or abs(slot - key_slot) < rule.window
            seen = near and (key_slot <= slot or not rule.causal)
            out[query, n_context + block * block_size + key_slot] = seen
    return out


def unfolded(mask: BlockwiseMask, n_context: int, block_size: int) -> torch.Tensor:
    """A blockwise mask as bool (Q, T + Q)."""
    n_queries = mask.groups[-1].last * block_size
    out = torch.zeros(n_queries, n_context + n_queries, dtype=torch.bool)
    for group in mask.groups:
        for block in range(group.first, group.last):
            queries = slice(block * block_size, (block + 1) * block_size)
            out[queries, group.start : group.stop] = group.visible_ABC[block - group.first]
            out[queries, n_context + queries.start : n_context + queries.stop] = mask.visible_BB
    return out


@settings(max_examples=60, deadline=None)
@given(rules(), cases())
def test_dense_and_blockwise_masks_are_the_semantics_spelled_out(rule: MaskRule, case: Case) -> None:
    row, blocks, block_size = case
    where = (block_size, row.document_ids_T, blocks.anchors_A, blocks.document_A)
    expected = spelled_out(rule, row, blocks, block_size)
    assert torch.equal(dense_mask(rule, *where).visible_QS, expected)
    assert torch.equal(unfolded(blockwise_mask(rule, *where), len(row.document_ids_T), block_size), expected)
    assert expected.any(dim=1).all()  # no query without a key, padding blocks included


@settings(max_examples=20, deadline=None)
@given(rules(), cases())
def test_flex_rule_is_the_dense_one(rule: MaskRule, case: Case) -> None:
    row, blocks, block_size = case
    where = (block_size, row.document_ids_T, blocks.anchors_A, blocks.document_A)
    dense = dense_mask(rule, *where).visible_QS
    assert torch.equal(
        create_mask(visible_stretches(rule, *where).mask_mod(), None, None, *dense.shape, device="cpu")[0, 0], dense
    )


@pytest.mark.parametrize(("n_blocks", "block_size", "n_context"), [(7, 5, 61), (20, 7, 130), (26, 5, 300)])
def test_flex_mask_of_a_shape_that_is_no_multiple_of_128_reads_no_anchor_past_the_end(
    n_blocks: int, block_size: int, n_context: int
) -> None:
    row = make_row((n_context - 20, 20))
    spec = tiny_spec(block_size=block_size)
    blocks = blocks_at(row, spec, list(range(1, n_blocks)), padding=1)
    where = (block_size, row.document_ids_T, blocks.anchors_A, blocks.document_A)
    rule = MaskRule(window=9, causal=True)
    beyond = torch.tensor(10_000)  # flex rounds indices up to its tiles: unclamped reads would raise
    assert not visible_stretches(rule, *where).mask_mod()(beyond, beyond, beyond, beyond)


@settings(max_examples=25, deadline=None)
@given(rules(), st.integers(1, 40), st.sampled_from([5, 8, 16, 128]), st.integers(2, 500), st.integers(0, 3))
def test_tiles_are_those_that_torch_finds_by_forming_the_whole_mask(
    rule: MaskRule, n_blocks: int, block_size: int, n_context: int, padding: int
) -> None:
    row = make_row((n_context - n_context // 3, n_context // 3)) if n_context >= 3 else make_row((n_context,))
    anchors = sorted({i * n_context // n_blocks for i in range(n_blocks)})
    blocks = blocks_at(row, tiny_spec(block_size=block_size), anchors, padding)
    where = (block_size, row.document_ids_T, blocks.anchors_A, blocks.document_A)
    seen, ours = visible_stretches(rule, *where), flex_mask(rule, *where).block_mask
    theirs = create_block_mask(seen.mask_mod(), None, None, seen.n_queries, seen.n_keys, device="cpu")
    assert ours.seq_lengths == theirs.seq_lengths
    for kind in ("kv", "full_kv", "q", "full_q"):
        count = getattr(ours, f"{kind}_num_blocks")
        assert torch.equal(count, getattr(theirs, f"{kind}_num_blocks"))
        wanted = torch.arange(getattr(ours, f"{kind}_indices").shape[-1]) < count[..., None]
        pairs = [getattr(mask, f"{kind}_indices").masked_fill(~wanted, -1) for mask in (ours, theirs)]
        assert torch.equal(*pairs)


def test_masks_are_made_once_for_each_kind_of_layer() -> None:
    types = ("sliding_attention", "full_attention", "sliding_attention")
    spec = tiny_spec(num_layers=3, layer_types=types)
    row = make_row((20,))
    blocks = blocks_at(row, spec, [3, 9])
    for path, kind in (("dense", DenseMask), ("blockwise", BlockwiseMask), ("flex", FlexMask)):
        masks = build_masks(spec, row.document_ids_T, blocks.anchors_A, blocks.document_A, attention=path)  # type: ignore[arg-type]
        assert sorted(masks) == ["full_attention", "sliding_attention"]
        assert all(isinstance(mask, kind) for mask in masks.values())


def test_the_path_is_chosen_by_the_device() -> None:
    assert choose_path("auto", torch.device("cpu")) == "blockwise"
    assert choose_path("auto", torch.device("cuda", 1)) == "flex"
    assert choose_path("dense", torch.device("cuda")) == "dense"


@pytest.mark.parametrize(
    ("in_block", "sliding_causal", "full_causal"),
    [("zlab", True, False), ("causal", True, True), ("bidirectional", False, False)],
)
def test_in_block_attention_by_layer_kind(in_block: str, sliding_causal: bool, full_causal: bool) -> None:
    spec = tiny_spec(in_block_attention=in_block)
    assert mask_rule(spec, "sliding_attention") == MaskRule(5, sliding_causal)
    assert mask_rule(spec, "full_attention") == MaskRule(None, full_causal)


def test_window_origin_anchor_reaches_one_token_further_and_not_with_the_slot() -> None:
    rule = mask_rule(tiny_spec(window_origin="anchor"), "sliding_attention")
    keys = torch.arange(20)
    for slot in (0, 3):
        assert keys[rule.context(torch.tensor(12), torch.tensor(slot), keys)].tolist() == [7, 8, 9, 10, 11]


@settings(max_examples=100, deadline=None)
@given(rules(), st.integers(0, 40), st.integers(2, 8))
def test_the_floor_is_the_first_context_token_any_slot_sees(rule: MaskRule, anchor: int, block_size: int) -> None:
    slots, keys = torch.arange(block_size)[:, None], torch.arange(50)
    seen = rule.context(torch.tensor(anchor), slots, keys).any(0).nonzero().flatten().tolist()
    assert all(key >= rule.context_floor(anchor) for key in seen)
    assert not seen or seen[0] == rule.context_floor(anchor)
