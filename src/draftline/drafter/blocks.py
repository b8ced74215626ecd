"""Blocks to train on: anchors, block inputs, labels, masks, and the noise of training. All draws are seeded here.

Every draw of a sample comes from (seed, epoch, sample id): a sample is trained the same way wherever, whenever and
beside whomever it runs. Random numbers are made on the host by numpy, or by integer arithmetic that is the same on
every device; nothing here waits for a device.

Shape letters: T context tokens of a row, A anchor slots, B block size, F tap features.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F

from draftline.config.drafter_spec import DrafterSpec
from draftline.config.schema import FeatureNoise, ObjectiveConfig
from draftline.records import HiddenStateRow

VALIDATION_EPOCH = -1
# Block counts that `anchors_per = conversation` may take: few, so that each shape can be compiled before the loop.
MAX_SLOT_SIZES = 8
_KEY_BITS = 31
_LOW_32 = 0xFFFFFFFF
# Feature noise is drawn for so many values at a time: bounds the memory of the integer arithmetic.
_NOISE_CHUNK_VALUES = 1 << 24


@dataclass(frozen=True, slots=True)
class BlockBatch:
    """The blocks of one row. Slot k of the block at anchor p stands at p + k and predicts the token there.

    Attributes:
        anchors_A: int64 index p in the row, rising; 0 where not kept.
        keep_A: bool, False for padding blocks.
        document_A: int64 document of the anchor; -1 for padding blocks.
        block_ids_AB: int64 input tokens, [token p, mask, mask, ...].
        position_ids_AB: int64 position in the document, position of p plus k.
        labels_AB: int64 data token at p + k; only meaningful where slot_mask_AB.
        slot_mask_AB: bool, slots that are supervised: kept, k >= 1, inside the document, written by the target, and
            no earlier slot of the block fails these.
        teacher_index_AB: int64 index p + k - 1, the context position whose output predicts slot k; clamped to the row.
    """

    anchors_A: torch.Tensor
    keep_A: torch.Tensor
    document_A: torch.Tensor
    block_ids_AB: torch.Tensor
    position_ids_AB: torch.Tensor
    labels_AB: torch.Tensor
    slot_mask_AB: torch.Tensor
    teacher_index_AB: torch.Tensor


def sample_seed(purpose: str, seed: int, epoch: int, sample_id: str) -> int:
    """The 64-bit seed of one kind of draw for one sample (BLAKE2b of the four values)."""
    digest = hashlib.blake2b(f"{purpose}\x1f{seed}\x1f{epoch}\x1f{sample_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def sample_generator(purpose: str, seed: int, epoch: int, sample_id: str) -> np.random.Generator:
    """The generator of one kind of draw for one sample."""
    return np.random.Generator(np.random.PCG64(sample_seed(purpose, seed, epoch, sample_id)))


def pad_row(row: HiddenStateRow, row_tokens: int) -> HiddenStateRow:
    """The row with its tensors padded to `row_tokens` (static shapes); `lengths` still count real tokens.

    Padding belongs to document -1, is unsupervised and is seen by nobody.

    Raises:
        ValueError: the row is longer than that.
    """
    missing = row_tokens - row.input_ids_T.shape[0]
    if missing < 0:
        raise ValueError(f"row {row.row_id} has {row.input_ids_T.shape[0]} tokens, more than row_tokens {row_tokens}")
    if missing == 0:
        return row
    final = row.final_hidden_TH
    return replace(
        row,
        input_ids_T=F.pad(row.input_ids_T, (0, missing)),
        loss_mask_T=F.pad(row.loss_mask_T, (0, missing), value=False),
        document_ids_T=F.pad(row.document_ids_T, (0, missing), value=-1),
        position_ids_T=F.pad(row.position_ids_T, (0, missing)),
        taps_TF=F.pad(row.taps_TF, (0, 0, 0, missing)),
        final_hidden_TH=None if final is None else F.pad(final, (0, 0, 0, missing)),
    )


def anchor_share(config: ObjectiveConfig, n_tokens: int, row_tokens: int) -> int:
    """Most anchors of a sample of `n_tokens`: its share of a full row, at least one; or `anchors` each.

    It never depends on what else is packed in the row.
    """
    if config.anchors_per == "conversation":
        return min(config.anchors, max(1, n_tokens - 1))
    return max(1, config.anchors * n_tokens // row_tokens)


def anchor_slot_sizes(config: ObjectiveConfig, row_tokens: int) -> tuple[int, ...]:
    """All values that A can take, rising: one when counted per row, a few steps when per conversation.

    A row holds no more anchors than tokens, however many are asked for.
    """
    if config.anchors_per == "row":
        return (min(config.anchors, row_tokens),)
    step = max(min(config.anchors, row_tokens), -(-row_tokens // MAX_SLOT_SIZES))
    return tuple(step * (i + 1) for i in range(-(-row_tokens // step)))


def anchor_slots(config: ObjectiveConfig, lengths: Sequence[int], row_tokens: int) -> int:
    """A for a row of samples with these lengths: the smallest allowed size that holds their shares."""
    sizes = anchor_slot_sizes(config, row_tokens)
    need = sum(anchor_share(config, n, row_tokens) for n in lengths)
    return next((size for size in sizes if size >= need), sizes[-1])


def warm_up_rows(
    spec: DrafterSpec, config: ObjectiveConfig, *, row_tokens: int, device: torch.device, dtype: torch.dtype
) -> list[HiddenStateRow]:
    """Rows of zeros that reach every number of anchor slots a full-length row can have, for compiling ahead.

    They carry a final hidden state (post norm), so that a step with a teacher can run on them.
    """
    rows, below = [], 0
    for size in anchor_slot_sizes(config, row_tokens):
        lengths = [row_tokens]
        if config.anchors_per == "conversation":
            whole, rest = divmod(below + 1, config.anchors)
            lengths = [config.anchors + 1] * whole + ([rest + 1] if rest else [])
        if sum(lengths) <= row_tokens:
            rows.append(pad_row(_blank_row(spec, tuple(lengths), device, dtype), row_tokens))
        below = size
    return rows


def _blank_row(spec: DrafterSpec, lengths: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> HiddenStateRow:
    n_tokens = sum(lengths)
    documents = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    positions = np.concatenate([np.arange(n, dtype=np.int64) for n in lengths])
    return HiddenStateRow(
        row_id=-1,
        epoch=0,
        sample_ids=tuple(f"warm-up-{i}" for i in range(len(lengths))),
        lengths=lengths,
        input_ids_T=torch.zeros(n_tokens, dtype=torch.int64, device=device),
        loss_mask_T=torch.ones(n_tokens, dtype=torch.bool, device=device),
        document_ids_T=torch.from_numpy(documents).to(device),
        position_ids_T=torch.from_numpy(positions).to(device),
        taps_TF=torch.zeros(n_tokens, len(spec.taps) * spec.hidden_size, dtype=dtype, device=device),
        final_hidden_TH=torch.zeros(n_tokens, spec.hidden_size, dtype=dtype, device=device),
        final_hidden_norm="post",
        tap_layer_ids=spec.taps,
    )


def eligible_anchors(row: HiddenStateRow) -> torch.Tensor:
    """bool (T,): p and p + 1 are supervised tokens of one document.

    The last prompt token is never an anchor: the first answer token comes from the prefill.
    """
    mask, doc = row.loss_mask_T, row.document_ids_T
    follows = mask[1:] & (doc[1:] == doc[:-1])
    return mask & F.pad(follows, (0, 1), value=False)


def draw_blocks(
    row: HiddenStateRow,
    spec: DrafterSpec,
    config: ObjectiveConfig,
    *,
    row_tokens: int,
    seed: int,
    epoch: int | None = None,
) -> BlockBatch:
    """Draw the blocks of a row, on the row's device and without waiting for it.

    Args:
        row: may be padded (`pad_row`).
        row_tokens: tokens of a full row; the measure of `anchors_per = row`.
        seed: the run's seed.
        epoch: null: the row's own; VALIDATION_EPOCH (-1): the fixed set of validation, without token noise.
    """
    epoch = row.epoch if epoch is None else epoch
    anchors_A, keep_A = _draw_anchors(row, config, row_tokens, seed, epoch)
    tokens_T = row.input_ids_T
    if config.token_noise_prob > 0 and epoch != VALIDATION_EPOCH:
        tokens_T = _noisy_tokens(row, spec, config.token_noise_prob, seed, epoch)
    return make_blocks(row, spec, anchors_A, keep_A, anchor_tokens_T=tokens_T)


def make_blocks(
    row: HiddenStateRow,
    spec: DrafterSpec,
    anchors_A: torch.Tensor,
    keep_A: torch.Tensor,
    *,
    anchor_tokens_T: torch.Tensor | None = None,
) -> BlockBatch:
    """Inputs, labels and masks for given anchors (`anchor_tokens_T`: other tokens for slot 0, token noise)."""
    n_tokens = row.input_ids_T.shape[0]
    slots_B = torch.arange(spec.block_size, device=anchors_A.device)
    document_A = torch.where(keep_A, row.document_ids_T[anchors_A].long(), -1)
    index_AB = anchors_A[:, None] + slots_B
    inside_AB = index_AB < n_tokens
    index_AB = index_AB.clamp(max=n_tokens - 1)
    inside_AB &= row.document_ids_T[index_AB] == document_A[:, None]
    usable_AB = inside_AB & row.loss_mask_T[index_AB] & keep_A[:, None]
    usable_AB[:, 0] = keep_A
    slot_mask_AB = usable_AB.to(torch.int32).cumprod(dim=1).bool()
    slot_mask_AB[:, 0] = False
    block_ids_AB = torch.full_like(index_AB, spec.mask_token_id)
    block_ids_AB[:, 0] = (row.input_ids_T if anchor_tokens_T is None else anchor_tokens_T)[anchors_A]
    return BlockBatch(
        anchors_A=anchors_A,
        keep_A=keep_A,
        document_A=document_A,
        block_ids_AB=block_ids_AB,
        position_ids_AB=row.position_ids_T[anchors_A][:, None] + slots_B,
        labels_AB=row.input_ids_T[index_AB],
        slot_mask_AB=slot_mask_AB,
        teacher_index_AB=(anchors_A[:, None] + slots_B - 1).clamp(0, n_tokens - 1),
    )


def _draw_anchors(
    row: HiddenStateRow, config: ObjectiveConfig, row_tokens: int, seed: int, epoch: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each sample's eligible positions with the smallest keys, as many as its share; (anchors_A, keep_A)."""
    n_slots = anchor_slots(config, row.lengths, row_tokens)
    device, n_tokens = row.input_ids_T.device, row.input_ids_T.shape[0]
    shares = [anchor_share(config, n, row_tokens) for n in row.lengths]
    eligible_T = eligible_anchors(row)
    key_T = _keys(row, n_tokens, seed, epoch).to(device, non_blocking=True)
    share_T = _per_token(row, shares, n_tokens).to(device, non_blocking=True)
    rank_T = _rank_in_document(row, eligible_T, key_T)
    chosen_T = eligible_T & (rank_T < share_T)
    index_T = torch.arange(n_tokens, device=device)
    if sum(shares) > n_slots:
        # Only when samples are so short that their single anchors overflow the row: lowest ranks, then keys, stay.
        order_T = torch.argsort(
            torch.where(chosen_T, (rank_T << 32) | key_T, torch.iinfo(torch.int64).max), stable=True
        )
        place_T = torch.empty_like(order_T).scatter_(0, order_T, index_T)
        chosen_T = chosen_T & (place_T < n_slots)
    found = torch.where(chosen_T, index_T, n_tokens).sort().values[:n_slots]
    found = F.pad(found, (0, n_slots - found.shape[0]), value=n_tokens)
    keep_A = found < n_tokens
    return torch.where(keep_A, found, 0), keep_A


def _keys(row: HiddenStateRow, n_tokens: int, seed: int, epoch: int) -> torch.Tensor:
    """int64 (T,) random keys, each sample's from its own generator."""
    keys = np.zeros(n_tokens, dtype=np.int64)
    start = 0
    for sample_id, length in zip(row.sample_ids, row.lengths, strict=True):
        generator = sample_generator("anchors", seed, epoch, sample_id)
        keys[start : start + length] = generator.integers(0, 1 << _KEY_BITS, size=length)
        start += length
    return _host_tensor(keys, row.input_ids_T.device)


def _rank_in_document(row: HiddenStateRow, eligible_T: torch.Tensor, key_T: torch.Tensor) -> torch.Tensor:
    """int64 (T,): place of each position in its document, eligible ones first, by key. Exact integer order."""
    device, n_tokens = key_T.device, key_T.shape[0]
    starts = np.concatenate(([0], np.cumsum(row.lengths))).astype(np.int64)
    starts_D = _host_tensor(starts, device).to(device, non_blocking=True)
    doc_T = row.document_ids_T.long()
    doc_T = torch.where(doc_T < 0, len(row.lengths), doc_T)
    order_T = torch.argsort((doc_T << 33) | ((~eligible_T).long() << 32) | key_T, stable=True)
    rank_T = torch.arange(n_tokens, device=device) - starts_D[doc_T[order_T]]
    return torch.empty_like(rank_T).scatter_(0, order_T, rank_T)


def _per_token(row: HiddenStateRow, values: Sequence[int], n_tokens: int) -> torch.Tensor:
    spread = np.zeros(n_tokens, dtype=np.int64)
    spread[: sum(row.lengths)] = np.repeat(np.asarray(values, dtype=np.int64), row.lengths)
    return _host_tensor(spread, row.input_ids_T.device)


def _noisy_tokens(row: HiddenStateRow, spec: DrafterSpec, prob: float, seed: int, epoch: int) -> torch.Tensor:
    """Token ids with each one replaced, with probability `prob`, by a uniform token that is not the mask token."""
    n_tokens = row.input_ids_T.shape[0]
    hit, other = np.zeros(n_tokens, dtype=np.bool_), np.zeros(n_tokens, dtype=np.int64)
    start = 0
    for sample_id, length in zip(row.sample_ids, row.lengths, strict=True):
        generator = sample_generator("token_noise", seed, epoch, sample_id)
        hit[start : start + length] = generator.random(length) < prob
        other[start : start + length] = generator.integers(0, spec.vocab_size - 1, size=length)
        start += length
    other += other >= spec.mask_token_id
    device = row.input_ids_T.device
    hit_T, other_T = (_host_tensor(x, device).to(device, non_blocking=True) for x in (hit, other))
    return torch.where(hit_T, other_T, row.input_ids_T)


def apply_feature_noise(
    taps_TF: torch.Tensor, row: HiddenStateRow, config: FeatureNoise, seed: int, *, epoch: int | None = None
) -> torch.Tensor:
    """Tap features [T, F] with additive noise: uniform in (-scale, scale), or gaussian of standard deviation `scale`.

    The value at (sample, position, feature) is a hash of these and the seed, so it is the same on every device and
    in every packing (gaussian: up to the rounding of `erfinv`). Training only; the validation epoch stays clean.
    """
    epoch = row.epoch if epoch is None else epoch
    if config.kind == "none" or config.scale == 0 or epoch == VALIDATION_EPOCH:
        return taps_TF
    n_tokens, n_features = taps_TF.shape
    device = taps_TF.device
    token_seed_T = _token_seeds(row, n_tokens, seed, epoch).to(device, non_blocking=True)
    feature_F = torch.arange(n_features, device=device) * 0x9E3779B1 & _LOW_32
    out_TF = torch.empty_like(taps_TF)
    chunk = max(1, _NOISE_CHUNK_VALUES // n_features)
    for start in range(0, n_tokens, chunk):
        part = slice(start, start + chunk)
        unit = _unit_hash(token_seed_T[part, None] ^ feature_F)
        noise = unit if config.kind == "uniform" else torch.erfinv(unit) * 2**0.5
        out_TF[part] = (taps_TF[part].float() + noise * config.scale).to(taps_TF.dtype)
    return out_TF


def _token_seeds(row: HiddenStateRow, n_tokens: int, seed: int, epoch: int) -> torch.Tensor:
    """int64 (T,) 32-bit seeds, one a token."""
    seeds = np.zeros(n_tokens, dtype=np.int64)
    start = 0
    for sample_id, length in zip(row.sample_ids, row.lengths, strict=True):
        generator = sample_generator("feature_noise", seed, epoch, sample_id)
        seeds[start : start + length] = generator.integers(0, 1 << 32, size=length)
        start += length
    return _host_tensor(seeds, row.input_ids_T.device)


def _unit_hash(bits: torch.Tensor) -> torch.Tensor:
    """float32 in (-1, 1) from 32-bit integers: two rounds of xor-shift and multiply, top 23 bits, centred.

    24 bits and a half would round to 1 in the largest of them, whose normal quantile is infinite.

    Multipliers are below 2**31, so products of 32-bit values stay inside int64.
    """
    for shift, multiplier in ((16, 0x21F0AAAD), (15, 0x735A2D97), (16, 0x21F0AAAD)):
        bits = (bits ^ (bits >> shift)) * multiplier & _LOW_32
    bits = bits ^ (bits >> 15)
    return ((bits >> 9).float() + 0.5) * 2.0**-22 - 1.0


def _host_tensor(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """The array as a host tensor, pinned when it goes to a GPU, so that its copy does not block."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" else tensor


def without_padding(blocks: BlockBatch) -> BlockBatch:
    """The kept blocks alone: less work where shapes may vary (the CPU, where reading the mask costs nothing)."""
    fields = {name: getattr(blocks, name)[blocks.keep_A] for name in BlockBatch.__dataclass_fields__}
    return replace(blocks, **fields)
