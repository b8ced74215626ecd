"""Captured states of the samples: rows that stay on the device for the whole experiment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from draftline.data.rows import plan_rows
from draftline.data.shards import Sample
from draftline.drafter.blocks import pad_row
from draftline.records import HiddenStateRow, PlannedRow
from draftline.target.capture import TargetCapture


def capture_rows(
    capture: TargetCapture, samples: Sequence[Sample], *, row_tokens: int, at_once: int, pad: bool
) -> list[HiddenStateRow]:
    """Samples packed into rows of `row_tokens`, and their states.

    Args:
        at_once: rows of one forward of the target.
        pad: pad each row to its full length now, so that no step has to.
    """
    sizes = [len(s.input_ids) for s in samples]
    plan = plan_rows(sizes, [int(s.loss_mask.sum()) for s in samples], row_tokens=row_tokens, seed=0, epochs=1)
    found: list[HiddenStateRow] = []
    for start in range(0, len(plan), at_once):
        group = plan[start : start + at_once]
        members = [i for row in group for i in row.samples]
        whole = PlannedRow(start, 0, tuple(members), sum(r.n_tokens for r in group), sum(r.n_supervised for r in group))
        states = capture.capture(whole, [samples[i] for i in members])
        found.extend(split_row(states, group, row_tokens=row_tokens if pad else None))
    return found


def split_row(whole: HiddenStateRow, group: Sequence[PlannedRow], *, row_tokens: int | None) -> list[HiddenStateRow]:
    """A captured row cut back into the planned rows that it was made of; padded to `row_tokens` if given."""
    found, sample, token = [], 0, 0
    for planned in group:
        first, stop = sample, sample + len(planned.samples)
        part = slice(token, token + planned.n_tokens)
        final = whole.final_hidden_TH
        row = replace(
            whole,
            row_id=planned.row_id,
            sample_ids=whole.sample_ids[first:stop],
            lengths=whole.lengths[first:stop],
            input_ids_T=whole.input_ids_T[part].clone(),
            loss_mask_T=whole.loss_mask_T[part].clone(),
            document_ids_T=whole.document_ids_T[part] - first,
            position_ids_T=whole.position_ids_T[part].clone(),
            taps_TF=whole.taps_TF[part].clone(),
            final_hidden_TH=None if final is None else final[part].clone(),
            ready=None,
        )
        found.append(row if row_tokens is None else pad_row(row, row_tokens))
        sample, token = stop, part.stop
    return found


def rows_in_turn(rows: Sequence[HiddenStateRow], seed: int, number: int) -> HiddenStateRow:
    """Row number `number` of endless epochs, each in an order of its own."""
    epoch, place = divmod(number, len(rows))
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))
    return replace(rows[int(order[place])], epoch=epoch)


@dataclass(frozen=True)
class PaddedSamples:
    """The same states as a trainer that pads wants them: one sample a batch row, all padded to one length.

    Attributes:
        taps_NF: of all tokens of all rows, end to end.
        input_ids_N: likewise.
        index_SL: for each sample, where its tokens stand; padding points at token 0.
        loss_mask_SL: fp32, 0 in padding.
    """

    taps_NF: torch.Tensor
    input_ids_N: torch.Tensor
    index_SL: torch.Tensor
    loss_mask_SL: torch.Tensor

    @classmethod
    def of(cls, rows: Sequence[HiddenStateRow], length: int) -> PaddedSamples:
        """Raises ValueError if a sample is longer than `length`."""
        taps_NF = torch.cat([row.taps_TF for row in rows])
        ids_N = torch.cat([row.input_ids_T for row in rows])
        mask_N = torch.cat([row.loss_mask_T for row in rows])
        starts, sizes, base = [], [], 0
        for row in rows:
            at = base
            for size in row.lengths:
                starts.append(at)
                sizes.append(size)
                at += size
            base += row.input_ids_T.shape[0]
        if max(sizes) > length:
            raise ValueError(f"a sample has {max(sizes)} tokens, more than {length}")
        device = taps_NF.device
        starts_S1, sizes_S1 = (torch.tensor(x, device=device)[:, None] for x in (starts, sizes))
        steps_L = torch.arange(length, device=device)
        inside_SL = steps_L < sizes_S1
        index_SL = torch.where(inside_SL, starts_S1 + steps_L, 0)
        return cls(taps_NF, ids_N, index_SL, (mask_N[index_SL] & inside_SL).float())

    def __len__(self) -> int:
        return self.index_SL.shape[0]

    def batch(self, samples_B: torch.Tensor) -> dict[str, torch.Tensor]:
        """What OnlineDFlashModel is called with."""
        index_BL = self.index_SL[samples_B]
        return {
            "input_ids": self.input_ids_N[index_BL],
            "hidden_states": self.taps_NF[index_BL],
            "loss_mask": self.loss_mask_SL[samples_B],
        }
