"""The loop of all methods that verify one line of drafts: chain decoding and prompt lookup.

A round: the newest token and its drafts run through the target in one forward; the leading drafts that the target would
have chosen itself are committed, and one more token of the target's own. The text is the target's, whatever is drafted.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Protocol

import torch

from draftline.decode.sampling import Proposal, Sampler, agreed
from draftline.decode.steps import (
    Request,
    RoundContext,
    Session,
    Steps,
    Task,
    Tokens,
    extended,
    prefilled,
    recorder_for,
)


class DraftSource(Protocol):
    """Proposes the drafts of a block. One object serves one prompt at a time."""

    @property
    def block_size(self) -> int:
        """B: a round commits between 1 and B tokens."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose states it needs; empty for none."""

    def propose(self, context: RoundContext, sampler: Sampler) -> Generator[Request, Any, Proposal]:
        """At most `context.slots - 1` drafts; may ask for a forward of a drafter."""


def linear_steps(session: Session, source: DraftSource, task: Task) -> Steps:
    """Decodes with one line of drafts a round. The session must tap the source's layers."""
    recorder = recorder_for(session, task, source.block_size)
    sampler = Sampler(task.sampling, session.target.device)
    logits_V, taps_SF = yield from prefilled(task.prompt_ids)
    recorder.begin(int(sampler.pick(logits_V[None])))
    while not recorder.done:
        slots = recorder.slots
        proposal = yield from source.propose(RoundContext(recorder.tokens, taps_SF, slots), sampler)
        block = _block(recorder.tokens[-1], proposal.drafts_K)
        found = yield from extended(block, greedy=task.sampling.is_greedy)
        if task.sampling.is_greedy:
            new_tokens = agreed(found.own, found.ran[1:])
        else:
            new_tokens = sampler.verify(proposal, found.logits_NV)
        produced = recorder.commit(new_tokens, drafted=len(block) - 1, slots=slots)
        session.commit(produced)
        taps_SF = None if found.taps_NF is None else found.taps_NF[:produced]
    return recorder.finish(n_forwards=session.n_forwards, n_replays=session.n_replays)


def _block(root: int, drafts_K: torch.Tensor) -> Tokens:
    """The newest token, then its drafts."""
    if drafts_K.device.type == "cpu":
        return Tokens([root, *drafts_K.tolist()])
    return Tokens([root], drafts_K)
