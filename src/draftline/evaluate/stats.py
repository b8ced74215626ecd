"""Intervals and comparisons over prompts. Prompts are what is drawn at random, so they are what is counted.

Rounds of one prompt are alike and tell less than as many independent ones. Every figure here is a ratio of sums over
prompts (or a difference, or a quotient of two); its standard error is the jackknife's (Tukey 1958): the spread of the
figure when each prompt in turn is left out. Intervals are Student's t with n - 1 degrees of freedom, for a handful of
prompts says little about its own spread; percentiles of resampled prompts would forget that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Below so many prompts nothing is called better: that all of five differ in one direction happens by chance in 1 of 16.
LEAST_PROMPTS = 6
CONFIDENCE = 0.95
# Prompt lengths in tokens at which a group ends.
LENGTH_EDGES = (64, 256, 1024, 4096)
# Two-sided 5 % and 80 % power: normal quantiles 0.975 and 0.8.
_Z_SUM = 1.959964 + 0.841621


@dataclass(frozen=True, slots=True)
class PromptCounts:
    """Tokens committed after the prefill, and the rounds (target forwards) it took, for one prompt."""

    tokens: int
    rounds: int

    def __add__(self, other: PromptCounts) -> PromptCounts:
        return PromptCounts(self.tokens + other.tokens, self.rounds + other.rounds)


def pooled(counts: Sequence[PromptCounts]) -> float | None:
    """Tokens per round over all prompts; None without a round."""
    rounds = sum(c.rounds for c in counts)
    return sum(c.tokens for c in counts) / rounds if rounds else None


def interval(counts: Sequence[PromptCounts]) -> tuple[float, float] | None:
    """95 % interval of `pooled` by prompt; None below two prompts with rounds.

    A round commits at least one token, so the lower end is at least 1.
    """
    counts = [c for c in counts if c.rounds]
    if len(counts) < 2:
        return None
    value, effect_N = _ratio(counts)
    half = _half_width(effect_N)
    return max(1.0, value - half), value + half


def speedup_interval(
    own: Sequence[tuple[int, float]], plain: Sequence[tuple[int, float]]
) -> tuple[float, float] | None:
    """95 % interval of a speed-up by prompt, taken on its logarithm; None below two usable pairs.

    Args:
        own, plain: (tokens, seconds) of each prompt, in the same order.
    """
    pairs = [(a, b) for a, b in zip(own, plain, strict=True) if min(a[0], a[1], b[0], b[1]) > 0]
    if len(pairs) < 2:
        return None
    values_N4 = np.array([[*a, *b] for a, b in pairs], dtype=np.float64)
    signs_4, sums_4 = np.array([1.0, -1.0, -1.0, 1.0]), values_N4.sum(axis=0)
    value, without_N = float(np.log(sums_4) @ signs_4), np.log(sums_4 - values_N4) @ signs_4
    half = _half_width((len(pairs) - 1) * (value - without_N))
    return math.exp(value - half), math.exp(value + half)


@dataclass(frozen=True, slots=True)
class Difference:
    """Pooled tokens per round of B minus that of A on the same prompts.

    Attributes:
        value: the difference.
        low, high: 95 % interval by prompt, of paired differences.
        n_prompts: pairs used.
        n_needed: prompts that would decide a difference of this size (5 % two-sided, power 80 %); None if it is 0.
    """

    value: float
    low: float
    high: float
    n_prompts: int
    n_needed: int | None

    def verdict(self, a: str = "A", b: str = "B") -> str:
        """Which one is better, by name, or `undecided`; always undecided below `LEAST_PROMPTS`."""
        if self.n_prompts < LEAST_PROMPTS:
            return "undecided"
        if self.low > 0:
            return f"{b} is better"
        return f"{a} is better" if self.high < 0 else "undecided"


def paired_difference(a: Sequence[PromptCounts], b: Sequence[PromptCounts]) -> Difference | None:
    """Compares two methods or drafters on the same prompts, in the same order; None below two usable pairs."""
    pairs = [(x, y) for x, y in zip(a, b, strict=True) if x.rounds and y.rounds]
    if len(pairs) < 2:
        return None
    value_a, effect_a_N = _ratio([x for x, _ in pairs])
    value_b, effect_b_N = _ratio([y for _, y in pairs])
    value, effect_N = value_b - value_a, effect_b_N - effect_a_N
    half, needed = _half_width(effect_N), None
    if value:
        needed = max(LEAST_PROMPTS, math.ceil((_Z_SUM * float(effect_N.std(ddof=1)) / value) ** 2))
    return Difference(value, value - half, value + half, len(pairs), needed)


def length_range(n_tokens: int) -> str:
    """The group of prompts of this length, for example `64-255` or `4096+`."""
    for low, high in zip((0, *LENGTH_EDGES), LENGTH_EDGES, strict=False):
        if n_tokens < high:
            return f"{low}-{high - 1}"
    return f"{LENGTH_EDGES[-1]}+"


def first_length(name: str) -> int:
    """Shortest prompt of a `length_range`, for example 4096 of `4096+`."""
    return int(name.rstrip("+").partition("-")[0])


def t_quantile(degrees: int, confidence: float = CONFIDENCE) -> float:
    """t with P(|T| <= t) = confidence for Student's distribution of whole degrees of freedom, by bisection."""
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_mass(middle, degrees) < confidence else (low, middle)
    return math.sqrt(degrees) * math.tan(low)


def _t_mass(angle: float, degrees: int) -> float:
    """P(|T| <= sqrt(degrees) tan(angle)): the finite sums of Abramowitz and Stegun 26.7.3 and 26.7.4."""
    sine, cosine = math.sin(angle), math.cos(angle)
    is_odd = degrees % 2
    term, total = (cosine if is_odd else 1.0), 0.0
    for index in range(degrees // 2):
        total += term
        term *= cosine**2 * (2 * index + 1 + is_odd) / (2 * index + 2 + is_odd)
    return 2 / math.pi * (angle + sine * total) if is_odd else sine * total


def _ratio(counts: Sequence[PromptCounts]) -> tuple[float, np.ndarray]:
    """Pooled tokens per round, and what each prompt adds to it, float64 [N]: n - 1 times what leaving it out takes."""
    tokens_N = np.array([c.tokens for c in counts], dtype=np.float64)
    rounds_N = np.array([c.rounds for c in counts], dtype=np.float64)
    value = tokens_N.sum() / rounds_N.sum()
    without_N = (tokens_N.sum() - tokens_N) / (rounds_N.sum() - rounds_N)
    return float(value), (len(counts) - 1) * (value - without_N)


def _half_width(effect_N: np.ndarray) -> float:
    """Half of the 95 % interval of a mean of effects."""
    n = len(effect_N)
    return t_quantile(n - 1) * float(effect_N.std(ddof=1)) / math.sqrt(n)
