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
from torch.nn.attention.flex_attention import BlockMask

from draftline.config.drafter_spec import DrafterSpec, LayerType

AttentionPath = Literal["auto", "blockwise", "dense", "flex"]
MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

# Side of the tiles in which flex_attention skips what is invisible.
FLEX_TILE = 128
# Slots whose scores are formed together on the blockwise path: bounds memory, and lets a group skip the context
# before its window and behind its last anchor.
GROUP_SLOTS = 512
# More slots than any block has.
_NO_BOUND = 2**30


@dataclass(frozen=True, slots=True)
class MaskRule:
    """Visibility in one kind of layer. Tensors given to a method are integers whose shapes broadcast; it returns that
    shape.

    Attributes:
        window: W in tokens, None for full attention.
        causal: slot k sees only slots k' <= k of its block.
        from_anchor: the window reaches back W tokens from the anchor for all slots alike and does not bound the
            block (speculators); False: W - 1 tokens back from the query's own position, in the block too (z-lab).
    """

    window: int | None
    causal: bool
    from_anchor: bool = False

    def context_bounds(self, anchor: torch.Tensor, slot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Context rows from low to below high that `slot` of the block at `anchor` sees, documents aside, in the
        broadcast shape; low may be negative."""
        high = anchor + 0 * slot  # the second term only gives the result its full shape
        if self.window is None:
            return 0 * high, high
        return (high if self.from_anchor else anchor + slot + 1) - self.window, high

    def block_bounds(self, slot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots from low to below high of the own block that `slot` sees, in its shape; both may lie outside."""
        low, high = 0 * slot, slot + (1 if self.causal else _NO_BOUND)
        if self.window is None or self.from_anchor:
            return low, high
        return slot + 1 - self.window, torch.minimum(high, slot + self.window)

    def context(self, anchor: torch.Tensor, slot: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Bool, in the broadcast shape: context at row index `key` is visible to `slot` of the block at `anchor`,
        documents aside."""
        low, high = self.context_bounds(anchor, slot)
        return (key >= low) & (key < high)

    def block(self, slot: torch.Tensor, key_slot: torch.Tensor) -> torch.Tensor:
        """Bool, in the broadcast shape: `key_slot` of the same block is visible to `slot`."""
        low, high = self.block_bounds(slot)
        return (key_slot >= low) & (key_slot < high)

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
) -> DrafterMasks:
    """Masks of a row, one for each kind of layer.

    Args:
        document_ids_T: document of each context token, -1 for padding; documents are contiguous.
        anchors_A: row index of each block's anchor.
        document_A: document of each block, -1 for padding blocks.
    """
    path = choose_path(attention, document_ids_T.device)
    masks: DrafterMasks = {}
    for layer_type in sorted(set(spec.layer_types)):
        rule = mask_rule(spec, layer_type)
        if path == "dense":
            masks[layer_type] = dense_mask(rule, spec.block_size, document_ids_T, anchors_A, document_A)
        elif path == "flex":
            masks[layer_type] = flex_mask(rule, spec.block_size, document_ids_T, anchors_A, document_A)
        else:
            masks[layer_type] = blockwise_mask(rule, spec.block_size, document_ids_T, anchors_A, document_A)
    return masks


@dataclass(frozen=True, slots=True)
class VisibleStretches:
    """All that a query sees: two stretches of keys, [low, high) of the context and [own_low, own_high) of its block.

    Attributes:
        low_Q, high_Q, own_low_Q, own_high_Q: int32 key indices; a stretch may be empty.
        n_keys: S.
    """

    low_Q: torch.Tensor
    high_Q: torch.Tensor
    own_low_Q: torch.Tensor
    own_high_Q: torch.Tensor
    n_keys: int

    @property
    def n_queries(self) -> int:
        """Q, queries that have a stretch."""
        return self.low_Q.shape[0]

    def mask_mod(self) -> MaskMod:
        """The mask as flex_attention wants it: a function of (batch, head, query index, key index).

        Four numbers a query are all that is looked up inside a kernel. Query indices may lie past the end, because
        flex rounds lengths up to its tiles; reads are clamped.
        """
        low_Q, high_Q, own_low_Q, own_high_Q = self.low_Q, self.high_Q, self.own_low_Q, self.own_high_Q
        last = self.n_queries - 1

        def visible(_b: torch.Tensor, _h: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            query = query.clamp(max=last)
            in_context = (key >= low_Q[query]) & (key < high_Q[query])
            return in_context | ((key >= own_low_Q[query]) & (key < own_high_Q[query]))

        return visible

    def count(self, tile: int) -> torch.Tensor:
        """Visible (query, key) pairs in each tile of `tile` queries by `tile` keys, int64 [ceil(Q/t), ceil(S/t)]."""
        start_K = torch.arange(0, self.n_keys, tile, device=self.low_Q.device)
        seen_QK = _overlap(self.low_Q, self.high_Q, start_K, tile) + _overlap(
            self.own_low_Q, self.own_high_Q, start_K, tile
        )
        seen_QK = torch.nn.functional.pad(seen_QK, (0, 0, 0, -self.n_queries % tile))
        return seen_QK.unflatten(0, (-1, tile)).sum(1)


def _overlap(low_Q: torch.Tensor, high_Q: torch.Tensor, start_K: torch.Tensor, length: int) -> torch.Tensor:
    """Keys that [low, high) shares with [start, start + length), [Q, K]."""
    stop = torch.minimum(high_Q[:, None], start_K + length)
    return (stop - torch.maximum(low_Q[:, None], start_K)).clamp(min=0)


def visible_stretches(
    rule: MaskRule, block_size: int, document_ids_T: torch.Tensor, anchors_A: torch.Tensor, document_A: torch.Tensor
) -> VisibleStretches:
    """The rule for a row. No host sync."""
    n_context, n_blocks = document_ids_T.shape[0], anchors_A.shape[0]
    slots_B = torch.arange(block_size, device=anchors_A.device)
    low_AB, high_AB = rule.context_bounds(anchors_A[:, None], slots_B)
    first_A = _first_tokens(document_ids_T, document_A)
    own_low_B, own_high_B = (bound.clamp(0, block_size) for bound in rule.block_bounds(slots_B))
    own_A1 = (n_context + block_size * torch.arange(n_blocks, device=anchors_A.device))[:, None]
    return VisibleStretches(
        low_Q=_flat(torch.maximum(low_AB, first_A[:, None])),
        high_Q=_flat(torch.where((document_A < 0)[:, None], 0, high_AB)),
        own_low_Q=_flat(own_A1 + own_low_B),
        own_high_Q=_flat(own_A1 + own_high_B),
        n_keys=n_context + n_blocks * block_size,
    )


def _flat(bound_AB: torch.Tensor) -> torch.Tensor:
    return bound_AB.flatten().int()


def _first_tokens(document_ids_T: torch.Tensor, document_A: torch.Tensor) -> torch.Tensor:
    """Row index of the first token of each block's document [A], without host sync; anything for padding blocks."""
    n_context = document_ids_T.shape[0]
    order_T = torch.arange(n_context, device=document_ids_T.device)
    first_D = torch.full((n_context + 1,), n_context, device=document_ids_T.device)
    first_D.scatter_reduce_(0, document_ids_T.long() % (n_context + 1), order_T, "amin")  # -1, padding, goes last
    return first_D[document_A.long().clamp(min=0)]


def dense_mask(
    rule: MaskRule, block_size: int, document_ids_T: torch.Tensor, anchors_A: torch.Tensor, document_A: torch.Tensor
) -> DenseMask:
    """The whole (Q, S) mask; for tests and small shapes."""
    seen = visible_stretches(rule, block_size, document_ids_T, anchors_A, document_A)
    queries = torch.arange(seen.n_queries, device=anchors_A.device)[:, None]
    keys = torch.arange(seen.n_keys, device=anchors_A.device)[None]
    return DenseMask(seen.mask_mod()(queries, queries, queries, keys))


def flex_mask(
    rule: MaskRule, block_size: int, document_ids_T: torch.Tensor, anchors_A: torch.Tensor, document_A: torch.Tensor
) -> FlexMask:
    """The BlockMask of flex_attention (sorted anchors make most of its tiles empty or full).

    Which tiles are empty, partly or wholly visible is counted from the stretches: Q * S / 128 numbers, where
    `create_block_mask` forms the whole Q * S mask, or compiles for minutes (190 s and more on one shape, torch 2.11).
    """
    seen = visible_stretches(rule, block_size, document_ids_T, anchors_A, document_A)
    count_QK = seen.count(FLEX_TILE)
    full_QK = count_QK == FLEX_TILE * FLEX_TILE
    partial_QK = (count_QK > 0) & ~full_QK
    return FlexMask(
        BlockMask.from_kv_blocks(
            *_tile_lists(partial_QK),
            *_tile_lists(full_QK),
            BLOCK_SIZE=FLEX_TILE,
            mask_mod=seen.mask_mod(),
            seq_lengths=(seen.n_queries, seen.n_keys),
        )
    )


def _tile_lists(wanted_QK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many tiles each row of tiles has, int32 [1, 1, Q/128], and which, first in the list [1, 1, Q/128, S/128]."""
    order_QK = torch.argsort(wanted_QK.int(), dim=-1, descending=True, stable=True)
    return wanted_QK.sum(-1, dtype=torch.int32)[None, None], order_QK.int().contiguous()[None, None]


def blockwise_mask(
    rule: MaskRule, block_size: int, document_ids_T: torch.Tensor, anchors_A: torch.Tensor, document_A: torch.Tensor
) -> BlockwiseMask:
    """Groups of blocks with only the context that they can see. Reads anchors on the host: for the CPU."""
    slots_B = torch.arange(block_size, device=anchors_A.device)
    anchors, documents = anchors_A.tolist(), document_A.tolist()
    firsts = _first_tokens(document_ids_T, document_A).tolist()
    groups = []
    for first, last in _runs(documents, max(1, GROUP_SLOTS // block_size)):
        start = stop = 0
        if documents[first] >= 0:
            start = max(firsts[first], rule.context_floor(min(anchors[first:last])))
            stop = max(start, *anchors[first:last])
        keys_C = torch.arange(start, stop, device=anchors_A.device)
        visible_ABC = rule.context(anchors_A[first:last, None, None], slots_B[:, None], keys_C)
        groups.append(BlockGroup(first, last, start, stop, visible_ABC))
    return BlockwiseMask(tuple(groups), rule.block(slots_B[:, None], slots_B))


def _runs(documents: list[int], longest: int) -> list[tuple[int, int]]:
    """[first, last) of runs of blocks with one document, none longer than `longest`."""
    runs, first = [], 0
    for index in range(1, len(documents) + 1):
        if index == len(documents) or documents[index] != documents[first] or index - first == longest:
            runs.append((first, index))
            first = index
    return runs
