"""The two namings of a tapped layer, converted in this one place.

    ours, z-lab `target_layer_ids`                         i  = OUTPUT of decoder layer i, counted from 0
    HF hidden_states, speculators, vLLM capture ids        i+1 = state after i + 1 layers; 0 is the embedding

Refused both ways: the embedding, and the last layer, whose entry servers and Hugging Face give after the final norm.
"""

from __future__ import annotations

from collections.abc import Sequence

from draftline.errors import UserError


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
