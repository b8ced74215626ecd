"""Loss of the candidate selector, teacher-forced: all slots at once, each behind the data's own token.

    L_sel = sum over supervised slots of w * f * CE(S_t(x_{t-1}, .) over the candidates, y),  f = [y is one of them]

It is added to the numerator of the other terms, with their weights w and their denominator, so its pull grows with the
share of slots that hold the right token among their candidates. (NeMo Automodel divides by sum w f of its own.) Which
tokens are candidates has no gradient; their logits and the hidden states have, unless that is stopped.

The head's logits are gone by now. The gradient of the candidates' logits goes back to the hidden states through their
rows of the head alone.

Shape letters: Q slots of a row, N slots of a chunk, C candidates, H hidden size, A blocks, B slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from draftline.config.dflash2 import SelectorObjective
from draftline.drafter.candidates import Candidates
from draftline.drafter.head_plan import HeadPlan
from draftline.drafter.selector import CandidateSelector
from draftline.records import FrozenHead


@dataclass(frozen=True, slots=True)
class SelectorOutcome:
    """What the selector found, per slot [Q], without graph; zeros where a slot was dropped.

    Attributes:
        ce: cross-entropy of the label among the slot's own candidates; 0 where it is none of them.
        found: 1 where the label is a candidate.
        right: 1 where the label is the selector's choice.
        numerator: weighted loss with the objective's factor, a scalar.
        gradient_QH: of the numerator by the hidden states; None without gradient.
    """

    ce: Tensor
    found: Tensor
    right: Tensor
    numerator: Tensor
    gradient_QH: Tensor | None


class SelectorLoss:
    """The loss of one drafter's selector.

    Args:
        selector: its parameters receive gradients.
        head: the draft's head, whose logits the candidates' are.
        objective: the selector's section.
    """

    def __init__(self, selector: CandidateSelector, head: FrozenHead, objective: SelectorObjective) -> None:
        self._selector, self._head, self._objective = selector, head, objective

    def factor(self, row_id: int) -> float:
        """The weight of a row's selector loss, which rises over the first rows of the plan."""
        warmup = self._objective.warmup_rows
        return self._objective.weight * (min(1.0, (row_id + 1) / warmup) if warmup and row_id >= 0 else 1.0)

    def run(
        self,
        hidden_QH: Tensor,
        candidates: Candidates,
        labels_AB: Tensor,
        weight_AB: Tensor,
        plan: HeadPlan,
        *,
        factor: float,
        train: bool,
    ) -> SelectorOutcome:
        """Values and, in training, gradients: those of the selector's parameters are added to their `.grad`.

        Args:
            hidden_QH: the drafter's output, with or without graph.
            candidates: filled by the head for the planned slots.
            labels_AB: the data's tokens, the anchor's at slot 0.
            weight_AB: weights of the slots, 0 where not supervised.
            factor: see `factor`; 0 leaves the selector and everything else as they are.
        """
        hidden_QH, weight_Q = hidden_QH.detach(), weight_AB.flatten()
        before_Q = labels_AB.roll(1, dims=-1).flatten()  # slot 0 has none, and is never supervised
        label_Q = labels_AB.flatten()
        learns = train and factor > 0
        outcome = _Table(hidden_QH, learns, candidates.logits_QK.dtype)
        for chunk in plan.chunks():
            slots_N = plan.order_Q[chunk.start : chunk.stop]
            part = _Part(hidden_QH[slots_N], candidates, slots_N, before_Q[slots_N], label_Q[slots_N])
            self._pass(part, factor * weight_Q[slots_N], outcome, learns)
        return outcome.finished()

    def _pass(self, part: _Part, weight_N: Tensor, outcome: _Table, learns: bool) -> None:
        with torch.no_grad():
            scores_NC = self._selector.score(part.hidden_NH, part.logits_NC, part.tokens_NC, part.before_N)
            ce_N = _cross_entropy(scores_NC, part.tokens_NC, part.label_N)
            hit_NC = part.tokens_NC == part.label_N[:, None]
            found_N = hit_NC.any(-1)
            right_N = hit_NC.gather(-1, scores_NC.argmax(-1, keepdim=True)).squeeze(-1)
            outcome.fill(part.slots_N, ce_N, found_N, right_N)
        injects = self._objective.missing == "inject"
        if not learns and not injects:
            outcome.add((weight_N * ce_N).sum())
            return
        logits_NC, tokens_NC = part.injected(found_N) if injects else (part.logits_NC, part.tokens_NC)
        with torch.set_grad_enabled(learns):
            back = learns and not self._objective.stop_gradient
            hidden_NH, logits_NC = part.hidden_NH.requires_grad_(back), logits_NC.requires_grad_(back)
            loss_N = _cross_entropy(
                self._selector.score(hidden_NH, logits_NC, tokens_NC, part.before_N), tokens_NC, part.label_N
            )
            numerator = (weight_N * loss_N).sum()
        outcome.add(numerator.detach())
        if not learns:
            return
        numerator.backward()
        if back and hidden_NH.grad is not None and logits_NC.grad is not None:
            through_NH = self._through_head(logits_NC.detach(), logits_NC.grad, tokens_NC)
            outcome.put_gradient(part.slots_N, hidden_NH.grad + through_NH.to(hidden_NH.dtype))

    def _through_head(self, logits_NC: Tensor, gradient_NC: Tensor, tokens_NC: Tensor) -> Tensor:
        """Gradient [N, H] of the hidden states that reaches them through the candidates' rows of the head."""
        slope_NC = gradient_NC * self._head.multiplier
        if self._head.softcap is not None:
            slope_NC = slope_NC * (1.0 - (logits_NC / self._head.softcap).square())
        weight_VH = self._head.weight_VH.detach()
        return F.embedding_bag(tokens_NC, weight_VH, mode="sum", per_sample_weights=slope_NC.to(weight_VH.dtype))


class _Part:
    """A chunk of slots with what the head kept of them."""

    def __init__(
        self, hidden_NH: Tensor, candidates: Candidates, slots_N: Tensor, before_N: Tensor, label_N: Tensor
    ) -> None:
        self.hidden_NH, self.slots_N, self.before_N, self.label_N = hidden_NH, slots_N, before_N, label_N
        self.logits_NC, self.tokens_NC = candidates.logits_QK[slots_N], candidates.tokens_QK[slots_N]
        self._label_logit_N = candidates.label_logit_Q[slots_N]

    def injected(self, found_N: Tensor) -> tuple[Tensor, Tensor]:
        """Candidates with the label in the weakest one's place where it is none of them."""
        logits_NC, tokens_NC = self.logits_NC.clone(), self.tokens_NC.clone()
        logits_NC[:, -1] = torch.where(found_N, logits_NC[:, -1], self._label_logit_N)
        tokens_NC[:, -1] = torch.where(found_N, tokens_NC[:, -1], self.label_N)
        return logits_NC, tokens_NC


class _Table:
    """Collects what chunks find."""

    def __init__(self, hidden_QH: Tensor, learns: bool, dtype: torch.dtype) -> None:
        self._ce, self._found, self._right = (
            torch.zeros(len(hidden_QH), device=hidden_QH.device, dtype=dtype) for _ in range(3)
        )
        self._numerator = torch.zeros((), device=hidden_QH.device, dtype=dtype)
        self._gradient_QH = torch.zeros_like(hidden_QH) if learns else None

    def fill(self, slots_N: Tensor, ce_N: Tensor, found_N: Tensor, right_N: Tensor) -> None:
        self._ce[slots_N] = ce_N.to(self._ce.dtype)
        self._found[slots_N], self._right[slots_N] = found_N.to(self._found.dtype), right_N.to(self._right.dtype)

    def add(self, numerator: Tensor) -> None:
        self._numerator += numerator.to(self._numerator.dtype)

    def put_gradient(self, slots_N: Tensor, gradient_NH: Tensor) -> None:
        assert self._gradient_QH is not None
        self._gradient_QH[slots_N] = gradient_NH

    def finished(self) -> SelectorOutcome:
        return SelectorOutcome(self._ce, self._found, self._right, self._numerator, self._gradient_QH)


def _cross_entropy(scores_NC: Tensor, tokens_NC: Tensor, label_N: Tensor) -> Tensor:
    """CE of the label among the candidates, 0 where it is none of them."""
    hit_NC = tokens_NC == label_N[:, None]
    ce_N = scores_NC.logsumexp(-1) - torch.where(hit_NC, scores_NC, 0.0).sum(-1)
    return torch.where(hit_NC.any(-1), ce_N, 0.0)
