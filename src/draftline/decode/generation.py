"""What a generation gives back, and the bookkeeping that all methods share.

Acceptance length tau: tokens committed per target forward after the prefill, the target's own (bonus) token counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from draftline.errors import UserError

if TYPE_CHECKING:
    from draftline.target.load import LoadedTarget

TAU_DEFINITION = (
    "acceptance length tau = tokens committed per target forward after the prefill, the target's own token counted"
)


@dataclass(frozen=True, slots=True)
class Leaders:
    """The target's best tokens at one place and their logits, best first."""

    tokens: tuple[int, ...]
    logits: tuple[float, ...]

    def gap(self, token: int) -> float | None:
        """How far the token's logit lies below the best one; None if it is not among the leaders."""
        return self.logits[0] - self.logits[self.tokens.index(token)] if token in self.tokens else None


@dataclass(frozen=True, slots=True)
class Generation:
    """Output of one prompt.

    Attributes:
        output_ids: new tokens, the stop token included. The first one comes from the prefill.
        prompt_tokens: length of the prompt.
        acceptance_lengths: tokens committed in each round (one verifying target forward each); they sum to
            len(output_ids) - 1.
        clipped: per round, True if the length limit shortened its block or a limit or stop token cut what it committed.
        target_forwards: forwards after the prefill, one a round.
        replay_forwards: further forwards that put recurrent layers right after a rejection.
        drafted_by_position: how often slot k = 1.. was drafted (index k - 1); depth of the tree for a tree.
        accepted_by_position: how often it was accepted by the target and is text: not behind a stop token or the limit.
        tree_nodes: drafts verified in each round of a tree; empty otherwise.
        prefill_s, decode_s: wall-clock seconds.
        stopped: True if a stop token ended it, False at the length limit.
        leaders: per output token the target's best tokens there; only if asked for.
    """

    output_ids: list[int]
    prompt_tokens: int
    acceptance_lengths: list[int]
    clipped: list[bool]
    target_forwards: int
    replay_forwards: int
    drafted_by_position: list[int]
    accepted_by_position: list[int]
    tree_nodes: list[int]
    prefill_s: float
    decode_s: float
    stopped: bool
    leaders: list[Leaders] | None = None

    @property
    def elapsed_s(self) -> float:
        """Seconds of prefill and decoding."""
        return self.prefill_s + self.decode_s

    @property
    def clipped_last_round(self) -> bool:
        """True if a limit or a stop token cut the last round."""
        return bool(self.clipped) and self.clipped[-1]

    @property
    def acceptance_length(self) -> float:
        """Mean over rounds; 1.0 if there was none."""
        return sum(self.acceptance_lengths) / len(self.acceptance_lengths) if self.acceptance_lengths else 1.0


@dataclass(slots=True)
class Recorder:
    """Builds a `Generation` round by round and knows when to stop.

    Args:
        prompt_ids: the prompt.
        max_new_tokens: most new tokens, the prefill's included.
        stop_token_ids: tokens that end the text; they are kept.
        block_size: slots of a full block.
        clock: seconds, read after the device is done.
    """

    prompt_ids: Sequence[int]
    max_new_tokens: int
    stop_token_ids: Collection[int]
    block_size: int
    clock: Callable[[], float]
    tokens: list[int] = field(init=False)
    stopped: bool = field(default=False, init=False)
    _lengths: list[int] = field(default_factory=list, init=False)
    _clipped: list[bool] = field(default_factory=list, init=False)
    _nodes: list[int] = field(default_factory=list, init=False)
    _drafted: list[int] = field(init=False)
    _accepted: list[int] = field(init=False)
    _started_s: float = field(init=False)
    _prefilled_s: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise UserError("the prompt has no token", where="decode", mend="give at least one token")
        if self.max_new_tokens < 1:
            raise UserError(
                f"max_new_tokens is {self.max_new_tokens}", where="decode", mend="ask for at least one token"
            )
        self.tokens = list(self.prompt_ids)
        self._drafted = [0] * max(self.block_size - 1, 0)
        self._accepted = [0] * max(self.block_size - 1, 0)
        self._started_s = self.clock()

    @property
    def start(self) -> int:
        """Position of the newest token, which the target has not seen yet: slot 0 of the next block."""
        return len(self.tokens) - 1

    @property
    def slots(self) -> int:
        """Slots of the next block: a full one, or what is left before the length limit."""
        return min(self.block_size, len(self.prompt_ids) + self.max_new_tokens - self.start)

    @property
    def done(self) -> bool:
        """True when a stop token or the length limit was reached."""
        return self.stopped or len(self.tokens) - len(self.prompt_ids) >= self.max_new_tokens

    def begin(self, first_token: int) -> None:
        """Takes the prefill's token and starts the decoding clock."""
        self.tokens.append(first_token)
        self.stopped = first_token in self.stop_token_ids
        self._prefilled_s = self.clock()

    def commit(
        self,
        new_tokens: Sequence[int],
        *,
        drafted: int,
        slots: int,
        nodes: int | None = None,
        accepted: int | None = None,
    ) -> int:
        """Takes a round's tokens (accepted drafts, then the target's own), cut at the limit and behind a stop token.

        Args:
            new_tokens: at least one token.
            accepted: how many of them were drafted; None: all but the last, which is the target's own. A known text
                that ends in a draft has no token of the target's own behind it.
            drafted: drafts of the block, or depth of the tree.
            slots: slots of the block (see `slots`).
            nodes: drafts in the tree, for a tree.

        Returns:
            How many tokens of the block (its root counted) now are committed text.
        """
        accepted = len(new_tokens) - 1 if accepted is None else accepted
        room = len(self.prompt_ids) + self.max_new_tokens - len(self.tokens)
        produced = min(len(new_tokens), room)
        for index in range(produced):
            if new_tokens[index] in self.stop_token_ids:
                produced, self.stopped = index + 1, True
                break
        self.tokens.extend(new_tokens[:produced])
        self._lengths.append(produced)
        self._clipped.append(produced < accepted + 1 or slots < self.block_size)
        for index in range(drafted):
            self._drafted[index] += 1
        for index in range(min(accepted, produced)):
            self._accepted[index] += 1
        if nodes is not None:
            self._nodes.append(nodes)
        return produced

    def finish(self, *, n_forwards: int, n_replays: int, leaders: list[Leaders] | None = None) -> Generation:
        """The whole generation. Called once, at the end."""
        return Generation(
            output_ids=self.tokens[len(self.prompt_ids) :],
            prompt_tokens=len(self.prompt_ids),
            acceptance_lengths=self._lengths,
            clipped=self._clipped,
            target_forwards=n_forwards,
            replay_forwards=n_replays,
            drafted_by_position=self._drafted,
            accepted_by_position=self._accepted,
            tree_nodes=self._nodes,
            prefill_s=self._prefilled_s - self._started_s,
            decode_s=self.clock() - self._prefilled_s,
            stopped=self.stopped,
            leaders=leaders,
        )


def device_clock(device: torch.device | str) -> Callable[[], float]:
    """Wall clock in seconds, read after the device has finished its work."""
    if torch.device(device).type != "cuda":
        return time.perf_counter

    def clock() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return clock


def check_context(target: LoadedTarget, prompt_tokens: int, max_new_tokens: int, *, where: str = "decode") -> None:
    """Raises UserError if prompt and answer together do not fit the target's context; `where` names the prompt.

    Nor may a text cross the length at which the target's rotary frequencies change: a forward that reaches across it
    rotates all of its tokens otherwise than one token at a time would, so no block there is lossless.
    """
    limit = getattr(target.text_config, "max_position_embeddings", None)
    if limit is not None and prompt_tokens + max_new_tokens > limit:
        raise UserError(
            f"a prompt of {prompt_tokens} tokens and {max_new_tokens} new ones exceed the target's context of {limit}",
            where=where,
            mend="shorten the prompt or lower max_new_tokens",
        )
    edge = target.facts.rope_changes_at
    if edge is not None and prompt_tokens <= edge < prompt_tokens + max_new_tokens:
        raise UserError(
            f"a prompt of {prompt_tokens} tokens and {max_new_tokens} new ones cross the length of {edge} tokens, at "
            "which the target's rotary embedding changes",
            where=where,
            mend="keep prompt and answer together below it, or the prompt above it",
        )
