"""Attention of block queries over [context ; own block]: three forms of one computation.

dense      SDPA with the whole mask: the reference.
blockwise  exact, never forms scores between different blocks; the CPU's path.
flex       flex_attention; the GPU's path, compiled through `compile_cache`.

Shape letters: Q = A * B block tokens, T context tokens, N query heads, M key/value heads, G = N / M, D head size.
Queries (Q, N, D), block keys and values (Q, M, D), context keys and values (T, M, D); returns (Q, N, D).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from draftline.drafter.masks import (
    BlockGroup,
    BlockwiseMask,
    DenseMask,
    FlexMask,
    LayerMask,
)

if TYPE_CHECKING:
    from draftline.drafter.model import DrafterLayer

Rope = tuple[torch.Tensor, torch.Tensor]
KeyValue = tuple[torch.Tensor, torch.Tensor]
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
FlexKernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, BlockMask], torch.Tensor]
LayerRunner = Callable[
    ["DrafterLayer", torch.Tensor, torch.Tensor, Rope, Rope, torch.Tensor, LayerMask, FlexKernel], torch.Tensor
]


def attend(
    mask: LayerMask,
    q_QND: torch.Tensor,
    k_QMD: torch.Tensor,
    v_QMD: torch.Tensor,
    context_k_TMD: torch.Tensor,
    context_v_TMD: torch.Tensor,
    flex: FlexKernel,
) -> torch.Tensor:
    """Attention under `mask`, [Q, N, D]; the kind of the mask decides the form."""
    if isinstance(mask, BlockwiseMask):
        return blockwise_attention(mask, q_QND, k_QMD, v_QMD, context_k_TMD, context_v_TMD)
    k_SMD = torch.cat((context_k_TMD, k_QMD))
    v_SMD = torch.cat((context_v_TMD, v_QMD))
    if isinstance(mask, DenseMask):
        return masked_attention(q_QND, k_SMD, v_SMD, mask.visible_QS)
    return flex_form(mask, q_QND, k_SMD, v_SMD, flex)


def masked_attention(
    q_QND: torch.Tensor, k_SMD: torch.Tensor, v_SMD: torch.Tensor, visible_QS: torch.Tensor | None
) -> torch.Tensor:
    """SDPA [Q, N, D] with a bool mask (True: visible; None: all). Key/value heads are repeated for their queries."""
    groups = q_QND.shape[1] // k_SMD.shape[1]
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q_QND, k_SMD, v_SMD))
    if groups > 1:
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible_QS)[0].transpose(0, 1)


def plain_flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_mask: BlockMask) -> torch.Tensor:
    """flex_attention with grouped heads; what is compiled for a GPU, and the uncompiled form for checks.

    `q` [1, N, Q, D], `k` and `v` [1, M, S, D]; returns [1, N, Q, D].
    """
    return flex_attention(q, k, v, block_mask=block_mask, enable_gqa=q.shape[1] != k.shape[1])


def flex_form(
    mask: FlexMask, q_QND: torch.Tensor, k_SMD: torch.Tensor, v_SMD: torch.Tensor, flex: FlexKernel
) -> torch.Tensor:
    """flex_attention over a batch of one, [Q, N, D]."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q_QND, k_SMD, v_SMD))
    return flex(q, k, v, mask.block_mask)[0].transpose(0, 1)


def blockwise_attention(
    mask: BlockwiseMask,
    q_QND: torch.Tensor,
    k_QMD: torch.Tensor,
    v_QMD: torch.Tensor,
    context_k_TMD: torch.Tensor,
    context_v_TMD: torch.Tensor,
) -> torch.Tensor:
    """Each group of blocks against its stretch of context and each block against itself, under one softmax.

    Returns:
        [Q, N, D], in the order of the queries.
    """
    n_slots, n_kv = mask.visible_BB.shape[0], k_QMD.shape[1]
    scale = q_QND.shape[-1] ** -0.5
    q_MAGBD = (q_QND * scale).unflatten(1, (n_kv, -1)).unflatten(0, (-1, n_slots)).permute(2, 0, 3, 1, 4)
    k_MABD, v_MABD = (x.unflatten(0, (-1, n_slots)).permute(2, 0, 1, 3) for x in (k_QMD, v_QMD))
    context_k_MTD, context_v_MTD = context_k_TMD.transpose(0, 1), context_v_TMD.transpose(0, 1)
    out = [
        _group_attention(
            q_MAGBD[:, group.first : group.last],
            k_MABD[:, group.first : group.last],
            v_MABD[:, group.first : group.last],
            context_k_MTD[:, group.start : group.stop],
            context_v_MTD[:, group.start : group.stop],
            _visible(group, mask.visible_BB),
        )
        for group in mask.groups
    ]
    return torch.cat(out, dim=1).permute(1, 3, 0, 2, 4).flatten(2, 3).flatten(0, 1)


def _visible(group: BlockGroup, visible_BB: torch.Tensor) -> torch.Tensor:
    """bool (A, B, C + B) of a group: its context keys, then the slots of the own block."""
    return torch.cat((group.visible_ABC, visible_BB.expand(group.last - group.first, -1, -1)), dim=-1)


def _group_attention(
    q_MAGBD: torch.Tensor,
    k_MABD: torch.Tensor,
    v_MABD: torch.Tensor,
    context_k_MCD: torch.Tensor,
    context_v_MCD: torch.Tensor,
    visible_ABS: torch.Tensor,
) -> torch.Tensor:
    n_kv, n_blocks, n_groups, n_slots, _ = q_MAGBD.shape
    n_context = context_k_MCD.shape[1]
    rows_MRD = q_MAGBD.reshape(n_kv, -1, q_MAGBD.shape[-1])
    context_scores = (rows_MRD @ context_k_MCD.transpose(1, 2)).view(n_kv, n_blocks, n_groups, n_slots, n_context)
    block_scores = q_MAGBD @ k_MABD.transpose(2, 3).unsqueeze(2)
    scores = torch.cat((context_scores, block_scores), dim=-1)
    scores = scores.masked_fill(~visible_ABS[:, None], float("-inf"))
    statistics = torch.promote_types(scores.dtype, torch.float32)
    weights = torch.softmax(scores, dim=-1, dtype=statistics).to(scores.dtype)
    from_context = weights[..., :n_context].reshape(n_kv, rows_MRD.shape[1], n_context) @ context_v_MCD
    from_block = weights[..., n_context:] @ v_MABD.unsqueeze(2)
    return from_context.view_as(from_block) + from_block


def run_layer(
    layer: DrafterLayer,
    x_QH: torch.Tensor,
    context_TH: torch.Tensor,
    rope_T: Rope,
    rope_Q: Rope,
    slots_Q: torch.Tensor,
    mask: LayerMask,
    flex: FlexKernel,
) -> torch.Tensor:
    """One layer of the packed form, [Q, H], context keys and values included; the unit that may be compiled."""
    context_k, context_v = layer.self_attn.key_value(context_TH, rope_T)
    return layer(x_QH, rope_Q, lambda q, k, v: attend(mask, q, k, v, context_k, context_v, flex), slots_Q)


@dataclass(frozen=True, slots=True)
class Kernels:
    """What the packed form calls; `compile_cache.compiled_kernels` gives the compiled ones of a device."""

    flex: FlexKernel = plain_flex
    run_layer: LayerRunner = run_layer
