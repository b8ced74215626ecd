"""The target's key/value cache with exact roll-back.

Between two rounds a decoder must take back what it appended for rejected drafts. Attention layers are cut or compacted.
Recurrent layers (linear attention, convolution) cannot be cut: their state is kept aside before a block is verified and
put back afterwards, and the accepted prefix runs through the model once more.

Shape letters: N tokens of the newest forward, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from draftline.errors import UserError

if TYPE_CHECKING:
    from draftline.target.load import LoadedTarget

_FULL_LAYERS = (DynamicLayer, LinearAttentionAndFullAttentionLayer)


@dataclass(frozen=True, slots=True)
class _RecurrentState:
    """Copies of one recurrent layer's states, and whether each was set."""

    conv: dict[int, torch.Tensor | None]
    recurrent: dict[int, torch.Tensor | None]
    has_previous: dict[int, bool]


class RollbackCache:
    """A `DynamicCache` of one prompt, cut back to any accepted prefix or path.

    Attributes:
        hf: the cache to hand to the model.
        length: committed tokens.
        is_recurrent: True if cutting back needs a replay of the accepted prefix (see `restore`).
    """

    def __init__(self, target: LoadedTarget) -> None:
        takes_cache = getattr(target.model, "_supports_default_dynamic_cache", None)
        if takes_cache is not None and not takes_cache():
            raise _own_cache()
        self.hf = DynamicCache(config=target.model.config)
        self.length = 0
        self._linear = [layer for layer in self.hf.layers if isinstance(layer, LinearAttentionLayer)]
        self._attention = [layer for layer in self.hf.layers if isinstance(layer, _FULL_LAYERS)]
        self._refuse_unknown_layers()
        for layer in self._attention:
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.activate_past_recording()
        self.is_recurrent = bool(self._linear)

    def _refuse_unknown_layers(self) -> None:
        known = {DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer, LinearAttentionAndFullAttentionLayer}
        unknown = sorted({type(layer).__name__ for layer in self.hf.layers if type(layer) not in known})
        if unknown:
            raise UserError(
                f"the target caches layers of kind {', '.join(unknown)}, which cannot be rolled back exactly",
                where="decode",
                mend="use plain decoding of your server for this target",
            )

    def require_use(self) -> None:
        """Raises UserError if the forward before has left the cache empty: the model keeps its state elsewhere."""
        states = [
            is_set
            for layer in self._linear
            for is_set in (
                *layer.is_conv_states_initialized.values(),
                *layer.is_recurrent_states_initialized.values(),
            )
        ]
        if not all(layer.is_initialized for layer in self._attention) or (self._linear and not any(states)):
            raise _own_cache()

    @property
    def windows(self) -> list[int | None]:
        """Sliding window of each attention layer in tokens, None for full attention."""
        return [getattr(layer, "sliding_window", None) for layer in self._attention]

    def snapshot(self) -> list[_RecurrentState]:
        """Copy of all recurrent states; empty for a target without any."""
        return [
            _RecurrentState(_clone(layer.conv_states), _clone(layer.recurrent_states), dict(layer.has_previous_state))
            for layer in self._linear
        ]

    def restore(self, states: Sequence[_RecurrentState], n_appended: int) -> None:
        """Undoes the newest forward of `n_appended` tokens altogether, recurrent states included."""
        for layer, state in zip(self._linear, states, strict=True):
            layer.conv_states = _clone(state.conv)
            layer.recurrent_states = _clone(state.recurrent)
            layer.has_previous_state = dict(state.has_previous)
        self._cut(n_appended)

    def keep(self, n_appended: int, n_kept: int) -> None:
        """Keeps the first `n_kept` of the `n_appended` tokens of the newest forward (attention layers only)."""
        self._cut(n_appended - n_kept)
        self.length += n_kept

    def keep_path(self, n_appended: int, path: Sequence[int]) -> None:
        """Keeps the appended tokens of index `path`, moved together in path order, and drops the others.

        Args:
            n_appended: tokens of the newest forward.
            path: rising indices into those tokens.
        """
        if list(path) != list(range(len(path))):
            for layer in self._attention:
                _compact(layer, n_appended, path)
        self.keep(n_appended, len(path))

    def _cut(self, n_removed: int) -> None:
        for layer in self._attention:
            # The linear part of a combined layer is restored from its snapshot, so only the attention part is cut here.
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.crop(-n_removed)
            else:
                DynamicLayer.crop(layer, -n_removed)


def _own_cache() -> UserError:
    return UserError(
        "the target keeps its state elsewhere than in the cache it is handed, so drafts cannot be taken back",
        where="decode",
        mend="use plain decoding of your server for this target",
    )


def _clone(states: dict[int, torch.Tensor | None]) -> dict[int, torch.Tensor | None]:
    return {index: None if state is None else state.clone() for index, state in states.items()}


def _compact(layer: Any, n_appended: int, path: Sequence[int]) -> None:
    """Moves the keys and values of `path` to the front of the newest `n_appended` positions, in path order."""
    index = torch.as_tensor(path, device=layer.keys.device)
    for states in (layer.keys, layer.values):
        newest = states[..., states.shape[-2] - n_appended :, :]
        newest[..., : len(path), :] = newest.index_select(-2, index)
