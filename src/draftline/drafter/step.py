"""One row through the drafter: blocks, forward, head, backward. The same for training and validation.

Adds the gradient of the loss's NUMERATOR, unscaled, to `.grad` of the drafter's parameters and reports the denominator;
the optimizer divides once by the denominators of all rows of its step. A row without any valid anchor contributes
zero to both, touches no gradient and is counted.

Inside a step the host waits once at most, and never for the drafter: for the number of supervised slots, whose copy
starts before the forward is launched (see `head_plan.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from draftline.config.schema import ObjectiveConfig
from draftline.drafter.blocks import (
    VALIDATION_EPOCH,
    BlockBatch,
    anchor_slot_sizes,
    anchor_slots,
    apply_feature_noise,
    draw_blocks,
    make_blocks,
    pad_row,
)
from draftline.drafter.head import HeadOutput, Teacher, run_head, run_top_tokens, score_head
from draftline.drafter.head_fp8 import quantize_head, require_fp8
from draftline.drafter.head_plan import HeadPlan, plan_slots
from draftline.drafter.loss import LossTerms, denominator, slot_weights
from draftline.drafter.metrics import RowOutcome, StepStats, TreeMetric, sum_row
from draftline.drafter.model import Drafter, DrafterCache
from draftline.drafter.top_tokens import TopTokens
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


class DrafterStep:
    """Forward and backward of rows for one drafter.

    Args:
        drafter: the model whose (compute) parameters receive gradients.
        embedding: the target's input embedding.
        head: the draft's head, with the soft cap and multiplier of the drafter's spec.
        objective: what is minimised.
        teacher: the target's own head; needed if `objective.needs_teacher`.
        row_tokens: tokens of a full row.
        seed: the run's seed; draws of a sample depend on (seed, epoch, sample id) only.
        final_norm: the target's final norm, applied where a row carries its last hidden state before it.
        static_shapes: pad rows to `row_tokens` and keep padding blocks, so that compiled code sees one shape.
            None: on CUDA only. The result is the same.
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
        self.trees = trees

    def forward_backward(self, row: HiddenStateRow) -> StepStats:
        """Trains on one row: gradients are added to `.grad`. No host sync beyond the module's note."""
        self._drafter.train()
        prepared = self._prepare(row, row.epoch)
        if self._is_known_empty(prepared):
            return self._empty_row(row)
        taps_TF = apply_feature_noise(
            prepared.row.taps_TF, prepared.row, self._objective.feature_noise, self._seed, epoch=row.epoch
        )
        hidden_QH = self._hidden(prepared, taps_TF)
        if not prepared.plan.chunks():
            return self._empty_row(row)
        return self._finish(prepared, self._pass_head(prepared, hidden_QH), train=True)

    @torch.no_grad()
    def evaluate(self, row: HiddenStateRow) -> StepStats:
        """Scores one row without gradient and without noise, at the fixed anchors of validation."""
        self._drafter.eval()
        prepared = self._prepare(row, VALIDATION_EPOCH)
        if self._is_known_empty(prepared):
            return self._empty_row(row, self.trees)
        hidden_QH = self._hidden(prepared, prepared.row.taps_TF)
        top = None if self.trees is None else TopTokens.empty(len(hidden_QH), self._width(), hidden_QH.device)
        labels_Q = prepared.blocks.labels_AB.flatten()
        output = score_head(hidden_QH, labels_Q, prepared.plan, self._head, self._terms, prepared.teacher, top)
        return self._finish(prepared, output, train=False, top=top)

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
    def draft_blocks(self, row: HiddenStateRow, anchors: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Drafts the blocks at given places as decoding would: without noise, whole, whatever is supervised in them.

        Args:
            row: on the drafter's device.
            anchors: rising row indices, at least one and at most `blocks_at_once(row)`.

        Returns:
            Log-probabilities [A, K, R] and ids [A, K, R] of the likeliest tokens of slots 1..K; R is what `trees`
            needs, 1 without trees.
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
        top = TopTokens.empty(len(hidden_QH), self._width(), hidden_QH.device)
        run_top_tokens(hidden_QH, plan, self._head, top)
        log_probs_AKR, tokens_AKR = top.blocks(self._drafter.spec.block_size)
        return log_probs_AKR[: len(anchors)], tokens_AKR[: len(anchors)]

    @torch.no_grad()
    def draft_short(
        self, row: HiddenStateRow, first: int, anchor: int, slots: int, cache: DrafterCache | None
    ) -> tuple[Tensor, Tensor, DrafterCache]:
        """Drafts one block of fewer slots, as decoding does before a length limit, by the block form of the drafter.

        Args:
            row: on the drafter's device.
            first: row index of the document's first token.
            anchor: row index of the block's first slot.
            slots: slots of the block, 2 at least.
            cache: what an earlier call for the same document gave back; None at first.

        Returns:
            As `draft_blocks`, with slots - 1 in place of K and one block; and the cache.
        """
        self._drafter.eval()
        cache = cache or self._drafter.new_cache()
        start = anchor - first
        cache.crop(min(cache.length, start))
        ids_B = torch.full((slots,), self._drafter.spec.mask_token_id, device=row.input_ids_T.device)
        ids_B[0] = row.input_ids_T[anchor]
        new_taps_SF = row.taps_TF[first + cache.length : anchor]
        hidden_BH = self._drafter.forward_block(self._embed(ids_B), new_taps_SF, cache, start)
        top = TopTokens.empty(slots, self._width(), hidden_BH.device)
        slots_Q = torch.arange(slots, device=hidden_BH.device)
        run_top_tokens(hidden_BH, plan_slots(slots_Q > 0, slots_Q, chunk=slots), self._head, top)
        return *top.blocks(slots), cache

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
        for row in self._made_up_rows():
            self.forward_backward(row)
            self.evaluate(row)
        for parameter, gradient in zip(self._drafter.parameters(), kept, strict=True):
            parameter.grad = gradient

    def _made_up_rows(self) -> Iterator[HiddenStateRow]:
        """Full rows of one sample, two, three, ... until each number of anchor slots has come up."""
        missing = set(anchor_slot_sizes(self._objective, self._row_tokens))
        for n_samples in range(1, self._row_tokens // 2 + 1):
            lengths = (self._row_tokens // n_samples,) * n_samples
            size = anchor_slots(self._objective, lengths, self._row_tokens)
            if size in missing:
                missing.remove(size)
                yield self._made_up_row(lengths)
            if not missing:
                return

    def _made_up_row(self, lengths: tuple[int, ...]) -> HiddenStateRow:
        spec, weight_VH = self._drafter.spec, self._embedding.weight_VH
        n_samples, length, n_tokens = len(lengths), lengths[0], sum(lengths)
        index_T = torch.arange(n_tokens, device=weight_VH.device)
        return HiddenStateRow(
            row_id=-1,
            epoch=0,
            sample_ids=tuple(f"warm-up-{i}" for i in range(n_samples)),
            lengths=lengths,
            input_ids_T=torch.zeros_like(index_T),
            loss_mask_T=torch.ones_like(index_T, dtype=torch.bool),
            document_ids_T=(index_T // length).to(torch.int32),
            position_ids_T=index_T % length,
            taps_TF=weight_VH.new_zeros(n_tokens, len(spec.taps) * spec.hidden_size),
            final_hidden_TH=weight_VH.new_zeros(n_tokens, spec.hidden_size) if self._terms.needs_teacher else None,
            final_hidden_norm="post",
            tap_layer_ids=spec.taps,
        )

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
            blocks = _kept_blocks(blocks)
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
        mask = self._drafter.build_masks(row.document_ids_T, blocks.anchors_A, blocks.document_A)
        embeddings_QH = self._embed(blocks.block_ids_AB.flatten())
        return self._drafter(embeddings_QH, taps_TF, mask, row.position_ids_T, blocks.position_ids_AB.flatten())

    def _embed(self, ids_Q: Tensor) -> Tensor:
        embeddings_QH = F.embedding(ids_Q, self._embedding.weight_VH.detach())
        return embeddings_QH if self._embedding.scale == 1.0 else embeddings_QH * self._embedding.scale

    def _pass_head(self, prepared: _Prepared, hidden_QH: Tensor) -> HeadOutput:
        return run_head(
            hidden_QH,
            prepared.blocks.labels_AB.flatten(),
            prepared.plan,
            self._training_head,
            self._terms,
            prepared.teacher,
            form=self._objective.head,
        )

    def _finish(
        self, prepared: _Prepared, output: HeadOutput, *, train: bool, top: TopTokens | None = None
    ) -> StepStats:
        """Weights, backward and sums."""
        mask_AB, values = prepared.blocks.slot_mask_AB, output.values
        weight_AB = slot_weights(self._objective.decay, mask_AB, values.ce.view_as(mask_AB))
        weight_Q = weight_AB.flatten()
        total_Q = sum(
            (c * getattr(values, name) for name, c in self._terms.coefficients().items() if c),
            torch.zeros_like(weight_Q),
        )
        numerator = (weight_Q * total_Q).sum()
        size = output.backward(weight_Q) if train else torch.zeros_like(numerator)
        return sum_row(
            RowOutcome(
                mask_AB=mask_AB,
                weight_AB=weight_AB,
                values=values,
                numerator=numerator,
                denominator=denominator(self._objective.decay, mask_AB, weight_AB),
                gradient_size=size,
                tree_budgets=self.trees.budgets if self.trees is not None and not train else (),
                tree_accepted_AN=self._tree_accepted(prepared.blocks, top),
            )
        )

    def _tree_accepted(self, blocks: BlockBatch, top: TopTokens | None) -> Tensor | None:
        """Leading labels that each block's trees hold, [A, N]. Labels are the data's: the text that was written."""
        if self.trees is None or top is None:
            return None
        log_probs_AKR, tokens_AKR = top.blocks(self._drafter.spec.block_size)
        labels_AK, known_AK = blocks.labels_AB[:, 1:], blocks.slot_mask_AB[:, 1:]
        return self.trees.accepted(log_probs_AKR, tokens_AKR, labels_AK, known_AK, self.trees.budgets)

    def _is_known_empty(self, prepared: _Prepared) -> bool:
        """True if no block is left, where that is known without waiting for the device."""
        return prepared.blocks.anchors_A.shape[0] == 0

    def _empty_row(self, row: HiddenStateRow, trees: TreeMetric | None = None) -> StepStats:
        """Every parameter has a gradient afterwards, so a joint step finds zeros rather than nothing."""
        if torch.is_grad_enabled():
            for parameter in self._drafter.parameters():
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        budgets = () if trees is None else trees.budgets
        return StepStats.of_empty_row(self._drafter.spec.block_size, row.taps_TF.device, budgets)


def _kept_blocks(blocks: BlockBatch) -> BlockBatch:
    """Without padding blocks: less work where shapes may vary (the CPU, where reading the mask costs nothing)."""
    keep_A = blocks.keep_A
    fields = {name: getattr(blocks, name)[keep_A] for name in BlockBatch.__dataclass_fields__}
    return replace(blocks, **fields)
