"""Trees scored in batches are the trees that decoding grows: same rule, ties included."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftline.decode.tree import build_tree, top_marginals
from draftline.decode.tree_batch import accepted_in_trees
from draftline.drafter.top_tokens import TopTokens, top_tokens

BUDGETS = (1, 2, 7, 16, 40)


def grown(logits_ADV: torch.Tensor, labels: list[list[int]], budgets: tuple[int, ...]) -> list[list[int]]:
    """One tree after the other, as `tree_replay` scores them; of equal tokens at the edge all trees know the same."""
    return [
        [build_tree(top_marginals(logits_DV, max(budgets)), b).walk_text(label) for b in budgets]
        for logits_DV, label in zip(logits_ADV, labels, strict=True)
    ]


def batched(logits_ADV: torch.Tensor, labels: list[list[int]], budgets: tuple[int, ...]) -> list[list[int]]:
    n_blocks, depth, vocab = logits_ADV.shape
    log_probs, tokens = top_tokens(logits_ADV.flatten(0, 1), min(max(budgets), vocab))
    # What is behind the known labels must not matter: it repeats the likeliest token.
    labels_AD = tokens.view(n_blocks, depth, -1)[..., 0].clone()
    known_AD = torch.zeros(n_blocks, depth, dtype=torch.bool)
    for block, label in enumerate(labels):
        labels_AD[block, : len(label)] = torch.tensor(label, dtype=torch.long)
        known_AD[block, : len(label)] = True
    shape = (n_blocks, depth, -1)
    return accepted_in_trees(log_probs.view(shape), tokens.view(shape), labels_AD, known_AD, budgets).tolist()


def random_case(seed: int, *, levels: int | None) -> tuple[torch.Tensor, list[list[int]]]:
    """Blocks with labels that follow the marginals, of any length; few logit `levels` make ties."""
    g = torch.Generator().manual_seed(seed)
    n_blocks, depth, vocab = 12, int(torch.randint(1, 6, (), generator=g)), int(torch.randint(2, 60, (), generator=g))
    logits = 2 * torch.randn(n_blocks, depth, vocab, generator=g)
    if levels is not None:
        logits = torch.randint(0, levels, logits.shape, generator=g).float()
    drawn = torch.multinomial((2 * logits).softmax(-1).flatten(0, 1), 1, generator=g).view(n_blocks, depth)
    lengths = torch.randint(0, depth + 1, (n_blocks,), generator=g).tolist()
    return logits, [row[:n] for row, n in zip(drawn.tolist(), lengths, strict=True)]


@pytest.mark.parametrize("levels", [None, 2, 3])
def test_batched_trees_accept_what_grown_trees_accept(levels: int | None) -> None:
    reached = set()
    for seed in range(16):
        logits, labels = random_case(seed, levels=levels)
        found = batched(logits, labels, BUDGETS)
        assert found == grown(logits, labels, BUDGETS), seed
        reached |= {count for row in found for count in row}
    assert len(reached) >= 4  # otherwise nothing was compared


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.lists(st.integers(1, 300), min_size=1, max_size=4, unique=True).map(sorted))
def test_budgets_of_any_size_agree_with_grown_trees(seed: int, budgets: list[int]) -> None:
    logits, labels = random_case(seed, levels=4 if seed % 2 else None)
    assert batched(logits, labels, tuple(budgets)) == grown(logits, labels, tuple(budgets))


def test_a_tree_that_holds_the_chain_accepts_at_least_what_the_chain_accepts() -> None:
    checked = 0
    for seed in range(16):
        logits, labels = random_case(seed, levels=None)
        drafts = logits.argmax(-1).tolist()
        found = batched(logits, labels, BUDGETS)
        for block, (label, draft) in enumerate(zip(labels, drafts, strict=True)):
            wrong = (i for i, (a, b) in enumerate(zip(label, draft, strict=False)) if a != b)
            chain = next(wrong, len(label))
            for budget, accepted in zip(BUDGETS, found[block], strict=True):
                tree = build_tree(top_marginals(logits[block], budget), budget)
                if tree.walk_text(draft) == len(draft):
                    assert accepted >= chain
                    checked += chain > 0
            assert found[block] == sorted(found[block])
    assert checked > 20


def test_a_sure_drafter_is_right_to_the_end_and_impossible_tokens_are_in_no_tree() -> None:
    """Probability 1 makes every prefix of the chain a tie; probability 0 is never drafted."""
    logits = torch.full((1, 5, 9), float("-inf"))
    logits[..., 3] = 0.0
    assert batched(logits, [[3] * 5], (1, 4, 5, 64)) == [[1, 4, 5, 5]]
    assert batched(logits, [[3, 3, 2, 3, 3]], (5, 64)) == [[2, 2]]


def test_blocks_without_drafts_or_labels_accept_nothing() -> None:
    none = torch.zeros(3, 0, 4)
    labels, known = torch.zeros(3, 0, dtype=torch.long), torch.zeros(3, 0, dtype=torch.bool)
    assert accepted_in_trees(none, none.long(), labels, known, (1, 8)).tolist() == [[0, 0]] * 3
    assert batched(torch.randn(2, 3, 5), [[], []], (4,)) == [[0], [0]]


def test_top_tokens_taken_chunk_by_chunk_are_those_of_all_logits() -> None:
    logits = torch.randint(0, 5, (40, 30), generator=torch.Generator().manual_seed(0)).float()
    kept = TopTokens.empty(41, 7, torch.device("cpu"))
    for slots in torch.randperm(40).split(11):
        kept.take(slots, logits[slots])
    log_probs, tokens = top_tokens(logits, 7)
    assert torch.equal(kept.tokens_QR[:40], tokens) and torch.equal(kept.log_probs_QR[:40], log_probs)
    assert kept.tokens_QR[40].tolist() == [-1] * 7 and bool(torch.isinf(kept.log_probs_QR[40]).all())
    torch.testing.assert_close(log_probs, logits.log_softmax(-1).gather(-1, tokens))
