"""Several prompts decoded together: each is at its own place in its own text, their forwards are padded into one.

Prompts are seated in the rows of a key/value buffer; when one is done, the next waiting one takes its row. Per turn the
requests of all seated prompts are collected and answered: prefills together, drafts together, forwards together. The
numbers of a row do not depend on the others except in the last bits, so texts and acceptance lengths are those of
decoding one at a time (up to ties that rounding decides). Times of single prompts are not told apart: they are 0.

Shape letters: B rows of a forward, N tokens of a row, V vocabulary, L taps, F = L * hidden size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from draftline.decode.buffers import KeyValueBuffers, Place, RowForward, check_buffer_memory, lay_out
from draftline.decode.cache import RollbackCache
from draftline.decode.draft_batch import draft_together
from draftline.decode.draft_rows import DraftRows
from draftline.decode.generation import Generation
from draftline.decode.memory import free_bytes
from draftline.decode.steps import Draft, DraftModel, Extend, Forwarded, Prefill, Request, Steps, Tokens, Verified
from draftline.decode.target_session import require_masks, slices_logits, tapped
from draftline.errors import UserError
from draftline.target.shape_plans import no_shape_plans

if TYPE_CHECKING:
    from draftline.target.load import LoadedTarget

# Padding tokens that cost a CPU about what reading the weights once more does.
_WORTH_A_FORWARD = 32


class RowSession:
    """Decoding state of one prompt in a row of the batch."""

    def __init__(self, batch: BatchedTarget, row: int) -> None:
        self.n_forwards = self.n_replays = 0
        self.row, self.length = row, 0
        self.target = batch.target
        # (first column, path) of the newest tree, not yet moved together.
        self.move: tuple[int, list[int]] | None = None

    @staticmethod
    def clock() -> float:
        """Always 0: no time of a batch belongs to one prompt."""
        return 0.0

    def refuse_tree(self) -> None:
        """A batched target verifies trees as well as lines."""

    def commit(self, n_kept: int) -> None:
        """Keep the first `n_kept` tokens of the last forward."""
        self.length += n_kept

    def commit_path(self, path: Sequence[int]) -> None:
        """Keep the nodes of a path through the last forward's tree, root first; the next forward moves them."""
        if list(path) != list(range(len(path))):
            self.move = (self.length, list(path))
        self.length += len(path)


class BatchedTarget:
    """Forwards of several prompts in one.

    Args:
        target: the frozen model.
        taps: 0-based decoder layers whose outputs are returned with each forward.
        rows: most prompts at once.
        columns: longest text with the drafts of its last round.

    Raises:
        UserError: a target with recurrent layers or without mask support, or too little memory.
    """

    def __init__(self, target: LoadedTarget, taps: Sequence[int], rows: int, columns: int) -> None:
        cache = require_rows(target)
        check_buffer_memory(target, rows, columns, free_bytes(target.device))
        self.target, self._taps = target, tuple(taps)
        self._windows = cache.windows
        self._buffers = KeyValueBuffers(len(cache.hf.layers), rows, columns, target.device)
        self._free = list(range(rows))
        self._slices_logits = slices_logits(target)

    @property
    def has_room(self) -> bool:
        """True if a row is free for another prompt."""
        return bool(self._free)

    def open(self) -> RowSession:
        """A session in a free row."""
        return RowSession(self, self._free.pop(0))

    def close(self, session: RowSession) -> None:
        """Give a prompt's row back, for the next one."""
        self._free.append(session.row)

    @torch.inference_mode()
    def prefill(self, sessions: Sequence[RowSession], prompts: Sequence[Sequence[int]]) -> list[Forwarded]:
        """Runs and commits prompts; see `Prefill`."""
        rows = [RowForward(Tokens(ids), 0) for ids in prompts]
        found = self._forward(sessions, rows, last_only=True)
        for session, ids in zip(sessions, prompts, strict=True):
            session.commit(len(ids))
        return [(one.logits_NV[-1], one.taps_NF) for one in found]

    @torch.inference_mode()
    def extend(self, sessions: Sequence[RowSession], requests: Sequence[Extend]) -> list[Verified]:
        """Runs tokens behind each prompt's committed text; see `Extend`."""
        self._move_paths(sessions)
        rows = [RowForward(r.tokens, s.length, r.tree) for s, r in zip(sessions, requests, strict=True)]
        for session in sessions:
            session.n_forwards += 1
        return self._forward(sessions, rows, greedy=any(request.greedy for request in requests))

    def _forward(
        self,
        sessions: Sequence[RowSession],
        rows: Sequence[RowForward],
        *,
        last_only: bool = False,
        greedy: bool = False,
    ) -> list[Verified]:
        """Padded forwards of rows that go together: see `_groups`."""
        found: dict[int, Verified] = {}
        for members in self._groups(rows):
            own_sessions, own_rows = [sessions[i] for i in members], [rows[i] for i in members]
            answers = self._padded(own_sessions, own_rows, last_only=last_only, greedy=greedy)
            found.update(zip(members, answers, strict=True))
        return [found[index] for index in range(len(rows))]

    def _groups(self, rows: Sequence[RowForward]) -> list[list[int]]:
        """Rows of one forward. Apart: texts whose length would change the rotary frequencies of shorter ones; and on a
        CPU, where padding costs what tokens cost, narrow rows and wide ones, if that saves more than a forward takes.
        """
        edge = self.target.facts.rope_changes_at
        is_long = [edge is not None and row.length + len(row.tokens) > edge for row in rows]
        sides = [[index for index, own in enumerate(is_long) if own == side] for side in sorted(set(is_long))]
        if self.target.device.type != "cpu":
            return sides
        return [group for side in sides for group in split_by_width(side, [len(row.tokens) for row in rows])]

    def _padded(
        self, sessions: Sequence[RowSession], rows: Sequence[RowForward], *, last_only: bool, greedy: bool
    ) -> list[Verified]:
        sizes = [len(row.tokens) for row in rows]
        width, stop = max(sizes), max(row.length + size for row, size in zip(rows, sizes, strict=True))
        spare, dtype, device = self._buffers.columns, self.target.dtype, self.target.device
        inputs = lay_out(rows, self._windows, width=width, stop=stop, spare=spare, dtype=dtype, device=device)
        self._buffers.place = Place(self._row_index(sessions), inputs.columns_BN, stop)
        # Rows are filled up in front, so the last position is every row's own last token.
        options = {"logits_to_keep": 1} if last_only and self._slices_logits else {}
        with tapped(self.target, self._taps) as captured:
            output = self.target.model(
                input_ids=inputs.ids_BN,
                position_ids=inputs.positions_BN,
                attention_mask=inputs.masks,
                past_key_values=self._buffers.hf,
                use_cache=True,
                **options,
            )
        taps_BNF = torch.cat([captured[tap] for tap in self._taps], dim=-1) if self._taps else None
        found = [
            Verified(output.logits[index][-size:], None if taps_BNF is None else taps_BNF[index, width - size :])
            for index, size in enumerate(sizes)
        ]
        if not greedy:
            return found
        own, ran = torch.stack([output.logits.argmax(dim=-1), inputs.ids_BN]).tolist()  # one wait for the device
        return [
            replace(one, own=own[index][width - size :], ran=ran[index][width - size :])
            for index, (one, size) in enumerate(zip(found, sizes, strict=True))
        ]

    def _row_index(self, sessions: Sequence[RowSession]) -> torch.Tensor | None:
        rows = [session.row for session in sessions]
        return None if rows == list(range(self._buffers.rows)) else torch.tensor(rows, device=self.target.device)

    def _move_paths(self, sessions: Sequence[RowSession]) -> None:
        """Moves the accepted paths of the newest trees together, all rows at once."""
        moves = [(session.row, *session.move) for session in sessions if session.move is not None]
        if not moves:
            return
        longest, spare = max(len(path) for _, _, path in moves), self._buffers.columns
        table = torch.full((3, len(moves), longest), spare)
        rows, source, aim = table
        for index, (row, first, path) in enumerate(moves):
            rows[index] = row
            source[index, : len(path)] = torch.tensor(path) + first
            aim[index, : len(path)] = torch.arange(first, first + len(path))
        rows, source, aim = table.to(self.target.device)
        self._buffers.move(rows[:, 0], source, aim)
        for session in sessions:
            session.move = None


def split_by_width(members: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    """The members in one group, or in two with the least padding, where that is at least `_WORTH_A_FORWARD` less.

    Args:
        members: indices into `sizes`.
        sizes: tokens of each row; a group is padded to its widest.
    """
    ordered = sorted(members, key=lambda index: sizes[index])
    whole = len(ordered) * sizes[ordered[-1]]
    costs = {
        cut: cut * sizes[ordered[cut - 1]] + (len(ordered) - cut) * sizes[ordered[-1]] for cut in range(1, len(ordered))
    }
    best = min(costs, key=lambda cut: costs[cut], default=0)
    if not costs or whole - costs[best] < _WORTH_A_FORWARD:
        return [list(members)]
    return [sorted(ordered[:best]), sorted(ordered[best:])]


def require_rows(target: LoadedTarget) -> RollbackCache:
    """The target's kind of cache, if several texts or static shapes are possible for it (UserError if not)."""
    cache = RollbackCache(target)
    if cache.is_recurrent or target.has_recurrent_layers:
        raise UserError(
            "the target has recurrent layers, whose state cannot be padded",
            where="decode",
            mend="decode one prompt at a time: batch 1, no compiled decoding",
        )
    require_masks(target, "a mask by row", mend="decode one prompt at a time: batch 1, no compiled decoding")
    return cache


@dataclass(slots=True)
class _Seat:
    index: int
    session: RowSession
    steps: Steps
    request: Request
    drafter: DraftModel | None = None


@torch.inference_mode()
@no_shape_plans()
def decode_together(
    batch: BatchedTarget,
    openers: Sequence[Callable[[RowSession], Steps]],
    on_done: Callable[[int], None] | None = None,
) -> list[Generation]:
    """Decodes all prompts, as many at once as the batch has rows.

    Args:
        openers: one a prompt; gives the prompt's steps in the session it is handed.
        on_done: called with the number of prompts finished so far, when it has grown.

    Returns:
        Generations in the order of `openers`; their times are 0.
    """
    results: dict[int, Generation] = {}
    waiting = deque(enumerate(openers))
    seats: list[_Seat] = []
    contexts = DraftRows()
    while waiting or seats:
        while waiting and batch.has_room:
            index, opener = waiting.popleft()
            session = batch.open()
            steps = opener(session)
            seats.append(_Seat(index, session, steps, next(steps)))
        for kind in (Prefill, Draft, Extend):
            asking = [seat for seat in seats if isinstance(seat.request, kind)]
            if not asking:
                continue
            for seat, reply in zip(asking, _answers(batch, asking, contexts), strict=True):
                _advance(seat, reply, results)
        finished = [seat for seat in seats if seat.index in results]
        for seat in finished:
            batch.close(seat.session)
            if seat.drafter is not None:
                contexts.release(seat.drafter)
        seats = [seat for seat in seats if seat.index not in results]
        if finished and on_done is not None:
            on_done(len(results))
    return [results[index] for index in range(len(openers))]


def _answers(batch: BatchedTarget, seats: Sequence[_Seat], contexts: DraftRows) -> Sequence[Any]:
    """Answers to requests of one kind."""
    sessions = [seat.session for seat in seats]
    requests = [seat.request for seat in seats]
    prefills = [request.ids for request in requests if isinstance(request, Prefill)]
    if prefills:
        return batch.prefill(sessions, prefills)
    extends = [request for request in requests if isinstance(request, Extend)]
    if extends:
        return batch.extend(sessions, extends)
    for seat in seats:
        if isinstance(seat.request, Draft):
            seat.drafter = seat.request.drafter
    return draft_together([request for request in requests if isinstance(request, Draft)], contexts)


def _advance(seat: _Seat, reply: Any, results: dict[int, Generation]) -> None:
    try:
        seat.request = seat.steps.send(reply)
    except StopIteration as end:
        results[seat.index] = end.value
