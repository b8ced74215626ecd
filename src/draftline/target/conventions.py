"""The two namings of a tapped layer, converted in this one place.

    ours, z-lab `target_layer_ids`                         i  = OUTPUT of decoder layer i, counted from 0
    HF hidden_states, speculators, vLLM capture ids        i+1 = state after i + 1 layers; 0 is the embedding

Refused both ways: the embedding, and the last layer, whose entry servers and Hugging Face give after the final norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from draftline.errors import RunFailedError, UserError

if TYPE_CHECKING:
    import torch


def check_taps(taps: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Taps in our convention, if each is a layer of the target below its last one, rising and without repeats.

    Raises:
        UserError: naming the tap that is not.
    """
    if not taps:
        raise UserError("no layer is tapped", where="taps", mend=f"give layers of 0..{num_layers - 2}")
    for tap in taps:
        if tap == num_layers - 1 or tap == -1:
            raise UserError(
                f"{tap} is the target's last layer, whose state servers give after the final norm",
                where="taps",
                mend=f"use 0..{num_layers - 2}",
            )
        if not 0 <= tap < num_layers:
            raise UserError(f"{tap} is not a layer of the target", where="taps", mend=f"use 0..{num_layers - 2}")
    if list(taps) != sorted(set(taps)):
        raise UserError(f"{list(taps)} must rise and not repeat", where="taps", mend="sort them")
    return tuple(taps)


def taps_to_aux_ids(taps: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Our ids as indices into hidden_states (HF, speculators `aux_hidden_state_layer_ids`, vLLM capture ids)."""
    return tuple(tap + 1 for tap in check_taps(taps, num_layers))


def aux_ids_to_taps(aux_ids: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Indices into hidden_states as our ids.

    Raises:
        UserError: an id is the embedding (0), the last entry (num_layers), or outside the model.
    """
    mend = f"use 1..{num_layers - 1}"
    for aux in aux_ids:
        if aux == 0:
            raise UserError("0 is the embedding, not a layer's output", where="aux ids", mend=mend)
        if aux == num_layers:
            raise UserError(
                f"{aux} is the state after the last layer, given before or after the final norm by different tools",
                where="aux ids",
                mend=mend,
            )
    return check_taps([aux - 1 for aux in aux_ids], num_layers)


@dataclass(frozen=True, slots=True)
class CaptureOrder:
    """Which layers a payload of vLLM or speculators holds, and which of them are our taps. Made by `capture_order`.

    Attributes:
        aux_ids: capture ids in the payload's order; id N (the number of layers) is the state after the last layer,
            BEFORE the final norm.
        taps: ours.
    """

    aux_ids: tuple[int, ...]
    taps: tuple[int, ...]
    num_layers: int

    def require_final(self) -> None:
        """Raises UserError if the last layer's state, which a teacher needs, is not captured."""
        if self.num_layers not in self.aux_ids:
            raise UserError(
                f"lacks {self.num_layers}, the state after the last layer, which the objective's teacher needs",
                where="target.backend.aux_layer_ids",
                mend="capture it too (speculators: --include-last-layer), or use an objective without a teacher",
            )

    def split(self, hidden_TLH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(taps [T, L * H] in our order, state before the final norm [T, H] or None).

        Raises:
            RunFailedError: the payload has another number of layers.
        """
        if hidden_TLH.shape[1] != len(self.aux_ids):
            what = f"a payload holds {hidden_TLH.shape[1]} layers, {len(self.aux_ids)} are captured"
            raise RunFailedError(what, origin="target capture")
        columns = [self.aux_ids.index(tap + 1) for tap in self.taps]
        final = self.aux_ids.index(self.num_layers) if self.num_layers in self.aux_ids else None
        return hidden_TLH[:, columns].flatten(1), None if final is None else hidden_TLH[:, final]


def capture_order(aux_ids: Sequence[int], taps: Sequence[int], num_layers: int) -> CaptureOrder:
    """Checks what a server or a file captures against what the drafter taps.

    Raises:
        UserError: an id outside the model or twice, or a tap that is not captured.
    """
    where, ids = "target.backend.aux_layer_ids", tuple(aux_ids)
    bad = [i for i in ids if not 0 <= i <= num_layers]
    if bad or len(set(ids)) != len(ids):
        raise UserError(f"{list(ids)} must be different ids of 0..{num_layers}", where=where, mend="0 is the embedding")
    missing = [tap for tap in check_taps(taps, num_layers) if tap + 1 not in ids]
    if missing:
        raise UserError(
            f"{list(ids)} lacks {[tap + 1 for tap in missing]}, the taps {missing} in its counting (one higher)",
            where=where,
            mend="capture those layers, or choose drafter.taps among what is captured",
        )
    return CaptureOrder(ids, tuple(taps), num_layers)
