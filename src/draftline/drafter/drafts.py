"""What drafted blocks hold: the likeliest tokens of slots that know nothing of each other, or the scores of paths.

Shape letters: A blocks, K drafted slots, R tokens kept of a slot.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from draftline.drafter.selector import PathScores


class SlotDrafts(NamedTuple):
    """Blocks of a DFlash drafter.

    Attributes:
        log_probs_AKR: log-probabilities of the likeliest tokens of slots 1..K, best first.
        tokens_AKR: their ids.
    """

    log_probs_AKR: Tensor
    tokens_AKR: Tensor

    def chain(self) -> Tensor:
        """The likeliest token of each slot, [A, K]."""
        return self.tokens_AKR[..., 0]

    def first(self, n_blocks: int) -> SlotDrafts:
        """The first blocks alone."""
        return SlotDrafts(self.log_probs_AKR[:n_blocks], self.tokens_AKR[:n_blocks])


BlockDrafts = SlotDrafts | PathScores
