"""Context keys and values of a drafter in decoding.

Shape letters: S new context tokens, M key/value heads, D head size.
"""

from __future__ import annotations

import torch

from draftline.drafter.attention import KeyValue


class DrafterCache:
    """Context keys and values of every layer, in growing buffers. Holds committed context only, never block slots.

    Attributes:
        length: context tokens held; they stand at positions 0..length-1.
    """

    def __init__(self, num_layers: int, capacity_tokens: int = 0) -> None:
        self.length = 0
        self._capacity = capacity_tokens
        self._buffers: list[KeyValue | None] = [None] * num_layers

    def crop(self, length: int) -> None:
        """Forget the context from position `length` on.

        Raises:
            ValueError: the cache is shorter than that.
        """
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot crop a cache of {self.length} tokens to {length}")
        self.length = length

    def write(self, layer: int, k_SMD: torch.Tensor, v_SMD: torch.Tensor) -> None:
        """Put a layer's keys and values behind the held ones; `advance` then makes them count for all layers."""
        stop = self.length + k_SMD.shape[0]
        held = self._buffers[layer]
        if held is None or held[0].shape[0] < stop:
            held = self._buffers[layer] = self._grown(held, k_SMD, v_SMD, max(stop, self._capacity))
        held[0][self.length : stop] = k_SMD
        held[1][self.length : stop] = v_SMD

    def advance(self, n_tokens: int) -> None:
        """Count what `write` has put in."""
        self.length += n_tokens

    def read(self, layer: int, start: int, stop: int) -> KeyValue:
        """Keys and values, [stop - start, M, D] each, of positions start to stop.

        Raises:
            ValueError: positions that are not held.
        """
        held = self._buffers[layer]
        if held is None or stop > held[0].shape[0]:
            raise ValueError(f"the cache does not hold positions up to {stop}")
        return held[0][start:stop], held[1][start:stop]

    def _grown(self, held: KeyValue | None, k: torch.Tensor, v: torch.Tensor, need: int) -> KeyValue:
        capacity = need if held is None else max(need, 2 * held[0].shape[0])
        grown = (k.new_empty(capacity, *k.shape[1:]), v.new_empty(capacity, *v.shape[1:]))
        if held is not None:
            for new, old in zip(grown, held, strict=True):
                new[: self.length] = old[: self.length]
        return grown
