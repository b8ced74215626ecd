"""The training objective: what one slot costs, and what each slot counts.

Plain, differentiable forms; `head.py` forms the same values and their gradients without autograd. Letters: N slots,
V vocabulary, A blocks, B slots of a block. z are the draft's logits, t the teacher's at the position the slot predicts
from (p + k - 1), q = softmax(z), P = softmax(t), y the label. Logits are already in the statistics dtype
(fp32 on a run, fp64 in proofs): bf16 logits lose most of a gradient where q is close to P.

The loss of a row is numerator / denominator with

    numerator   = sum over supervised slots of w * (sum over terms of coefficient * term)
    denominator = D, the same for every term (see `denominator`)

Only sums leave this module. The optimizer divides once by the denominators of everything in its step, so a step does
not depend on how its rows were split over drafters, accumulation or chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from draftline.config.schema import Decay, DPaceDecay, ExponentialDecay, ObjectiveConfig


@dataclass(frozen=True, slots=True)
class LossTerms:
    """Coefficients and settings of the terms of one slot's loss.

    Attributes:
        ce, kl, tv, reverse_kl, cap: coefficients; 0 leaves a term out.
        kl_temperature: softens teacher and draft in the forward KL.
        teacher_top_k: the forward KL's teacher keeps its k best tokens and is renormalised; None keeps all.
        cap_temperature: softens the draft in CAP.
        labels_from_teacher: the label is the teacher's argmax rather than the data's token.
    """

    ce: float = 1.0
    kl: float = 0.0
    tv: float = 0.0
    reverse_kl: float = 0.0
    cap: float = 0.0
    kl_temperature: float = 1.0
    teacher_top_k: int | None = None
    cap_temperature: float = 1.0
    labels_from_teacher: bool = False

    @classmethod
    def of(cls, objective: ObjectiveConfig) -> LossTerms:
        """L = (1 - kl_weight) CE + kl_weight KL + tv_weight TV + reverse_kl_weight RKL + cap_weight CAP."""
        return cls(
            ce=1.0 - objective.kl_weight,
            kl=objective.kl_weight,
            tv=objective.tv_weight,
            reverse_kl=objective.reverse_kl_weight,
            cap=objective.cap_weight,
            kl_temperature=objective.kl_temperature,
            teacher_top_k=objective.teacher_top_k,
            cap_temperature=objective.cap_temperature,
            labels_from_teacher=objective.labels == "target",
        )

    @property
    def needs_teacher(self) -> bool:
        """True if the target's distribution is needed."""
        return self.labels_from_teacher or any((self.kl, self.tv, self.reverse_kl))

    def coefficients(self) -> dict[str, float]:
        """Coefficient by term, in a fixed order."""
        return {"ce": self.ce, "kl": self.kl, "tv": self.tv, "reverse_kl": self.reverse_kl, "cap": self.cap}


def cross_entropy(z_NV: Tensor, label_N: Tensor) -> Tensor:
    """CE = -log q(y), per slot [N]."""
    return F.cross_entropy(z_NV, label_N, reduction="none")


def forward_kl(z_NV: Tensor, t_NV: Tensor, temperature: float = 1.0, top_k: int | None = None) -> Tensor:
    """KL = T^2 * sum P log(P / q) with P = softmax(t / T) and q = softmax(z / T), per slot [N].

    T^2 keeps the gradient's size when T changes (Hinton et al., arXiv 1503.02531, section 2). With `top_k`, P is zero
    outside the teacher's k best tokens (ties with the k-th are kept) and renormalised; q still covers the vocabulary.
    """
    log_p = torch.log_softmax(keep_top_k(t_NV, top_k) / temperature, dim=-1)
    log_q = torch.log_softmax(z_NV / temperature, dim=-1)
    p = log_p.exp()
    return temperature**2 * torch.where(p > 0, p * (log_p - log_q), 0.0).sum(-1)


def total_variation(z_NV: Tensor, t_NV: Tensor) -> Tensor:
    """TV = 1 - sum min(P, q) = sum |P - q| / 2, per slot [N].

    1 - TV is the chance that a draft sampled from q is kept.
    """
    return 0.5 * (torch.softmax(z_NV, dim=-1) - torch.softmax(t_NV, dim=-1)).abs().sum(-1)


def reverse_kl(z_NV: Tensor, t_NV: Tensor) -> Tensor:
    """RKL = sum q log(q / P), per slot [N]. Over the teacher's whole vocabulary: a cut teacher makes it infinite."""
    log_q = torch.log_softmax(z_NV, dim=-1)
    return (log_q.exp() * (log_q - torch.log_softmax(t_NV, dim=-1))).sum(-1)


def confidence_penalty(z_NV: Tensor, label_N: Tensor, temperature: float = 1.0) -> Tensor:
    """CAP = [argmax z = y] * H(softmax(z / T)), per slot: entropy of the slots that are right already.

    LLaDA2.0 (arXiv 2512.15745, Eq. 6) after dParallel (arXiv 2509.26488); no gradient through the choice of slots.
    Both divide by the weight of the right slots alone. Here CAP shares the denominator of all terms, so that
    gradients add up over rows: its pull grows with the share of right slots instead of starting at full size.
    """
    log_q = torch.log_softmax(z_NV / temperature, dim=-1)
    entropy_N = -(log_q.exp() * log_q).sum(-1)
    return torch.where(label_rank(z_NV, label_N) == 0, entropy_N, 0.0)


def label_rank(z_NV: Tensor, label_N: Tensor) -> Tensor:
    """Tokens that come before the label, int32 [N]: 0 means that the draft is right. Ties go to the lower id."""
    with torch.no_grad():
        label_N1 = label_N.unsqueeze(-1)
        z_label_N1 = z_NV.gather(-1, label_N1)
        before_NV = (z_NV == z_label_N1).logical_and_(torch.arange(z_NV.shape[-1], device=z_NV.device) < label_N1)
        before_NV = before_NV.logical_or_(z_NV > z_label_N1)
        return before_NV.view(torch.uint8).sum(-1, dtype=torch.int32)  # twice as fast as a sum of bools on a CPU


def keep_top_k(t_NV: Tensor, top_k: int | None) -> Tensor:
    """Teacher logits [N, V] with all but the k best set to -inf; ties with the k-th stay."""
    if top_k is None or top_k >= t_NV.shape[-1]:
        return t_NV
    kth_N1 = t_NV.topk(top_k, dim=-1).values[..., -1:]
    return t_NV.masked_fill(t_NV < kth_N1, float("-inf"))


def exponential_weights(block_size: int, gamma: float, *, device: torch.device, dtype: torch.dtype) -> Tensor:
    """w_k = exp(-(k - 1) / gamma) for k >= 1, w_0 = 0; shape [B]. DFlash (arXiv 2602.06036)."""
    slots_B = torch.arange(block_size, device=device, dtype=dtype)
    return torch.exp(-(slots_B - 1).clamp(min=0) / gamma) * (slots_B >= 1)


def dpace_weights(ce_AB: Tensor, mask_AB: Tensor, alpha: float) -> Tensor:
    """D-PACE (arXiv 2605.18810): w_k = m_k * sum_{j >= k} m_j * prod_{i <= j} s_i, shape [A, B], without gradient.

    s_i = (1 - alpha) exp(-CE_i) + alpha where m_i, else 1. With alpha = 0 this is the gradient, by the log-probability
    of slot k, of the expected number of accepted drafts; alpha keeps late slots alive while early ones are wrong.
    """
    ce_AB = ce_AB.detach()
    mask = mask_AB.to(ce_AB.dtype)
    smooth_AB = torch.where(mask_AB, (1.0 - alpha) * torch.exp(-ce_AB) + alpha, 1.0)
    reach_AB = smooth_AB.cumprod(-1) * mask
    return reach_AB.flip(-1).cumsum(-1).flip(-1) * mask


def slot_weights(decay: Decay, mask_AB: Tensor, ce_AB: Tensor) -> Tensor:
    """Weight of each slot, shape [A, B], 0 where not supervised.

    Args:
        decay: one of the configured kinds.
        mask_AB: bool, supervised slots; slot 0 is never one.
        ce_AB: cross-entropy of each slot; only D-PACE reads it. All terms share the weight.
    """
    ce_AB = ce_AB.detach()
    if isinstance(decay, DPaceDecay):
        return dpace_weights(ce_AB, mask_AB, decay.alpha)
    if isinstance(decay, ExponentialDecay):
        weights_B = exponential_weights(mask_AB.shape[-1], decay.gamma, device=ce_AB.device, dtype=ce_AB.dtype)
        return mask_AB * weights_B
    return mask_AB.to(ce_AB.dtype)


def denominator(decay: Decay, mask_AB: Tensor, weight_AB: Tensor) -> Tensor:
    """D of one row, a scalar shared by all terms: the sum of weights, or the number of supervised slots for D-PACE.

    D-PACE's weights are part of what it maximises (expected accepted length); dividing by their sum would take back
    the growth of a drafter's reach, and weigh rows by how sure the drafter happens to be of them. speculators divides
    by the same count, plus 1e-5, each rank by itself.
    """
    if isinstance(decay, DPaceDecay):
        return mask_AB.sum().to(weight_AB.dtype)
    return weight_AB.sum()
