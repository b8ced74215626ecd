"""The loop of all methods that verify one line of drafts: chain decoding and prompt lookup.

A round: the newest token and its drafts run through the target in one forward; the leading drafts that the target would
have chosen itself are committed, and one more token of the target's own. The text is the target's, whatever is drafted.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from draftline.decode.generation import Generation, Recorder, check_context, device_clock
from draftline.decode.sampling import Proposal, Sampler, Sampling
from draftline.decode.target_session import TargetSession

if TYPE_CHECKING:
    from draftline.target.load import LoadedTarget


@dataclass(frozen=True, slots=True)
class RoundContext:
    """What a source of drafts may look at.

    Attributes:
        tokens: prompt and committed text; the last one is slot 0 of the block.
        new_taps_SF: tap features of the tokens that the target has seen since the last round (the prompt at first),
            in order; None if the source asked for no taps.
        slots: slots of the block, slot 0 included.
    """

    tokens: Sequence[int]
    new_taps_SF: torch.Tensor | None
    slots: int

    @property
    def start(self) -> int:
        """Position of slot 0."""
        return len(self.tokens) - 1


class DraftSource(Protocol):
    """Proposes the drafts of a block. One object serves one prompt at a time."""

    @property
    def block_size(self) -> int: ...

    @property
    def taps(self) -> tuple[int, ...]: ...

    def propose(self, context: RoundContext, sampler: Sampler) -> Proposal:
        """At most `context.slots - 1` drafts."""


@torch.inference_mode()
def linear_generate(
    target: LoadedTarget,
    source: DraftSource,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    stop_token_ids: Collection[int] | None,
    sampling: Sampling,
) -> Generation:
    """Decodes with one line of drafts a round; arguments as in `plain_generate`."""
    check_context(target, len(prompt_ids), max_new_tokens)
    stops = target.stop_token_ids if stop_token_ids is None else stop_token_ids
    recorder = Recorder(prompt_ids, max_new_tokens, stops, source.block_size, device_clock(target.device))
    sampler, session = Sampler(sampling, target.device), TargetSession(target, source.taps)
    logits_V, taps_SF = session.prefill(prompt_ids)
    recorder.begin(int(sampler.pick(logits_V[None])))
    while not recorder.done:
        slots = recorder.slots
        proposal = source.propose(RoundContext(recorder.tokens, taps_SF, slots), sampler)
        block_N = torch.cat([proposal.drafts_K.new_tensor([recorder.tokens[-1]]), proposal.drafts_K])
        logits_NV, taps_NF = session.extend(block_N)
        new_tokens = sampler.verify(proposal, logits_NV)
        produced = recorder.commit(new_tokens, drafted=proposal.drafts_K.shape[0], slots=slots)
        session.commit(produced)
        taps_SF = None if taps_NF is None else taps_NF[:produced]
    return recorder.finish(n_forwards=session.n_forwards, n_replays=session.n_replays)
