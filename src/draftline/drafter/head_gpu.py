"""One chunk of the frozen-head loss on a GPU: launches the kernels of `head_kernels.py`.

The same contract, values and gradient as `head_chunk.torch_chunk`. Import only where Triton is installed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftline.drafter.head_chunk import VALUE_FIELDS, TeacherRows
from draftline.drafter.head_kernels import (
    DISTANCES,
    STATISTICS,
    distances_kernel,
    gradient_kernel,
    quantize_rows_kernel,
    row_statistics_kernel,
)
from draftline.drafter.loss import LossTerms, keep_top_k
from draftline.records import FrozenHead

# Elements of a row that a program holds at a time, and its warps: two loads of 16 bytes a thread, and few enough
# registers (64 for CE, KL and CAP) for four programs on a multiprocessor.
_BLOCK = 2048
_WARPS = 8


@dataclass(frozen=True, slots=True)
class _TeacherTable:
    """Teacher rows and their log-sum-exps; `kl` is the teacher of the forward KL (cut to its best k, tempered)."""

    logits_UV: Tensor
    kl_logits_UV: Tensor
    row_C: Tensor
    lse_U: Tensor
    kl_lse_U: Tensor
    argmax_U: Tensor


def kernel_chunk(
    raw_CV: Tensor,
    head: FrozenHead,
    label_C: Tensor,
    terms: LossTerms,
    teacher: TeacherRows | None,
    gradient_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor | None]:
    """Values [F, C] in the order of VALUE_FIELDS, and the gradient [C, V] by the raw product, without multiplier.

    Same contract as `head_chunk.torch_chunk`; fp32 logits only.
    """
    with torch.cuda.device_of(raw_CV):  # Triton launches on the current device
        return _launch_chunk(raw_CV, head, label_C, terms, teacher, gradient_dtype)


def _launch_chunk(
    raw_CV: Tensor,
    head: FrozenHead,
    label_C: Tensor,
    terms: LossTerms,
    teacher: TeacherRows | None,
    gradient_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor | None]:
    """KL's value comes from the gradient kernel, unless the distances have to be read for TV and RKL anyway."""
    n_rows = raw_CV.shape[0]
    rows = None if teacher is None else _teacher_table(teacher, terms)
    agrees_C = raw_CV.new_zeros(n_rows)
    if rows is not None:
        best_C = rows.argmax_U[rows.row_C]
        agrees_C = (best_C == label_C).to(raw_CV.dtype)
        label_C = best_C if terms.labels_from_teacher else label_C
    label_C = label_C.contiguous()
    table = _statistics(raw_CV, head, label_C, terms)
    distance_C4 = raw_CV.new_zeros(n_rows, len(DISTANCES))
    full = bool(terms.tv or terms.reverse_kl)
    kl_first = bool(terms.kl) and (full or gradient_dtype is None)
    if rows is not None and (full or kl_first):
        _launch_distances(raw_CV, head, table, rows, terms, distance_C4, full)
    gradient_CV = None
    if gradient_dtype is not None:
        gradient_CV = torch.empty(raw_CV.shape, dtype=gradient_dtype, device=raw_CV.device)
        _launch_gradient(raw_CV, head, label_C, table, rows, terms, distance_C4, gradient_CV, kl_first)
    return _values(table, distance_C4, agrees_C, terms), gradient_CV


def quantize_rows_kernel_form(
    gradient_CV: Tensor, dtype: torch.dtype, dtype_max: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `head_fp8.quantize_rows`: the same in one kernel, two reads of the gradient and one write of fp8.

    Args:
        dtype, dtype_max: an fp8 type and its largest finite value.
    """
    n_rows, n_vocab = gradient_CV.shape
    g8_CV = torch.empty(gradient_CV.shape, dtype=dtype, device=gradient_CV.device)
    scale_C, value_C = (torch.empty(n_rows, dtype=torch.float32, device=gradient_CV.device) for _ in range(2))
    largest_C = torch.empty(n_rows, dtype=torch.int64, device=gradient_CV.device)
    with torch.cuda.device_of(gradient_CV):
        quantize_rows_kernel[(n_rows,)](
            gradient_CV, g8_CV, scale_C, largest_C, value_C, n_vocab, dtype_max, **_launch_options()
        )
    return g8_CV, scale_C, largest_C, value_C


def _values(table_C8: Tensor, distance_C4: Tensor, agrees_C: Tensor, terms: LossTerms) -> Tensor:
    zero_C = torch.zeros_like(agrees_C)
    row = dict(zip(STATISTICS, table_C8.unbind(-1), strict=True))
    distance = dict(zip(DISTANCES, distance_C4.unbind(-1), strict=True))
    values = {
        "ce": row["lse"] - row["label_logit"],
        "kl": distance["kl"] * terms.kl_temperature**2 if terms.kl else zero_C,
        "tv": distance["tv"] if terms.tv else zero_C,
        "reverse_kl": distance["reverse_kl"] if terms.reverse_kl else zero_C,
        "cap": torch.where(row["rank"] == 0, row["entropy"], 0.0) if terms.cap else zero_C,
        "rank": row["rank"],
        "confidence": torch.exp(row["peak"] - row["lse"]),
        "agrees": agrees_C,
    }
    return torch.stack([values[name] for name in VALUE_FIELDS])


def _teacher_table(teacher: TeacherRows, terms: LossTerms) -> _TeacherTable:
    t_UV = teacher.logits_UV
    kl_UV = keep_top_k(t_UV, terms.teacher_top_k) if terms.kl else t_UV
    plain = FrozenHead(t_UV)  # teacher logits come finished: no bias, multiplier or soft cap
    any_label_U = torch.zeros(t_UV.shape[0], dtype=torch.int64, device=t_UV.device)
    row = dict(zip(STATISTICS, _statistics(t_UV, plain, any_label_U, terms, argmax=True).t().contiguous(), strict=True))
    kl_lse_U = row["lse_kl"]
    if kl_UV is not t_UV:
        kl_lse_U = (kl_UV / terms.kl_temperature).logsumexp(-1)
    return _TeacherTable(
        logits_UV=t_UV,
        kl_logits_UV=kl_UV,
        row_C=teacher.row_C.contiguous(),
        lse_U=row["lse"],
        kl_lse_U=kl_lse_U,
        argmax_U=row["argmax"].long(),
    )


def _statistics(raw_CV: Tensor, head: FrozenHead, label_C: Tensor, terms: LossTerms, *, argmax: bool = False) -> Tensor:
    table_C8 = raw_CV.new_zeros(raw_CV.shape[0], len(STATISTICS))
    row_statistics_kernel[(raw_CV.shape[0],)](
        raw_CV,
        label_C,
        *_head_pointers(raw_CV, head),
        table_C8,
        raw_CV.shape[1],
        *_head_numbers(head),
        1.0 / terms.kl_temperature,
        1.0 / terms.cap_temperature,
        **_head_flags(head),
        SOFT_KL=bool(terms.kl) and terms.kl_temperature != 1.0,
        ENTROPY=bool(terms.cap) and not argmax,
        ARGMAX=argmax,
        **_launch_options(),
    )
    return table_C8


def _launch_distances(
    raw_CV: Tensor,
    head: FrozenHead,
    table_C8: Tensor,
    rows: _TeacherTable,
    terms: LossTerms,
    out_C4: Tensor,
    full: bool,
) -> None:
    distances_kernel[(raw_CV.shape[0],)](
        raw_CV,
        *_head_pointers(raw_CV, head),
        table_C8,
        *_teacher_pointers(rows),
        out_C4,
        raw_CV.shape[1],
        *_head_numbers(head),
        1.0 / terms.kl_temperature,
        **_head_flags(head),
        KL=bool(terms.kl),
        FULL=full,
        **_launch_options(),
    )


def _launch_gradient(
    raw_CV: Tensor,
    head: FrozenHead,
    label_C: Tensor,
    table_C8: Tensor,
    rows: _TeacherTable | None,
    terms: LossTerms,
    distance_C4: Tensor,
    out_CV: Tensor,
    kl_is_known: bool,
) -> None:
    unused = (raw_CV, raw_CV, label_C, table_C8, table_C8)
    with_kl = bool(terms.kl) and rows is not None
    gradient_kernel[(raw_CV.shape[0],)](
        raw_CV,
        label_C,
        *_head_pointers(raw_CV, head),
        table_C8,
        *(unused if rows is None else _teacher_pointers(rows)),
        distance_C4,
        out_CV,
        raw_CV.shape[1],
        *_head_numbers(head),
        1.0 / terms.kl_temperature,
        1.0 / terms.cap_temperature,
        terms.ce,
        terms.kl * terms.kl_temperature,
        terms.tv,
        terms.reverse_kl,
        terms.cap,
        **_head_flags(head),
        KL=with_kl,
        KL_VALUE=with_kl and not kl_is_known,
        FULL=bool(terms.tv or terms.reverse_kl) and rows is not None,
        ENTROPY=bool(terms.cap),
        **_launch_options(),
    )


def _head_pointers(raw_CV: Tensor, head: FrozenHead) -> tuple[Tensor]:
    return (raw_CV if head.bias_V is None else head.bias_V,)


def _teacher_pointers(rows: _TeacherTable) -> tuple[Tensor, ...]:
    return rows.logits_UV, rows.kl_logits_UV, rows.row_C, rows.lse_U, rows.kl_lse_U


def _head_numbers(head: FrozenHead) -> tuple[float, float]:
    return float(head.multiplier), float(head.softcap or 1.0)


def _head_flags(head: FrozenHead) -> dict[str, bool]:
    return {"HAS_BIAS": head.bias_V is not None, "HAS_CAP": head.softcap is not None}


def _launch_options() -> dict[str, int]:
    return {"BLOCK": _BLOCK, "num_warps": _WARPS}
