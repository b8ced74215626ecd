"""The queue's door: what a captured row must be before anybody trains on it or keeps it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from draftline.errors import RunFailedError
from draftline.records import HiddenStateRow, PlannedRow


def check_row(row: HiddenStateRow, planned: PlannedRow) -> None:
    """The queue's door: a row is what the plan says, whole and finite.

    Raises:
        RunFailedError: names the row and what does not fit.
    """
    n = planned.n_tokens
    found = {
        "row id": (row.row_id, planned.row_id),
        "epoch": (row.epoch, planned.epoch),
        "tokens": (row.n_tokens, n),
        "samples": (len(row.sample_ids), len(planned.samples)),
        "token ids": (row.input_ids_T.shape[0], n),
        "loss mask": (row.loss_mask_T.shape[0], n),
        "tap features": (row.taps_TF.shape[0], n),
    }
    if row.final_hidden_TH is not None:
        found["final hidden states"] = (row.final_hidden_TH.shape[0], n)
    wrong = [f"{what} is {got}, planned {want}" for what, (got, want) in found.items() if got != want]
    if row.taps_TF.shape[1] % len(row.tap_layer_ids):
        wrong.append(f"{row.taps_TF.shape[1]} features do not split into {len(row.tap_layer_ids)} taps")
    if not wrong:
        wrong = _bad_values(row)
    if wrong:
        raise RunFailedError(
            f"row {planned.row_id} (samples {_few(row.sample_ids)}): {'; '.join(wrong)}", origin="queue door"
        )


def _bad_values(row: HiddenStateRow) -> list[str]:
    wrong = []
    per_tap = row.taps_TF.reshape(row.taps_TF.shape[0], len(row.tap_layer_ids), -1)
    peak_L = per_tap.abs().amax(dim=(0, 2)).float().tolist()
    for layer, peak in zip(row.tap_layer_ids, peak_L, strict=True):
        if not peak < float("inf"):
            wrong.append(f"hidden states of layer {layer} are not finite")
        elif peak == 0.0:
            wrong.append(f"hidden states of layer {layer} are all zero")
    if row.final_hidden_TH is not None and not bool(torch.isfinite(row.final_hidden_TH).all()):
        wrong.append("final hidden states are not finite")
    return wrong


def _few(ids: Sequence[str]) -> str:
    return ", ".join(ids[:3]) + (f" and {len(ids) - 3} more" if len(ids) > 3 else "")
