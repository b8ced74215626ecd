"""The frozen-head loss equals a dense fp64 reference in every term, chunk and mask, and holds one chunk at a time."""

from __future__ import annotations

import gc
import itertools
import weakref
from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from draftline.config.schema import Decay, DPaceDecay, ExponentialDecay, NoDecay, ObjectiveConfig
from draftline.drafter import head as head_module
from draftline.drafter.head import HeadForm, Teacher, run_head, score_head
from draftline.drafter.head_chunk import excess
from draftline.drafter.head_fp8 import quantize_head, quantize_rows, require_fp8
from draftline.drafter.head_plan import plan_slots
from draftline.drafter.loss import LossTerms, denominator, slot_weights
from draftline.errors import UserError
from draftline.records import FrozenHead
from objective_kit import Case, dense_logits, dense_reference, dense_slot_terms, make_case

FULL = LossTerms(ce=0.85, kl=0.15, tv=0.3, reverse_kl=0.2, cap=0.1)
TERMS = {
    "ce": LossTerms(),
    "kl": LossTerms(ce=0.0, kl=1.0),
    "kl-temperature": LossTerms(ce=0.0, kl=1.0, kl_temperature=2.5),
    "kl-top-k": LossTerms(ce=0.0, kl=1.0, teacher_top_k=5),
    "tv": LossTerms(ce=0.0, tv=1.0),
    "reverse-kl": LossTerms(ce=0.0, reverse_kl=1.0),
    "cap": LossTerms(ce=0.0, cap=1.0),
    "cap-temperature": LossTerms(ce=1.0, cap=2.0, cap_temperature=0.5),
    "full": FULL,
    "full-soft-top-k": replace(FULL, kl_temperature=1.7, teacher_top_k=7, cap_temperature=0.5),
    "full-target-labels": replace(FULL, labels_from_teacher=True),
}
FORMS: tuple[HeadForm, ...] = ("fused", "checkpointed")
CHUNKS = (1, 7, 1000)
DECAYS: dict[str, tuple[Decay, tuple[str, float]]] = {
    "exponential": (ExponentialDecay(gamma=2.0), ("exponential", 2.0)),
    "dpace": (DPaceDecay(alpha=0.5), ("dpace", 0.5)),
    "none": (NoDecay(), ("none", 0.0)),
}


def pass_head(
    case: Case, terms: LossTerms, decay: Decay, *, chunk: int, form: HeadForm = "fused"
) -> tuple[Tensor, Tensor, Tensor]:
    """(numerator, denominator, gradient) of a case by the package."""
    hidden = case.hidden_QH.detach().clone().requires_grad_()
    plan = plan_slots(case.mask_AB.flatten(), case.teacher_index_Q, chunk=chunk)
    teacher = Teacher(case.teacher_head, case.teacher_hidden_TH)
    out = run_head(hidden, case.label_Q, plan, case.head, terms, teacher, form=form)
    weight_AB = slot_weights(decay, case.mask_AB, out.values.ce.view_as(case.mask_AB))
    coefficients = terms.coefficients().items()
    total = sum((c * getattr(out.values, n) for n, c in coefficients), torch.zeros_like(out.values.ce))
    out.backward(weight_AB.flatten())
    gradient = torch.zeros_like(hidden) if hidden.grad is None else hidden.grad
    return (weight_AB.flatten() * total).sum(), denominator(decay, case.mask_AB, weight_AB), gradient


def relative(found: Tensor, wanted: Tensor) -> float:
    """Size of the difference by the size of what is wanted."""
    return float((found.double() - wanted).norm() / wanted.norm().clamp(min=1e-300))


@pytest.mark.parametrize("name", TERMS)
@pytest.mark.parametrize("head_kind", ["plain", "odd"])
def test_each_term_equals_the_dense_reference_in_fp64(name: str, head_kind: str) -> None:
    case = make_case(head_kind=head_kind, seed=3)
    case.label_Q[::2] = likely_labels(case)[::2]  # so that CAP has slots that are right
    decay, plain_decay = DECAYS["exponential"]
    wanted = dense_reference(case, TERMS[name], plain_decay)
    assert float(wanted.gradient_QH.norm()) > 1e-3
    for form, chunk in itertools.product(FORMS, CHUNKS):
        numerator, total_weight, gradient = pass_head(case, TERMS[name], decay, chunk=chunk, form=form)
        torch.testing.assert_close(numerator, wanted.numerator, rtol=1e-9, atol=1e-9)
        assert float(total_weight) == pytest.approx(wanted.denominator, rel=1e-12)
        torch.testing.assert_close(gradient, wanted.gradient_QH, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("masks", ["on", "off", "zero"])
@pytest.mark.parametrize("decay_name", DECAYS)
def test_the_full_recipe_equals_the_reference_under_all_masks_and_decays(masks: str, decay_name: str) -> None:
    case = make_case(masks=masks, head_kind="odd", seed=8)
    decay, plain_decay = DECAYS[decay_name]
    wanted = dense_reference(case, FULL, plain_decay)
    for form, chunk in itertools.product(FORMS, CHUNKS):
        numerator, total_weight, gradient = pass_head(case, FULL, decay, chunk=chunk, form=form)
        torch.testing.assert_close(numerator, wanted.numerator, rtol=1e-9, atol=1e-9)
        assert float(total_weight) == pytest.approx(wanted.denominator, rel=1e-12)
        torch.testing.assert_close(gradient, wanted.gradient_QH, rtol=1e-9, atol=1e-9)
    assert (wanted.denominator == 0) == (masks == "zero")


@pytest.mark.parametrize("name", ["ce", "kl", "tv", "reverse-kl", "full"])
@pytest.mark.parametrize("form", FORMS)
def test_bf16_gradient_is_within_one_percent_of_fp64(name: str, form: HeadForm) -> None:
    case = make_case(blocks=40, hidden=64, vocab=501, masks="off", dtype=torch.bfloat16, seed=1)
    case.head = case.teacher_head = FrozenHead((case.head.weight_VH * 0.125).to(torch.bfloat16))
    decay, plain_decay = DECAYS["exponential"]
    wanted = dense_reference(case, TERMS[name], plain_decay)
    numerator, _, gradient = pass_head(case, TERMS[name], decay, chunk=64, form=form)
    assert gradient.dtype == torch.bfloat16
    assert relative(gradient, wanted.gradient_QH) <= 1e-2
    assert float(numerator) == pytest.approx(float(wanted.numerator), rel=1e-3)


@pytest.mark.parametrize("name", ["kl", "tv", "reverse-kl"])
def test_distances_stay_exact_where_the_draft_is_close_to_the_teacher(name: str) -> None:
    """fp32 logits that differ by 1e-3 only: a sum of P log(P / q) has no correct digit left there."""
    case = make_case(blocks=8, hidden=32, vocab=400, masks="off", dtype=torch.float32, seed=2)
    near = case.teacher_hidden_TH[case.teacher_index_Q]
    case.hidden_QH = (near + 2e-4 * torch.randn(near.shape, generator=torch.Generator().manual_seed(0))).detach()
    decay, plain_decay = DECAYS["none"]
    wanted = dense_reference(case, TERMS[name], plain_decay)
    assert 0 < float(wanted.numerator) / int(case.mask_AB.sum()) < 1e-2
    numerator, _, gradient = pass_head(case, TERMS[name], decay, chunk=7)
    assert float(numerator) == pytest.approx(float(wanted.numerator), rel=1e-2)
    assert relative(gradient, wanted.gradient_QH) < 1e-2


def test_bf16_products_keep_the_gradient_near_the_teacher() -> None:
    """bf16 hidden states and weights, draft one rounding away from the teacher: error under 1 % for KL."""
    case = make_case(blocks=8, hidden=64, vocab=400, masks="off", dtype=torch.bfloat16, seed=4)
    near = case.teacher_hidden_TH[case.teacher_index_Q]
    case.hidden_QH = (near.float() * (1 + 2**-7)).to(torch.bfloat16).detach()
    decay, plain_decay = DECAYS["none"]
    wanted = dense_reference(case, TERMS["kl"], plain_decay)
    _, _, gradient = pass_head(case, TERMS["kl"], decay, chunk=16)
    assert relative(gradient, wanted.gradient_QH) < 1e-2


def test_equal_distributions_cost_nothing_and_pull_nowhere() -> None:
    case = make_case(masks="off", seed=5)
    case.hidden_QH = case.teacher_hidden_TH[case.teacher_index_Q].clone()
    terms = LossTerms(ce=0.0, kl=1.0, reverse_kl=1.0)  # TV has a kink there: its slope is +-1/2
    numerator, _, gradient = pass_head(case, terms, NoDecay(), chunk=7)
    assert abs(float(numerator)) < 1e-12
    assert float(gradient.norm()) < 1e-12


def test_the_terms_of_a_divergence_are_never_negative() -> None:
    d = torch.linspace(-3, 3, 4001, dtype=torch.float64)
    p = torch.full_like(d, 0.01)
    found = excess(p, p * d.exp(), d)
    assert float(found.min()) >= 0.0
    torch.testing.assert_close(found, p * (torch.expm1(d) - d), rtol=1e-6, atol=1e-18)
    assert float(excess(torch.zeros(()), torch.tensor(0.25), torch.tensor(float("inf")))) == 0.25


def test_values_per_slot_are_those_of_the_reference() -> None:
    case = make_case(head_kind="odd", seed=11)
    plan = plan_slots(case.mask_AB.flatten(), case.teacher_index_Q, chunk=4)
    teacher = Teacher(case.teacher_head, case.teacher_hidden_TH)
    values = score_head(case.hidden_QH, case.label_Q, plan, case.head, FULL, teacher, None).values
    for slot, supervised in enumerate(case.mask_AB.flatten().tolist()):
        if not supervised:
            assert all(float(getattr(values, name)[slot]) == 0.0 for name in ("ce", "kl", "rank", "confidence"))
            continue
        z = dense_logits(case.hidden_QH.detach()[slot], case.head)
        t = dense_logits(case.teacher_hidden_TH[case.teacher_index_Q[slot]], case.teacher_head)
        wanted, label = dense_slot_terms(z, int(case.label_Q[slot]), t, FULL)
        for name, value in wanted.items():
            assert float(getattr(values, name)[slot]) == pytest.approx(float(value), abs=1e-9)
        assert int(values.rank[slot]) == int((z > z[label]).sum())
        assert float(values.confidence[slot]) == pytest.approx(float(torch.softmax(z, 0).max()))
        assert bool(values.agrees[slot]) == (int(t.argmax()) == int(case.label_Q[slot]))


def test_fp8_products_cost_a_few_percent_of_the_gradient_at_most() -> None:
    case = make_case(blocks=40, hidden=64, vocab=512, masks="off", dtype=torch.bfloat16, seed=1)
    case.head = case.teacher_head = FrozenHead((case.head.weight_VH * 0.125).to(torch.bfloat16), multiplier=1.5)
    decay, plain_decay = DECAYS["exponential"]
    wanted = dense_reference(case, LossTerms(cap=0.1), plain_decay)
    case.head = quantize_head(case.head)
    numerator, _, gradient = pass_head(case, LossTerms(cap=0.1), decay, chunk=64)
    assert 1e-4 < relative(gradient, wanted.gradient_QH) < 3e-2
    assert float(numerator) == pytest.approx(float(wanted.numerator), rel=1e-2)


def test_fp8_keeps_the_largest_entry_of_a_row_exact() -> None:
    gradient = torch.softmax(4 * torch.randn(3, 64, generator=torch.Generator().manual_seed(0)), -1)
    gradient[0, 5] = -1.5
    g8, scale, largest, value = quantize_rows(gradient)
    assert int(largest[0]) == 5
    assert torch.equal(value, gradient.gather(-1, largest[:, None])[:, 0])
    rebuilt = (g8.float() * scale[:, None]).scatter(-1, largest[:, None], value[:, None])
    assert float((rebuilt - gradient).abs().max()) <= float((gradient.abs() * 2**-4).max())
    assert float((rebuilt - gradient).norm() / gradient.norm()) < 0.03


def test_fp8_is_refused_where_it_cannot_run() -> None:
    with pytest.raises(UserError, match="needs a GPU"):
        require_fp8(torch.device("cpu"))
    with pytest.raises(UserError, match="multiples of 16"):
        quantize_head(FrozenHead(torch.zeros(50_257, 64)))
    with pytest.raises(ValidationError, match="fp8 needs objective"):
        ObjectiveConfig(head_dtype="fp8", head="checkpointed")


class Recorder:
    """Counts rows of logits made and alive, by head."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: dict[int, int] = {}
        self.alive = self.peak = 0
        self._original = head_module.project
        monkeypatch.setattr(head_module, "project", self.project)

    def project(self, x_NH: Tensor, head: FrozenHead) -> Tensor:
        logits = self._original(x_NH, head)
        rows = logits.shape[0]
        self.made[id(head)] = self.made.get(id(head), 0) + rows
        self.alive += rows
        self.peak = max(self.peak, self.alive)
        weakref.finalize(logits, self._freed, rows)
        return logits

    def _freed(self, rows: int) -> None:
        self.alive -= rows


@pytest.mark.parametrize("name", TERMS)
def test_logits_live_one_chunk_at_a_time_and_are_made_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(blocks=40, context=30, seed=6, head_kind="odd")
    n_slots = int(case.mask_AB.sum())
    n_positions = len(set(case.teacher_index_Q[case.mask_AB.flatten()].tolist()))
    assert n_positions < n_slots / 3
    recorder, chunk = Recorder(monkeypatch), 16
    gc.collect()
    pass_head(case, TERMS[name], ExponentialDecay(gamma=2.0), chunk=chunk)
    assert recorder.made[id(case.head)] == n_slots
    assert recorder.peak <= 2 * chunk
    boundaries = -(-n_slots // chunk) - 1
    teacher_rows = recorder.made.get(id(case.teacher_head), 0)
    if TERMS[name].needs_teacher:
        assert n_positions <= teacher_rows <= n_positions + boundaries
    else:
        assert teacher_rows == 0


def test_the_head_is_never_trained() -> None:
    case = make_case(head_kind="odd")
    weight, bias = case.head.weight_VH.requires_grad_(), case.head.bias_V.requires_grad_()
    for form in FORMS:
        pass_head(case, FULL, NoDecay(), chunk=7, form=form)
        assert weight.grad is None
        assert bias.grad is None


def test_dropped_slots_may_hold_anything() -> None:
    case = make_case(seed=9)
    numerator, _, gradient = pass_head(case, FULL, NoDecay(), chunk=7)
    dropped = ~case.mask_AB.flatten()
    case.hidden_QH = case.hidden_QH.detach().clone()
    case.hidden_QH[dropped] = float("nan")
    case.label_Q[dropped] = -100
    case.teacher_index_Q[dropped] = 10**9
    again, _, gradient_again = pass_head(case, FULL, NoDecay(), chunk=7)
    assert torch.equal(numerator, again)
    assert torch.equal(gradient, gradient_again)
    assert float(gradient[dropped].abs().sum()) == 0.0


def likely_labels(case: Case) -> Tensor:
    """The draft's own argmax."""
    return torch.stack([dense_logits(h, case.head).argmax() for h in case.hidden_QH.detach()])
