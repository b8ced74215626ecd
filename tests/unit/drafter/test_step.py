"""A row's step adds the numerator's gradient, whatever it is packed, padded or chunked with; empty rows do nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from draftline.config.schema import DPaceDecay, ExponentialDecay, FeatureNoise, ObjectiveConfig
from draftline.drafter.blocks import VALIDATION_EPOCH, anchor_slot_sizes, draw_blocks, pad_row
from draftline.drafter.loss import LossTerms
from draftline.drafter.metrics import StepStats
from draftline.drafter.model import Drafter
from draftline.drafter.step import DrafterStep
from draftline.errors import UserError
from draftline.records import FrozenEmbedding, FrozenHead, HiddenStateRow
from objective_kit import (
    Case,
    dense_reference,
    random_embedding,
    random_head,
    random_row,
    split_row,
    tiny_spec,
)

SPEC = tiny_spec()
RECIPE = ObjectiveConfig(
    anchors=40, decay=ExponentialDecay(gamma=3.0), kl_weight=0.15, cap_weight=0.1, tv_weight=0.2, reverse_kl_weight=0.1
)
ROW_TOKENS = 96
Trained = tuple[StepStats, dict[str, Tensor]]


def make_step(objective: ObjectiveConfig = RECIPE, dtype: torch.dtype = torch.float64, **options: Any) -> DrafterStep:
    drafter = Drafter(SPEC).to(dtype)
    return DrafterStep(
        drafter,
        random_embedding(SPEC, dtype),
        random_head(SPEC, dtype),
        objective,
        **({"teacher": random_head(SPEC, dtype), "row_tokens": ROW_TOKENS, "seed": 7} | options),
    )


def gradients(step: DrafterStep) -> dict[str, Tensor]:
    """Takes the gradients away, so that the next row starts from none."""
    found = {}
    for name, parameter in step._drafter.named_parameters():
        found[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        parameter.grad = None
    return found


def train(step: DrafterStep, *rows: HiddenStateRow) -> Trained:
    stats = [step.forward_backward(row) for row in rows]
    total = stats[0]
    for other in stats[1:]:
        total = total + other
    return total, gradients(step)


def assert_same(
    left: tuple[StepStats, dict[str, Tensor]], right: tuple[StepStats, dict[str, Tensor]], tol: float
) -> None:
    for name in ("numerator", "denominator", "acceptance_sum", "acceptance_blocks"):
        torch.testing.assert_close(left[0].scalar(name), right[0].scalar(name), rtol=tol, atol=tol)
    for name, gradient in left[1].items():
        torch.testing.assert_close(gradient, right[1][name], rtol=tol, atol=tol)
    assert max(float(g.abs().max()) for g in left[1].values()) > 1e-2


def row64(lengths: tuple[int, ...] = (30, 21, 40), **options: Any) -> HiddenStateRow:
    return random_row(lengths, SPEC, dtype=torch.float64, **options)


def test_numerator_is_that_of_the_dense_reference_on_the_drafters_own_hidden_states() -> None:
    step, row = make_step(), row64()
    stats = step.evaluate(row)
    blocks = draw_blocks(row, SPEC, RECIPE, row_tokens=ROW_TOKENS, seed=7, epoch=VALIDATION_EPOCH)
    embeddings = step._embedding.weight_VH[blocks.block_ids_AB.flatten()]
    mask = step._drafter.build_masks(row.document_ids_T, blocks.anchors_A, blocks.document_A)
    with torch.no_grad():
        hidden = step._drafter(embeddings, row.taps_TF, mask, row.position_ids_T, blocks.position_ids_AB.flatten())
    head = random_head(SPEC, torch.float64)
    case = Case(
        hidden,
        blocks.labels_AB.flatten(),
        blocks.slot_mask_AB,
        blocks.teacher_index_AB.flatten(),
        head,
        head,
        row.final_hidden_TH,
    )
    wanted = dense_reference(case, LossTerms.of(RECIPE), ("exponential", 3.0))
    assert float(stats.numerator) == pytest.approx(float(wanted.numerator), rel=1e-9)
    assert float(stats.denominator) == pytest.approx(wanted.denominator, rel=1e-9)
    for name, value in wanted.terms.items():
        assert float(stats.terms[name][0]) == pytest.approx(value, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("decay", [ExponentialDecay(gamma=3.0), DPaceDecay()])
def test_a_packed_row_equals_the_sum_of_its_samples_alone(decay: Any) -> None:
    step, row = make_step(RECIPE.model_copy(update={"decay": decay})), row64()
    assert_same(train(step, row), train(step, *split_row(row)), 1e-9)


def test_two_drafters_with_a_row_each_add_up_to_one_with_both_in_fp32() -> None:
    rows = [random_row((50,), SPEC, seed=s) for s in (1, 2)]
    one = make_step(dtype=torch.float32)
    joint = train(one, *rows)
    first, second = (train(make_step(dtype=torch.float32), row) for row in rows)
    summed = {name: g + second[1][name] for name, g in first[1].items()}
    divisor = float(joint[0].denominator)
    assert float(first[0].denominator + second[0].denominator) == pytest.approx(divisor)
    for name, gradient in joint[1].items():
        torch.testing.assert_close(gradient / divisor, summed[name] / divisor, rtol=0, atol=1e-6)


@pytest.mark.parametrize("padding", [0, 16, 33])
def test_padding_changes_neither_loss_nor_gradient(padding: int) -> None:
    step, row = make_step(), row64((30, 21))
    assert_same(train(step, row), train(step, pad_row(row, 51 + padding)), 1e-9)


def test_static_shapes_change_nothing_but_the_shapes() -> None:
    row = row64((30, 21))
    assert_same(train(make_step(static_shapes=False), row), train(make_step(static_shapes=True), row), 1e-9)


@pytest.mark.parametrize("head", ["fused", "checkpointed"])
@pytest.mark.parametrize("chunk", [1, 7, 4096])
def test_the_form_of_the_head_and_its_chunk_change_nothing(head: str, chunk: int) -> None:
    row = row64((30, 21))
    other = RECIPE.model_copy(update={"head": head, "head_chunk_positions": chunk})
    assert_same(train(make_step(), row), train(make_step(other), row), 1e-9)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("head", ["fused", "checkpointed"])
def test_a_row_without_a_valid_anchor_adds_nothing_and_is_counted(static: bool, head: str) -> None:
    step = make_step(RECIPE.model_copy(update={"head": head}), static_shapes=static)
    empty = random_row((5, 2), SPEC, prompt=4, dtype=torch.float64)
    stats = step.forward_backward(empty)
    assert float(stats.numerator) == float(stats.denominator) == 0.0
    assert stats.summary()["counts"] | {"blocks": 0} == stats.summary()["counts"]
    assert float(stats.scalar("empty_rows")) == float(stats.scalar("rows")) == 1.0
    for parameter in step._drafter.parameters():
        assert parameter.grad is not None
        assert float(parameter.grad.abs().sum()) == 0.0
    row = row64()
    with_empty = train(step, row, empty)
    assert_same(with_empty, train(make_step(), row), 1e-9)
    assert float(step.evaluate(empty).scalar("empty_rows")) == 1.0


def test_gradients_add_to_those_that_are_there() -> None:
    step, row = make_step(), row64((30,))
    _, once = train(step, row)
    _, twice = train(step, row, row)
    for name, gradient in once.items():
        torch.testing.assert_close(twice[name], 2 * gradient)


def test_validation_has_fixed_anchors_no_noise_and_no_gradient() -> None:
    noisy = RECIPE.model_copy(
        update={"feature_noise": FeatureNoise(kind="gaussian", scale=0.5), "token_noise_prob": 0.5, "anchors": 8}
    )
    step, row = make_step(noisy), row64()
    first = step.evaluate(row)
    assert all(parameter.grad is None for parameter in step._drafter.parameters())
    assert torch.equal(first.vector, step.evaluate(replace(row, epoch=9)).vector)
    quiet = make_step(RECIPE.model_copy(update={"anchors": 8}))
    assert torch.equal(first.vector, quiet.evaluate(row).vector)


def test_training_draws_follow_the_epoch_and_the_seed_alone() -> None:
    noisy = RECIPE.model_copy(update={"feature_noise": FeatureNoise(kind="uniform", scale=0.5), "anchors": 8})
    row = row64()
    found = [
        float(make_step(noisy, seed=seed).forward_backward(replace(row, epoch=epoch)).numerator)
        for seed, epoch in ((7, 0), (7, 0), (7, 1), (8, 0))
    ]
    assert found[0] == found[1]
    assert len(set(found)) == 3
    clean = float(make_step(RECIPE.model_copy(update={"anchors": 8})).forward_backward(row).numerator)
    assert clean != found[0]


def test_a_state_before_the_final_norm_is_normed_first() -> None:
    norm = torch.nn.RMSNorm(SPEC.hidden_size, dtype=torch.float64)
    row = row64()
    before = replace(row, final_hidden_norm="pre")
    after = replace(row, final_hidden_TH=norm(row.final_hidden_TH).detach())
    found = make_step(final_norm=norm).evaluate(before)
    torch.testing.assert_close(found.vector, make_step().evaluate(after).vector)
    with pytest.raises(UserError, match="final norm"):
        make_step().evaluate(before)


def test_the_targets_own_argmax_can_be_the_label() -> None:
    row = row64()
    agreement = make_step().evaluate(row).summary()["teacher_agreement"]
    assert 0.0 <= agreement < 0.5
    relabelled = make_step(RECIPE.model_copy(update={"labels": "target"})).evaluate(row)
    best_T = (row.final_hidden_TH @ random_head(SPEC, torch.float64).weight_VH.t()).argmax(-1)
    by_hand = replace(row, input_ids_T=torch.cat((row.input_ids_T[:1], best_T[:-1])))
    blocks = draw_blocks(row, SPEC, RECIPE, row_tokens=ROW_TOKENS, seed=7, epoch=VALIDATION_EPOCH)
    wanted = draw_blocks(by_hand, SPEC, RECIPE, row_tokens=ROW_TOKENS, seed=7, epoch=VALIDATION_EPOCH)
    assert torch.equal(blocks.slot_mask_AB, wanted.slot_mask_AB)
    assert float(relabelled.scalar("numerator")) != float(make_step().evaluate(row).scalar("numerator"))
    assert relabelled.summary()["counts"]["supervised_slots"] == int(blocks.slot_mask_AB.sum())


def test_features_that_are_not_finite_raise_the_flag_and_spoil_no_sum() -> None:
    step, row = make_step(), row64((40,))
    taps = row.taps_TF.clone()
    taps[3] = float("nan")
    stats = step.forward_backward(replace(row, taps_TF=taps))
    assert not bool(stats.finite)
    assert bool(torch.isfinite(stats.vector).all())
    assert bool((stats + make_step().forward_backward(row)).numerator > 0)


def test_a_missing_teacher_is_named() -> None:
    with pytest.raises(UserError, match="needs a teacher"):
        make_step(teacher=None)
    with pytest.raises(UserError, match="no final hidden state"):
        make_step().forward_backward(replace(row64(), final_hidden_TH=None))
    plain = make_step(ObjectiveConfig(anchors=8), teacher=None)
    assert float(plain.forward_backward(replace(row64(), final_hidden_TH=None)).denominator) > 0


@pytest.mark.parametrize("per", ["row", "conversation"])
def test_a_warm_up_meets_every_shape_and_leaves_no_trace(per: str, monkeypatch: pytest.MonkeyPatch) -> None:
    objective = RECIPE.model_copy(update={"anchors_per": per, "anchors": 12})
    step = make_step(objective, static_shapes=True)
    train(step, row64())
    step.forward_backward(row64())
    before = {name: p.grad.clone() for name, p in step._drafter.named_parameters()}
    met = set()
    original = step._drafter.build_masks

    def build_masks(documents: Tensor, anchors: Tensor, owner: Tensor) -> Any:
        met.add((documents.shape[0], anchors.shape[0]))
        return original(documents, anchors, owner)

    monkeypatch.setattr(step._drafter, "build_masks", build_masks)
    step.warm_up()
    assert met == {(ROW_TOKENS, size) for size in anchor_slot_sizes(objective, ROW_TOKENS)}
    for name, parameter in step._drafter.named_parameters():
        assert torch.equal(parameter.grad, before[name])


def test_fp8_on_a_cpu_is_one_clear_line() -> None:
    with pytest.raises(UserError, match="fp8 needs a GPU, but the drafter is on cpu"):
        make_step(RECIPE.model_copy(update={"head_dtype": "fp8"}))


def test_a_bf16_drafter_trains_with_fp32_statistics() -> None:
    row = random_row((50, 30), SPEC, dtype=torch.bfloat16)
    wide = replace(row, taps_TF=row.taps_TF.double(), final_hidden_TH=row.final_hidden_TH.double())
    stats, found = train(make_step(dtype=torch.bfloat16), row)
    wanted, exact = train(make_step(), wide)
    assert stats.vector.dtype == torch.float64
    assert float(stats.numerator) == pytest.approx(float(wanted.numerator), rel=0.05)
    flat, flat_exact = (torch.cat([g.flatten().double() for g in part.values()]) for part in (found, exact))
    assert float(torch.nn.functional.cosine_similarity(flat, flat_exact, dim=0)) > 0.95


def test_overfitting_one_conversation_of_a_real_target_reaches_the_block_size() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=97,
    )
    target = LlamaForCausalLM(config).eval()
    n_tokens, taps = 56, (0, 1)
    ids = torch.randint(0, 96, (1, n_tokens), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        states = target(ids, output_hidden_states=True).hidden_states
    row = HiddenStateRow(
        row_id=0,
        epoch=0,
        sample_ids=("only",),
        lengths=(n_tokens,),
        input_ids_T=ids[0],
        loss_mask_T=torch.arange(n_tokens) >= 8,
        document_ids_T=torch.zeros(n_tokens, dtype=torch.int32),
        position_ids_T=torch.arange(n_tokens),
        taps_TF=torch.cat([states[tap + 1][0] for tap in taps], dim=-1),
        final_hidden_TH=None,
        final_hidden_norm="post",
        tap_layer_ids=taps,
    )
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    spec = tiny_spec(**sizes, vocab_size=97, mask_token_id=96, taps=taps, block_size=8, initializer_range=0.02)
    drafter = Drafter(spec)
    head = FrozenHead(target.lm_head.weight.detach())
    embedding = FrozenEmbedding(target.model.embed_tokens.weight.detach())
    step = DrafterStep(drafter, embedding, head, ObjectiveConfig(anchors=40), row_tokens=n_tokens, seed=0)
    untrained = step.evaluate(row).summary()["acceptance_length"]
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3)
    for _ in range(120):
        divisor = step.forward_backward(row).denominator
        for parameter in drafter.parameters():
            parameter.grad /= divisor
        optimizer.step()
        optimizer.zero_grad()
    trained = step.evaluate(row).summary()["acceptance_length"]
    assert untrained < 1.5
    assert trained >= 0.9 * spec.block_size
