"""A pruned draft vocabulary in the form that speculators' format gives it.

    d2t   int64 [D]   offsets: draft token i is target token i + d2t[i]
    t2d   bool [V]    whether a target token can be drafted

The drafter is the same; its head is the target's, with the rows of those tokens alone. Letters: D draft tokens, V
target tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from draftline.errors import UserError

HEAD, TO_TARGET, TO_DRAFT = "lm_head.weight", "d2t", "t2d"
# What a folder in speculators' format may hold beside the drafter: parts of the target, and the map.
NOT_THE_DRAFTERS = frozenset(
    {HEAD, TO_TARGET, TO_DRAFT, "embed_tokens.weight", "verifier_lm_head.weight", "verifier_norm.weight"}
)


def vocabulary_tensors(ids: tuple[int, ...], head_DH: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """The three tensors of the format.

    Args:
        ids: target tokens that can be drafted, rising.
        head_DH: their rows of the target's head.
    """
    ids_D = torch.tensor(ids, dtype=torch.int64)
    can_V = torch.zeros(vocab_size, dtype=torch.bool)
    can_V[ids_D] = True
    return {TO_TARGET: ids_D - torch.arange(len(ids)), TO_DRAFT: can_V, HEAD: head_DH}


def read_vocabulary(weights: Mapping[str, Tensor], where: str) -> tuple[int, ...]:
    """The target tokens that can be drafted, from `d2t` [D]; `t2d` [V], if it is there, must say the same.

    Raises:
        UserError: no map, or one that contradicts itself.
    """
    mend = "give the weights that belong to this config.json"
    to_target = weights.get(TO_TARGET)
    if to_target is None or to_target.ndim != 1 or to_target.dtype not in (torch.int64, torch.int32):
        raise UserError("holds no map d2t of the pruned vocabulary", where=where, mend=mend)
    ids = tuple((to_target.long() + torch.arange(len(to_target))).tolist())
    can = weights.get(TO_DRAFT)
    if can is not None and can.dtype not in (torch.bool, torch.uint8, torch.int32, torch.int64):
        raise UserError(f"t2d is {can.dtype}, not bool", where=where, mend=mend)
    if can is not None and tuple(can.flatten().nonzero().flatten().tolist()) != ids:
        raise UserError("t2d and d2t tell different vocabularies", where=where, mend=mend)
    return ids


def refuse_idle_map(weights: Mapping[str, Tensor], where: str) -> None:
    """Raises UserError for a map `d2t` [D] to other tokens beside a head of the whole vocabulary: vLLM applies it."""
    offsets = weights.get(TO_TARGET)
    if offsets is not None and bool((offsets != 0).any()):
        raise UserError(
            "d2t maps draft tokens to others, but config.json drafts from the whole vocabulary",
            where=where,
            mend="give the config.json that belongs to these weights",
        )
