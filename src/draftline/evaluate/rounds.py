"""Trees beside the chain on the same rounds: one drafted block, its chain and its trees, walked along one known text.

Real decoding takes each method through rounds of its own, so acceptance lengths compare different places of the text.
Here every tree is grown from the very block that the chain drafted. Whatever the drafter, a tree that holds the chain
accepts at least as much; a round where it does not is a fault of the code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from draftline.decode.budget import BudgetRule
from draftline.decode.generation import Generation
from draftline.decode.path_tree import block_marginals, chain_of
from draftline.decode.steps import Drafted, DraftModel, RoundContext
from draftline.decode.target_session import TargetSession
from draftline.decode.tree import DraftTree
from draftline.evaluate.report import TreeRounds
from draftline.target.shape_plans import no_shape_plans

if TYPE_CHECKING:
    from draftline.target.load import LoadedTarget


@no_shape_plans()
def tree_rounds(
    target: LoadedTarget,
    name: str,
    drafter: DraftModel,
    texts: Sequence[tuple[Sequence[int], Generation]],
    trees: Mapping[str, BudgetRule],
    max_new_tokens: int,
) -> list[TreeRounds]:
    """Each tree against the chain, on the rounds of the chain.

    Args:
        name: of the drafter, for the result.
        texts: prompts and their greedy chain generations.
        trees: budget rules by name of method.
        max_new_tokens: the limit they were decoded with.
    """
    chain_tokens = rounds = 0
    tree_tokens, kept, fewer = (dict.fromkeys(trees, 0) for _ in range(3))
    for prompt_ids, generation in texts:
        for draft, continuation, room in _blocks(target, drafter, prompt_ids, generation, max_new_tokens):
            chain = chain_of(draft).tolist()
            accepted = _common(chain, continuation)
            rounds, chain_tokens = rounds + 1, chain_tokens + min(accepted + 1, room)
            for method, budget in trees.items():
                tree = budget.grow(block_marginals(draft, budget.largest))
                walked = tree.walk_text(continuation)
                tree_tokens[method] += min(walked + 1, room)
                if holds(tree, chain):
                    kept[method] += walked >= accepted
                    fewer[method] += walked < accepted
    return [
        TreeRounds(
            drafter=name,
            method=method,
            rounds=rounds,
            chain_tokens=chain_tokens,
            tree_tokens=tree_tokens[method],
            rounds_with_chain=kept[method] + fewer[method],
            rounds_not_below_chain=kept[method],
            rounds_below_chain=fewer[method],
        )
        for method in trees
        if rounds
    ]


def holds(tree: DraftTree, chain: Sequence[int]) -> bool:
    """True if all of the chain's drafts are nodes of the tree, one behind the other."""
    return tree.walk_text(chain) == len(chain)


def _common(chain: Sequence[int], text: Sequence[int]) -> int:
    """Leading tokens in which both agree."""
    return next(
        (i for i, (one, other) in enumerate(zip(chain, text, strict=False)) if one != other), min(len(chain), len(text))
    )


@torch.inference_mode()
def _blocks(
    target: LoadedTarget,
    drafter: DraftModel,
    prompt_ids: Sequence[int],
    generation: Generation,
    max_new_tokens: int,
) -> Iterator[tuple[Drafted, list[int], int]]:
    """Of each chain round: what its block drafts, the tokens that the target wrote there, and how many tokens
    there were left to commit.
    """
    text = [*prompt_ids, *generation.output_ids]
    _, taps_TF = TargetSession(target, drafter.taps).prefill(text)
    drafter.start()
    start, seen = len(prompt_ids), 0
    for length in generation.acceptance_lengths:
        slots = min(drafter.block_size, len(prompt_ids) + max_new_tokens - start)
        new_taps_SF = None if taps_TF is None else taps_TF[seen:start]
        draft = drafter.block_logits(RoundContext(text[: start + 1], new_taps_SF, slots))
        yield draft, text[start + 1 : start + slots], len(text) - start - 1
        seen, start = start, start + length
