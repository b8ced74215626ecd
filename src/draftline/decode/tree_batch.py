"""How far the trees of many blocks follow known continuations, without growing the trees: tensors on any device.

A tree of budget b holds the b likeliest prefixes, so a continuation's prefix is in it if fewer than b prefixes come
before it. What comes before is counted from the best prefixes of each depth, a depth at a time and all blocks at once;
the same doubles are added in the same order as in `tree.best_first`. Prefixes of exactly equal probability are ordered
by their ranks there. Where that order decides whether a prefix is in a tree, that block's tree is grown after all, so
the result is `build_tree(marginals, b).walk_text(continuation)` in every case.

Shape letters: A blocks, D depths, R tokens kept per depth, N budgets, W prefixes kept per depth, C candidates.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftline.decode.tree import Marginals, build_tree


@torch.no_grad()
def accepted_in_trees(
    log_probs_ADR: Tensor, tokens_ADR: Tensor, labels_AD: Tensor, known_AD: Tensor, budgets: Sequence[int]
) -> Tensor:
    """Drafts of each block's trees that its continuation passes through, int64 [A, N].

    Args:
        log_probs_ADR, tokens_ADR: likeliest tokens of each depth, best first (see `top_tokens`); R must be the largest
            budget, or the whole vocabulary.
        labels_AD: the continuation.
        known_AD: bool, False from where the continuation is not known (any later True is ignored).
        budgets: drafts of the trees, the root not counted; each at least 1.

    Waits for the device once, to see whether ties decide anywhere.
    """
    label_AD, found_AD = _label_log_probs(log_probs_ADR, tokens_ADR, labels_AD, known_AD)
    # One more than the largest tree holds: a list that ties cut short then never looks complete.
    before_AD, at_least_AD = _places(log_probs_ADR, label_AD, width=max(budgets) + 1)
    budget_N = torch.tensor(tuple(budgets), device=labels_AD.device)
    inside_ADN = found_AD[..., None] & (at_least_AD[..., None] <= budget_N)
    unsure_ADN = found_AD[..., None] & ~inside_ADN & (before_AD[..., None] < budget_N)
    accepted_AN = inside_ADN.sum(1)
    for block in unsure_ADN.flatten(1).any(-1).nonzero().flatten().tolist():
        accepted_AN[block] = _accepted_by_growing(
            Marginals(log_probs_ADR[block].tolist(), tokens_ADR[block].tolist()),
            labels_AD[block][known_AD[block].cumprod(0).bool()].tolist(),
            budget_N,
        )
    return accepted_AN


def _label_log_probs(
    log_probs_ADR: Tensor, tokens_ADR: Tensor, labels_AD: Tensor, known_AD: Tensor
) -> tuple[Tensor, Tensor]:
    """(fp64 log-probability of the continuation's prefix of each depth, bool: drafted at all up to there)."""
    hit_ADR = tokens_ADR == labels_AD[..., None]
    own_AD = torch.where(hit_ADR, log_probs_ADR, 0.0).sum(-1).double()
    usable_AD = hit_ADR.any(-1) & known_AD & torch.isfinite(own_AD)
    total_A = own_AD.new_zeros(own_AD.shape[0])
    sums = []
    for own_A in own_AD.unbind(1):  # not cumsum: a device may add in another order
        total_A = total_A + own_A
        sums.append(total_A)
    label_AD = torch.stack(sums, dim=1) if sums else own_AD
    return label_AD, usable_AD.to(torch.int32).cumprod(1).bool()


def _places(log_probs_ADR: Tensor, label_AD: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """For each prefix of the continuation: (prefixes strictly likelier, prefixes at least as likely), int64 [A, D].

    Counts are exact up to `width` and never fall below it where the truth is larger.
    """
    before_AD, at_least_AD = (torch.zeros(label_AD.shape, dtype=torch.int64, device=label_AD.device) for _ in range(2))
    best_AW = label_AD.new_zeros(label_AD.shape[0], 1)
    label_AD = label_AD.contiguous()
    for level_AR in log_probs_ADR.double().unbind(1):
        best_AW = _extended(best_AW, level_AR, width)
        rising_AW = best_AW.flip(-1).contiguous()
        size = rising_AW.shape[1]
        before_AD += size - torch.searchsorted(rising_AW, label_AD, right=True)
        at_least_AD += size - torch.searchsorted(rising_AW, label_AD)
    return before_AD, at_least_AD


def _extended(best_AW: Tensor, level_AR: Tensor, width: int) -> Tensor:
    """The `width` likeliest extensions of the likeliest prefixes by one token, best first.

    Extension (i, j) of the i-th prefix by the j-th token has (i + 1)(j + 1) - 1 others at least as likely, so only
    those below `width` are formed.
    """
    n_prefixes, n_tokens = best_AW.shape[1], level_AR.shape[1]
    tokens = [min(n_tokens, width // (i + 1)) for i in range(min(n_prefixes, width))]
    device = best_AW.device
    counts = torch.tensor(tokens, device=device)
    prefix_C = torch.repeat_interleave(torch.arange(len(tokens), device=device), counts, output_size=sum(tokens))
    first_C = (counts.cumsum(0) - counts)[prefix_C]
    token_C = torch.arange(sum(tokens), device=device) - first_C
    candidates_AC = best_AW[:, prefix_C] + level_AR[:, token_C]
    return candidates_AC.topk(min(width, candidates_AC.shape[1]), dim=-1).values


def _accepted_by_growing(marginals: Marginals, continuation: Sequence[int], budget_N: Tensor) -> Tensor:
    counts = [build_tree(marginals, budget).walk_text(continuation) for budget in budget_N.tolist()]
    return torch.tensor(counts, device=budget_N.device)
