"""Which slots pass the head, in which order and chunks.

How many slots are left is known on the device first. `plan_slots` starts the copy of a few counts to the host before
the drafter's forward is launched; `HeadPlan.chunks` waits for that copy alone, while the forward is still running.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Chunk:
    """Slots start..stop of the ordered slots, which predict from unique positions first..last of the plan."""

    start: int
    stop: int
    first: int
    last: int


class HeadPlan:
    """Which slots pass the head, in which order and chunks. Made by `plan_slots`.

    Attributes:
        order_Q: int64, slot of each place; supervised slots first, by the position they predict from.
        rank_Q: int64, which of the unique positions each place predicts from.
        positions_Q: int64, context position of each unique position (only the first few are filled).
    """

    def __init__(self, order_Q: Tensor, rank_Q: Tensor, positions_Q: Tensor, counts: Tensor, chunk: int) -> None:
        self.order_Q, self.rank_Q, self.positions_Q = order_Q, rank_Q, positions_Q
        self._chunk, self._counts, self._copied = chunk, counts, None
        if counts.is_cuda:
            self._counts = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True)
            self._counts.copy_(counts, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def chunks(self) -> list[Chunk]:
        """The chunks; waits for the early copy of the counts, nothing later on the stream."""
        if self._copied is not None:
            self._copied.synchronize()
        n_slots, *ranks = self._counts.tolist()
        firsts, lasts = ranks[: len(ranks) // 2], ranks[len(ranks) // 2 :]
        starts = range(0, n_slots, self._chunk)
        return [
            Chunk(start, min(start + self._chunk, n_slots), first, last)
            for start, first, last in zip(starts, firsts, lasts, strict=False)
        ]


def plan_slots(mask_Q: Tensor, teacher_index_Q: Tensor, *, chunk: int) -> HeadPlan:
    """Orders the supervised slots for the head. No host sync.

    Args:
        mask_Q: bool, slots with weight.
        teacher_index_Q: int64, context position each slot predicts from.
        chunk: most slots whose logits live at once.
    """
    with torch.no_grad():
        n_slots = mask_Q.shape[0]
        key_Q = torch.where(mask_Q, teacher_index_Q, torch.iinfo(torch.int64).max)
        key_Q, order_Q = key_Q.sort(stable=True)
        is_new_Q = torch.ones_like(mask_Q)
        is_new_Q[1:] = key_Q[1:] != key_Q[:-1]
        rank_Q = is_new_Q.cumsum(0) - 1
        positions_Q = torch.zeros_like(key_Q).scatter_(0, rank_Q, key_Q)
        total = mask_Q.sum()
        starts = torch.arange(0, n_slots, chunk, device=mask_Q.device)
        stops = torch.minimum(starts + chunk, total).sub_(1).clamp_(min=0)
        counts = torch.cat((total.unsqueeze(0), rank_Q[starts], rank_Q[stops]))
    return HeadPlan(order_Q, rank_Q, positions_Q, counts, chunk)
