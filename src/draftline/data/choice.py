"""A seeded choice of samples, the same on every platform."""

from __future__ import annotations

from draftline.data.rows import seeded_order


def chosen_samples(n_available: int, n_wanted: int, seed: int) -> list[int]:
    """Indices of at most `n_wanted` of `n_available` samples, rising."""
    return sorted(seeded_order(n_available, seed=seed, epoch=0, what="choice")[:n_wanted].tolist())
