"""What a method needs of a drafted block, taken from the drafter's logits: of one block, or of many in one go.

Block by block it takes a few launches and a wait for the device a prompt, which is what a round of many prompts would
spend most of its time on; all blocks end to end take as many as one.

Shape letters: Q drafted slots of all blocks end to end, K of one block, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from draftline.decode.path_tree import PathMarginals, block_marginals, chain_of
from draftline.decode.steps import Drafted
from draftline.decode.tree import Marginals, top_marginals


@dataclass(frozen=True, slots=True)
class GreedyChain:
    """The likeliest token of each slot."""

    def of_block(self, draft: Drafted) -> torch.Tensor:
        """Ids [K]."""
        return chain_of(draft)

    def of_blocks(self, logits_QV: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Ids [K] of each block; `sizes` are their K."""
        return list(logits_QV.argmax(dim=-1).split(list(sizes)))


@dataclass(frozen=True, slots=True)
class TreeMarginals:
    """What a tree grows from.

    Attributes:
        width: likeliest tokens of each slot that are kept.
    """

    width: int

    def of_block(self, draft: Drafted) -> Marginals | PathMarginals:
        """See `block_marginals`."""
        return block_marginals(draft, self.width)

    def of_blocks(self, logits_QV: torch.Tensor, sizes: Sequence[int]) -> list[Marginals]:
        """Those of each block; `sizes` are their K."""
        all_of = top_marginals(logits_QV, self.width)
        return [
            Marginals(all_of.log_probs_DR[first:stop], all_of.tokens_DR[first:stop])
            for first, stop in pairwise(accumulate(sizes, initial=0))
        ]
