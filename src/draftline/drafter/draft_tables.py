"""What is read off the head's logits, chunk by chunk, to know what blocks draft."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from draftline.drafter.candidates import Candidates
from draftline.drafter.drafts import BlockDrafts, SlotDrafts
from draftline.drafter.head import run_candidates, run_top_tokens
from draftline.drafter.head_plan import HeadPlan
from draftline.drafter.selector import CandidateSelector
from draftline.drafter.top_tokens import TopTokens
from draftline.records import FrozenHead


@dataclass(frozen=True, slots=True)
class DraftTables:
    """Likeliest tokens of Q slots for a drafter without a selector, candidates for one with a selector."""

    selector: CandidateSelector | None = None
    top: TopTokens | None = None
    candidates: Candidates | None = None

    @classmethod
    def none(cls) -> Self:
        """Nothing is to be read."""
        return cls()

    @classmethod
    def empty(cls, hidden_QH: Tensor, selector: CandidateSelector | None, width: int) -> Self:
        """Tables for the slots of the drafter's output; `width` tokens of a slot where there is no selector."""
        if selector is None:
            return cls(top=TopTokens.empty(len(hidden_QH), width, hidden_QH.device))
        dtype = torch.float64 if hidden_QH.dtype == torch.float64 else torch.float32
        return cls(selector, candidates=Candidates.empty(len(hidden_QH), selector.top_k, hidden_QH.device, dtype))

    @torch.no_grad()
    def drafts(self, hidden_QH: Tensor, block_size: int, anchor_A: Tensor) -> BlockDrafts:
        """Drafts of filled tables: whole blocks of `block_size` slots, `anchor_A` the tokens at slot 0."""
        if self.top is not None:
            return SlotDrafts(*self.top.blocks(block_size))
        assert self.selector is not None and self.candidates is not None
        hidden_AKH, logits_AKC, tokens_AKC = (
            x.unflatten(0, (-1, block_size))[:, 1:]
            for x in (hidden_QH, self.candidates.logits_QK, self.candidates.tokens_QK)
        )
        return self.selector.paths(hidden_AKH, logits_AKC, tokens_AKC, anchor_A)


def run_tables(hidden_QH: Tensor, plan: HeadPlan, head: FrozenHead, tables: DraftTables) -> None:
    """Passes the planned slots through the head for these tables alone."""
    if tables.candidates is not None:
        run_candidates(hidden_QH, plan, head, tables.candidates)
    elif tables.top is not None:
        run_top_tokens(hidden_QH, plan, head, tables.top)
