"""Boundary records: what crosses from one room to another. Frozen, without behaviour beyond simple sums.

Shape letters used everywhere: T context tokens of a row, L taps, H hidden size, V vocabulary, A anchor slots,
B block size (slots), Q = A * B block tokens, K = B - 1 supervised slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

FinalHiddenNorm = Literal["pre", "post"]


@dataclass(frozen=True, slots=True)
class PlannedRow:
    """One row of the plan: which samples of the data set are packed together, in which order.

    Attributes:
        row_id: unique over all epochs, counted from 0 in plan order.
        epoch: counted from 0.
        samples: indices into the data set.
        n_tokens: sum of the samples' lengths, in tokens.
        n_supervised: sum of the samples' supervised tokens.
    """

    row_id: int
    epoch: int
    samples: tuple[int, ...]
    n_tokens: int
    n_supervised: int


@dataclass(frozen=True, slots=True)
class HiddenStateRow:
    """What a target hands to a drafter for one planned row: samples packed end to end, without padding.

    Attributes:
        row_id, epoch: those of the PlannedRow.
        sample_ids: one a sample, in packed order; the seed of every draw for that sample.
        lengths: tokens of each sample; sums to T.
        input_ids_T: int64 token ids.
        loss_mask_T: bool, True where the token was written by the target (supervised).
        document_ids_T: int32, 0..n_samples-1; a query sees only its own document.
        position_ids_T: int64, restart at 0 in each sample.
        taps_TF: tap features side by side, F = L * H, in the target's dtype.
        final_hidden_TH: last hidden state, or None when no teacher was asked for.
        final_hidden_norm: whether the target's final norm is already in `final_hidden_TH`.
        tap_layer_ids: 0-based ids of the decoder layers whose OUTPUT was tapped (z-lab convention).
        ready: device event after which the tensors may be read on another stream; None on the CPU.
    """

    row_id: int
    epoch: int
    sample_ids: tuple[str, ...]
    lengths: tuple[int, ...]
    input_ids_T: torch.Tensor
    loss_mask_T: torch.Tensor
    document_ids_T: torch.Tensor
    position_ids_T: torch.Tensor
    taps_TF: torch.Tensor
    final_hidden_TH: torch.Tensor | None
    final_hidden_norm: FinalHiddenNorm
    tap_layer_ids: tuple[int, ...]
    ready: Any | None = None

    @property
    def n_tokens(self) -> int:
        """T, tokens of all its samples."""
        return sum(self.lengths)

    def n_bytes(self) -> int:
        """Bytes of the tensors that travel (taps and final hidden state are all but nothing of it)."""
        tensors = (self.input_ids_T, self.loss_mask_T, self.document_ids_T, self.position_ids_T, self.taps_TF)
        total = sum(t.numel() * t.element_size() for t in tensors)
        if self.final_hidden_TH is not None:
            total += self.final_hidden_TH.numel() * self.final_hidden_TH.element_size()
        return total


@dataclass(frozen=True, slots=True)
class FrozenEmbedding:
    """The target's input embedding, borrowed by the drafter and never trained.

    Embedding of token i = `scale` * `weight_VH[i]`.
    """

    weight_VH: torch.Tensor
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class FrozenHead:
    """The target's output head, borrowed and never trained: logits = softcap(multiplier * (h @ weight.T + bias)).

    `softcap` c means c * tanh(logits / c); None leaves logits as they are.
    """

    weight_VH: torch.Tensor
    bias_V: torch.Tensor | None = None
    multiplier: float = 1.0
    softcap: float | None = None
