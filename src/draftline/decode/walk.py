"""The rounds that greedy decoding would take along captured answers, found without decoding.

Blocks are drafted at every place of an answer at once, from the captured features; then each method is walked: start
at the answer's first token (the prefill's), commit what the block there accepts and one token more, go on from there.
An answer that the target wrote greedily makes this exact, up to ties of rounding: the target's own token behind every
accepted draft is the next token of the answer. For other answers it is the acceptance along that text.

Ends are those of decoding. Behind a stop token nothing is committed. An answer without one was ended by a length
limit: its last blocks are shortened to what was left (by the block form of the drafter, as they see fewer mask tokens).
An answer with one is taken as far from any limit.

Shape letters: P places, K drafts of a block, R tokens kept a slot, N budgets.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import torch

from draftline.drafter.context_cache import DrafterCache
from draftline.drafter.drafts import BlockDrafts
from draftline.drafter.step import DrafterStep
from draftline.records import HiddenStateRow

# What each method's trees (the chain first) accept of the answer at a place.
AcceptedAt = dict[int, list[int]]


@dataclass(frozen=True, slots=True)
class Answer:
    """A run of tokens in a row that the target wrote.

    Attributes:
        first: row index of its document's first token.
        start, stop: row indices [start, stop) of its tokens; the stop token is the last one if there is one.
        limited: it does not end in a stop token.
    """

    first: int
    start: int
    stop: int
    limited: bool


def answers_of(row: HiddenStateRow, stop_token_ids: Collection[int]) -> list[Answer]:
    """The answers of a row that take at least one round, one or more a document. Reads the row on the host."""
    ids, mask = row.input_ids_T.tolist(), row.loss_mask_T.tolist()
    found, first = [], 0
    for length in row.lengths:
        end, at = first + length, first
        while at < end:
            start = at
            while at < end and mask[at]:
                at += 1
            stopped = next((i for i in range(start, at) if ids[i] in stop_token_ids), None)
            stop = at if stopped is None else stopped + 1
            if stop - start >= 2:
                found.append(Answer(first, start, stop, limited=stopped is None))
            at += 1
        first = end
    return found


@dataclass(frozen=True, slots=True)
class WalkSums:
    """Additive sums of walked rounds, the same for each method: the chain first, then a tree of each budget.

    Attributes:
        rounds, tokens: rounds, and tokens that they committed.
        clipped_rounds, clipped_tokens: those among them that a length limit or a stop token cut.
    """

    rounds: tuple[int, ...]
    tokens: tuple[int, ...]
    clipped_rounds: tuple[int, ...]
    clipped_tokens: tuple[int, ...]

    @classmethod
    def zeros(cls, n_methods: int) -> Self:
        """Nothing walked yet, for so many methods."""
        none = (0,) * n_methods
        return cls(none, none, none, none)

    def __add__(self, other: WalkSums) -> WalkSums:
        def added(mine: Sequence[int], its: Sequence[int]) -> tuple[int, ...]:
            return tuple(a + b for a, b in zip(mine, its, strict=True))

        return WalkSums(
            added(self.rounds, other.rounds),
            added(self.tokens, other.tokens),
            added(self.clipped_rounds, other.clipped_rounds),
            added(self.clipped_tokens, other.clipped_tokens),
        )

    def acceptance_lengths(self) -> tuple[float | None, ...]:
        """Tokens per round of each method, all rounds counted as in decoding; None without any."""
        return tuple(t / r if r else None for t, r in zip(self.tokens, self.rounds, strict=True))


def walk_answers(step: DrafterStep, row: HiddenStateRow, answers: Iterable[Answer]) -> WalkSums:
    """Walks answers of one row and sums them up.

    Args:
        step: drafts the blocks; the trees walked beside the chain are its `trees`.
        row: on the drafter's device.
        answers: some of `answers_of(row, ...)`.
    """
    return sum(walk_each(step, row, answers), WalkSums.zeros(_n_methods(step)))


def walk_each(step: DrafterStep, row: HiddenStateRow, answers: Iterable[Answer]) -> list[WalkSums]:
    """As `walk_answers`, with the sums of each answer by itself, in their order."""
    answers = list(answers)
    accepted = _accepted_at(step, row, [p for answer in answers for p in _whole_places(step, answer)], answers)
    return [_walk(step, row, answer, accepted) for answer in answers]


def _n_methods(step: DrafterStep) -> int:
    return 1 if step.trees is None else 1 + len(step.trees.budgets)


def _whole_places(step: DrafterStep, answer: Answer) -> range:
    """Places of an answer whose blocks are not shortened."""
    return range(answer.start, answer.stop - (step.block_size - 1 if answer.limited else 1))


def _accepted_at(step: DrafterStep, row: HiddenStateRow, places: list[int], answers: Sequence[Answer]) -> AcceptedAt:
    """Accepted drafts at all places, as many blocks at a time as a step has. One copy to the host each."""
    stop_of = {p: answer.stop for answer in answers for p in range(answer.start, answer.stop)}
    found: AcceptedAt = {}
    size = step.blocks_at_once(row)
    for at in range(0, len(places), size):
        batch = places[at : at + size]
        drafts = step.draft_blocks(row, batch)
        stops = [stop_of[p] for p in batch]
        found.update(zip(batch, _accepted(step, row, batch, stops, drafts), strict=True))
    return found


def _accepted(
    step: DrafterStep,
    row: HiddenStateRow,
    places: Sequence[int],
    stops: Sequence[int],
    drafts: BlockDrafts,
) -> list[list[int]]:
    """For each place, the leading tokens behind it that the chain and each tree draft."""
    chain_PK = drafts.chain()
    device = chain_PK.device
    places_P1, stops_P1 = (torch.tensor([x], device=device).t() for x in (places, stops))
    index_PK = places_P1 + torch.arange(1, chain_PK.shape[1] + 1, device=device)
    known_PK = index_PK < stops_P1
    labels_PK = row.input_ids_T[index_PK.clamp(max=row.input_ids_T.shape[0] - 1)]
    right_PK = known_PK & (chain_PK == labels_PK)
    counts = [right_PK.to(torch.int32).cumprod(1).sum(1, keepdim=True)]
    if step.trees is not None:
        counts.append(step.trees.count(drafts, labels_PK, known_PK))
    return torch.cat(counts, dim=1).tolist()


def _walk(step: DrafterStep, row: HiddenStateRow, answer: Answer, accepted: AcceptedAt) -> WalkSums:
    """The rounds of each method along one answer. `accepted` may grow by shortened blocks."""
    cache: DrafterCache | None = None
    sums: list[tuple[int, int, int, int]] = []
    for method in range(_n_methods(step)):
        rounds = clipped_rounds = clipped_tokens = 0
        at = answer.start
        while (left := answer.stop - 1 - at) > 0:
            if at not in accepted:
                drafts, cache = step.draft_short(row, answer.first, at, left + 1, cache)
                (accepted[at],) = _accepted(step, row, [at], [answer.stop], drafts)
            n_drafts = accepted[at][method]
            committed = min(n_drafts + 1, left)
            is_clipped = n_drafts == left or (answer.limited and left + 1 < step.block_size)
            rounds, clipped_rounds = rounds + 1, clipped_rounds + is_clipped
            clipped_tokens += committed * is_clipped
            at += committed
        sums.append((rounds, answer.stop - 1 - answer.start, clipped_rounds, clipped_tokens))
    return WalkSums(*(tuple(column) for column in zip(*sums, strict=True)))
