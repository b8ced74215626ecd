"""Chain decoding: a drafter proposes one block a round, from the target's tap features and mask tokens.

The block is [newest token, mask, mask, ...]; slot k predicts the token AT position start + k, so a block of b slots
carries b - 1 drafts. Near the length limit the block is shortened, as z-lab's decoder does. Source of the rule:
arXiv 2602.06036 and the `dflash` package.

Shape letters: S new context tokens, F tap features, B slots, K = B - 1 drafts, V vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from draftline.decode.generation import Generation
from draftline.decode.linear import linear_steps
from draftline.decode.reduce import GreedyChain
from draftline.decode.sampling import GREEDY, Proposal, Sampler, Sampling
from draftline.decode.steps import Draft, Drafted, DraftModel, Request, RoundContext, Task, run_steps
from draftline.decode.target_session import TargetSession
from draftline.errors import UserError

if TYPE_CHECKING:
    from draftline.config.drafter_spec import DrafterSpec
    from draftline.drafter.context_cache import DrafterCache
    from draftline.drafter.model import Drafter
    from draftline.records import FrozenHead
    from draftline.target.load import LoadedTarget


class BoundDrafter:
    """A `Drafter` with the embedding and head of its target, and the key/value cache of one prompt's context.

    Args:
        drafter: weights on the target's device.
        target: the model it was trained for; a mismatch is a UserError that names both.
    """

    def __init__(self, drafter: Drafter, target: LoadedTarget) -> None:
        check_match(drafter, target)
        self.drafter, self._target = drafter, target
        self._spec = drafter.spec
        self._dtype = next(drafter.parameters()).dtype
        self.cache: DrafterCache | None = None
        self._head, self._kept_D = _draft_head(drafter.spec, target)

    @property
    def block_size(self) -> int:
        """B: the anchor's token and B - 1 drafts."""
        return self._spec.block_size

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose states it reads."""
        return self._spec.taps

    @property
    def spec(self) -> DrafterSpec:
        """Shape and conventions of the drafter."""
        return self._spec

    @property
    def mask_token_id(self) -> int:
        """The token that stands in slots to be drafted."""
        return self._spec.mask_token_id

    def start(self) -> None:
        """Begin a text: an empty cache."""
        self.cache = self.drafter.new_cache()

    def fork(self) -> BoundDrafter:
        """The same weights with a context of its own, for another prompt."""
        other = copy(self)
        other.cache = None
        return other

    def block_ids(self, context: RoundContext) -> torch.Tensor:
        """Token ids [B] of a block: the newest token, then masks."""
        ids_B = torch.full((context.slots,), self.mask_token_id, dtype=torch.long, device=self._target.device)
        ids_B[0] = context.tokens[-1]
        return ids_B

    def block_logits(self, context: RoundContext) -> Drafted:
        """Logits [B - 1, V] of the drafted slots of one block, or the scores of a candidate selector's paths.

        The context's new taps enter the cache.
        """
        assert self.cache is not None, "block_logits before start"
        assert context.new_taps_SF is not None, "a drafter needs tap features"
        taps_SF = context.new_taps_SF.to(self._dtype)
        block_BH = self.embed(self.block_ids(context))
        hidden_BH = self.drafter.forward_block(block_BH, taps_SF, self.cache, context.start)
        return self.draft(hidden_BH[1:], context.tokens[-1])

    def draft(self, hidden_KH: torch.Tensor, anchor: int) -> Drafted:
        """What the drafter's output at slots 1..K drafts behind the anchor's token."""
        selector = self.drafter.candidate_selector
        logits_KV = self.head(hidden_KH)
        if selector is None:
            return logits_KV
        best = logits_KV.topk(selector.top_k, dim=-1)
        anchor_1 = torch.tensor([anchor], device=hidden_KH.device)
        return selector.paths(hidden_KH[None], best.values[None], best.indices[None], anchor_1)

    def embed(self, ids_B: torch.Tensor) -> torch.Tensor:
        """The target's embedding rows [B, H], scaled, in the drafter's dtype."""
        rows_BH = F.embedding(ids_B, self._target.embedding.weight_VH)
        return (rows_BH * self._spec.input_embedding_scale).to(self._dtype)

    def head(self, hidden_KH: torch.Tensor) -> torch.Tensor:
        """Logits [K, V] by the target's output matrix, multiplier and soft cap of the drafter's own configuration.

        Of a pruned vocabulary only the kept rows are multiplied; the other tokens get -inf.
        """
        head = self._head
        logits_KV = F.linear(hidden_KH.to(head.weight_VH.dtype), head.weight_VH, head.bias_V)
        if self._spec.output_multiplier != 1.0:
            logits_KV = logits_KV * self._spec.output_multiplier
        cap = self._spec.final_logit_softcapping
        logits_KV = torch.tanh(logits_KV / cap) * cap if cap else logits_KV
        if self._kept_D is None:
            return logits_KV
        whole_KV = logits_KV.new_full((len(logits_KV), self._spec.vocab_size), -torch.inf)
        return whole_KV.index_copy(-1, self._kept_D, logits_KV)


def _draft_head(spec: DrafterSpec, target: LoadedTarget) -> tuple[FrozenHead, torch.Tensor | None]:
    """The head's rows that are drafted from, and their ids [D]; None: all."""
    head = target.head
    if spec.draft_vocabulary is None:
        return head, None
    kept_D = torch.tensor(spec.draft_vocabulary, device=head.weight_VH.device)
    bias_D = None if head.bias_V is None else head.bias_V[kept_D]
    return replace(head, weight_VH=head.weight_VH[kept_D], bias_V=bias_D), kept_D


def check_match(drafter: Drafter, target: LoadedTarget) -> None:
    """Raises UserError if the drafter was made for another target. Names both values."""
    spec = drafter.spec
    for name, of_drafter, of_target in (
        ("hidden size", spec.hidden_size, target.hidden_size),
        ("vocabulary", spec.vocab_size, target.vocab_size),
        ("number of target layers", spec.num_target_layers, target.num_layers),
    ):
        if of_drafter != of_target:
            raise UserError(
                f"the drafter is for another target: its {name} is {of_drafter}, the target's is {of_target}",
                where="decode",
                mend="load the target that the drafter was trained with",
            )
    width = drafter.fc.in_features
    if width != len(spec.taps) * spec.hidden_size:
        raise UserError(
            f"the drafter's input takes {width // spec.hidden_size} taps, its configuration names {len(spec.taps)}",
            where="decode",
            mend="repair target_layer_ids",
        )


class ChainSource:
    """Draft source of chain decoding: one token a slot, all slots from one forward of the drafter."""

    def __init__(self, drafter: DraftModel) -> None:
        self._drafter = drafter
        drafter.start()

    @property
    def block_size(self) -> int:
        """B: the anchor's token and B - 1 drafts."""
        return self._drafter.block_size

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose states the drafter reads."""
        return self._drafter.taps

    def propose(self, context: RoundContext, sampler: Sampler) -> Generator[Request, Any, Proposal]:
        """Drafts of one block: the likeliest token of each slot, or drawn ones where the request says so."""
        if sampler.sampling.samples_drafts:
            return sampler.propose((yield Draft(self._drafter, context)))
        return Proposal((yield Draft(self._drafter, context, GreedyChain())))


def chain_generate(
    target: LoadedTarget,
    drafter: DraftModel,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    stop_token_ids: Collection[int] | None = None,
    sampling: Sampling = GREEDY,
) -> Generation:
    """Decodes with one block of drafts a round.

    Args:
        drafter: a `BoundDrafter`, or anything with its methods; other arguments as in `plain_generate`.
    """
    session, source = TargetSession(target, drafter.taps), ChainSource(drafter)
    return run_steps(session, linear_steps(session, source, Task(prompt_ids, max_new_tokens, stop_token_ids, sampling)))
