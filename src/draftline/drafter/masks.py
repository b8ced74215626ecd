"""Who sees whom: ONE rule set for the dense, blockwise and flex forms of the drafter's attention.

Queries are block slots, keys are [context of the row ; all block slots]. A slot k of the block at anchor p sees
the context of its own document strictly before p (the feature of p itself does not exist when the block is drafted)
and slots of its own block; in sliding layers within the window. Padding blocks (document -1) see only themselves, so
that no query is without a key. Distances are row indices: documents are contiguous, so they equal position distances.

Shape letters: T context tokens, A blocks, B slots, Q = A * B, S = T + Q keys, C context keys of a group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from draftline.config.drafter_spec import DrafterSpec, LayerType

AttentionPath = Literal["auto", "blockwise", "dense", "flex"]
MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
BlockMaskBuilder = Callable[[MaskMod, int, int, str], BlockMask]

# Slots whose scores are formed together on the blockwise path: bounds memory, and lets a group skip the context
# before its window and behind its last anchor.
GROUP_SLOTS = 512


@dataclass(frozen=True, slots=True)
class MaskRule:
    """Visibility in one kind of layer.

    Attributes:
        window: W in tokens, None for full attention.
        causal: slot k sees only slots k' <= k of its block.
        from_anchor: the window reaches back W tokens from the anchor for all slots alike and does not bound the
            block (speculators); False: W - 1 tokens back from the query's own position, in the block too (z-lab).
    """

    window: int | None
    causal: bool
    from_anchor: bool = False

    def context(self, anchor: torch.Tensor, slot: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Context at row index `key` is visible to `slot` of the block at `anchor`, documents aside."""
        visible = (key < anchor) & (slot >= 0)  # the second term only gives the result its full shape
        if self.window is None:
            return visible
        if self.from_anchor:
            return visible & (key >= anchor - self.window)
        return visible & (key > anchor + slot - self.window)

    def block(self, slot: torch.Tensor, key_slot: torch.Tensor) -> torch.Tensor:
        """`key_slot` of the same block is visible to `slot`."""
        visible = key_slot <= slot if self.causal else key_slot + slot >= 0
        if self.window is None or self.from_anchor:
            return visible
        return visible & ((slot - key_slot).abs() < self.window)

    def context_floor(self, anchor: int) -> int:
        """Lowest context index that any slot of the block at `anchor` sees."""
        if self.window is None:
            return 0
        return max(0, anchor - self.window + (0 if self.from_anchor else 1))


def mask_rule(spec: DrafterSpec, layer_type: LayerType) -> MaskRule:
    """The rule of one kind of layer; see `DrafterSpec.in_block_attention` and `window_origin`."""
    slides = layer_type == "sliding_attention"
    causal = slides if spec.in_block_attention == "zlab" else spec.in_block_attention == "causal"
    window = spec.sliding_window if slides else None
    return MaskRule(window=window, causal=causal, from_anchor=spec.window_origin == "anchor")


@dataclass(frozen=True, slots=True)
class DenseMask:
    """The reference: bool (Q, S), True where visible."""

    visible_QS: torch.Tensor


@dataclass(frozen=True, slots=True)
class BlockGroup:
    """Consecutive blocks of one document and the stretch of context that they can see.

    Attributes:
        first, last: blocks [first, last).
        start, stop: context [start, stop).
        visible_ABC: bool, last - first blocks by B slots by C = stop - start context keys.
    """

    first: int
    last: int
    start: int
    stop: int
    visible_ABC: torch.Tensor


@dataclass(frozen=True, slots=True)
class BlockwiseMask:
    """Groups in block order, covering all blocks, and the in-block rule as bool (B, B)."""

    groups: tuple[BlockGroup, ...]
    visible_BB: torch.Tensor


@dataclass(frozen=True, slots=True)
class FlexMask:
    """A flex_attention BlockMask over Q queries and S keys."""

    block_mask: BlockMask


LayerMask = DenseMask | BlockwiseMask | FlexMask
# One mask for each kind of layer that the drafter has, made once per row.
DrafterMasks = dict[LayerType, LayerMask]


def choose_path(attention: AttentionPath, device: torch.device) -> Literal["blockwise", "dense", "flex"]:
    """`auto` is flex on CUDA and blockwise elsewhere."""
    if attention != "auto":
        return attention
    return "flex" if device.type == "cuda" else "blockwise"


@torch.no_grad()
def build_masks(
    spec: DrafterSpec,
    document_ids_T: torch.Tensor,
    anchors_A: torch.Tensor,
    document_A: torch.Tensor,
    *,
    attention: AttentionPath = "auto",
    build_block_mask: BlockMaskBuilder | None = None,
) -> DrafterMasks:
    """Masks of a row, one for each kind of layer.

    Args:
        document_ids_T: document of each context token, -1 for padding; documents are contiguous.
        anchors_A: row index of each block's anchor.
        document_A: document of each block, -1 for padding blocks.
        build_block_mask: the (compiled) builder of the flex path; None: the uncompiled one.
    """
    path = choose_path(attention, document_ids_T.device)
    masks: DrafterMasks = {}
    for layer_type in sorted(set(spec.layer_types)):
        rule = mask_rule(spec, layer_type)
        if path == "dense":
            masks[layer_type] = dense_mask(rule, spec.block_size, document_ids_T, anchors_A, document_A)
        elif path == "flex":
            builder = build_block_mask or plain_block_mask
            masks[layer_type] = flex_mask(rule, spec.block_size, document_ids_T, anchors_A, document_A, builder)
        else:
            masks[layer_type] = blockwise_mask(rule, spec.block_size, document_ids_T, anchors_A, document_A)
    return masks


def make_mask_mod(
    rule: MaskRule, block_size: int, document_ids_T: torch.Tensor, anchors_A: torch.Tensor, document_A: torch.Tensor
) -> MaskMod:
    """The rule as a function of (batch, head, query index, key index), for flex_attention and the dense twin.

    Indices may lie past the ends, because flex rounds both lengths up to its block of 128; reads are clamped.
    """
    n_context, n_blocks = document_ids_T.shape[0], anchors_A.shape[0]

    def visible(_b: torch.Tensor, _h: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        block, slot = (query // block_size).clamp(max=n_blocks - 1), query % block_size
        context_key = key.clamp(max=n_context - 1)
        document = document_A[block]
        sees_context = (
            (key < n_context)
            & (document >= 0)
            & (document_ids_T[context_key] == document)
            & rule.context(anchors_A[block], slot, context_key)
        )
        block_key = key - n_context
        sees_block = (block_key >= 0) & (block_key // block_size == block) & rule.block(slot, block_key % block_size)
        return sees_context | sees_block

    return visible


def dense_mask(
    rule: MaskRule, block_size: int, document_ids_T: torch.Tensor, anchors_A: torch.Tensor, document_A: torch.Tensor
) -> DenseMask:
    """The whole (Q, S) mask; for tests and small shapes."""
    mod = make_mask_mod(rule, block_size, document_ids_T, anchors_A, document_A)
    n_queries = anchors_A.shape[0] * block_size
    queries = torch.arange(n_queries, device=anchors_A.device)[:, None]
    keys = torch.arange(document_ids_T.shape[0] + n_queries, device=anchors_A.device)[None]
    return DenseMask(mod(queries, queries, queries, keys))


def plain_block_mask(mask_mod: MaskMod, q_len: int, kv_len: int, device: str) -> BlockMask:
    """create_block_mask for one batch and all heads."""
    return create_block_mask(mask_mod, None, None, q_len, kv_len, device=device)


def flex_mask(
    rule: MaskRule,
    block_size: int,
    document_ids_T: torch.Tensor,
    anchors_A: torch.Tensor,
    document_A: torch.Tensor,
    builder: BlockMaskBuilder = plain_block_mask,
) -> FlexMask:
    """The BlockMask of flex_attention (its block stays 128; sorted anchors make most of its blocks empty or full)."""
    mod = make_mask_mod(rule, block_size, document_ids_T, anchors_A, document_A)
    n_queries = anchors_A.shape[0] * block_size
    return FlexMask(builder(mod, n_queries, document_ids_T.shape[0] + n_queries, str(document_ids_T.device)))


def blockwise_mask(
    rule: MaskRule, block_size: int, document_ids_T: torch.Tensor, anchors_A: torch.Tensor, document_A: torch.Tensor
) -> BlockwiseMask:
    """Groups of blocks with only the context that they can see. Reads anchors on the host: for the CPU."""
    slots_B = torch.arange(block_size, device=anchors_A.device)
    anchors, documents = anchors_A.tolist(), document_A.tolist()
    first_token = _first_tokens(document_ids_T)
    groups = []
    for first, last in _runs(documents, max(1, GROUP_SLOTS // block_size)):
        start = stop = 0
        if documents[first] >= 0:
            start = max(first_token[documents[first]], rule.context_floor(min(anchors[first:last])))
            stop = max(start, *anchors[first:last])
        keys_C = torch.arange(start, stop, device=anchors_A.device)
        visible_ABC = rule.context(anchors_A[first:last, None, None], slots_B[:, None], keys_C)
        groups.append(BlockGroup(first, last, start, stop, visible_ABC))
    return BlockwiseMask(tuple(groups), rule.block(slots_B[:, None], slots_B))


def _first_tokens(document_ids_T: torch.Tensor) -> dict[int, int]:
    documents, counts = torch.unique_consecutive(document_ids_T, return_counts=True)
    starts = counts.cumsum(0) - counts
    return dict(zip(documents.tolist(), starts.tolist(), strict=True))


def _runs(documents: list[int], longest: int) -> list[tuple[int, int]]:
    """[first, last) of runs of blocks with one document, none longer than `longest`."""
    runs, first = [], 0
    for index in range(1, len(documents) + 1):
        if index == len(documents) or documents[index] != documents[first] or index - first == longest:
            runs.append((first, index))
            first = index
    return runs
