"""Terms and weights of the objective, held against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from draftline.config.schema import DPaceDecay, ExponentialDecay, NoDecay, ObjectiveConfig
from draftline.drafter.loss import (
    LossTerms,
    confidence_penalty,
    cross_entropy,
    denominator,
    dpace_weights,
    exponential_weights,
    forward_kl,
    keep_top_k,
    label_rank,
    reverse_kl,
    slot_weights,
    total_variation,
)


def logits(*rows: tuple[float, ...]) -> torch.Tensor:
    """Logits whose softmax is the given probabilities."""
    return torch.tensor(rows, dtype=torch.float64).log()


Q = logits((0.5, 0.25, 0.25))
P = logits((0.25, 0.5, 0.25))


def test_terms_of_two_small_distributions() -> None:
    assert float(cross_entropy(Q, torch.tensor([1]))) == pytest.approx(math.log(4))
    divergence = 0.25 * math.log(2)
    assert float(forward_kl(Q, P)) == pytest.approx(0.5 * math.log(2) - divergence)
    assert float(reverse_kl(Q, P)) == pytest.approx(0.5 * math.log(2) - divergence)
    assert float(total_variation(Q, P)) == pytest.approx(0.25)


def test_one_minus_total_variation_is_the_overlap() -> None:
    z, t = torch.randn(2, 5, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    overlap = torch.minimum(z.softmax(-1), t.softmax(-1)).sum(-1)
    torch.testing.assert_close(1 - total_variation(z, t), overlap)


def test_temperature_softens_both_sides_and_keeps_the_gradient_size() -> None:
    z, t = torch.randn(2, 4, 30, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(forward_kl(z, t, temperature=2.0), 4.0 * forward_kl(z / 2, t / 2))

    def gradient_size(temperature: float) -> float:
        leaf = (1e-2 * z).requires_grad_()
        forward_kl(leaf, 1e-2 * t, temperature).sum().backward()
        return float(leaf.grad.norm())

    assert gradient_size(8.0) == pytest.approx(gradient_size(4.0), rel=1e-2)


def test_a_cut_teacher_is_renormalised_and_the_draft_is_not() -> None:
    teacher, draft = logits((0.4, 0.4, 0.15, 0.05)), logits((0.1, 0.2, 0.3, 0.4))
    expected = 0.5 * math.log(0.5 / 0.1) + 0.5 * math.log(0.5 / 0.2)
    assert float(forward_kl(draft, teacher, top_k=2)) == pytest.approx(expected)
    assert float(forward_kl(draft, teacher, top_k=1)) == pytest.approx(expected)  # both best tokens tie
    torch.testing.assert_close(forward_kl(draft, teacher, top_k=9), forward_kl(draft, teacher))
    assert int(torch.isinf(keep_top_k(teacher, 3)).sum()) == 1


def test_confidence_is_asked_of_right_slots_only_and_without_a_gradient_through_the_choice() -> None:
    z = torch.stack((Q[0], Q[0])).requires_grad_()
    value = confidence_penalty(z, torch.tensor([0, 1]))
    entropy = 0.5 * math.log(2) + 0.5 * math.log(4)
    assert value.tolist() == pytest.approx([entropy, 0.0])
    value.sum().backward()
    assert float(z.grad[0].norm()) > 0.1
    assert float(z.grad[1].norm()) == 0.0


def test_ties_go_to_the_lower_token_so_that_flat_logits_are_not_right() -> None:
    z = torch.tensor([[1.0, 3.0, 3.0, 2.0]]).repeat(4, 1)
    assert label_rank(z, torch.arange(4)).tolist() == [3, 0, 1, 2]


def test_exponential_decay_starts_at_the_first_slot_and_spares_the_anchor() -> None:
    weights = exponential_weights(4, 10.0, device=torch.device("cpu"), dtype=torch.float64)
    assert weights.tolist() == pytest.approx([0.0, 1.0, math.exp(-0.1), math.exp(-0.2)])


def test_dpace_weights_of_a_block_worked_out_by_hand() -> None:
    ce = -torch.tensor([[1.0, 0.5, 0.25, 0.9]], dtype=torch.float64).log()
    mask = torch.tensor([[False, True, True, False]])
    first, second = 0.75, 0.75 * 0.625
    assert dpace_weights(ce, mask, 0.5)[0].tolist() == pytest.approx([0.0, first + second, second, 0.0])
    assert dpace_weights(ce, mask, 1.0)[0].tolist() == pytest.approx([0.0, 2.0, 1.0, 0.0])


def test_without_smoothing_dpace_is_the_gradient_of_the_expected_accepted_length() -> None:
    ce = torch.rand(3, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64).requires_grad_()
    mask = torch.ones(3, 5, dtype=torch.bool)
    mask[:, 0] = False
    expected_length = torch.exp(-ce[:, 1:]).cumprod(-1).sum()
    (slope,) = torch.autograd.grad(expected_length, ce)
    torch.testing.assert_close(dpace_weights(ce, mask, 0.0), -slope)


@pytest.mark.parametrize("decay", [ExponentialDecay(gamma=3.0), DPaceDecay(), NoDecay()])
def test_unsupervised_slots_weigh_nothing_whatever_they_hold(decay: object) -> None:
    mask = torch.tensor([[False, True, True, False], [False] * 4])
    ce = torch.tensor([[5.0, 1.0, 2.0, 7.0], [1.0] * 4])
    weights = slot_weights(decay, mask, ce)
    assert torch.equal(weights > 0, mask)
    other = slot_weights(decay, mask, torch.where(mask, ce, 100.0))
    assert torch.equal(weights, other)


def test_the_divisor_is_the_weight_or_for_dpace_the_number_of_slots() -> None:
    mask = torch.tensor([[False, True, True, False], [False, True, False, False]])
    ce = torch.ones(2, 4)
    exponential, dpace = ExponentialDecay(gamma=2.0), DPaceDecay()
    assert float(denominator(exponential, mask, slot_weights(exponential, mask, ce))) == pytest.approx(
        2 + math.exp(-0.5)
    )
    assert float(denominator(dpace, mask, slot_weights(dpace, mask, ce))) == 3.0
    assert float(denominator(NoDecay(), mask, slot_weights(NoDecay(), mask, ce))) == 3.0


def test_the_blend_of_the_recipe() -> None:
    terms = LossTerms.of(ObjectiveConfig(kl_weight=0.15, cap_weight=0.1, kl_temperature=2.0, teacher_top_k=8))
    assert terms.coefficients() == pytest.approx({"ce": 0.85, "kl": 0.15, "tv": 0.0, "reverse_kl": 0.0, "cap": 0.1})
    assert (terms.kl_temperature, terms.teacher_top_k) == (2.0, 8)
    assert terms.needs_teacher
    assert not LossTerms.of(ObjectiveConfig(cap_weight=0.1)).needs_teacher
    assert LossTerms.of(ObjectiveConfig(labels="target")).needs_teacher
