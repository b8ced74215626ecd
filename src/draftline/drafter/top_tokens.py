"""The likeliest tokens of a slot: what is kept of logits that live one chunk at a time, for trees grown later.

Shape letters: N or C rows of logits, V vocabulary, Q slots, R tokens kept a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

# Rows whose exponentials are formed at once: the log-sum-exp must not double a chunk's memory.
_ROWS_AT_ONCE = 256


def top_tokens(logits_NV: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The `width` likeliest tokens of each row, best first, equal ones in order of their ids.

    Which of equal tokens at the edge of the width are kept is the device's choice. A width above V takes all of V.

    Returns:
        Natural logarithms of their probabilities under the whole vocabulary [N, R] in fp32, and their ids [N, R].
    """
    logits_NV = logits_NV.float()
    best = logits_NV.topk(min(width, logits_NV.shape[-1]), dim=-1)
    by_id = best.indices.sort(dim=-1)
    total_N1 = torch.cat([part.logsumexp(dim=-1, keepdim=True) for part in logits_NV.split(_ROWS_AT_ONCE)])
    # Rounding may put a token that has all the mass a hair above 0, and its extensions above their prefix.
    log_probs_NR = (best.values.gather(-1, by_id.indices) - total_N1).clamp_max(0.0)
    ordered = log_probs_NR.sort(dim=-1, descending=True, stable=True)
    return ordered.values, by_id.values.gather(-1, ordered.indices)


@dataclass(frozen=True, slots=True)
class TopTokens:
    """The likeliest tokens of Q slots, filled chunk by chunk.

    Attributes:
        log_probs_QR: fp32, falling; -inf where a slot was not filled.
        tokens_QR: int64 ids; -1 where a slot was not filled.
    """

    log_probs_QR: Tensor
    tokens_QR: Tensor

    @classmethod
    def empty(cls, n_slots: int, width: int, device: torch.device) -> Self:
        """Nothing known of any slot: log-probabilities [Q, R] of -inf, ids [Q, R] of -1."""
        log_probs_QR = torch.full((n_slots, width), float("-inf"), dtype=torch.float32, device=device)
        return cls(log_probs_QR, torch.full((n_slots, width), -1, dtype=torch.int64, device=device))

    def take(self, slots_C: Tensor, logits_CV: Tensor) -> None:
        """Keeps the best of a chunk's logits (after soft cap and multiplier), which belong to slots `slots_C`."""
        self.log_probs_QR[slots_C], self.tokens_QR[slots_C] = top_tokens(logits_CV, self.tokens_QR.shape[1])

    def blocks(self, block_size: int) -> tuple[Tensor, Tensor]:
        """Views [A, K, R] of slots 1.. of A blocks: log-probabilities and ids."""
        log_probs, tokens = (x.unflatten(0, (-1, block_size))[:, 1:] for x in (self.log_probs_QR, self.tokens_QR))
        return log_probs, tokens
