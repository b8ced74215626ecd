"""Our losses against the eager losses of `speculators` 0.9.0 on the same logits, targets and masks.

Two differences are by design, and tested here as such: speculators divides by (number of slots + 1e-5) on each rank
alone, where we hand out a numerator and a denominator; and with exponential decay our denominator is the sum of the
weights, not the number of slots. Numerators agree as they are.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from speculators.losses import eager, utils
from torch import Tensor

from draftline.config.schema import Decay, DPaceDecay, ExponentialDecay
from draftline.drafter.head import HeadForm, Teacher, run_head
from draftline.drafter.head_plan import plan_slots
from draftline.drafter.loss import LossTerms, denominator, slot_weights
from draftline.records import FrozenHead

pytestmark = pytest.mark.interop

BLOCKS, BLOCK_SIZE, VOCAB = 9, 8, 61
N_SLOTS = BLOCKS * BLOCK_SIZE
TERMS: dict[str, tuple[LossTerms, Any]] = {
    "ce": (LossTerms(labels_from_teacher=True), eager.ce_loss),
    "kl": (LossTerms(ce=0.0, kl=1.0), eager.kl_div_loss),
    "tv": (LossTerms(ce=0.0, tv=1.0), eager.tv_loss),
    "reverse_kl": (LossTerms(ce=0.0, reverse_kl=1.0), eager.reverse_kl_div_loss),
}
DECAYS: dict[str, Decay] = {"exponential": ExponentialDecay(gamma=4.0), "dpace": DPaceDecay(alpha=0.5)}


class Slots:
    """Random draft and target logits of fp32, and a mask without the anchors' slots."""

    def __init__(self, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)
        self.draft = torch.randn(N_SLOTS, VOCAB, generator=g) * 2
        self.target = self.draft + torch.randn(N_SLOTS, VOCAB, generator=g)
        mask = torch.rand(BLOCKS, BLOCK_SIZE, generator=g) < 0.8
        mask[:, 0] = False
        self.mask_AB = mask
        self.position_B = torch.arange(BLOCK_SIZE)

    def theirs(self, loss: Any, decay: str) -> tuple[Tensor, Tensor]:
        """(scalar loss, gradient by the draft's logits)."""
        logits = self.draft.clone().unsqueeze(0).requires_grad_()
        mask = self.mask_AB.flatten().unsqueeze(0)
        if decay == "dpace":
            decay_fn = partial(utils.dpace_loss_decay, loss_mask=mask, block_size=BLOCK_SIZE, dpace_alpha=0.5)
        else:
            decay_fn = partial(utils.dflash_loss_decay, gamma=4.0)
        value = utils.loss_function(
            logits, self.target.unsqueeze(0), mask, self.position_B.repeat(BLOCKS).unsqueeze(0), loss, decay_fn
        )
        value.backward()
        return value.detach(), logits.grad[0]

    def ours(self, terms: LossTerms, decay: Decay, form: HeadForm) -> tuple[Tensor, Tensor, Tensor]:
        """(numerator, denominator, gradient): the head is the identity, so hidden states are logits."""
        logits = self.draft.clone().requires_grad_()
        head = FrozenHead(torch.eye(VOCAB))
        labels, index = torch.zeros(N_SLOTS, dtype=torch.int64), torch.arange(N_SLOTS)
        plan = plan_slots(self.mask_AB.flatten(), index, chunk=16)
        out = run_head(logits, labels, plan, head, terms, Teacher(head, self.target), form=form)
        weight = slot_weights(decay, self.mask_AB, out.values.ce.view(BLOCKS, BLOCK_SIZE))
        coefficients = terms.coefficients().items()
        total = sum((c * getattr(out.values, name) for name, c in coefficients), torch.zeros(N_SLOTS))
        out.backward(weight.flatten())
        return (weight.flatten() * total).sum(), denominator(decay, self.mask_AB, weight), logits.grad


@pytest.mark.parametrize("form", ["fused", "checkpointed"])
@pytest.mark.parametrize("name", TERMS)
def test_terms_and_exponential_decay_agree(name: str, form: HeadForm) -> None:
    slots = Slots()
    terms, loss = TERMS[name]
    n_slots = int(slots.mask_AB.sum())
    value, gradient = slots.theirs(loss, "exponential")
    numerator, total_weight, our_gradient = slots.ours(terms, DECAYS["exponential"], form)
    torch.testing.assert_close(numerator / (n_slots + 1e-5), value, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(our_gradient / (n_slots + 1e-5), gradient, rtol=1e-5, atol=1e-6)
    assert float(total_weight) < n_slots  # the stated difference: weights, not slots


@pytest.mark.parametrize("form", ["fused", "checkpointed"])
def test_dpace_agrees_and_has_the_same_divisor(form: HeadForm) -> None:
    slots = Slots(seed=1)
    terms, loss = TERMS["ce"]
    value, gradient = slots.theirs(loss, "dpace")
    numerator, divisor, our_gradient = slots.ours(terms, DECAYS["dpace"], form)
    assert float(divisor) == float(slots.mask_AB.sum())
    torch.testing.assert_close(numerator / divisor, value, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(our_gradient / divisor, gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("decay", DECAYS)
def test_slot_weights_agree(decay: str) -> None:
    slots = Slots(seed=2)
    ce = torch.rand(BLOCKS, BLOCK_SIZE, generator=torch.Generator().manual_seed(3)) * 4
    mask = slots.mask_AB.flatten().unsqueeze(0)
    position = slots.position_B.repeat(BLOCKS).unsqueeze(0).float()
    if decay == "dpace":
        theirs = utils.dpace_loss_decay(position, mask, BLOCK_SIZE, 0.5, ce.flatten().unsqueeze(0))
    else:
        theirs = utils.dflash_loss_decay(position, 4.0) * mask
    ours = slot_weights(DECAYS[decay], slots.mask_AB, ce)
    torch.testing.assert_close(ours.flatten(), theirs[0], rtol=1e-5, atol=1e-6)


def test_one_divisor_for_all_rows_is_not_the_mean_of_their_means() -> None:
    """Why sums are handed out: averaging ranks weighs a slot of a short row more. Ours adds up exactly."""
    long, short = Slots(seed=4), Slots(seed=5)
    short.mask_AB = short.mask_AB & (torch.arange(BLOCK_SIZE) < 2)
    terms, loss = TERMS["ce"]
    parts = [s.ours(terms, DPaceDecay(alpha=1.0), "fused") for s in (long, short)]
    joint = sum(p[0] for p in parts) / sum(p[1] for p in parts)
    means = [s.theirs(loss, "dpace")[0] for s in (long, short)]
    assert float(joint) != pytest.approx(float(sum(means) / 2), rel=1e-2)
