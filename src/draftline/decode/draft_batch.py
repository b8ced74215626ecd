"""Blocks of several prompts drafted in one forward of the drafter.

The drafter's layers work on flat tokens, so the tokens of all prompts go through them end to end; only attention sees
prompts apart, each with its own context (padded_attention.py). Same numbers as one block at a time, up to rounding.

Shape letters: P prompts, S new context tokens of one, B its slots, H hidden size, N query and M key/value heads, D head
size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from draftline.decode.chain import BoundDrafter
from draftline.decode.padded_attention import PaddedBlocks
from draftline.decode.steps import Draft, Drafted, RoundContext
from draftline.drafter.masks import MaskRule, mask_rule
from draftline.drafter.model import Drafter, DrafterCache, DrafterLayer


def draft_together(requests: Sequence[Draft]) -> list[Drafted]:
    """Logits [K, V] or path scores for each request, in order; other drafters than `BoundDrafter`s are asked singly."""
    bound = [request.drafter for request in requests if isinstance(request.drafter, BoundDrafter)]
    if len(bound) < len(requests) or any(one.drafter is not bound[0].drafter for one in bound):
        return [request.drafter.block_logits(request.context) for request in requests]
    contexts = [request.context for request in requests]
    sizes = [context.slots for context in contexts]
    ids_Q = torch.cat([one.block_ids(context) for one, context in zip(bound, contexts, strict=True)])
    hidden_QH = _forward_blocks(bound[0].drafter, bound[0].embed(ids_Q), contexts, [_cache_of(one) for one in bound])
    if bound[0].drafter.candidate_selector is not None:
        blocks = zip(hidden_QH.split(sizes), contexts, strict=True)
        return [bound[0].draft(hidden_BH[1:], context.tokens[-1]) for hidden_BH, context in blocks]
    drafted = torch.cat([hidden[1:] for hidden in hidden_QH.split(sizes)])
    return list(bound[0].head(drafted).split([size - 1 for size in sizes]))


def block_visibility(rule: MaskRule, start: torch.Tensor, slots_B: torch.Tensor, keys_C: torch.Tensor) -> torch.Tensor:
    """bool [B, C + B]: what each slot of the block at position `start` sees of context columns and of the block."""
    context = rule.context(start, slots_B[:, None], keys_C)
    return torch.cat((context, rule.block(slots_B[:, None], slots_B)), dim=-1)


def layers_of(drafter: Drafter) -> list[DrafterLayer]:
    """The decoder layers of a drafter, first to last."""
    return cast("list[DrafterLayer]", list(drafter.layers))


def _cache_of(one: BoundDrafter) -> DrafterCache:
    assert one.cache is not None, "block_logits before start"
    return one.cache


@torch.no_grad()
def _forward_blocks(
    drafter: Drafter, x_QH: torch.Tensor, contexts: Sequence[RoundContext], caches: Sequence[DrafterCache]
) -> torch.Tensor:
    """Hidden states behind the final norm of all blocks end to end; extends each prompt's context first."""
    _extend_caches(drafter, contexts, caches)
    device = x_QH.device
    slots = [(slot, slot + context.start) for context in contexts for slot in range(context.slots)]
    slots_Q, positions_Q = torch.tensor(slots, device=device).unbind(-1)
    rope_Q = drafter.rotary_emb(positions_Q, x_QH.dtype)
    blocks = PaddedBlocks([context.start for context in contexts], [context.slots for context in contexts])
    rules = {kind: mask_rule(drafter.spec, kind) for kind in set(drafter.spec.layer_types)}
    visible = {kind: blocks.visible(rule, device) for kind, rule in rules.items()}
    for index, kind in enumerate(drafter.spec.layer_types):
        held = [
            cache.read(index, rules[kind].context_floor(context.start), context.start)
            for context, cache in zip(contexts, caches, strict=True)
        ]
        x_QH = layers_of(drafter)[index](x_QH, rope_Q, blocks.attend(held, visible[kind]), slots_Q)
    return drafter.norm(x_QH)


def _extend_caches(drafter: Drafter, contexts: Sequence[RoundContext], caches: Sequence[DrafterCache]) -> None:
    new_taps = [context.new_taps_SF for context in contexts if context.new_taps_SF is not None]
    assert len(new_taps) == len(contexts), "a drafter needs tap features"
    sizes = [taps_SF.shape[0] for taps_SF in new_taps]
    context_TH = drafter.context(torch.cat(new_taps))
    positions = [cache.length + step for cache, size in zip(caches, sizes, strict=True) for step in range(size)]
    rope_T = drafter.rotary_emb(torch.tensor(positions, device=context_TH.device), context_TH.dtype)
    for index, layer in enumerate(layers_of(drafter)):
        k_TMD, v_TMD = layer.self_attn.key_value(context_TH, rope_T)
        for cache, k_SMD, v_SMD in zip(caches, k_TMD.split(sizes), v_TMD.split(sizes), strict=True):
            cache.write(index, k_SMD, v_SMD)
    for cache, size, context in zip(caches, sizes, contexts, strict=True):
        cache.advance(size)
        if cache.length != context.start:
            raise ValueError(f"the cache holds {cache.length} context tokens, the block starts at {context.start}")
