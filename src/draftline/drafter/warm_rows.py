"""Made-up rows of every shape that real ones can take, for compiling before the loops start."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from draftline.config.drafter_spec import DrafterSpec
from draftline.config.schema import ObjectiveConfig
from draftline.drafter.blocks import anchor_slot_sizes, anchor_slots
from draftline.records import HiddenStateRow


def made_up_rows(
    spec: DrafterSpec, objective: ObjectiveConfig, row_tokens: int, weight_VH: torch.Tensor, *, want_final: bool
) -> Iterator[HiddenStateRow]:
    """Full rows of one sample, two, three, ... until each number of anchor slots has come up.

    Args:
        weight_VH: gives device and dtype.
        want_final: with a final hidden state, as rows for a teacher have.
    """
    missing = set(anchor_slot_sizes(objective, row_tokens))
    for n_samples in range(1, row_tokens // 2 + 1):
        lengths = (row_tokens // n_samples,) * n_samples
        size = anchor_slots(objective, lengths, row_tokens)
        if size in missing:
            missing.remove(size)
            yield _made_up_row(spec, lengths, weight_VH, want_final)
        if not missing:
            return


def _made_up_row(
    spec: DrafterSpec, lengths: tuple[int, ...], weight_VH: torch.Tensor, want_final: bool
) -> HiddenStateRow:
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
        final_hidden_TH=weight_VH.new_zeros(n_tokens, spec.hidden_size) if want_final else None,
        final_hidden_norm="post",
        tap_layer_ids=spec.taps,
    )
