"""A dense, plain reference of the training objective, and small rows and drafters to hold it against.

The reference takes one slot after the other, writes every formula out as in docs and papers, and leaves the gradient to
autograd. It shares no code with the package.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from draftline.config.drafter_spec import DrafterSpec
from draftline.drafter.loss import LossTerms
from draftline.records import FrozenEmbedding, FrozenHead, HiddenStateRow
from spec_kit import small_spec


@dataclass
class Case:
    """Hidden states of A blocks of B slots, a head, a teacher over T positions, labels and masks."""

    hidden_QH: Tensor
    label_Q: Tensor
    mask_AB: Tensor
    teacher_index_Q: Tensor
    head: FrozenHead
    teacher_head: FrozenHead
    teacher_hidden_TH: Tensor


def make_case(
    *,
    blocks: int = 6,
    block_size: int = 5,
    hidden: int = 8,
    vocab: int = 37,
    context: int = 17,
    masks: str = "on",
    head_kind: str = "plain",
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Case:
    """A random case. `masks`: on (blocks cut at random slots), off (all supervised), zero (none)."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)

    anchors_A = torch.randint(1, context - block_size, (blocks,), generator=g)
    slots_B = torch.arange(block_size)
    cut_A = torch.randint(0, block_size + 1, (blocks,), generator=g)
    mask_AB = (slots_B < cut_A[:, None]) if masks == "on" else torch.full((blocks, block_size), masks == "off")
    mask_AB = mask_AB & (slots_B >= 1)
    weight = normal(vocab, hidden)
    bias = normal(vocab) if head_kind == "odd" else None
    head = FrozenHead(
        weight, bias, multiplier=1.3 if bias is not None else 1.0, softcap=4.0 if bias is not None else None
    )
    teacher_head = replace(head, multiplier=0.9, softcap=6.0) if head_kind == "odd" else head
    return Case(
        hidden_QH=normal(blocks * block_size, hidden).requires_grad_(),
        label_Q=torch.randint(0, vocab, (blocks * block_size,), generator=g),
        mask_AB=mask_AB,
        teacher_index_Q=(anchors_A[:, None] + slots_B - 1).flatten(),
        head=head,
        teacher_head=teacher_head,
        teacher_hidden_TH=normal(context, hidden),
    )


def dense_logits(hidden_H: Tensor, head: FrozenHead) -> Tensor:
    """softcap(multiplier * (W h + b)), in fp64."""
    z = head.weight_VH.double() @ hidden_H.double()
    if head.bias_V is not None:
        z = z + head.bias_V.double()
    z = head.multiplier * z
    return z if head.softcap is None else head.softcap * torch.tanh(z / head.softcap)


def dense_slot_terms(z_V: Tensor, label: int, t_V: Tensor, terms: LossTerms) -> tuple[dict[str, Tensor], int]:
    """Every term of one slot, and the label that was used."""
    if terms.labels_from_teacher:
        label = int(t_V.argmax())
    q, p = torch.softmax(z_V, 0), torch.softmax(t_V, 0)
    tau, top = terms.kl_temperature, terms.teacher_top_k
    soft_q = torch.softmax(z_V / tau, 0)
    soft_p = torch.softmax(t_V / tau, 0)
    if top is not None:
        best = t_V.topk(top).indices
        kept = torch.zeros_like(soft_p)
        kept[best] = soft_p[best]
        soft_p = kept / kept.sum()
    has = soft_p > 0
    cap_q = torch.softmax(z_V / terms.cap_temperature, 0)
    right = int(z_V.argmax()) == label
    return {
        "ce": -torch.log(q[label]),
        "kl": tau**2 * (soft_p[has] * torch.log(soft_p[has] / soft_q[has])).sum(),
        "tv": 1 - torch.minimum(p, q).sum(),
        "reverse_kl": (q * torch.log(q / p)).sum(),
        "cap": -(cap_q * torch.log(cap_q)).sum() * (1.0 if right else 0.0),
    }, label


@dataclass
class DenseResult:
    """What the reference found."""

    numerator: Tensor
    denominator: float
    gradient_QH: Tensor
    terms: dict[str, float] = field(default_factory=dict)


def dense_reference(case: Case, terms: LossTerms, decay: tuple[str, float]) -> DenseResult:
    """Loss and gradient slot by slot. `decay` is ("exponential", gamma), ("dpace", alpha) or ("none", 0)."""
    blocks, block_size = case.mask_AB.shape
    hidden_QH = case.hidden_QH.detach().double().requires_grad_()
    numerator, denominator = torch.zeros((), dtype=torch.float64), 0.0
    sums = dict.fromkeys(terms.coefficients(), 0.0)
    for a in range(blocks):
        found = {}
        for k in range(block_size):
            if case.mask_AB[a, k]:
                slot = a * block_size + k
                t_V = dense_logits(case.teacher_hidden_TH[case.teacher_index_Q[slot]], case.teacher_head)
                z_V = dense_logits(hidden_QH[slot], case.head)
                found[k], _ = dense_slot_terms(z_V, int(case.label_Q[slot]), t_V, terms)
        weights = dense_weights({k: float(v["ce"].detach()) for k, v in found.items()}, decay)
        for k, values in found.items():
            for name, c in terms.coefficients().items():
                if c:
                    numerator = numerator + c * weights[k] * values[name]
                    sums[name] += weights[k] * float(values[name].detach())
            denominator += 1.0 if decay[0] == "dpace" else weights[k]
    if numerator.requires_grad:
        numerator.backward()
    gradient = torch.zeros_like(hidden_QH) if hidden_QH.grad is None else hidden_QH.grad
    return DenseResult(numerator.detach(), denominator, gradient, sums)


def dense_weights(ce: dict[int, float], decay: tuple[str, float]) -> dict[int, float]:
    """Weight of each supervised slot of one block."""
    kind, value = decay
    if kind == "exponential":
        return {k: math.exp(-(k - 1) / value) for k in ce}
    if kind == "none":
        return dict.fromkeys(ce, 1.0)
    reach, product = {}, 1.0
    for k in sorted(ce):
        product *= (1 - value) * math.exp(-ce[k]) + value
        reach[k] = product
    return {k: sum(r for j, r in reach.items() if j >= k) for k in ce}


def tiny_spec(**changes: Any) -> DrafterSpec:
    """The small drafter, reading layers 1 and 3."""
    return small_spec(**({"taps": (1, 3), "max_position_embeddings": 256} | changes))


def random_row(
    lengths: tuple[int, ...],
    spec: DrafterSpec,
    *,
    prompt: int = 3,
    seed: int = 0,
    sample_ids: tuple[str, ...] | None = None,
    dtype: torch.dtype = torch.float32,
) -> HiddenStateRow:
    """Samples with random tokens and features; the first `prompt` tokens of each are unsupervised."""
    n_features = len(spec.taps) * spec.hidden_size
    parts = []
    for i, n in enumerate(lengths):
        g = torch.Generator().manual_seed(1000 * seed + i)
        parts.append(
            {
                "input_ids_T": torch.randint(0, spec.vocab_size - 1, (n,), generator=g),
                "loss_mask_T": torch.arange(n) >= prompt,
                "document_ids_T": torch.full((n,), i, dtype=torch.int32),
                "position_ids_T": torch.arange(n),
                "taps_TF": torch.randn(n, n_features, generator=g).to(dtype),
                "final_hidden_TH": torch.randn(n, spec.hidden_size, generator=g).to(dtype),
            }
        )
    return HiddenStateRow(
        row_id=0,
        epoch=0,
        sample_ids=sample_ids or tuple(f"sample-{seed}-{i}" for i in range(len(lengths))),
        lengths=lengths,
        final_hidden_norm="post",
        tap_layer_ids=spec.taps,
        **{name: torch.cat([part[name] for part in parts]) for name in parts[0]},
    )


def split_row(row: HiddenStateRow) -> list[HiddenStateRow]:
    """One row for each sample."""
    rows, start = [], 0
    for i, n in enumerate(row.lengths):
        part = slice(start, start + n)
        tensors = {
            name: getattr(row, name)[part]
            for name in ("input_ids_T", "loss_mask_T", "position_ids_T", "taps_TF", "final_hidden_TH")
        }
        rows.append(
            replace(
                row,
                sample_ids=(row.sample_ids[i],),
                lengths=(n,),
                document_ids_T=torch.zeros(n, dtype=torch.int32),
                **tensors,
            )
        )
        start += n
    return rows


def random_head(spec: DrafterSpec, dtype: torch.dtype = torch.float32, seed: int = 5) -> FrozenHead:
    g = torch.Generator().manual_seed(seed)
    return FrozenHead(torch.randn(spec.vocab_size, spec.hidden_size, generator=g).to(dtype))


def random_embedding(spec: DrafterSpec, dtype: torch.dtype = torch.float32, seed: int = 6) -> FrozenEmbedding:
    g = torch.Generator().manual_seed(seed)
    return FrozenEmbedding(torch.randn(spec.vocab_size, spec.hidden_size, generator=g).to(dtype))
