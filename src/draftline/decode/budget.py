"""How many drafts a tree may have: a fixed number, or the number that pays best this round.

The adaptive budget (CaDDTree, arXiv 2606.01813) maximises expected tokens per second, (1 + sum of q(u)) / (draft_s +
verify_s(nodes)), with a measured cost curve. Probabilities fall from node to node and the curve is made convex, so the
ratio rises and then falls: the tree grows until the first fall.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from draftline.decode.path_tree import PathMarginals, best_paths, tree_of
from draftline.decode.tree import DraftTree, Marginals, best_first
from draftline.errors import UserError


class BudgetRule(Protocol):
    """Chooses a round's tree."""

    @property
    def largest(self) -> int:
        """Most drafts of any tree."""

    def grow(self, marginals: Marginals | PathMarginals) -> DraftTree:
        """The tree of one round, of at most `largest` drafts."""


@dataclass(frozen=True, slots=True)
class FixedBudget:
    """The same number of drafts each round (the root is not counted)."""

    largest: int

    def __post_init__(self) -> None:
        if self.largest < 1:
            raise UserError(f"a tree budget of {self.largest} drafts nothing", where="decode", mend="give at least 1")

    def grow(self, marginals: Marginals | PathMarginals) -> DraftTree:
        """The `largest` likeliest prefixes, or fewer if there are no more."""
        return tree_of(marginals, self.largest)


@dataclass(frozen=True, slots=True)
class CostCurve:
    """Measured cost of a round.

    Attributes:
        draft_s: seconds of one block forward of the drafter and of finding its likeliest tokens.
        points: (drafts, seconds of growing a tree of them, verifying it in the target and walking it), drafts rising
            from 0; straight lines between them.
    """

    draft_s: float
    points: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        if len(self.points) < 2 or self.points[0][0] != 0 or self.draft_s < 0:
            raise UserError("a cost curve needs points from 0 drafts on", where="decode", mend="measure it again")

    @classmethod
    def fit(cls, draft_s: float, measured: Sequence[tuple[int, float]]) -> CostCurve:
        """Curve through the lower convex hull of noisy measurements, made non-decreasing.

        Args:
            draft_s: see the attribute.
            measured: (drafts, seconds), drafts rising from 0.
        """
        floor = math.inf
        rising: list[tuple[int, float]] = []
        for nodes, seconds in reversed(measured):
            # A larger tree cannot be cheaper; where it seems so, the smaller one was measured too high.
            floor = min(floor, seconds)
            rising.append((nodes, floor))
        hull: list[tuple[int, float]] = []
        for point in reversed(rising):
            while len(hull) >= 2 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], point):
                hull.pop()
            hull.append(point)
        return cls(draft_s, tuple(hull))

    @property
    def largest(self) -> int:
        """Drafts of the largest tree that was measured."""
        return self.points[-1][0]

    def round_s(self, nodes: int) -> float:
        """Seconds of a round with a tree of `nodes` drafts, between the measured sizes.

        Raises:
            UserError: more drafts than the largest tree that was measured.
        """
        for left, right in zip(self.points, self.points[1:], strict=False):
            if nodes <= right[0]:
                return self.draft_s + left[1] + _slope(left, right) * (nodes - left[0])
        raise UserError(f"the cost curve ends at {self.largest} drafts", where="decode", mend=f"measure up to {nodes}")


@dataclass(frozen=True, slots=True)
class AdaptiveBudget:
    """Grows each tree while expected tokens per second rise."""

    curve: CostCurve

    @property
    def largest(self) -> int:
        """Drafts of the largest tree that the curve knows."""
        return self.curve.largest

    def grow(self, marginals: Marginals | PathMarginals) -> DraftTree:
        """The tree at which expected tokens per second are highest."""
        tree = DraftTree()
        tokens = 1.0
        rate = tokens / self.curve.round_s(0)
        nodes = best_paths(marginals) if isinstance(marginals, PathMarginals) else best_first(marginals)
        for node in nodes:
            tokens += math.exp(node.log_prob)
            new_rate = tokens / self.curve.round_s(len(tree) + 1)
            if new_rate < rate:
                break
            rate = new_rate
            tree.nodes.append(node)
            if len(tree) >= self.largest:
                break
        return tree


def _slope(left: tuple[int, float], right: tuple[int, float]) -> float:
    return (right[1] - left[1]) / (right[0] - left[0])
