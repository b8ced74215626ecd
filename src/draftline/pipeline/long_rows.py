"""Rows of many tokens: refused beyond the target's context, and what its forward needs told beforehand."""

from __future__ import annotations

from pathlib import Path

from draftline.data.shards import TokenDataset
from draftline.errors import UserError
from draftline.target.facts import TargetFacts


def require_context(dataset: TokenDataset, facts: TargetFacts, path: Path) -> None:
    """Refuse (UserError) samples that are longer than the target was made for."""
    longest = int(dataset.lengths.max())
    if longest > facts.max_position_embeddings:
        raise UserError(
            f"a sample has {longest} tokens, the target's context is {facts.max_position_embeddings}",
            where=str(path),
            mend=f"prepare with --max-tokens {facts.max_position_embeddings}",
        )


def target_forward_bytes(facts: TargetFacts, row_tokens: int, longest_tokens: int, element: int, *, eager: bool) -> int:
    """Bytes that one forward of a row needs at most besides weights and captured states; an estimate.

    One layer lives at a time: input, residual, normed input and the attention's output (4 hidden sizes), queries, keys
    and values, and three tensors of the feed-forward. Eager attention holds all scores of the longest sample, in the
    compute dtype and in fp32 for the softmax; the other backends never do.

    Args:
        row_tokens: tokens of the largest row.
        longest_tokens: tokens of the longest sample.
        element: bytes of the compute dtype.
        eager: whether attention is eager.
    """
    heads = (facts.num_heads + 2 * facts.num_kv_heads) * facts.head_dim
    per_token = 4 * facts.hidden_size + heads + 3 * facts.intermediate_size
    scores = facts.num_heads * longest_tokens**2 * (element + 4) if eager else 0
    return row_tokens * per_token * element + scores
