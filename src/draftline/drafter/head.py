"""The frozen-head loss: hidden states in, values of all terms and the gradient of the hidden states out.

The head W [V, H] is never trained, so a chunk's logits are needed once only. Per chunk of supervised slots:

    product 1    X W^T      logits [C, V], statistics dtype (fp32 sums of bf16 products)
    statistics   values of all terms and the logits' gradient G [C, V], in the compute dtype
    product 2    G W        gradient of the chunk's hidden states

and the logits are gone: nothing is recomputed, no graph is kept, W gets no gradient. All terms of a slot share that
slot's weight, so the gradient is formed for weight 1 and scaled at the end (D-PACE knows its weights only then).

Slots without weight are dropped before product 1. The others are ordered by the context position they predict from
(p + k - 1): slots of overlapping blocks that share a position stand side by side, and its teacher row is made once for
all of them (twice where a chunk ends between them). At most C draft and C teacher rows of logits are alive at a time.

Which slots those are, in which order, says the plan (`head_plan.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from draftline.drafter import loss
from draftline.drafter.candidates import Candidates
from draftline.drafter.head_chunk import VALUE_FIELDS, TeacherRows, apply_head_, torch_chunk
from draftline.drafter.head_fp8 import Fp8Head, gradient_product_fp8, project_fp8
from draftline.drafter.head_plan import Chunk, HeadPlan
from draftline.drafter.loss import LossTerms
from draftline.drafter.top_tokens import TopTokens
from draftline.products import wide_product
from draftline.records import FrozenHead

HeadForm = Literal["fused", "checkpointed"]
ChunkFunction = Callable[
    [Tensor, FrozenHead, Tensor, LossTerms, TeacherRows | None, torch.dtype | None], tuple[Tensor, Tensor | None]
]


@dataclass(frozen=True, slots=True)
class Teacher:
    """The target's distribution at each context position.

    Attributes:
        head: the target's own head, with its own soft cap and multiplier.
        hidden_TH: the target's last hidden states, after its final norm.
    """

    head: FrozenHead
    hidden_TH: Tensor


@dataclass(frozen=True, slots=True)
class SlotValues:
    """What the head found, per slot [Q], without graph; zeros where a slot was dropped.

    Attributes:
        ce, kl, tv, reverse_kl, cap: values of the terms (0 for terms that are switched off).
        rank: tokens before the label, as a float; 0 means the draft is right.
        confidence: the draft's largest probability.
        agrees: 1 where the data's token is the teacher's argmax; 0 without a teacher.
    """

    ce: Tensor
    kl: Tensor
    tv: Tensor
    reverse_kl: Tensor
    cap: Tensor
    rank: Tensor
    confidence: Tensor
    agrees: Tensor


class HeadOutput:
    """Values of one pass of the head, and the way back to the hidden states.

    Attributes:
        values: per slot.
        unit_gradient_QH: fused form: gradient of each slot's unweighted loss; None without gradient.
    """

    def __init__(self, hidden_QH: Tensor, values: SlotValues, unit_gradient_QH: Tensor | None) -> None:
        self._hidden_QH, self.values, self.unit_gradient_QH = hidden_QH, values, unit_gradient_QH

    def backward(self, weight_Q: Tensor, extra_QH: Tensor | None = None) -> Tensor:
        """Runs the backward of sum(weight * slot loss) from the hidden states on.

        Args:
            extra_QH: a further gradient of the hidden states, of other losses.

        Returns the gradient's size [scalar, statistics dtype]: not finite if anything in it is not.
        """
        assert self.unit_gradient_QH is not None
        gradient_QH = self.unit_gradient_QH.mul_(weight_Q.unsqueeze(-1))
        if extra_QH is not None:
            gradient_QH.add_(extra_QH)
        size = torch.linalg.vector_norm(gradient_QH, dtype=weight_Q.dtype)
        self._hidden_QH.backward(gradient=gradient_QH)
        return size


class _CheckpointedOutput(HeadOutput):
    """Output of the plain form: each chunk's losses keep a graph that recomputes the logits."""

    def __init__(self, hidden_QH: Tensor, values: SlotValues, losses: list[tuple[Tensor, Tensor]]) -> None:
        super().__init__(hidden_QH, values, None)
        self._losses = losses

    def backward(self, weight_Q: Tensor, extra_QH: Tensor | None = None) -> Tensor:
        parts = [(weight_Q[slots_C] * loss_C).sum() for slots_C, loss_C in self._losses]
        if not parts:
            return weight_Q.new_zeros(())
        numerator = torch.stack(parts).sum()
        if extra_QH is None:
            numerator.backward()
            return numerator.detach().abs()
        torch.autograd.backward((numerator, self._hidden_QH), (None, extra_QH.to(self._hidden_QH.dtype)))
        return numerator.detach().abs() + torch.linalg.vector_norm(extra_QH, dtype=numerator.dtype)


@dataclass(frozen=True, slots=True)
class _Sinks:
    """Where chunks write: value table, gradient of the hidden states, likeliest tokens, a selector's candidates."""

    values_FQ: Tensor
    unit_QH: Tensor | None
    top: TopTokens | None = None
    candidates: Candidates | None = None


def run_head(
    hidden_QH: Tensor,
    label_Q: Tensor,
    plan: HeadPlan,
    head: FrozenHead,
    terms: LossTerms,
    teacher: Teacher | None = None,
    *,
    form: HeadForm = "fused",
    candidates: Candidates | None = None,
) -> HeadOutput:
    """Passes the planned slots through the frozen head.

    Args:
        hidden_QH: the drafter's output; the compute dtype is the head weight's.
        label_Q: int64 labels of the data (any value where a slot is dropped).
        plan: from `plan_slots`, of the same Q slots.
        head: the draft's head: the target's weight with the soft cap and multiplier that the export names. An
            `Fp8Head` forms both products in fp8 (fused form only).
        terms: what to form.
        teacher: needed if `terms.needs_teacher`.
        form: "checkpointed" recomputes each chunk's logits in the backward, by autograd: the plain reference.
        candidates: filled with the likeliest tokens of each planned slot, for a candidate selector.
    """
    assert teacher is not None or not terms.needs_teacher
    teacher = teacher if terms.needs_teacher else None
    values_FQ = _empty_values(hidden_QH)
    if form == "checkpointed":
        losses = _checkpointed_chunks(
            hidden_QH, label_Q, plan, head, terms, teacher, _Sinks(values_FQ, None, candidates=candidates)
        )
        return _CheckpointedOutput(hidden_QH, SlotValues(*values_FQ), losses)
    sinks = _Sinks(values_FQ, torch.zeros_like(hidden_QH.detach()), candidates=candidates)
    _fused_pass(hidden_QH, label_Q, plan, head, terms, teacher, sinks)
    return HeadOutput(hidden_QH, SlotValues(*values_FQ), sinks.unit_QH)


def score_head(
    hidden_QH: Tensor,
    label_Q: Tensor,
    plan: HeadPlan,
    head: FrozenHead,
    terms: LossTerms,
    teacher: Teacher | None,
    top: TopTokens | None,
    candidates: Candidates | None = None,
) -> HeadOutput:
    """`run_head` without gradient; `top`, if given, is filled with the likeliest tokens of each planned slot."""
    sinks = _Sinks(_empty_values(hidden_QH), None, top, candidates)
    _fused_pass(hidden_QH, label_Q, plan, head, terms, teacher if terms.needs_teacher else None, sinks)
    return HeadOutput(hidden_QH, SlotValues(*sinks.values_FQ), None)


@torch.no_grad()
def _fused_pass(
    hidden_QH: Tensor,
    label_Q: Tensor,
    plan: HeadPlan,
    head: FrozenHead,
    terms: LossTerms,
    teacher: Teacher | None,
    sinks: _Sinks,
) -> None:
    for chunk in plan.chunks():
        slots_C = plan.order_Q[chunk.start : chunk.stop]
        rows = _teacher_rows(plan, chunk, teacher)
        _fused_chunk(hidden_QH.detach(), label_Q, slots_C, head, terms, rows, sinks)


def _empty_values(hidden_QH: Tensor) -> Tensor:
    dtype = _statistics_dtype(hidden_QH)
    return torch.zeros(len(VALUE_FIELDS), hidden_QH.shape[0], dtype=dtype, device=hidden_QH.device)


@torch.no_grad()
def run_candidates(hidden_QH: Tensor, plan: HeadPlan, head: FrozenHead, candidates: Candidates) -> None:
    """Passes the planned slots through the head for a selector's candidates alone."""
    for chunk in plan.chunks():
        slots_C = plan.order_Q[chunk.start : chunk.stop]
        candidates.take(slots_C, project(hidden_QH[slots_C], head), head)


@torch.no_grad()
def run_top_tokens(hidden_QH: Tensor, plan: HeadPlan, head: FrozenHead, top: TopTokens) -> None:
    """Passes the planned slots through the head for their likeliest tokens alone, written into `top`."""
    for chunk in plan.chunks():
        slots_C = plan.order_Q[chunk.start : chunk.stop]
        top.take(slots_C, apply_head_(project(hidden_QH[slots_C], head), head))


def project(x_NH: Tensor, head: FrozenHead) -> Tensor:
    """Raw products x W^T [N, V] in the statistics dtype. The only place where rows of logits are made."""
    if isinstance(head, Fp8Head):
        return project_fp8(x_NH, head)
    return product(x_NH.to(head.weight_VH.dtype), head.weight_VH.t())


def product(a: Tensor, b: Tensor) -> Tensor:
    """a [M, K] @ b [K, N], summed and returned in fp32 (fp64 for fp64 factors): logits in bf16 would drown q - P."""
    if a.dtype in (torch.float32, torch.float64):
        return a @ b if a.is_cuda else wide_product(a, b)
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return _upcast_product(a, b)


def _upcast_product(a: Tensor, b: Tensor, block: int = 8192) -> Tensor:
    """CPUs cannot widen inside a product; widens `b` a block at a time, along its longer side."""
    out = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float32, device=a.device)
    if b.shape[0] > b.shape[1]:
        for i in range(0, b.shape[0], block):
            out.addmm_(a[:, i : i + block].float(), b[i : i + block].float())
    else:
        for i in range(0, b.shape[1], block):
            torch.mm(a.float(), b[:, i : i + block].float(), out=out[:, i : i + block])
    return out


def _statistics_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _teacher_rows(plan: HeadPlan, chunk: Chunk, teacher: Teacher | None) -> TeacherRows | None:
    if teacher is None:
        return None
    positions_U = plan.positions_Q[chunk.first : chunk.last + 1]
    logits_UV = apply_head_(project(teacher.hidden_TH[positions_U], teacher.head), teacher.head)
    return TeacherRows(logits_UV, plan.rank_Q[chunk.start : chunk.stop] - chunk.first)


def _fused_chunk(
    hidden_QH: Tensor,
    label_Q: Tensor,
    slots_C: Tensor,
    head: FrozenHead,
    terms: LossTerms,
    rows: TeacherRows | None,
    sinks: _Sinks,
) -> None:
    """Forward and gradient of one chunk, written into `sinks`. Its logits die with this call."""
    raw_CV, unit_QH = project(hidden_QH[slots_C], head), sinks.unit_QH
    if sinks.candidates is not None:
        sinks.candidates.take(slots_C, raw_CV, head, label_Q[slots_C])
    if sinks.top is not None:
        raw_CV = apply_head_(raw_CV, head)
        sinks.top.take(slots_C, raw_CV)
        head = FrozenHead(head.weight_VH)  # bias, multiplier and soft cap are in these logits already
    gradient_dtype = None if unit_QH is None else head.weight_VH.dtype
    form_chunk = _chunk_function(raw_CV)
    values_FC, gradient_CV = form_chunk(raw_CV, head, label_Q[slots_C], terms, rows, gradient_dtype)
    sinks.values_FQ[:, slots_C] = values_FC
    if gradient_CV is not None and unit_QH is not None:
        if isinstance(head, Fp8Head):
            gradient_CH = gradient_product_fp8(gradient_CV, head)
        else:
            gradient_CH = product(gradient_CV, head.weight_VH)
        gradient_CH.mul_(head.multiplier)
        unit_QH.index_copy_(0, slots_C, gradient_CH.to(unit_QH.dtype))


def _chunk_function(raw_CV: Tensor) -> ChunkFunction:
    """Triton kernels on a GPU that has them, for fp32 statistics; torch operations elsewhere."""
    if raw_CV.is_cuda and raw_CV.dtype == torch.float32 and _has_triton():
        from draftline.drafter.head_gpu import kernel_chunk

        return kernel_chunk
    return torch_chunk


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def _checkpointed_chunks(
    hidden_QH: Tensor,
    label_Q: Tensor,
    plan: HeadPlan,
    head: FrozenHead,
    terms: LossTerms,
    teacher: Teacher | None,
    sinks: _Sinks,
) -> list[tuple[Tensor, Tensor]]:
    """(slots, loss of each with graph) per chunk. Logits live in a chunk's forward and, made again, in its backward."""

    def chunk_values(x_CH: Tensor, label_C: Tensor, chunk: Chunk) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            rows = _teacher_rows(plan, chunk, teacher)
        z_CV = _differentiable_logits(x_CH, head)
        if sinks.candidates is not None:
            slots_C = plan.order_Q[chunk.start : chunk.stop]
            sinks.candidates.take(slots_C, z_CV.detach(), FrozenHead(head.weight_VH), label_C)
        return _plain_values(z_CV, label_C, terms, rows)

    losses = []
    for chunk in plan.chunks():
        slots_C = plan.order_Q[chunk.start : chunk.stop]
        loss_C, values_FC = checkpoint(
            chunk_values, hidden_QH[slots_C], label_Q[slots_C], chunk, use_reentrant=False, preserve_rng_state=False
        )
        sinks.values_FQ[:, slots_C] = values_FC
        losses.append((slots_C, loss_C))
    return losses


class _WideProduct(torch.autograd.Function):
    """x W^T in the statistics dtype, with both products in the compute dtype and no gradient for W."""

    @staticmethod
    def forward(ctx: Any, x_CH: Tensor, weight_VH: Tensor) -> Tensor:
        ctx.save_for_backward(weight_VH)
        return product(x_CH, weight_VH.t())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (weight_VH,) = ctx.saved_tensors
        return product(gradients[0].to(weight_VH.dtype), weight_VH).to(weight_VH.dtype), None


def _differentiable_logits(x_CH: Tensor, head: FrozenHead) -> Tensor:
    weight_VH = head.weight_VH.detach()
    raw_CV = _WideProduct.apply(x_CH.to(weight_VH.dtype), weight_VH)
    if head.bias_V is not None:
        raw_CV = raw_CV + head.bias_V.detach().to(raw_CV.dtype)
    z_CV = head.multiplier * raw_CV if head.multiplier != 1.0 else raw_CV
    return z_CV if head.softcap is None else head.softcap * torch.tanh(z_CV / head.softcap)


def _plain_values(z_CV: Tensor, label_C: Tensor, terms: LossTerms, rows: TeacherRows | None) -> tuple[Tensor, Tensor]:
    """(slot loss with graph, value table without) from the plain forms of `loss.py`."""
    values = dict.fromkeys(VALUE_FIELDS, z_CV.new_zeros(z_CV.shape[0]))
    if rows is not None:
        t_CV = rows.logits_UV[rows.row_C]
        best_C = t_CV.argmax(-1)
        values["agrees"] = (best_C == label_C).to(z_CV.dtype)
        label_C = best_C if terms.labels_from_teacher else label_C
        if terms.kl:
            values["kl"] = loss.forward_kl(z_CV, t_CV, terms.kl_temperature, terms.teacher_top_k)
        if terms.tv:
            values["tv"] = loss.total_variation(z_CV, t_CV)
        if terms.reverse_kl:
            values["reverse_kl"] = loss.reverse_kl(z_CV, t_CV)
    values["ce"] = loss.cross_entropy(z_CV, label_C)
    if terms.cap:
        values["cap"] = loss.confidence_penalty(z_CV, label_C, terms.cap_temperature)
    total_C = sum((c * values[name] for name, c in terms.coefficients().items() if c), z_CV.new_zeros(z_CV.shape[0]))
    with torch.no_grad():
        values["rank"] = loss.label_rank(z_CV, label_C).to(z_CV.dtype)
        values["confidence"] = torch.exp(z_CV.amax(-1) - z_CV.logsumexp(-1))
        table_FC = torch.stack([v.detach() for v in values.values()])
    return total_C, table_FC
