"""What a row costs: model FLOPs and bytes of target capture and of a drafter step, from sizes alone.

FLOPs are the model's: two a weight and token in the forward, twice that in the backward, nothing for what is
recomputed. Left out, because below 2 % each: norms, rotary embeddings, the state updates of linear attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from draftline.config.drafter_spec import DrafterSpec
from draftline.config.schema import ObjectiveConfig, RunConfig
from draftline.drafter.blocks import anchor_slots
from draftline.pipeline.runplan import RunPlan, compute_dtype, count_drafter_parameters, dtype_bytes
from draftline.target.facts import TargetFacts
from draftline.target.size import TargetSize

# Reads and writes of AdamW on fp32 masters with a bf16 copy, bytes a parameter: gradients in and out, masters and
# moments read and written, copy written.
_OPTIMIZER_BYTES = 2 + 4 + 4 + 2 * 12 + 2
_FP8_SPEED = 1.6  # of an fp8 product over a bf16 one, measured on an H200


@dataclass(frozen=True, slots=True)
class RowWork:
    """FLOPs and bytes of memory traffic of one row at one stage; bytes of weights and states only."""

    flops: float
    memory_bytes: float


def target_work(
    config: RunConfig, facts: TargetFacts, size: TargetSize, taps: Sequence[int], lengths: list[int]
) -> RowWork:
    """Capture of a row of samples with these lengths: the layers up to the last tap, or all if a teacher is needed."""
    layers = facts.num_layers if config.objective.needs_teacher else taps[-1] + 1
    tokens, weights = sum(lengths), sum(size.active_by_layer[:layers])
    width = facts.num_heads * facts.head_dim
    scores = sum(4 * width * _seen(lengths, None) for kind in facts.layer_types[:layers] if kind != "linear_attention")
    element = dtype_bytes(compute_dtype(config.target.dtype, config.pipeline.target_devices[0]))
    return RowWork(2.0 * tokens * weights + scores, float(weights * element))


def drafter_work(plan: RunPlan, lengths: list[int]) -> RowWork:
    """Forward, backward and optimizer step of a row."""
    spec, objective = plan.spec, plan.config.objective
    row_tokens = plan.config.data.row_tokens
    anchors = anchor_slots(objective, lengths, row_tokens)
    flops = _layer_flops(spec, anchors, row_tokens, lengths) + _head_flops(spec, objective, anchors, sum(lengths))
    steps = 1.0 / plan.config.optimizer.accumulate_rows
    return RowWork(flops, count_drafter_parameters(spec) * _OPTIMIZER_BYTES * steps)


def _layer_flops(spec: DrafterSpec, anchors: int, row_tokens: int, lengths: list[int]) -> float:
    """The drafter's layers over block positions Q = A B, and what its context costs."""
    hidden, width = spec.hidden_size, spec.num_heads * spec.head_dim
    positions = anchors * spec.block_size
    key_value = 2 * hidden * spec.num_kv_heads * spec.head_dim
    block = 2 * hidden * width + key_value + 3 * hidden * spec.intermediate_size
    layers = spec.num_layers * (positions * block + row_tokens * key_value)
    fusion = row_tokens * len(spec.taps) * hidden * hidden  # no gradient flows on into the frozen target
    return 6.0 * layers + 4.0 * fusion + 12.0 * width * _scores(spec, anchors, lengths)


def _scores(spec: DrafterSpec, anchors: int, lengths: list[int]) -> float:
    """Pairs of a block position and what it sees, over all layers."""
    total, tokens = 0.0, sum(lengths)
    for kind in spec.layer_types:
        window = spec.sliding_window if kind == "sliding_attention" else None
        context = _seen(lengths, window) / tokens
        total += anchors * spec.block_size * (context + spec.block_size)
    return total


def _head_flops(spec: DrafterSpec, objective: ObjectiveConfig, anchors: int, tokens: int) -> float:
    """Products with the frozen head: to logits, back to hidden states, again if checkpointed; the teacher's once."""
    product = 2.0 * spec.hidden_size * spec.vocab_size
    slots = anchors * (spec.block_size - 1)
    again = 1 if objective.head == "checkpointed" else 0
    draft = (2 + again) * slots * product / (_FP8_SPEED if objective.head_dtype == "fp8" else 1.0)
    return draft + (1 + again) * tokens * product * objective.needs_teacher


def _seen(lengths: Sequence[int], window: int | None) -> float:
    """Pairs of a token and one that it sees, itself counted, causally inside each sample."""
    pairs = 0.0
    for length in lengths:
        reach = length if window is None else min(window, length)
        pairs += reach * (reach + 1) / 2 + (length - reach) * reach
    return pairs
