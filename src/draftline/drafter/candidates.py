"""What is kept of logits that live one chunk at a time, for a candidate selector.

Shape letters: Q slots, N or C rows of logits at once, V vocabulary, K candidates of a slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from draftline.drafter.head_chunk import apply_head_
from draftline.records import FrozenHead


@dataclass(frozen=True, slots=True)
class Candidates:
    """The likeliest tokens of Q slots, filled chunk by chunk. The weakest stands last.

    Attributes:
        logits_QK: behind multiplier, bias and soft cap, in the statistics dtype; 0 where a slot was not filled.
        tokens_QK: int64 ids; 0 where a slot was not filled.
        label_logit_Q: logit of each slot's label, where labels were given.
    """

    logits_QK: Tensor
    tokens_QK: Tensor
    label_logit_Q: Tensor

    @classmethod
    def empty(cls, n_slots: int, top_k: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Self:
        """Nothing known of any slot."""
        return cls(
            torch.zeros(n_slots, top_k, device=device, dtype=dtype),
            torch.zeros(n_slots, top_k, device=device, dtype=torch.int64),
            torch.zeros(n_slots, device=device, dtype=dtype),
        )

    @torch.no_grad()
    def take(self, slots_N: Tensor, raw_NV: Tensor, head: FrozenHead, label_N: Tensor | None = None) -> None:
        """Keeps the best of raw products x W^T, which belong to slots `slots_N`. `raw_NV` is left as it is."""
        best = top_candidates(raw_NV, head, self.tokens_QK.shape[1])
        self.logits_QK[slots_N], self.tokens_QK[slots_N] = best
        if label_N is not None:
            label_N1 = label_N.unsqueeze(-1)
            self.label_logit_Q[slots_N] = _finished(raw_NV.gather(-1, label_N1), label_N1, head).squeeze(-1)


def top_candidates(raw_NV: Tensor, head: FrozenHead, top_k: int) -> tuple[Tensor, Tensor]:
    """The `top_k` likeliest tokens of each row of raw products, best first: finished logits [N, K], ids [N, K].

    Multiplier and soft cap do not change the order, so they are applied to what is kept alone.
    """
    order_NV = raw_NV if head.bias_V is None else raw_NV + head.bias_V.to(raw_NV.dtype)
    tokens_NK = order_NV.topk(top_k, dim=-1).indices
    return _finished(raw_NV.gather(-1, tokens_NK), tokens_NK, head), tokens_NK


def _finished(raw_NK: Tensor, tokens_NK: Tensor, head: FrozenHead) -> Tensor:
    if head.bias_V is not None:
        raw_NK = raw_NK + head.bias_V.to(raw_NK.dtype)[tokens_NK]
    return apply_head_(raw_NK.clone(), FrozenHead(head.weight_VH, None, head.multiplier, head.softcap))
