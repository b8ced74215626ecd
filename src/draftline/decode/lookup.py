"""Prompt lookup: drafts copied from an earlier place in the text. The free baseline that a drafter has to beat."""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from draftline.decode.generation import Generation
from draftline.decode.linear import linear_steps
from draftline.decode.sampling import GREEDY, Proposal, Sampler, Sampling
from draftline.decode.steps import Request, RoundContext, Task, run_steps
from draftline.decode.target_session import TargetSession

if TYPE_CHECKING:
    from draftline.target.load import LoadedTarget


class NgramIndex:
    """Where each n-gram of a growing text was last continued.

    Args:
        max_ngram: longest suffix looked up; shorter ones are tried down to one token.
    """

    def __init__(self, max_ngram: int) -> None:
        self._max_ngram = max_ngram
        self._next_position: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def continuation(self, tokens: Sequence[int], count: int) -> list[int]:
        """`count` tokens copied from behind the most recent earlier place of the longest suffix; empty without one.

        A copy that reaches the end of the text goes on with what it has copied, so a repetition is continued.
        """
        self._extend(tokens)
        for length in range(min(self._max_ngram, len(tokens)), 0, -1):
            position = self._next_position.get(tuple(tokens[-length:]))
            if position is not None:
                period = len(tokens) - position
                return [tokens[position + index % period] for index in range(count)]
        return []

    def _extend(self, tokens: Sequence[int]) -> None:
        # An n-gram that ends at the last token has no continuation yet, so the text is indexed up to the one before.
        for end in range(self._indexed, len(tokens) - 1):
            for length in range(1, min(self._max_ngram, end + 1) + 1):
                self._next_position[tuple(tokens[end + 1 - length : end + 1])] = end + 1
        self._indexed = max(self._indexed, len(tokens) - 1)


class LookupSource:
    """Draft source without a model: see `NgramIndex`."""

    taps: tuple[int, ...] = ()

    def __init__(self, block_size: int, max_ngram: int) -> None:
        self.block_size = block_size
        self._index = NgramIndex(max_ngram)

    def propose(
        self,
        context: RoundContext,
        sampler: Sampler,  # noqa: ARG002 - nothing is drawn
    ) -> Generator[Request, Any, Proposal]:
        """What followed the last words earlier in the text; nothing if they are new."""
        yield from ()  # a generator, like all sources, that asks for nothing
        drafts = self._index.continuation(context.tokens, context.slots - 1)
        return Proposal(torch.tensor(drafts, dtype=torch.long))


def lookup_generate(
    target: LoadedTarget,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    stop_token_ids: Collection[int] | None = None,
    block_size: int = 16,
    max_ngram: int = 3,
    sampling: Sampling = GREEDY,
) -> Generation:
    """Decodes with drafts looked up in the text so far; a round without a match is a plain step.

    Args:
        block_size: slots of a block, so at most block_size - 1 drafts.
        max_ngram: longest suffix looked up; other arguments as in `plain_generate`.
    """
    session, source = TargetSession(target), LookupSource(block_size, max_ngram)
    return run_steps(session, linear_steps(session, source, Task(prompt_ids, max_new_tokens, stop_token_ids, sampling)))
