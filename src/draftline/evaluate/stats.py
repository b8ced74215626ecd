"""Intervals and comparisons over prompts. Prompts are what is drawn at random, so they are what is resampled.

Rounds of one prompt are alike and tell less than as many independent ones; a bootstrap over prompts takes that in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 2000
# Two-sided 5 % and 80 % power: normal quantiles 0.975 and 0.8.
_Z_SUM = 1.959964 + 0.841621


@dataclass(frozen=True, slots=True)
class PromptCounts:
    """Tokens committed after the prefill, and the rounds (target forwards) it took, for one prompt."""

    tokens: int
    rounds: int


def pooled(counts: Sequence[PromptCounts]) -> float | None:
    """Tokens per round over all prompts; None without a round."""
    rounds = sum(c.rounds for c in counts)
    return sum(c.tokens for c in counts) / rounds if rounds else None


def interval(counts: Sequence[PromptCounts], seed: int) -> tuple[float, float] | None:
    """95 % bootstrap interval of `pooled` by prompt; None below two prompts with rounds."""
    counts = [c for c in counts if c.rounds]
    if len(counts) < 2:
        return None
    ratios = _ratios(counts, _resamples(len(counts), seed))
    low, high = np.percentile(ratios, [2.5, 97.5])
    return float(low), float(high)


def speedup_interval(
    own: Sequence[tuple[int, float]], plain: Sequence[tuple[int, float]], seed: int
) -> tuple[float, float] | None:
    """95 % bootstrap interval of a speed-up, prompts resampled in pairs; None below two usable pairs.

    Args:
        own, plain: (tokens, seconds) of each prompt, in the same order.
    """
    pairs = [(a, b) for a, b in zip(own, plain, strict=True) if min(a[0], a[1], b[0], b[1]) > 0]
    if len(pairs) < 2:
        return None
    values = np.array([[*a, *b] for a, b in pairs])
    sums = values[_resamples(len(pairs), seed)].sum(axis=1)
    ratios = (sums[:, 0] / sums[:, 1]) / (sums[:, 2] / sums[:, 3])
    low, high = np.percentile(ratios, [2.5, 97.5])
    return float(low), float(high)


@dataclass(frozen=True, slots=True)
class Difference:
    """Pooled tokens per round of B minus that of A on the same prompts.

    Attributes:
        value: the difference.
        low, high: 95 % bootstrap interval, prompts resampled in pairs.
        n_prompts: pairs used.
        n_needed: prompts that would decide a difference of this size (5 % two-sided, power 80 %); None if it is 0.
    """

    value: float
    low: float
    high: float
    n_prompts: int
    n_needed: int | None

    def verdict(self, a: str = "A", b: str = "B") -> str:
        """Which one is better, by name, or `undecided`."""
        if self.low > 0:
            return f"{b} is better"
        return f"{a} is better" if self.high < 0 else "undecided"


def paired_difference(a: Sequence[PromptCounts], b: Sequence[PromptCounts], seed: int) -> Difference | None:
    """Compares two methods or drafters on the same prompts, in the same order; None below two usable pairs."""
    pairs = [(x, y) for x, y in zip(a, b, strict=True) if x.rounds and y.rounds]
    if len(pairs) < 2:
        return None
    left, right = [x for x, _ in pairs], [y for _, y in pairs]
    drawn = _resamples(len(pairs), seed)
    differences = _ratios(right, drawn) - _ratios(left, drawn)
    low, high = np.percentile(differences, [2.5, 97.5])
    mean_a, mean_b = pooled(left), pooled(right)
    assert mean_a is not None
    assert mean_b is not None
    value = mean_b - mean_a
    needed = None
    if value:
        needed = max(2, math.ceil(len(pairs) * (_Z_SUM * float(differences.std()) / value) ** 2))
    return Difference(value, float(low), float(high), len(pairs), needed)


def _resamples(n_prompts: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(n_prompts, size=(RESAMPLES, n_prompts))


def _ratios(counts: Sequence[PromptCounts], drawn: np.ndarray) -> np.ndarray:
    tokens = np.array([c.tokens for c in counts])[drawn].sum(axis=1)
    rounds = np.array([c.rounds for c in counts])[drawn].sum(axis=1)
    return tokens / rounds
