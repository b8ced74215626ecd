"""Validation's trees: the same blocks as the chain, grown by decoding's rule, summed like everything else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from draftline.config.schema import ExponentialDecay, ObjectiveConfig, ValidationConfig
from draftline.decode.tree import build_tree, top_marginals
from draftline.drafter.blocks import VALIDATION_EPOCH, draw_blocks
from draftline.drafter.head_chunk import apply_head_
from draftline.drafter.metrics import StepStats
from draftline.drafter.model import Drafter
from draftline.drafter.step import DrafterStep
from draftline.pipeline.validation import tree_metric
from draftline.records import HiddenStateRow
from objective_kit import random_embedding, random_head, random_row, tiny_spec

SPEC = tiny_spec()
BUDGETS = (1, 5, 24)
OBJECTIVE = ObjectiveConfig(anchors=40, decay=ExponentialDecay(gamma=3.0), kl_weight=0.2, head_chunk_positions=50)
ROW_TOKENS = 96


def make_step(budgets: tuple[int, ...] = BUDGETS, *, static_shapes: bool | None = None) -> DrafterStep:
    drafter = Drafter(SPEC)
    return DrafterStep(
        drafter,
        random_embedding(SPEC, torch.float32),
        replace(random_head(SPEC, torch.float32), multiplier=1.5, softcap=5.0),
        OBJECTIVE,
        teacher=random_head(SPEC, torch.float32),
        row_tokens=ROW_TOKENS,
        seed=7,
        static_shapes=static_shapes,
        trees=tree_metric(ValidationConfig(tree_budgets=budgets)),
    )


def make_row(lengths: tuple[int, ...] = (30, 21, 40)) -> HiddenStateRow:
    return random_row(lengths, SPEC, dtype=torch.float32)


def grown(step: DrafterStep, row: HiddenStateRow) -> tuple[list[float], int]:
    """Tree lengths summed over whole blocks, one block and one tree after the other, and the number of such blocks."""
    blocks = draw_blocks(row, SPEC, OBJECTIVE, row_tokens=ROW_TOKENS, seed=7, epoch=VALIDATION_EPOCH)
    sums, whole = [0.0] * len(BUDGETS), 0
    for index, anchor in enumerate(blocks.anchors_A.tolist()):
        if not bool(blocks.keep_A[index]) or not bool(blocks.slot_mask_AB[index, 1:].all()):
            continue
        whole += 1
        logits_KV = block_logits(step, row, anchor)
        labels = row.input_ids_T[anchor + 1 : anchor + SPEC.block_size].tolist()
        for i, budget in enumerate(BUDGETS):
            sums[i] += 1 + build_tree(top_marginals(logits_KV, budget), budget).walk_text(labels)
    return sums, whole


def block_logits(step: DrafterStep, row: HiddenStateRow, anchor: int, slots: int = SPEC.block_size) -> torch.Tensor:
    """Logits of one block by the block form of the drafter, which shares no code with the packed form's blocks."""
    drafter, head = step._drafter, step._head
    first = anchor - int(row.position_ids_T[anchor])
    ids = torch.full((slots,), SPEC.mask_token_id)
    ids[0] = row.input_ids_T[anchor]
    with torch.no_grad():
        embedded = step._embedding.weight_VH[ids] * step._embedding.scale
        hidden = drafter.forward_block(embedded, row.taps_TF[first:anchor], drafter.new_cache(), anchor - first)
        return apply_head_(hidden[1:] @ head.weight_VH.t(), head)


def test_validation_trees_are_those_that_decoding_would_grow_from_the_same_blocks() -> None:
    step, row = make_step(), make_row()
    stats = step.evaluate(row)
    sums, whole = grown(step, row)
    assert whole > 5 and float(stats.acceptance_blocks) == whole
    assert stats.tree_sums.tolist() == sums
    assert sums[0] < sums[-1]
    lengths = stats.summary()["tree_acceptance_length"]
    assert lengths == {str(b): total / whole for b, total in zip(BUDGETS, sums, strict=True)}


def test_trees_change_no_other_number_of_validation() -> None:
    row = make_row()
    with_trees, without = make_step().evaluate(row), make_step(()).evaluate(row)
    n_others = without.vector.shape[0]
    torch.testing.assert_close(with_trees.vector[:n_others], without.vector, rtol=1e-5, atol=1e-6)
    assert without.tree_sums.shape == (0,) and without.summary()["tree_acceptance_length"] == {}


def test_tree_sums_add_up_over_rows_and_do_not_depend_on_padding() -> None:
    step, rows = make_step(), [make_row((30, 21, 40)), make_row((50, 20))]
    parts = [step.evaluate(row) for row in rows]
    both = parts[0] + parts[1]
    assert both.tree_sums.tolist() == (parts[0].tree_sums + parts[1].tree_sums).tolist()
    padded = make_step(static_shapes=True).evaluate(rows[0])
    assert padded.tree_sums.tolist() == parts[0].tree_sums.tolist()
    assert both.to("cpu").tree_budgets == BUDGETS


def test_sums_with_other_trees_do_not_add_up() -> None:
    with pytest.raises(ValueError, match=r"trees \(1, 5\) and \(1, 6\) do not add up"):
        StepStats.zeros(4, tree_budgets=(1, 5)) + StepStats.zeros(4, tree_budgets=(1, 6))


def test_rows_without_blocks_or_with_broken_numbers_add_no_tree() -> None:
    step, row = make_step(), make_row()
    empty = step.evaluate(replace(row, loss_mask_T=torch.zeros_like(row.loss_mask_T)))
    broken = step.evaluate(replace(row, taps_TF=torch.full_like(row.taps_TF, float("nan"))))
    total = empty + broken + step.evaluate(row)
    assert total.tree_sums.tolist() == step.evaluate(row).tree_sums.tolist()
    assert total.summary()["counts"]["nonfinite_rows"] == 1


def test_training_keeps_no_trees() -> None:
    step = make_step()
    assert step.forward_backward(make_row()).tree_budgets == ()


def test_drafts_of_given_places_come_whole_whatever_is_supervised() -> None:
    step, row = make_step(), make_row((30, 21))
    anchors = [3, 28, 29, 35, 50]  # near the ends of both documents too
    for static in (False, True):
        log_probs, tokens = make_step(static_shapes=static).draft_blocks(row, anchors)
        assert tokens.shape == (5, SPEC.block_size - 1, min(24, SPEC.vocab_size))
        for index, anchor in enumerate(anchors):
            expected = block_logits(step, row, anchor).log_softmax(-1)
            torch.testing.assert_close(log_probs[index], expected.gather(-1, tokens[index]), rtol=1e-4, atol=1e-4)
            assert tokens[index, :, 0].tolist() == expected.argmax(-1).tolist()


def test_short_blocks_see_fewer_mask_tokens_and_may_be_asked_for_in_any_order() -> None:
    step, row = make_step(), make_row((30, 21))
    cache = None
    for anchor, slots in ((33, 3), (40, 2), (36, 3)):
        (log_probs, tokens), cache = step.draft_short(row, 30, anchor, slots, cache)
        assert tokens.shape[:2] == (1, slots - 1)
        expected = block_logits(step, row, anchor, slots).log_softmax(-1)
        torch.testing.assert_close(log_probs[0], expected.gather(-1, tokens[0]), rtol=1e-4, atol=1e-4)
        whole, _ = step.draft_blocks(row, [anchor])
        assert not torch.allclose(log_probs[0, 0], whole[0, 0], atol=1e-4)
