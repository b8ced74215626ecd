"""One row through the drafter: blocks, forward, head, backward. The same for training and validation.

Adds the gradient of the loss's NUMERATOR, unscaled, to `.grad` of the drafter's parameters and reports the denominator;
the optimizer divides once by the denominators of all rows of its step. A row without any valid anchor contributes
zero to both, touches no gradient and is counted.

Inside a step the host waits once at most, and never for the drafter: for the number of supervised slots, whose copy
starts before the forward is launched (see `head_plan.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from draftline.config.schema import ObjectiveConfig
from draftline.drafter.blocks import (
    VALIDATION_EPOCH,
    BlockBatch,
    anchor_slots,
    apply_feature_noise,
    draw_blocks,
    make_blocks,
    pad_row,
    without_padding,
)
from draftline.drafter.candidates import Candidates
from draftline.drafter.draft_tables import DraftTables, run_tables
from draftline.drafter.drafts import BlockDrafts
from draftline.drafter.graphed import GraphedFunction
from draftline.drafter.head import HeadOutput, Teacher, run_head, score_head
from draftline.drafter.head_fp8 import quantize_head, require_fp8
from draftline.drafter.head_plan import HeadPlan, plan_slots
from draftline.drafter.loss import LossTerms, denominator, slot_weights
from draftline.drafter.metrics import RowOutcome, StepStats, TreeMetric, sum_row
from draftline.drafter.model import Drafter, DrafterCache
from draftline.drafter.selector_loss import SelectorLoss, SelectorOutcome
from draftline.drafter.warm_rows import made_up_rows
from draftline.errors import UserError
from draftline.records import FrozenEmbedding, FrozenHead, HiddenStateRow

__all__ = ["DrafterStep", "StepStats"]


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A row ready for the forward: blocks drawn, and the head's plan on its way to the host."""

    row: HiddenStateRow
    blocks: BlockBatch
    plan: HeadPlan
    teacher: Teacher | None

    def is_known_empty(self) -> bool:
        """True if no block is left, where that is known without waiting for the device."""
        return self.blocks.anchors_A.shape[0] == 0


class DrafterStep:
    """Forward and backward of rows for one drafter.

    Args:
        drafter: the model whose (compute) parameters receive gradients.
        embedding: the target's input embedding.
        head: the draft's head, with the soft cap and multiplier of the drafter's spec.
        objective: what is minimised.
        teacher: the target's own head; needed if `objective.needs_teacher`, else UserError (so for fp8 without a GPU).
        row_tokens: tokens of a full row.
        seed: the run's seed; draws of a sample depend on (seed, epoch, sample id) only.
        final_norm: the target's final norm, applied where a row carries its last hidden state before it.
        static_shapes: pad rows and keep padding blocks: one shape, the same result. None: on CUDA only.
        cuda_graphs: replay the drafter's part of training from CUDA graphs (`graphed.py`); needs static shapes.
        trees: draft trees that `evaluate` scores beside the chain; None: none.
    """

    def __init__(
        self,
        drafter: Drafter,
        embedding: FrozenEmbedding,
        head: FrozenHead,
        objective: ObjectiveConfig,
        *,
        teacher: FrozenHead | None = None,
        row_tokens: int,
        seed: int,
        final_norm: torch.nn.Module | None = None,
        static_shapes: bool | None = None,
        cuda_graphs: bool = False,
        trees: TreeMetric | None = None,
    ) -> None:
        if objective.needs_teacher and teacher is None:
            raise UserError("the objective needs a teacher, but no target head was given", where="objective")
        if objective.needs_fp8:
            require_fp8(head.weight_VH.device)
        drafter.set_mlp_fp8(objective.mlp_dtype == "fp8")
        self._drafter, self._embedding, self._head = drafter, embedding, head
        self._training_head = quantize_head(head) if objective.head_dtype == "fp8" else head
        self._objective, self._terms = objective, LossTerms.of(objective)
        self._teacher_head, self._final_norm = teacher, final_norm
        self._row_tokens, self._seed, self._static_shapes = row_tokens, seed, static_shapes
        selector = drafter.candidate_selector
        self._selector = None if selector is None else SelectorLoss(selector, head, objective.selector)
        self._graphed = GraphedFunction(self._drafted, list(drafter.parameters())) if cuda_graphs else None
        self.trees = trees

    def forward_backward(self, row: HiddenStateRow) -> StepStats:
        """Trains on one row: gradients are added to `.grad`. No host sync beyond the module's note."""
        if not self._drafter.training:  # walking all modules takes a millisecond
            self._drafter.train()
        prepared = self._prepare(row, row.epoch)
        if prepared.is_known_empty():
            return self._empty_row(row)
        taps_TF = apply_feature_noise(
            prepared.row.taps_TF, prepared.row, self._objective.feature_noise, self._seed, epoch=row.epoch
        )
        hidden_QH = self._hidden(prepared, taps_TF)
        if not prepared.plan.chunks():
            return self._empty_row(row)
        candidates = None if self._selector is None else self._tables(hidden_QH).candidates
        output = self._pass_head(prepared, hidden_QH, candidates)
        found = self._pass_selector(prepared, hidden_QH, output, candidates, train=True)
        return self._finish(prepared, output, found, train=True)

    @torch.no_grad()
    def evaluate(self, row: HiddenStateRow) -> StepStats:
        """Scores one row without gradient and without noise, at the fixed anchors of validation."""
        self._drafter.eval()
        prepared = self._prepare(row, VALIDATION_EPOCH)
        if prepared.is_known_empty():
            return self._empty_row(row, self.trees)
        hidden_QH = self._hidden(prepared, prepared.row.taps_TF)
        labels_Q = prepared.blocks.labels_AB.flatten()
        tables = DraftTables.none() if self._selector is None and self.trees is None else self._tables(hidden_QH)
        output = score_head(
            hidden_QH,
            labels_Q,
            prepared.plan,
            self._head,
            self._terms,
            prepared.teacher,
            tables.top,
            tables.candidates,
        )
        found = self._pass_selector(prepared, hidden_QH, output, tables.candidates, train=False)
        trees_AN = None
        if self.trees is not None:  # labels are the data's: the text that was written
            labels_AB = prepared.blocks.labels_AB
            drafts = tables.drafts(hidden_QH, self.block_size, labels_AB[:, 0])
            trees_AN = self.trees.count(drafts, labels_AB[:, 1:], prepared.blocks.slot_mask_AB[:, 1:])
        return self._finish(prepared, output, found, train=False, trees_AN=trees_AN)

    @property
    def block_size(self) -> int:
        """B: the anchor's token and B - 1 drafts."""
        return self._drafter.spec.block_size

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self._head.weight_VH.device

    def blocks_at_once(self, row: HiddenStateRow) -> int:
        """Most anchors of one `draft_blocks`: as many as a step on this row has, so that its shape is a known one."""
        return anchor_slots(self._objective, row.lengths, self._row_tokens)

    @torch.no_grad()
    def draft_blocks(self, row: HiddenStateRow, anchors: Sequence[int]) -> BlockDrafts:
        """Drafts the blocks at given places as decoding would: without noise, whole, whatever is supervised in them.

        Args:
            row: on the drafter's device.
            anchors: rising row indices, at least one and at most `blocks_at_once(row)`.

        Returns:
            The likeliest tokens of slots 1..K, as many as `trees` needs, 1 without trees; or, of a drafter with a
            candidate selector, the scores of its paths.
        """
        self._drafter.eval()
        if self._is_static(row):
            row = pad_row(row, self._row_tokens)
        missing = self.blocks_at_once(row) - len(anchors) if self._is_static(row) else 0
        anchors_A = torch.tensor([*anchors, *[0] * missing], device=row.taps_TF.device)
        keep_A = torch.arange(len(anchors_A), device=anchors_A.device) < len(anchors)
        blocks = make_blocks(row, self._drafter.spec, anchors_A, keep_A)
        drafted_AB = keep_A[:, None].repeat(1, self._drafter.spec.block_size)
        drafted_AB[:, 0] = False
        plan = self._plan(drafted_AB, blocks.teacher_index_AB)
        hidden_QH = self._hidden(_Prepared(row, blocks, plan, None), row.taps_TF)
        tables = self._tables(hidden_QH)
        run_tables(hidden_QH, plan, self._head, tables)
        return tables.drafts(hidden_QH, self.block_size, row.input_ids_T[anchors_A]).first(len(anchors))

    @torch.no_grad()
    def draft_short(
        self, row: HiddenStateRow, first: int, anchor: int, slots: int, cache: DrafterCache | None
    ) -> tuple[BlockDrafts, DrafterCache]:
        """Drafts one block of fewer slots, as decoding does before a length limit, by the block form of the drafter.

        Args:
            row: on the drafter's device.
            first: row index of the document's first token.
            anchor: row index of the block's first slot.
            slots: slots of the block, 2 at least.
            cache: what an earlier call for the same document gave back; None at first.

        Returns:
            As `draft_blocks`, one block with slots - 1 in place of K; and the cache.
        """
        self._drafter.eval()
        cache = cache or self._drafter.new_cache()
        start = anchor - first
        cache.crop(min(cache.length, start))
        ids_B = torch.full((slots,), self._drafter.spec.mask_token_id, device=row.input_ids_T.device)
        ids_B[0] = row.input_ids_T[anchor]
        new_taps_SF = row.taps_TF[first + cache.length : anchor]
        hidden_BH = self._drafter.forward_block(self._embed(ids_B), new_taps_SF, cache, start)
        slots_Q = torch.arange(slots, device=hidden_BH.device)
        plan = plan_slots(slots_Q > 0, slots_Q, chunk=slots)
        tables = self._tables(hidden_BH)
        run_tables(hidden_BH, plan, self._head, tables)
        return tables.drafts(hidden_BH, slots, row.input_ids_T[anchor : anchor + 1]), cache

    def _tables(self, hidden_QH: Tensor) -> DraftTables:
        return DraftTables.empty(hidden_QH, self._drafter.candidate_selector, self._width())

    def _width(self) -> int:
        """Tokens to keep of a slot."""
        wanted = 1 if self.trees is None else self.trees.width
        return min(wanted, self._drafter.spec.vocab_size)

    def warm_up(self) -> None:
        """A training and a validation step on made-up rows, one for each shape that rows can take.

        Compiles whatever is compiled lazily (layers, masks, kernels of the head); gradients are left as they were.
        """
        kept = [parameter.grad for parameter in self._drafter.parameters()]
        self._drafter.zero_grad(set_to_none=True)  # a backward adds in place to what is there
        rows = made_up_rows(
            self._drafter.spec,
            self._objective,
            self._row_tokens,
            self._embedding.weight_VH,
            want_final=self._terms.needs_teacher,
        )
        for row in rows:
            self.forward_backward(row)
            self.evaluate(row)
        for parameter, gradient in zip(self._drafter.parameters(), kept, strict=True):
            parameter.grad = gradient

    def _prepare(self, row: HiddenStateRow, epoch: int) -> _Prepared:
        if self._terms.needs_teacher and row.final_hidden_TH is None:
            raise UserError(
                f"row {row.row_id} carries no final hidden state, but the objective needs a teacher",
                mend="capture with want_final, or set objective.labels: data and kl, tv and reverse_kl weights to 0",
            )
        static = self._is_static(row)
        if static:
            row = pad_row(row, self._row_tokens)
        blocks = draw_blocks(
            row, self._drafter.spec, self._objective, row_tokens=self._row_tokens, seed=self._seed, epoch=epoch
        )
        if not static:
            blocks = without_padding(blocks)
        return _Prepared(row, blocks, self._plan(blocks.slot_mask_AB, blocks.teacher_index_AB), self._teacher(row))

    def _is_static(self, row: HiddenStateRow) -> bool:
        return row.taps_TF.is_cuda if self._static_shapes is None else self._static_shapes

    def _plan(self, mask_AB: Tensor, teacher_index_AB: Tensor) -> HeadPlan:
        chunk = self._objective.head_chunk_positions
        return plan_slots(mask_AB.flatten(), teacher_index_AB.flatten(), chunk=chunk)

    def _teacher(self, row: HiddenStateRow) -> Teacher | None:
        hidden_TH = row.final_hidden_TH
        if not self._terms.needs_teacher or hidden_TH is None or self._teacher_head is None:
            return None
        if row.final_hidden_norm == "pre":
            if self._final_norm is None:
                raise UserError(
                    f"row {row.row_id} carries the target's last hidden state before its final norm",
                    mend="give DrafterStep the target's final norm",
                )
            with torch.no_grad():
                hidden_TH = self._final_norm(hidden_TH)
        return Teacher(self._teacher_head, hidden_TH)

    def _hidden(self, prepared: _Prepared, taps_TF: Tensor) -> Tensor:
        row, blocks = prepared.row, prepared.blocks
        run = self._drafted if self._graphed is None or not torch.is_grad_enabled() else self._graphed
        of_row = (taps_TF, row.document_ids_T, row.position_ids_T)
        return run(blocks.block_ids_AB, blocks.anchors_A, blocks.document_A, blocks.position_ids_AB, *of_row)

    def _drafted(
        self,
        block_ids_AB: Tensor,
        anchors_A: Tensor,
        document_A: Tensor,
        block_positions_AB: Tensor,
        taps_TF: Tensor,
        document_ids_T: Tensor,
        position_ids_T: Tensor,
    ) -> Tensor:
        """Hidden states of all blocks, [Q, H]. A function of tensors, so that it can be recorded."""
        mask = self._drafter.build_masks(document_ids_T, anchors_A, document_A)
        return self._drafter(
            self._embed(block_ids_AB.flatten()), taps_TF, mask, position_ids_T, block_positions_AB.flatten()
        )

    def _embed(self, ids_Q: Tensor) -> Tensor:
        embeddings_QH = F.embedding(ids_Q, self._embedding.weight_VH.detach())
        return embeddings_QH if self._embedding.scale == 1.0 else embeddings_QH * self._embedding.scale

    def _pass_head(self, prepared: _Prepared, hidden_QH: Tensor, candidates: Candidates | None) -> HeadOutput:
        return run_head(
            hidden_QH,
            prepared.blocks.labels_AB.flatten(),
            prepared.plan,
            self._training_head,
            self._terms,
            prepared.teacher,
            form=self._objective.head,
            candidates=candidates,
        )

    def _weights(self, prepared: _Prepared, output: HeadOutput) -> Tensor:
        mask_AB = prepared.blocks.slot_mask_AB
        return slot_weights(self._objective.decay, mask_AB, output.values.ce.view_as(mask_AB))

    def _pass_selector(
        self,
        prepared: _Prepared,
        hidden_QH: Tensor,
        output: HeadOutput,
        candidates: Candidates | None,
        *,
        train: bool,
    ) -> SelectorOutcome | None:
        if self._selector is None or candidates is None:
            return None
        factor = self._selector.factor(prepared.row.row_id) if train else self._objective.selector.weight
        return self._selector.run(
            hidden_QH,
            candidates,
            prepared.blocks.labels_AB,
            self._weights(prepared, output),
            prepared.plan,
            factor=factor,
            train=train,
        )

    def _finish(
        self,
        prepared: _Prepared,
        output: HeadOutput,
        found: SelectorOutcome | None,
        *,
        train: bool,
        trees_AN: Tensor | None = None,
    ) -> StepStats:
        """Weights, backward and sums."""
        mask_AB, values = prepared.blocks.slot_mask_AB, output.values
        weight_AB = self._weights(prepared, output)
        weight_Q = weight_AB.flatten()
        total_Q = sum(
            (c * getattr(values, name) for name, c in self._terms.coefficients().items() if c),
            torch.zeros_like(weight_Q),
        )
        numerator = (weight_Q * total_Q).sum()
        size = torch.zeros_like(numerator)
        if train:
            size = output.backward(weight_Q, None if found is None else found.gradient_QH)
        if found is not None:
            numerator = numerator + found.numerator
        return sum_row(
            RowOutcome(
                mask_AB=mask_AB,
                weight_AB=weight_AB,
                values=values,
                numerator=numerator,
                denominator=denominator(self._objective.decay, mask_AB, weight_AB),
                gradient_size=size,
                tree_budgets=self.trees.budgets if self.trees is not None and trees_AN is not None else (),
                tree_accepted_AN=trees_AN,
                selector=found,
            )
        )

    def _empty_row(self, row: HiddenStateRow, trees: TreeMetric | None = None) -> StepStats:
        """Every parameter has a gradient afterwards, so a joint step finds zeros rather than nothing."""
        if torch.is_grad_enabled():
            for parameter in self._drafter.parameters():
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        budgets = () if trees is None else trees.budgets
        return StepStats.of_empty_row(self._drafter.spec.block_size, row.taps_TF.device, budgets)
