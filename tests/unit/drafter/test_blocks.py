"""Anchors, labels and masks of blocks: what is drawn, that it depends on the sample alone, and noise in training."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from drafter_rows import MASK_ID, VOCAB, blocks_at, make_row, tiny_spec
from hypothesis import given, settings
from hypothesis import strategies as st

from draftline.config.schema import FeatureNoise, ObjectiveConfig
from draftline.drafter.blocks import (
    VALIDATION_EPOCH,
    BlockBatch,
    _unit_hash,
    anchor_share,
    anchor_slot_sizes,
    anchor_slots,
    apply_feature_noise,
    draw_blocks,
    eligible_anchors,
    pad_row,
    sample_seed,
    warm_up_rows,
)
from draftline.records import HiddenStateRow

SPEC = tiny_spec()


def draw(row: HiddenStateRow, *, anchors: int = 16, row_tokens: int = 64, seed: int = 1, **more: object) -> BlockBatch:
    epoch = more.pop("epoch", None)
    config = ObjectiveConfig(anchors=anchors, **more)  # type: ignore[arg-type]
    return draw_blocks(row, SPEC, config, row_tokens=row_tokens, seed=seed, epoch=epoch)  # type: ignore[arg-type]


def by_sample(row: HiddenStateRow, blocks: BlockBatch) -> dict[str, list[tuple[object, ...]]]:
    """Kept blocks of each sample in positions of the sample: anchor, input, labels where supervised, mask."""
    out: dict[str, list[tuple[object, ...]]] = {sample: [] for sample in row.sample_ids}
    for i in blocks.keep_A.nonzero().flatten().tolist():
        mask = blocks.slot_mask_AB[i]
        content = (blocks.position_ids_AB[i].tolist(), blocks.block_ids_AB[i].tolist(), mask.tolist())
        out[row.sample_ids[int(blocks.document_A[i])]].append((*content, blocks.labels_AB[i][mask].tolist()))
    return out


def reorder(row: HiddenStateRow, order: list[int]) -> HiddenStateRow:
    """The same samples packed in another order, some of them left out."""
    starts = [sum(row.lengths[:i]) for i in range(len(row.lengths))]
    index = torch.cat([torch.arange(starts[i], starts[i] + row.lengths[i]) for i in order])
    lengths = tuple(row.lengths[i] for i in order)
    return replace(
        row,
        sample_ids=tuple(row.sample_ids[i] for i in order),
        lengths=lengths,
        input_ids_T=row.input_ids_T[index],
        loss_mask_T=row.loss_mask_T[index],
        document_ids_T=torch.repeat_interleave(torch.arange(len(order)), torch.tensor(lengths)).int(),
        position_ids_T=row.position_ids_T[index],
        taps_TF=row.taps_TF[index],
    )


def test_anchors_are_supervised_tokens_followed_by_one_in_the_same_document() -> None:
    row = replace(make_row((4, 5)), loss_mask_T=torch.tensor([0, 1, 1, 1, 1, 0, 1, 1, 1]).bool())
    assert eligible_anchors(row).tolist() == [bool(x) for x in (0, 1, 1, 0, 0, 0, 1, 1, 0)]


def test_slots_are_always_as_many_as_configured_sorted_and_padded() -> None:
    row = make_row((17, 9, 23))
    for anchors in (4, 16, 48):
        blocks = draw(row, anchors=anchors)
        kept = blocks.anchors_A[blocks.keep_A]
        assert blocks.keep_A.shape == (anchors,)
        assert kept.tolist() == sorted(set(kept.tolist()))
        assert eligible_anchors(row)[kept].all()
        n_kept = len(kept)
        assert blocks.keep_A.tolist() == [True] * n_kept + [False] * (anchors - n_kept)
        assert (blocks.document_A[n_kept:] == -1).all()
        assert not blocks.slot_mask_AB[n_kept:].any()


def test_a_sample_gets_its_share_by_length_and_at_least_one() -> None:
    row = replace(make_row((32, 16, 3)), loss_mask_T=torch.ones(51, dtype=torch.bool))
    counts = {sample: len(found) for sample, found in by_sample(row, draw(row)).items()}
    assert counts == {"s0": 8, "s1": 4, "s2": 1}


def test_a_sample_with_few_eligible_positions_gives_all_of_them() -> None:
    mask = torch.zeros(40, dtype=torch.bool)
    mask[[5, 6, 7, 20]] = True
    blocks = draw(replace(make_row((40,)), loss_mask_T=mask), anchors=32)
    assert blocks.anchors_A[blocks.keep_A].tolist() == [5, 6]


def test_a_row_without_any_anchor_gives_padding_blocks_only() -> None:
    blocks = draw(replace(make_row((20,)), loss_mask_T=torch.zeros(20, dtype=torch.bool)))
    assert not blocks.keep_A.any()
    assert not blocks.slot_mask_AB.any()


@pytest.mark.parametrize("anchors_per", ["row", "conversation"])
@settings(max_examples=25, deadline=None)
@given(st.permutations(range(4)), st.integers(1, 4), st.integers(0, 99), st.integers(0, 9))
def test_blocks_of_a_sample_depend_on_nothing_that_is_packed_with_it(
    anchors_per: str, order: list[int], n_taken: int, seed: int, padding: int
) -> None:
    row = make_row((17, 9, 23, 12), seed=seed)
    more = {"anchors_per": anchors_per, "token_noise_prob": 0.3}
    together = by_sample(row, draw(row, seed=seed, **more))
    packed = reorder(row, order[:n_taken])
    packed = pad_row(packed, sum(packed.lengths) + padding)
    alone = by_sample(packed, draw(packed, seed=seed, **more))
    assert alone == {sample: together[sample] for sample in packed.sample_ids}


def test_anchors_are_redrawn_with_seed_and_epoch_and_fixed_in_validation() -> None:
    row = make_row((60,))
    anchors = [
        tuple(draw(row, seed=seed, epoch=epoch).anchors_A.tolist()) for seed, epoch in ((1, 0), (1, 1), (2, 0), (1, -1))
    ]
    assert len(set(anchors)) == 4
    later = replace(row, epoch=7)
    assert tuple(draw(later, epoch=VALIDATION_EPOCH).anchors_A.tolist()) == anchors[3]
    assert draw(later).anchors_A.tolist() == draw(row, epoch=7).anchors_A.tolist()


def test_every_eligible_position_is_drawn_about_equally_often() -> None:
    row = replace(make_row((64,)), loss_mask_T=torch.ones(64, dtype=torch.bool))
    counts = torch.zeros(64)
    for epoch in range(400):
        blocks = draw(row, epoch=epoch)
        counts[blocks.anchors_A[blocks.keep_A]] += 1
    expected = 400 * 16 / 63
    assert counts[63] == 0
    assert ((counts[:63] - expected).abs() < 5 * (expected * 0.75) ** 0.5).all()


def test_samples_shorter_than_one_anchor_share_cannot_overflow_the_slots() -> None:
    row = replace(make_row((3,) * 12), loss_mask_T=torch.ones(36, dtype=torch.bool))
    blocks = draw(row, anchors=4, row_tokens=36)
    assert blocks.keep_A.all()
    assert len(set(blocks.document_A.tolist())) == 4
    assert blocks.anchors_A.tolist() == sorted(blocks.anchors_A.tolist())


def test_slots_per_conversation_take_few_sizes_that_hold_all_shares() -> None:
    config = ObjectiveConfig(anchors=10, anchors_per="conversation")
    sizes = anchor_slot_sizes(config, 64)
    assert sizes == (10, 20, 30, 40, 50, 60, 70)
    assert anchor_slots(config, (30, 30, 4), 64) == 30
    assert anchor_share(config, 4, 64) == 3
    assert len(anchor_slot_sizes(ObjectiveConfig(anchors=2, anchors_per="conversation"), 4096)) == 8
    assert anchor_slot_sizes(ObjectiveConfig(anchors=10), 64) == (10,)
    row = replace(make_row((30, 30, 4)), loss_mask_T=torch.ones(64, dtype=torch.bool))
    counts = [len(found) for found in by_sample(row, draw(row, anchors=10, anchors_per="conversation")).values()]
    assert counts == [10, 10, 3]


@pytest.mark.parametrize("anchors_per", ["row", "conversation"])
@pytest.mark.parametrize("anchors", [3, 10, 64])
def test_warm_up_rows_reach_every_number_of_slots_that_real_rows_can_need(anchors_per: str, anchors: int) -> None:
    config = ObjectiveConfig(anchors=anchors, anchors_per=anchors_per)  # type: ignore[arg-type]
    rows = warm_up_rows(SPEC, config, row_tokens=64, device=torch.device("cpu"), dtype=torch.float32)
    warmed = [draw_blocks(row, SPEC, config, row_tokens=64, seed=0).anchors_A.shape[0] for row in rows]
    assert all(row.taps_TF.shape == (64, 64) for row in rows)
    assert warmed == sorted(set(warmed))
    for count in range(1, 32):
        short = 64 // count
        assert anchor_slots(config, (short,) * count, 64) in warmed


def test_inputs_labels_positions_and_teacher_of_each_slot() -> None:
    row = replace(make_row((6, 8)), loss_mask_T=torch.ones(14, dtype=torch.bool))
    blocks = blocks_at(row, SPEC, [4, 8])
    ids = row.input_ids_T.tolist()
    assert blocks.block_ids_AB.tolist() == [[ids[4], MASK_ID, MASK_ID, MASK_ID], [ids[8], MASK_ID, MASK_ID, MASK_ID]]
    assert blocks.position_ids_AB.tolist() == [[4, 5, 6, 7], [2, 3, 4, 5]]
    assert blocks.teacher_index_AB.tolist() == [[3, 4, 5, 6], [7, 8, 9, 10]]
    assert blocks.labels_AB[1].tolist() == ids[8:12]
    assert blocks.slot_mask_AB.tolist() == [[False, True, False, False], [False, True, True, True]]


def test_supervision_stops_at_the_first_unsupervised_token_and_never_resumes() -> None:
    mask = torch.ones(20, dtype=torch.bool)
    mask[9] = False
    blocks = blocks_at(replace(make_row((20,)), loss_mask_T=mask), SPEC, [7, 8, 10, 18])
    assert blocks.slot_mask_AB.int().tolist() == [[0, 1, 0, 0], [0, 0, 0, 0], [0, 1, 1, 1], [0, 1, 0, 0]]


def test_indices_stay_inside_the_row() -> None:
    row = make_row((5,))
    blocks = blocks_at(row, SPEC, [0, 4], padding=1)
    assert blocks.teacher_index_AB.min() >= 0 and blocks.teacher_index_AB.max() <= 4
    assert blocks.labels_AB.shape == (3, 4)


def test_token_noise_replaces_anchor_inputs_only_and_never_by_the_mask_token() -> None:
    row = replace(make_row((600,)), loss_mask_T=torch.ones(600, dtype=torch.bool))
    clean = draw(row, anchors=500, row_tokens=600)
    noisy = draw(row, anchors=500, row_tokens=600, token_noise_prob=0.25)
    changed = noisy.block_ids_AB[:, 0] != clean.block_ids_AB[:, 0]
    assert 0.15 < float(changed.float().mean()) < 0.35
    for field in fields(BlockBatch):
        if field.name != "block_ids_AB":
            assert torch.equal(getattr(noisy, field.name), getattr(clean, field.name))
    assert torch.equal(noisy.block_ids_AB[:, 1:], clean.block_ids_AB[:, 1:])
    new = noisy.block_ids_AB[changed, 0]
    assert (new != MASK_ID).all() and (new < VOCAB).all() and len(set(new.tolist())) > 20
    fixed = draw(row, anchors=500, row_tokens=600, token_noise_prob=1.0, epoch=VALIDATION_EPOCH)
    assert torch.equal(fixed.block_ids_AB[:, 0], row.input_ids_T[fixed.anchors_A])


def test_padding_a_row_keeps_its_tokens_and_refuses_a_longer_row() -> None:
    row = replace(make_row((5, 4)), final_hidden_TH=torch.ones(9, 32))
    padded = pad_row(row, 12)
    assert padded.lengths == row.lengths and padded.n_tokens == 9
    assert padded.document_ids_T.tolist() == [0] * 5 + [1] * 4 + [-1] * 3
    assert not padded.loss_mask_T[9:].any() and not padded.taps_TF[9:].any()
    assert padded.final_hidden_TH is not None and padded.final_hidden_TH.shape == (12, 32)
    assert torch.equal(padded.input_ids_T[:9], row.input_ids_T)
    assert pad_row(row, 9) is row
    with pytest.raises(ValueError, match="more than row_tokens 8"):
        pad_row(row, 8)


@pytest.mark.parametrize("kind", ["uniform", "gaussian"])
def test_feature_noise_has_the_named_distribution(kind: str) -> None:
    row = make_row((1500, 500))
    noise = apply_feature_noise(torch.zeros(2000, 64), row, FeatureNoise(kind=kind, scale=0.1), seed=5)
    assert abs(float(noise.mean())) < 0.001
    deviation = 0.1 if kind == "gaussian" else 0.1 / 3**0.5
    assert abs(float(noise.std()) / deviation - 1) < 0.01
    if kind == "uniform":
        assert float(noise.abs().max()) < 0.1
        quarter = (noise.flatten() < -0.05).float().mean()
        assert abs(float(quarter) - 0.25) < 0.005
    else:
        assert abs(float((noise.abs() < 0.1).float().mean()) - 0.6827) < 0.005
    # Neighbours along both axes are unrelated, and no value comes back often.
    for a, b in ((noise[1:], noise[:-1]), (noise[:, 1:], noise[:, :-1]), (noise[:1000], noise[1000:])):
        assert abs(float(torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1])) < 0.02
    assert noise.unique().numel() > 0.95 * noise.numel()


def test_feature_noise_depends_on_the_sample_alone_and_changes_with_seed_and_epoch() -> None:
    row, config = make_row((17, 9, 23)), FeatureNoise(kind="uniform", scale=0.05)
    noisy = apply_feature_noise(row.taps_TF, row, config, seed=5)
    other = pad_row(reorder(row, [2, 0]), 50)
    expected = torch.cat((noisy[26:49], noisy[:17]))
    assert torch.equal(apply_feature_noise(other.taps_TF, other, config, seed=5)[:40], expected)
    assert not torch.equal(apply_feature_noise(row.taps_TF, row, config, seed=6), noisy)
    assert not torch.equal(apply_feature_noise(row.taps_TF, row, config, seed=5, epoch=1), noisy)


def test_feature_noise_does_not_depend_on_the_chunks_it_is_made_in(monkeypatch: pytest.MonkeyPatch) -> None:
    row, config = make_row((17, 9)), FeatureNoise(kind="gaussian")
    whole = apply_feature_noise(row.taps_TF, row, config, seed=5)
    monkeypatch.setattr("draftline.drafter.blocks._NOISE_CHUNK_VALUES", 200)
    assert torch.equal(apply_feature_noise(row.taps_TF, row, config, seed=5), whole)


def test_without_noise_and_in_validation_features_are_the_captured_ones() -> None:
    row = make_row((9,))
    for config, epoch in ((FeatureNoise(), None), (FeatureNoise(kind="uniform"), VALIDATION_EPOCH)):
        assert apply_feature_noise(row.taps_TF, row, config, 1, epoch=epoch) is row.taps_TF


def test_feature_noise_keeps_the_type_of_the_features() -> None:
    row = make_row((9,))
    noisy = apply_feature_noise(row.taps_TF.bfloat16(), row, FeatureNoise(kind="uniform", scale=0.5), 1)
    assert noisy.dtype == torch.bfloat16
    assert 0 < float((noisy.float() - row.taps_TF).abs().max()) < 0.52


def test_seeds_of_draws_are_fixed_and_apart() -> None:
    seeds = {sample_seed(p, s, e, i) for p in ("anchors", "token_noise") for s in (0, 1) for e in (-1, 0) for i in "ab"}
    assert len(seeds) == 16
    assert sample_seed("anchors", 0, 0, "a") == sample_seed("anchors", 0, 0, "a")
    assert sample_seed("anchors", 1, 11, "a") != sample_seed("anchors", 11, 1, "a")


def _unshifted(bits: int, shift: int) -> int:
    """x where x ^ (x >> shift) is `bits`."""
    found = bits
    for _ in range(32 // shift + 1):
        found = bits ^ (found >> shift)
    return found


def _unmixed(value: int) -> int:
    """The number whose hash is `value`: each round undone, last first."""
    value = _unshifted(value, 15)
    for shift, multiplier in ((16, 0x21F0AAAD), (15, 0x735A2D97), (16, 0x21F0AAAD)):
        value = _unshifted(value * pow(multiplier, -1, 1 << 32) & 0xFFFFFFFF, shift)
    return value


def test_noise_is_finite_for_every_hash() -> None:
    extremes = _unit_hash(torch.tensor([_unmixed(0), _unmixed(0xFFFFFFFF), _unmixed(0x80000000)]))
    assert -1 < float(extremes[0]) < -0.9999 and 0.9999 < float(extremes[1]) < 1 and abs(float(extremes[2])) < 1e-6
    assert bool(torch.erfinv(extremes).isfinite().all())


def test_a_row_has_no_more_slots_than_tokens() -> None:
    assert anchor_slots(ObjectiveConfig(anchors=3_000_000), [30, 34], 64) == 64
