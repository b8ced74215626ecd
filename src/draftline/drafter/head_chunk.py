"""One chunk of the frozen-head loss in plain torch operations: values of all terms, and the gradient of the logits.

Nothing here keeps a graph; every derivative is written out. z are logits after multiplier, bias and soft cap, t the
teacher's, q = softmax(z), P = softmax(t), e_y the one-hot label, all per slot:

    CE    q - e_y
    KL    T (q_T - P_T)                               q_T = softmax(z / T), with the term's factor T^2
    TV    q (g - sum q g),  g = sign(q - P) / 2
    RKL   q (log(q / P) - RKL)
    CAP   -c q_T (log q_T + H) / T                    c = 1 where the draft is right
    cap   the soft cap's derivative 1 - (z / c)^2 multiplies the sum

KL and RKL are summed as P (e^d - 1 - d) with d = log(q / P), whose terms are never negative: the usual sum of
P log(P / q) cancels where q is close to P.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftline.drafter.loss import LossTerms, keep_top_k, label_rank
from draftline.records import FrozenHead

# Rows of the value table that a chunk fills; `rank` counts tokens before the label, `agrees` is 1 where the data's
# token is the teacher's argmax.
VALUE_FIELDS = ("ce", "kl", "tv", "reverse_kl", "cap", "rank", "confidence", "agrees")

# Elements of logits that a CPU works on at once: the dozens of passes over them then find them in its cache, and in
# memory that the allocator keeps, where whole chunks would be mapped, zeroed and unmapped in each pass.
_CACHED_ELEMENTS = 2**18

# From this log(q / P) on, P (1 + log(q / P)) is less than rounding of q, and e^d may overflow.
_FAR = 42.0


@dataclass(frozen=True, slots=True)
class TeacherRows:
    """Teacher logits of the context positions that a chunk's slots predict from, one row a position.

    Attributes:
        logits_UV: in the statistics dtype, soft-capped.
        row_C: int64, which of the U rows belongs to each of the chunk's C slots.
    """

    logits_UV: Tensor
    row_C: Tensor

    def part(self, start: int, stop: int) -> TeacherRows:
        """The teacher of slots start..stop, with no other rows. Reads `row_C` on the host."""
        row_C = self.row_C[start:stop]
        first, last = int(row_C.min()), int(row_C.max())
        return TeacherRows(self.logits_UV[first : last + 1], row_C - first)


def apply_head_(raw_CV: Tensor, head: FrozenHead) -> Tensor:
    """softcap(multiplier * (raw + bias)) [C, V], in place."""
    if head.bias_V is not None:
        raw_CV.add_(head.bias_V.to(raw_CV.dtype))
    if head.multiplier != 1.0:
        raw_CV.mul_(head.multiplier)
    if head.softcap is not None:
        raw_CV.div_(head.softcap).tanh_().mul_(head.softcap)
    return raw_CV


def excess(p: Tensor, q: Tensor, log_ratio: Tensor) -> Tensor:
    """p * (e^d - 1 - d) for d = log(q / p), all of one shape: terms of KL(p, q), each at least 0; q where p is 0."""
    terms = torch.expm1(log_ratio).sub_(log_ratio).clamp_(min=0).mul_(p)
    return torch.where(log_ratio < _FAR, terms, q)


def torch_chunk(
    raw_CV: Tensor,
    head: FrozenHead,
    label_C: Tensor,
    terms: LossTerms,
    teacher: TeacherRows | None,
    gradient_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor | None]:
    """Values [F, C] in the order of VALUE_FIELDS, and the gradient [C, V] by the raw product, without multiplier.

    Args:
        raw_CV: products x W^T in the statistics dtype; used up.
        head: its bias, multiplier and soft cap are applied here.
        label_C: int64 labels of the data.
        terms: what to form.
        teacher: needed if `terms.needs_teacher`.
        gradient_dtype: dtype of the gradient; None forms none.
    """
    n_slots, n_vocab = raw_CV.shape
    together = max(1, _CACHED_ELEMENTS // n_vocab) if raw_CV.device.type == "cpu" else n_slots
    if n_slots <= together:
        values_FC, gradient_CV = _few_rows(raw_CV, head, label_C, terms, teacher, gradient_dtype is not None)
        return values_FC, None if gradient_CV is None else gradient_CV.to(gradient_dtype)
    values_FC = raw_CV.new_empty(len(VALUE_FIELDS), n_slots)
    for start in range(0, n_slots, together):
        stop = min(start + together, n_slots)
        rows = None if teacher is None else teacher.part(start, stop)
        raw = raw_CV[start:stop]
        values, gradient = _few_rows(raw, head, label_C[start:stop], terms, rows, gradient_dtype is not None)
        values_FC[:, start:stop] = values
        if gradient is not None:
            raw.copy_(gradient)
    return values_FC, None if gradient_dtype is None else raw_CV.to(gradient_dtype)


def _few_rows(
    raw_CV: Tensor,
    head: FrozenHead,
    label_C: Tensor,
    terms: LossTerms,
    teacher: TeacherRows | None,
    with_gradient: bool,
) -> tuple[Tensor, Tensor | None]:
    """Values [F, C] and the gradient [C, V] in the statistics dtype."""
    chunk_loss = ChunkLoss(apply_head_(raw_CV, head), label_C, head, terms, teacher)
    gradient_CV = chunk_loss.run(with_gradient=with_gradient)
    return torch.stack([chunk_loss.values[name] for name in VALUE_FIELDS]), gradient_CV


class ChunkLoss:
    """Values and logit gradient of one chunk. `z_CV` is used up: it holds nothing of meaning afterwards.

    Args:
        z_CV: the draft's logits in the statistics dtype.
        label_C: int64 labels of the data.
        head: the draft's head (its soft cap enters the gradient).
        terms: what to form.
        teacher: needed if `terms.needs_teacher`.
    """

    def __init__(
        self, z_CV: Tensor, label_C: Tensor, head: FrozenHead, terms: LossTerms, teacher: TeacherRows | None
    ) -> None:
        self._z, self._terms, self._teacher, self._softcap = z_CV, terms, teacher, head.softcap
        self.values = dict.fromkeys(VALUE_FIELDS, z_CV.new_zeros(z_CV.shape[0]))
        self._label = label_C
        if teacher is not None:
            best_C = teacher.logits_UV.argmax(-1)[teacher.row_C]
            self.values["agrees"] = (best_C == label_C).to(z_CV.dtype)
            if terms.labels_from_teacher:
                self._label = best_C
        peak_C1 = z_CV.amax(-1, keepdim=True)
        q_CV = (z_CV - peak_C1).exp_()
        total_C1 = q_CV.sum(-1, keepdim=True)
        self._q, self._lse = q_CV.div_(total_C1), peak_C1 + total_C1.log()
        self.values["confidence"] = (1 / total_C1).squeeze(-1)
        self.values["ce"] = (self._lse - z_CV.gather(-1, self._label.unsqueeze(-1))).squeeze(-1)
        self._rank = label_rank(z_CV, self._label)
        self.values["rank"] = self._rank.to(z_CV.dtype)

    def run(self, with_gradient: bool) -> Tensor | None:
        """Fills `values`; returns the gradient [C, V] of sum(coefficient * term) by the raw product (no multiplier)."""
        extra = [self._kl(), self._tv(), self._reverse_kl(), self._cap()] if self._has_extras() else []
        if not with_gradient:
            return None
        gradient_CV = self._cross_entropy_gradient()
        for part_CV in extra:
            if part_CV is not None:
                gradient_CV.add_(part_CV)
        if self._softcap is not None:
            gradient_CV.mul_(self._z.div_(self._softcap).square_().neg_().add_(1.0))
        return gradient_CV

    def _has_extras(self) -> bool:
        return any((self._terms.kl, self._terms.tv, self._terms.reverse_kl, self._terms.cap))

    def _cross_entropy_gradient(self) -> Tensor:
        weight = self._terms.ce
        gradient_CV = self._q if weight == 1.0 else self._q.mul_(weight)
        label_C1 = self._label.unsqueeze(-1)
        return gradient_CV.scatter_add_(-1, label_C1, torch.full_like(self._lse, -weight))

    def _softened(self, temperature: float) -> tuple[Tensor, Tensor]:
        """(z / T, its log-sum-exp [C, 1])."""
        if temperature == 1.0:
            return self._z, self._lse
        scaled_CV = self._z / temperature
        return scaled_CV, scaled_CV.logsumexp(-1, keepdim=True)

    def _against_teacher(self, temperature: float, top_k: int | None) -> tuple[Tensor, Tensor, Tensor]:
        """(P, q, log(q / P)), each [C, V], at a temperature; q is shared, not to be written to.

        The difference of logits comes first: it is exact.
        """
        assert self._teacher is not None
        t_UV = keep_top_k(self._teacher.logits_UV, top_k)
        if temperature != 1.0:
            t_UV = t_UV / temperature
        t_lse_C1 = t_UV.logsumexp(-1, keepdim=True)[self._teacher.row_C]
        t_CV = t_UV[self._teacher.row_C]
        z_CV, lse_C1 = self._softened(temperature)
        log_ratio_CV = (z_CV - t_CV).sub_(lse_C1 - t_lse_C1)
        q_CV = self._q if temperature == 1.0 else (z_CV - lse_C1).exp_()
        return t_CV.sub_(t_lse_C1).exp_(), q_CV, log_ratio_CV

    def _kl(self) -> Tensor | None:
        weight, temperature = self._terms.kl, self._terms.kl_temperature
        if not weight:
            return None
        p_CV, q_CV, log_ratio_CV = self._against_teacher(temperature, self._terms.teacher_top_k)
        self.values["kl"] = temperature**2 * excess(p_CV, q_CV, log_ratio_CV).sum(-1)
        return (q_CV - p_CV).mul_(weight * temperature)

    def _tv(self) -> Tensor | None:
        if not self._terms.tv:
            return None
        p_CV, q_CV, _ = self._against_teacher(1.0, None)
        difference_CV = q_CV - p_CV
        self.values["tv"] = 0.5 * difference_CV.abs().sum(-1)
        slope_CV = difference_CV.sign_().mul_(0.5)
        mean_C1 = (q_CV * slope_CV).sum(-1, keepdim=True)
        return slope_CV.sub_(mean_C1).mul_(q_CV).mul_(self._terms.tv)

    def _reverse_kl(self) -> Tensor | None:
        if not self._terms.reverse_kl:
            return None
        p_CV, q_CV, log_ratio_CV = self._against_teacher(1.0, None)
        value_C = excess(q_CV, p_CV, -log_ratio_CV).sum(-1)
        self.values["reverse_kl"] = value_C
        return log_ratio_CV.sub_(value_C.unsqueeze(-1)).mul_(q_CV).mul_(self._terms.reverse_kl)

    def _cap(self) -> Tensor | None:
        weight, temperature = self._terms.cap, self._terms.cap_temperature
        if not weight:
            return None
        z_CV, lse_C1 = self._softened(temperature)
        log_q_CV = z_CV - lse_C1
        q_CV = log_q_CV.exp()
        entropy_C1 = -(q_CV * log_q_CV).sum(-1, keepdim=True)
        right_C1 = (self._rank == 0).to(z_CV.dtype).unsqueeze(-1)
        self.values["cap"] = (right_C1 * entropy_C1).squeeze(-1)
        return log_q_CV.add_(entropy_C1).mul_(q_CV).mul_(right_C1 * (-weight / temperature))
