"""Draft trees from the marginals of one block (DDTree, arXiv 2604.12989). Pure functions, no model.

A drafter of the DFlash kind gives independent distributions q_1..q_D over the tokens of the next D positions. The
chance of a prefix u is q(u) = q_1(u_1) * .. * q_d(u_d). A prefix is never less likely than its extensions, so the B
most likely prefixes form a tree, and that tree has the largest expected number of accepted drafts among all of B nodes.

Nodes are found best first. Ties are broken by the tuple of ranks (0 = most likely token of its depth), the smaller
first; log-probabilities are added in double precision from the root down.

Shape letters: D depths (drafted positions), R tokens kept per depth, V vocabulary, N nodes with the root.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from draftline.drafter.top_tokens import top_tokens


@dataclass(frozen=True, slots=True)
class Marginals:
    """The likeliest tokens of each depth, best first.

    Attributes:
        log_probs_DR: natural logarithms of their probabilities under the whole vocabulary.
        tokens_DR: their ids.
    """

    log_probs_DR: list[list[float]]
    tokens_DR: list[list[int]]

    @property
    def depth(self) -> int:
        """D, drafted positions."""
        return len(self.log_probs_DR)


def top_marginals(logits_DV: torch.Tensor, width: int) -> Marginals:
    """The `width` likeliest tokens of each depth, found on the logits' device; equal ones in order of their ids.

    A tree of B nodes needs no more than B tokens a depth. A width above the vocabulary takes all of it. Which of equal
    tokens at the edge of the width are kept is the device's choice.
    """
    if logits_DV.shape[0] == 0 or width < 1:
        return Marginals([], [])
    log_probs_DR, tokens_DR = top_tokens(logits_DV, width)
    return Marginals(log_probs_DR.tolist(), tokens_DR.tolist())


@dataclass(frozen=True, slots=True)
class Node:
    """One drafted token. `parent` is an index into the tree, 0 being the root; `log_prob` is that of its prefix."""

    token: int
    parent: int
    depth: int
    log_prob: float
    ranks: tuple[int, ...]


@dataclass(slots=True)
class DraftTree:
    """Drafts below a root, each behind its parent. Node i >= 1 of the forward is `nodes[i - 1]`, 0 the root."""

    nodes: list[Node] = field(default_factory=list)

    def __len__(self) -> int:
        """Drafts, the root not counted."""
        return len(self.nodes)

    def expected_accepted(self) -> float:
        """Expected accepted drafts if the drafter's marginals were the target's."""
        return math.fsum(math.exp(node.log_prob) for node in self.nodes)

    def depths(self) -> list[int]:
        """Depth of each node, the root (0) first."""
        return [0, *(node.depth for node in self.nodes)]

    def visible(self) -> np.ndarray:
        """bool [N, N], True where node i may see node j: the root, its ancestors and itself."""
        visible = np.zeros((len(self) + 1, len(self) + 1), dtype=np.bool_)
        visible[0, 0] = True
        for index, node in enumerate(self.nodes, start=1):
            visible[index] = visible[node.parent]
            visible[index, index] = True
        return visible

    def walk(self, own_tokens_N: Sequence[int]) -> list[int]:
        """Path of nodes from the root that the target would have gone itself.

        Args:
            own_tokens_N: the target's token behind each node.
        """
        children = {(node.parent, node.token): index for index, node in enumerate(self.nodes, start=1)}
        path = [0]
        while (child := children.get((path[-1], own_tokens_N[path[-1]]))) is not None:
            path.append(child)
        return path

    def walk_text(self, continuation: Sequence[int]) -> int:
        """Drafts of the tree that a known continuation of the root passes through."""
        children = {(node.parent, node.token): index for index, node in enumerate(self.nodes, start=1)}
        at = 0
        for count, token in enumerate(continuation):
            child = children.get((at, token))
            if child is None:
                return count
            at = child
        return len(continuation)


def best_first(marginals: Marginals) -> Iterator[Node]:
    """All prefixes in falling order of probability. The caller must add each node to its tree before the next is asked
    for, as `parent` counts them in this order. Prefixes of probability 0 are left out.
    """
    if marginals.depth == 0:
        return
    # An entry is (-log q, ranks, parent, log q of the parent); ranks are unique, so nothing behind them is compared.
    heap: list[tuple[float, tuple[int, ...], int, float]] = [(-marginals.log_probs_DR[0][0], (0,), 0, 0.0)]
    index = 0
    while heap:
        cost, ranks, parent, parent_log_prob = heapq.heappop(heap)
        if math.isinf(cost):
            return
        depth, rank = len(ranks), ranks[-1]
        index += 1
        yield Node(marginals.tokens_DR[depth - 1][rank], parent, depth, -cost, ranks)
        row = marginals.log_probs_DR[depth - 1]
        if rank + 1 < len(row):
            heapq.heappush(heap, (-(parent_log_prob + row[rank + 1]), (*ranks[:-1], rank + 1), parent, parent_log_prob))
        if depth < marginals.depth:
            heapq.heappush(heap, (cost - marginals.log_probs_DR[depth][0], (*ranks, 0), index, -cost))


def build_tree(marginals: Marginals, budget: int) -> DraftTree:
    """The `budget` most likely prefixes; fewer if there are no more. Budget 0 or no depth gives a root alone."""
    tree = DraftTree()
    if budget > 0:
        for node in best_first(marginals):
            tree.nodes.append(node)
            if len(tree) >= budget:
                break
    return tree
