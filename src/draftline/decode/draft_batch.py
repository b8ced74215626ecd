"""Blocks of several prompts drafted in one forward of the drafter.

The drafter's layers work on flat tokens, so the tokens of all prompts go through them end to end; only attention sees
prompts apart, each with its own context (padded_attention.py). Same numbers as one block at a time, up to rounding.

Shape letters: P prompts, S new context tokens of one, B its slots, H hidden size, N query and M key/value heads, D head
size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from draftline.decode.chain import BoundDrafter
from draftline.decode.draft_rows import DraftRows
from draftline.decode.padded_attention import PaddedBlocks
from draftline.decode.steps import Draft, RoundContext
from draftline.drafter.masks import MaskRule, mask_rule
from draftline.drafter.model import Drafter, DrafterLayer


def draft_together(requests: Sequence[Draft], contexts: DraftRows) -> list[Any]:
    """Answers of each request, in order; drafters of another kind than the contexts' are asked singly.

    Args:
        contexts: holds the contexts of all prompts from round to round.
    """
    answers: list[Any] = [None] * len(requests)
    together = [index for index, request in enumerate(requests) if contexts.serves(request.drafter)]
    for index in set(range(len(requests))).difference(together):
        request = requests[index]
        answers[index] = request.reduced(request.drafter.block_logits(request.context))
    found = _one_forward([requests[index] for index in together], contexts) if together else []
    for index, answer in zip(together, found, strict=True):
        answers[index] = answer
    return answers


def _one_forward(requests: Sequence[Draft], contexts: DraftRows) -> list[Any]:
    bound = [cast("BoundDrafter", request.drafter) for request in requests]
    first, rounds = bound[0], [request.context for request in requests]
    ids = [token for one in rounds for token in (one.tokens[-1], *[first.mask_token_id] * (one.slots - 1))]
    x_QH = first.embed(torch.tensor(ids, device=first.drafter.fc.weight.device))
    hidden_QH = _forward_blocks(first.drafter, x_QH, rounds, contexts, contexts.seat(bound))
    blocks = hidden_QH.split([context.slots for context in rounds])
    if first.drafter.candidate_selector is not None:
        each = zip(requests, blocks, strict=True)
        return [request.reduced(first.draft(x_BH[1:], request.context.tokens[-1])) for request, x_BH in each]
    logits_QV = first.head(torch.cat([x_BH[1:] for x_BH in blocks]))
    return _reduced(requests, logits_QV, [context.slots - 1 for context in rounds])


def _reduced(requests: Sequence[Draft], logits_QV: torch.Tensor, sizes: Sequence[int]) -> list[Any]:
    """Equal reductions in one go."""
    reduction = requests[0].reduction
    if reduction is not None and all(request.reduction == reduction for request in requests):
        return list(reduction.of_blocks(logits_QV, sizes))
    each = zip(requests, logits_QV.split(list(sizes)), strict=True)
    return [request.reduced(logits_KV) for request, logits_KV in each]


def block_visibility(rule: MaskRule, start: torch.Tensor, slots_B: torch.Tensor, keys_C: torch.Tensor) -> torch.Tensor:
    """bool [B, C + B]: what each slot of the block at position `start` sees of context columns and of the block."""
    context = rule.context(start, slots_B[:, None], keys_C)
    return torch.cat((context, rule.block(slots_B[:, None], slots_B)), dim=-1)


def layers_of(drafter: Drafter) -> list[DrafterLayer]:
    """The decoder layers of a drafter, first to last."""
    return cast("list[DrafterLayer]", list(drafter.layers))


@torch.no_grad()
def _forward_blocks(
    drafter: Drafter, x_QH: torch.Tensor, rounds: Sequence[RoundContext], contexts: DraftRows, rows: Sequence[int]
) -> torch.Tensor:
    """Hidden states behind the final norm of all blocks end to end; extends each prompt's context first."""
    _extend_contexts(drafter, rounds, contexts, rows)
    device = x_QH.device
    slots = [(slot, slot + context.start) for context in rounds for slot in range(context.slots)]
    slots_Q, positions_Q = torch.tensor(slots, device=device).unbind(-1)
    rope_Q = drafter.rotary_emb(positions_Q, x_QH.dtype)
    blocks = PaddedBlocks([context.start for context in rounds], [context.slots for context in rounds])
    seen = {kind: blocks.view(mask_rule(drafter.spec, kind), device) for kind in set(drafter.spec.layer_types)}
    rows_P = torch.tensor(rows, device=device)
    for index, kind in enumerate(drafter.spec.layer_types):
        held = contexts.read(index, rows_P, seen[kind].columns_PC)
        x_QH = layers_of(drafter)[index](x_QH, rope_Q, blocks.attend(held, seen[kind].visible_PBS), slots_Q)
    return drafter.norm(x_QH)


def _extend_contexts(
    drafter: Drafter, rounds: Sequence[RoundContext], contexts: DraftRows, rows: Sequence[int]
) -> None:
    new_taps = [context.new_taps_SF for context in rounds if context.new_taps_SF is not None]
    assert len(new_taps) == len(rounds), "a drafter needs tap features"
    sizes, lengths = [taps_SF.shape[0] for taps_SF in new_taps], contexts.lengths(rows)
    for length, size, context in zip(lengths, sizes, rounds, strict=True):
        if length + size != context.start:
            raise ValueError(f"the cache holds {length + size} context tokens, the block starts at {context.start}")
    context_TH = drafter.context(torch.cat(new_taps))
    places = [
        (row, length + step) for row, length, size in zip(rows, lengths, sizes, strict=True) for step in range(size)
    ]
    rows_T, at_T = torch.tensor(places, dtype=torch.long, device=context_TH.device).view(-1, 2).unbind(-1)
    rope_T = drafter.rotary_emb(at_T, context_TH.dtype)
    for index, layer in enumerate(layers_of(drafter)):
        k_TMD, v_TMD = layer.self_attn.key_value(context_TH, rope_T)
        contexts.reserve(drafter.spec.num_layers, k_TMD, max(context.start for context in rounds))
        contexts.write(index, (k_TMD, v_TMD), rows_T, at_T)
    contexts.advance(rows, sizes)
