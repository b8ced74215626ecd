"""Decoding one prompt, told as a sequence of requests, so that the same code decodes one prompt or many together.

A method (plain, chain, tree) is a generator: it asks for forwards of the target and of the drafter, gets their results
back, and returns the finished `Generation`. Who answers decides how: `run_steps` serves one prompt, `decode_together`
(batch.py) collects the requests of several prompts and answers them with one padded forward.

Shape letters: N tokens of a forward, V vocabulary, S new context tokens, F tap features, K drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

import torch

from draftline.decode.generation import Generation, Recorder, check_context
from draftline.decode.sampling import GREEDY, Sampling
from draftline.target.shape_plans import no_shape_plans

if TYPE_CHECKING:
    from draftline.drafter.selector import PathScores
    from draftline.target.load import LoadedTarget

# Logits and tap features of a forward; None where no layer is tapped.
Forwarded = tuple[torch.Tensor, torch.Tensor | None]
# What a drafter tells of a block: logits [K, V] of slots that know nothing of each other, or scores of paths.
Drafted: TypeAlias = "torch.Tensor | PathScores"


@dataclass(frozen=True, slots=True)
class Task:
    """One prompt to be continued.

    Attributes:
        prompt_ids: at least one token.
        max_new_tokens: most new tokens, the prefill's included.
        stop_token_ids: tokens that end the text; None takes the target's own.
        sampling: rule for the next token.
    """

    prompt_ids: Sequence[int]
    max_new_tokens: int
    stop_token_ids: Collection[int] | None = None
    sampling: Sampling = GREEDY


@dataclass(frozen=True, slots=True)
class TreeLayout:
    """How the tokens of one forward hang together: token 0 is the root, the others are drafts below it.

    Attributes:
        depths_N: int64, distance from the root; the position of token i is the root's plus its depth.
        visible_NN: True where token i may see token j: its ancestors and itself.

    Both are made on the host; whoever runs the forward brings them to its device.
    """

    depths_N: torch.Tensor
    visible_NN: torch.Tensor

    def to(self, device: torch.device) -> TreeLayout:
        """The same on a device."""
        return TreeLayout(self.depths_N.to(device), self.visible_NN.to(device))


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of a forward: those that the host knows, then those that so far only the device does.

    Attributes:
        known: ids on the host.
        drafts_K: int64 ids behind them on the target's device; None: there are none.
    """

    known: Sequence[int]
    drafts_K: torch.Tensor | None = None

    def __len__(self) -> int:
        """N, tokens of the forward."""
        return len(self.known) + (0 if self.drafts_K is None else self.drafts_K.shape[0])

    def on(self, device: torch.device) -> torch.Tensor:
        """int64 ids [N]."""
        if self.drafts_K is not None and not self.known:
            return self.drafts_K
        known_M = torch.tensor(self.known, dtype=torch.long, device=device)
        return known_M if self.drafts_K is None else torch.cat([known_M, self.drafts_K])


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


class DraftModel(Protocol):
    """What chain and tree decoding ask of a drafter. One object serves one prompt at a time."""

    @property
    def block_size(self) -> int:
        """B: the anchor's token and B - 1 drafts."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose states it reads."""

    def start(self) -> None:
        """Forgets the last prompt."""

    def block_logits(self, context: RoundContext) -> Drafted:
        """Logits [K, V] of slots 1..K of the next block, K = context.slots - 1; or the scores of its paths (A = 1)."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """Run and commit the prompt. Answer: logits [V] behind its last token, tap features [N, F] of all of it."""

    ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Extend:
    """Run tokens behind the committed ones. Answer: a `Verified`.

    Attributes:
        greedy: the likeliest tokens and the tokens that ran are wanted on the host.
    """

    tokens: Tokens
    tree: TreeLayout | None = None
    greedy: bool = False


@dataclass(frozen=True, slots=True)
class Verified:
    """What the target says to the N tokens of a forward.

    Attributes:
        logits_NV: behind each token.
        taps_NF: tap features of each token; None without taps.
        own: the likeliest token behind each, and
        ran: the tokens themselves, on the host; both empty unless asked for.
    """

    logits_NV: torch.Tensor
    taps_NF: torch.Tensor | None
    own: Sequence[int] = ()
    ran: Sequence[int] = ()


class Reduction(Protocol):
    """What a method needs of a block's logits. Equal ones are taken from many blocks in one go."""

    def of_block(self, draft: Drafted) -> Any:
        """From one block."""

    def of_blocks(self, logits_QV: torch.Tensor, sizes: Sequence[int]) -> Sequence[Any]:
        """From each of several blocks of `sizes` drafted slots, end to end; the same values as one by one."""


@dataclass(frozen=True, slots=True)
class Draft:
    """Draft the next block. Answer: its reduction; without one its logits [K, V], or the scores of a candidate
    selector's paths.
    """

    drafter: DraftModel
    context: RoundContext
    reduction: Reduction | None = None

    def reduced(self, draft: Drafted) -> Any:
        """The answer, from what the drafter tells of this block."""
        return draft if self.reduction is None else self.reduction.of_block(draft)


Request = Prefill | Extend | Draft
Steps = Generator[Request, Any, Generation]


class Session(Protocol):
    """Decoding state of one prompt inside the target, as a method sees it."""

    n_forwards: int
    n_replays: int

    @property
    def target(self) -> LoadedTarget:
        """The target that verifies."""

    @property
    def clock(self) -> Callable[[], float]:
        """Seconds; constant where one prompt's time cannot be told from the others'."""

    def refuse_tree(self) -> None:
        """Raises UserError if this target cannot verify a tree in one forward."""

    def commit(self, n_kept: int) -> None:
        """Keeps the first `n_kept` tokens of the last `Extend`; the others leave no trace."""

    def commit_path(self, path: Sequence[int]) -> None:
        """Keeps the tokens of index `path` (rising) of the last `Extend`, in that order."""


class SoloSession(Session, Protocol):
    """A session that runs its forwards itself."""

    def prefill(self, ids: Sequence[int]) -> Forwarded:
        """Run the prompt: logits [V] of its last token, taps of all of it."""

    def extend(self, ids_N: torch.Tensor, tree: TreeLayout | None = None) -> Forwarded:
        """Run a line or a tree of N tokens: logits [N, V] and taps of each."""


def recorder_for(session: Session, task: Task, block_size: int) -> Recorder:
    """The bookkeeping of a task. Raises UserError if it does not fit the target's context."""
    check_context(session.target, len(task.prompt_ids), task.max_new_tokens)
    stops = session.target.stop_token_ids if task.stop_token_ids is None else task.stop_token_ids
    return Recorder(task.prompt_ids, task.max_new_tokens, stops, block_size, session.clock)


def prefilled(ids: Sequence[int]) -> Generator[Request, Any, Forwarded]:
    """Asks for the prefill."""
    return cast("Forwarded", (yield Prefill(ids)))


def extended(
    tokens: Tokens, tree: TreeLayout | None = None, *, greedy: bool = False
) -> Generator[Request, Any, Verified]:
    """Asks for a forward behind the committed text."""
    return cast("Verified", (yield Extend(tokens, tree, greedy)))


def verified(forwarded: Forwarded, ids_N: torch.Tensor, *, greedy: bool) -> Verified:
    """The answer to an `Extend` that ran alone; waits for the device, once, if it is greedy."""
    logits_NV, taps_NF = forwarded
    if not greedy:
        return Verified(logits_NV, taps_NF)
    own, ran = torch.stack([logits_NV.argmax(dim=-1), ids_N]).tolist()
    return Verified(logits_NV, taps_NF, own, ran)


@torch.inference_mode()
@no_shape_plans()
def run_steps(session: SoloSession, steps: Steps) -> Generation:
    """Answers each request at once: one prompt, one forward at a time."""
    reply: Any = None
    while True:
        try:
            request = steps.send(reply)
        except StopIteration as end:
            return cast("Generation", end.value)
        if isinstance(request, Prefill):
            reply = session.prefill(request.ids)
        elif isinstance(request, Extend):
            ids_N = request.tokens.on(session.target.device)
            reply = verified(session.extend(ids_N, request.tree), ids_N, greedy=request.greedy)
        else:
            reply = request.reduced(request.drafter.block_logits(request.context))
