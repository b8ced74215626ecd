"""Blocks of several prompts in one attention: the same numbers as prompt by prompt."""

from __future__ import annotations

import pytest
import torch

from draftline.decode.draft_batch import block_visibility
from draftline.decode.padded_attention import PaddedBlocks
from draftline.drafter.attention import masked_attention
from draftline.drafter.masks import MaskRule

STARTS = (7, 3, 12)
RULES = (
    MaskRule(window=None, causal=False),
    MaskRule(window=None, causal=True),
    MaskRule(window=5, causal=True),
    MaskRule(window=4, causal=False, from_anchor=True),
)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("sizes", [(4, 4, 4), (4, 2, 3)])
def test_padded_attention_is_that_of_each_prompt(rule, sizes):
    g = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    floors = [rule.context_floor(start) for start in STARTS]
    held = [(normal(s - f, 2, 8), normal(s - f, 2, 8)) for s, f in zip(STARTS, floors, strict=True)]
    q, k, v = normal(sum(sizes), 6, 8), normal(sum(sizes), 2, 8), normal(sum(sizes), 2, 8)
    blocks = PaddedBlocks(STARTS, sizes)
    view = blocks.view(rule, torch.device("cpu"))
    padded = tuple(_at(view.columns_PC, floors, [pair[which] for pair in held]) for which in range(2))
    found = blocks.attend(padded, view.visible_PBS)(q, k, v)
    expected = []
    each = zip(STARTS, floors, held, q.split(sizes), k.split(sizes), v.split(sizes), strict=True)
    for start, floor, (context_k, context_v), own_q, own_k, own_v in each:
        slots, keys = torch.arange(own_q.shape[0]), torch.arange(floor, start)
        visible = block_visibility(rule, torch.tensor(start), slots, keys)
        expected.append(masked_attention(own_q, torch.cat((context_k, own_k)), torch.cat((context_v, own_v)), visible))
    torch.testing.assert_close(found, torch.cat(expected))


def _at(columns_PC, floors, contexts):
    """Contexts [P, C, M, D] read at their columns; what is not held is huge, for nobody may see it."""
    read = torch.full((*columns_PC.shape, *contexts[0].shape[1:]), 1e3, dtype=torch.float64)
    for index, (floor, context) in enumerate(zip(floors, contexts, strict=True)):
        inside = columns_PC[index] - floor < context.shape[0]
        read[index, inside] = context[columns_PC[index, inside] - floor]
    return read
