"""DFlash2's candidate selector: ranks the likeliest tokens of a slot anew, given the token drafted before it.

    S_t(a, c) = U_t[c] + < A[a] * (W h_t), B[c] >        c among the C likeliest tokens of slot t by the logits U

h_t is the drafter's output at slot t, a the token in front of the slot (the anchor's for slot 1), A and B the codebooks
of predecessors and successors, W the projection of the hidden state. Drafting walks: each slot takes the best S given
the token that the slot before took. A constant added to all U of a slot changes nothing. Parameter names are those of
published checkpoints.

Shape letters: N slots, H hidden size, C candidates, r rank, A blocks, K = B - 1 drafted slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftline.config.drafter_spec import Dflash2Spec, DrafterSpec
from draftline.drafter.modules import Linear


@dataclass(frozen=True, slots=True)
class PathScores:
    """Scores of all steps that a block's walk can take; A blocks.

    Attributes:
        tokens_AKC: candidates of slots 1..K.
        scores_AKCC: [.., k, i, j]: candidate j of slot k + 1 behind candidate i of slot k; at k = 0 behind the anchor,
            whatever i is.
    """

    tokens_AKC: Tensor
    scores_AKCC: Tensor

    def chain(self) -> Tensor:
        """Tokens [A, K] of the greedy walk."""
        best_AKC = self.scores_AKCC.argmax(-1)
        at_A1 = best_AKC.new_zeros(len(best_AKC), 1)
        picks = []
        for best_AC, tokens_AC in zip(best_AKC.unbind(1), self.tokens_AKC.unbind(1), strict=True):
            at_A1 = best_AC.gather(-1, at_A1)
            picks.append(tokens_AC.gather(-1, at_A1))
        return torch.cat(picks, dim=-1) if picks else self.tokens_AKC.new_zeros(self.tokens_AKC.shape[0], 0)

    def block(self, index: int) -> PathScores:
        """One of the blocks, as A = 1."""
        return PathScores(self.tokens_AKC[index : index + 1], self.scores_AKCC[index : index + 1])

    def first(self, n_blocks: int) -> PathScores:
        """The first blocks alone."""
        return PathScores(self.tokens_AKC[:n_blocks], self.scores_AKCC[:n_blocks])


class CandidateSelector(nn.Module):
    """Codebooks of predecessors and successors [V, r], and the projection of the hidden state."""

    def __init__(self, spec: DrafterSpec, sizes: Dflash2Spec) -> None:
        super().__init__()
        self.top_k = sizes.selector_top_k
        self.predecessor_codebook = nn.Parameter(torch.empty(spec.vocab_size, sizes.selector_rank))
        self.successor_codebook = nn.Parameter(torch.empty(spec.vocab_size, sizes.selector_rank))
        self.hidden_projection = Linear(spec.hidden_size, sizes.selector_rank)

    def score(self, hidden_NH: Tensor, logits_NC: Tensor, tokens_NC: Tensor, predecessor_N: Tensor) -> Tensor:
        """S [N, C], at least fp32, of each slot's candidates behind a given token.

        Args:
            hidden_NH: the drafter's output.
            logits_NC, tokens_NC: the candidates' logits behind multiplier and soft cap, and their ids.
            predecessor_N: the token in front of each slot.
        """
        steered_Nr = self._steered(hidden_NH, predecessor_N, logits_NC.dtype)
        targets_NCr = F.embedding(tokens_NC, self.successor_codebook).to(steered_Nr.dtype)
        return logits_NC.to(steered_Nr.dtype) + (targets_NCr @ steered_Nr.unsqueeze(-1)).squeeze(-1)

    def paths(self, hidden_AKH: Tensor, logits_AKC: Tensor, tokens_AKC: Tensor, anchor_A: Tensor) -> PathScores:
        """All scores of A blocks' slots 1..K, whose anchors hold the tokens `anchor_A`."""
        first_A1C = anchor_A[:, None, None].expand(-1, 1, tokens_AKC.shape[-1])
        before_AKC = torch.cat((first_A1C, tokens_AKC[:, :-1]), dim=1)[:, : tokens_AKC.shape[1]]
        steered_AKCr = self._steered(hidden_AKH.unsqueeze(-2), before_AKC, logits_AKC.dtype)
        targets_AKCr = F.embedding(tokens_AKC, self.successor_codebook).to(steered_AKCr.dtype)
        scores_AKCC = logits_AKC.to(steered_AKCr.dtype).unsqueeze(-2) + steered_AKCr @ targets_AKCr.mT
        return PathScores(tokens_AKC, scores_AKCC)

    def _steered(self, hidden: Tensor, predecessor: Tensor, dtype: torch.dtype) -> Tensor:
        wide = torch.promote_types(torch.promote_types(dtype, hidden.dtype), torch.float32)
        projected = self.hidden_projection(hidden.to(self.hidden_projection.weight.dtype)).to(wide)
        return F.embedding(predecessor, self.predecessor_codebook).to(wide) * projected
