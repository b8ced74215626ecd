"""Draft trees from a candidate selector's scores (DFlash2). Pure functions, no model.

The drafter's distribution is a Markov chain over the candidates of each slot: q(u) = prod_d softmax_j S_d(u_{d-1}, j).
As with marginals a prefix is never less likely than its extensions, so the most likely prefixes form the best tree,
found best first. Equal ones are ordered by the tuple of ranks among their siblings, the smaller first.

Shape letters: A blocks, D depths (drafted slots), C candidates, N budgets, W prefixes kept per depth.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftline.decode.steps import Drafted
from draftline.decode.tree import DraftTree, Marginals, Node, build_tree, top_marginals
from draftline.drafter.selector import PathScores


@dataclass(frozen=True, slots=True)
class PathMarginals:
    """A block's steps, best first: for each depth and each candidate in front, the log-probabilities of its children,
    and which candidates they are.
    """

    tokens_DC: list[list[int]]
    log_probs_DCC: list[list[list[float]]]
    order_DCC: list[list[list[int]]]

    @property
    def depth(self) -> int:
        """D, drafted positions."""
        return len(self.tokens_DC)


def chain_of(draft: Drafted) -> Tensor:
    """The greedy chain [K] of a block."""
    return draft.chain()[0] if isinstance(draft, PathScores) else draft.argmax(dim=-1)


def block_marginals(draft: Drafted, width: int) -> Marginals | PathMarginals:
    """What a tree grows from: the `width` likeliest tokens of each slot, or the steps of a selector's paths."""
    return path_marginals(draft) if isinstance(draft, PathScores) else top_marginals(draft, width)


def path_marginals(scores: PathScores) -> PathMarginals:
    """Of one block (A = 1)."""
    ordered = _log_probs(scores.scores_AKCC)[0].sort(dim=-1, descending=True, stable=True)
    return PathMarginals(scores.tokens_AKC[0].tolist(), ordered.values.tolist(), ordered.indices.tolist())


def best_paths(steps: PathMarginals) -> Iterator[Node]:
    """All prefixes in falling order of probability; see `tree.best_first`, whose contract this shares."""
    if steps.depth == 0:
        return
    # (-log q, ranks, parent node, log q of the parent, candidate that the parent is); ranks are unique.
    heap: list[tuple[float, tuple[int, ...], int, float, int]] = [(-steps.log_probs_DCC[0][0][0], (0,), 0, 0.0, 0)]
    index = 0
    while heap:
        cost, ranks, parent, parent_log_prob, before = heapq.heappop(heap)
        if math.isinf(cost):
            return
        depth, rank = len(ranks), ranks[-1]
        row, order = steps.log_probs_DCC[depth - 1][before], steps.order_DCC[depth - 1][before]
        index += 1
        yield Node(steps.tokens_DC[depth - 1][order[rank]], parent, depth, -cost, ranks)
        if rank + 1 < len(row):
            beside = -(parent_log_prob + row[rank + 1])
            heapq.heappush(heap, (beside, (*ranks[:-1], rank + 1), parent, parent_log_prob, before))
        if depth < steps.depth:
            below = cost - steps.log_probs_DCC[depth][order[rank]][0]
            heapq.heappush(heap, (below, (*ranks, 0), index, -cost, order[rank]))


@torch.no_grad()
def accepted_in_path_trees(scores: PathScores, labels_AD: Tensor, known_AD: Tensor, budgets: Sequence[int]) -> Tensor:
    """Drafts of each block's trees that its continuation passes through, int64 [A, N], without growing the trees.

    A tree of budget b holds the b likeliest prefixes, so a prefix of the continuation is in it if fewer than b prefixes
    come before it. Where prefixes of equal probability decide, the tree is grown after all.

    Args:
        labels_AD: the continuation.
        known_AD: bool, False from where the continuation is not known (any later True is ignored).
        budgets: drafts of the trees, the root not counted; each at least 1.
    """
    steps_ADCC = _log_probs(scores.scores_AKCC)
    label_AD, found_AD = _label_log_probs(steps_ADCC, scores.tokens_AKC, labels_AD, known_AD)
    before_AD, at_least_AD = _places(steps_ADCC, label_AD, max(budgets) + 1)
    budget_N = torch.tensor(tuple(budgets), device=labels_AD.device)
    inside_ADN = found_AD[..., None] & (at_least_AD[..., None] <= budget_N)
    unsure_ADN = found_AD[..., None] & ~inside_ADN & (before_AD[..., None] < budget_N)
    accepted_AN = inside_ADN.sum(1)
    for block in unsure_ADN.flatten(1).any(-1).nonzero().flatten().tolist():
        steps = path_marginals(scores.block(block))
        continuation = labels_AD[block][known_AD[block].cumprod(0).bool()].tolist()
        counts = [tree_of(steps, budget).walk_text(continuation) for budget in budgets]
        accepted_AN[block] = torch.tensor(counts, device=accepted_AN.device)
    return accepted_AN


def tree_of(marginals: Marginals | PathMarginals, budget: int) -> DraftTree:
    """The `budget` most likely prefixes; fewer if there are no more."""
    if isinstance(marginals, Marginals):
        return build_tree(marginals, budget)
    tree = DraftTree()
    if budget > 0:
        for node in best_paths(marginals):
            tree.nodes.append(node)
            if len(tree) >= budget:
                break
    return tree


def _log_probs(scores_ADCC: Tensor) -> Tensor:
    """Doubles, so that lists and tensors hold the same numbers."""
    return scores_ADCC.double().log_softmax(-1)


def _label_log_probs(
    steps_ADCC: Tensor, tokens_ADC: Tensor, labels_AD: Tensor, known_AD: Tensor
) -> tuple[Tensor, Tensor]:
    """(log-probability of the continuation's prefix of each depth, bool: drafted at all up to there)."""
    hit_ADC = tokens_ADC == labels_AD[..., None]
    usable_AD = (hit_ADC.any(-1) & known_AD).to(torch.int32).cumprod(1).bool()
    place_AD = hit_ADC.to(torch.int32).argmax(-1)
    n_candidates = tokens_ADC.shape[-1]
    at_A, total_A = torch.zeros_like(place_AD[:, 0]), steps_ADCC.new_zeros(len(labels_AD))
    sums = []
    for depth in range(labels_AD.shape[1]):
        row_AC = steps_ADCC[:, depth].gather(1, at_A[:, None, None].expand(-1, 1, n_candidates))[:, 0]
        at_A = place_AD[:, depth]
        total_A = total_A + row_AC.gather(1, at_A[:, None])[:, 0]
        sums.append(total_A)
    label_AD = torch.stack(sums, dim=1) if sums else steps_ADCC.new_zeros(labels_AD.shape)
    return label_AD, usable_AD & torch.isfinite(label_AD)


def _places(steps_ADCC: Tensor, label_AD: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """For each prefix of the continuation: (prefixes strictly likelier, prefixes at least as likely), int64 [A, D].

    Counts are exact up to `width` and never fall below it where the truth is larger.
    """
    n_blocks, n_depths, n_candidates = steps_ADCC.shape[:3]
    before_AD, at_least_AD = (torch.zeros(label_AD.shape, dtype=torch.int64, device=label_AD.device) for _ in range(2))
    best_AW = steps_ADCC.new_zeros(n_blocks, 1)
    at_AW = torch.zeros(n_blocks, 1, dtype=torch.int64, device=steps_ADCC.device)
    for depth in range(n_depths):
        rows_AWC = steps_ADCC[:, depth].gather(1, at_AW[..., None].expand(-1, -1, n_candidates))
        extended_AX = (best_AW[..., None] + rows_AWC).flatten(1)
        kept = extended_AX.topk(min(width, extended_AX.shape[1]), dim=-1)
        best_AW, at_AW = kept.values, kept.indices % n_candidates
        before_AD += (best_AW[:, None] > label_AD[..., None]).sum(-1)
        at_least_AD += (best_AW[:, None] >= label_AD[..., None]).sum(-1)
    return before_AD, at_least_AD
