"""The tree is the best one of its size, with a stated tie rule, walked and masked as an independent oracle does it."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decoding_kit import NoisyDrafter, random_prompt, tiny_target
from draftline.decode import budget as budget_rules
from draftline.decode import cost
from draftline.decode.budget import AdaptiveBudget, CostCurve, FixedBudget
from draftline.decode.tree import DraftTree, Marginals, Node, best_first, build_tree, top_marginals
from draftline.errors import UserError


def _marginals(rows: list[list[float]]) -> Marginals:
    """Tokens of depth d are 100 d + rank, so that a token tells where it comes from."""
    return Marginals(rows, [[100 * d + r for r in range(len(row))] for d, row in enumerate(rows)])


def _brute_force(marginals: Marginals, budget: int) -> list[tuple[int, ...]]:
    """Rank tuples of the most likely prefixes by enumeration: probability falls, then ranks rise."""
    scored = []
    for depth in range(1, marginals.depth + 1):
        for ranks in itertools.product(*(range(len(row)) for row in marginals.log_probs_DR[:depth])):
            log_prob = 0.0
            for row, rank in zip(marginals.log_probs_DR, ranks, strict=False):
                log_prob += row[rank]
            if not math.isinf(log_prob):
                scored.append((-log_prob, ranks))
    return [ranks for _, ranks in sorted(scored)[:budget]]


def _random_marginals(draw: random.Random, *, ties: bool) -> Marginals:
    rows = []
    for _ in range(draw.randint(1, 4)):
        width = draw.randint(1, 5)
        logits = [float(draw.randint(0, 2)) if ties else draw.gauss(0, 2) for _ in range(width)]
        total = math.log(sum(math.exp(x) for x in logits))
        rows.append(sorted((min(x - total, 0.0) for x in logits), reverse=True))
    return _marginals(rows)


@pytest.mark.parametrize("ties", [False, True])
def test_the_tree_equals_the_brute_force_optimum_with_its_tie_rule(ties: bool) -> None:
    for seed in range(300):
        draw = random.Random(seed)
        marginals = _random_marginals(draw, ties=ties)
        for budget in (1, 2, 7, 30, 2000):
            tree = build_tree(marginals, budget)
            assert [node.ranks for node in tree.nodes] == _brute_force(marginals, budget)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.lists(st.floats(-8, 0), min_size=1, max_size=5).map(lambda row: sorted(row, reverse=True)), max_size=4),
    st.integers(0, 60),
)
def test_trees_are_closed_and_hold_what_their_nodes_say(rows: list[list[float]], budget: int) -> None:
    tree = build_tree(_marginals(rows), budget)
    assert len(tree) <= budget
    ranks = [(), *(node.ranks for node in tree.nodes)]
    assert len(set(ranks)) == len(ranks)
    for node in tree.nodes:
        assert node.ranks[:-1] == ranks[node.parent]
        assert node.depth == len(node.ranks)
        assert node.token == 100 * (node.depth - 1) + node.ranks[-1]
        assert node.log_prob == pytest.approx(sum(rows[d][r] for d, r in enumerate(node.ranks)))
    assert [n.log_prob for n in tree.nodes] == sorted((n.log_prob for n in tree.nodes), reverse=True)


def test_e30_empty_horizons_budgets_and_widths_have_defined_results() -> None:
    assert len(build_tree(Marginals([], []), 5)) == 0
    assert len(build_tree(_marginals([[0.0]]), 0)) == 0
    assert len(build_tree(_marginals([[-0.1, -2.0]]), 50)) == 2
    # A token of probability 0 is never drafted.
    assert len(build_tree(_marginals([[0.0, -math.inf], [0.0, -math.inf]]), 50)) == 2
    assert top_marginals(torch.zeros(0, 7), 3).depth == 0
    assert top_marginals(torch.zeros(2, 7), 0).depth == 0
    wide = top_marginals(torch.randn(2, 7), 100)
    assert [len(row) for row in wide.tokens_DR] == [7, 7]


def test_marginals_are_log_probabilities_of_the_whole_vocabulary_with_ties_by_token() -> None:
    logits_DV = torch.tensor([[1.0, 3.0, 3.0, -2.0], [0.0, 7.0, 7.0, 7.0]])
    marginals = top_marginals(logits_DV, 3)
    assert marginals.tokens_DR == [[1, 2, 0], [1, 2, 3]]
    expected = logits_DV.log_softmax(-1)[0].tolist()
    assert marginals.log_probs_DR[0] == pytest.approx([expected[1], expected[2], expected[0]])
    certain = top_marginals(torch.tensor([[90.0, 0.0]]).bfloat16(), 1)
    assert certain.tokens_DR == [[0]]
    assert certain.log_probs_DR[0][0] <= 0.0


def test_e29_two_hundred_random_trees_are_masked_and_walked_like_an_independent_oracle_does() -> None:
    for seed in range(200):
        draw = random.Random(seed)
        tree = build_tree(_random_marginals(draw, ties=draw.random() < 0.5), draw.randint(1, 40))
        ranks = [(), *(node.ranks for node in tree.nodes)]
        expected = np.array([[other == own[: len(other)] for other in ranks] for own in ranks])
        assert np.array_equal(tree.visible(), expected)
        assert tree.depths() == [len(r) for r in ranks]
        own_tokens = [draw.choice([100 * len(r) + draw.randint(0, 4), 7]) for r in ranks]
        at, slow_path = (), [0]
        while True:
            token = own_tokens[ranks.index(at)]
            follower = (*at, token - 100 * len(at))
            if follower not in ranks:
                break
            at = follower
            slow_path.append(ranks.index(at))
        assert tree.walk(own_tokens) == slow_path


def test_walking_a_known_text_counts_the_drafts_it_passes_through() -> None:
    tree = build_tree(_marginals([[-0.1, -2.5], [-0.2, -2.0], [-0.3]]), 6)
    assert tree.walk_text([0, 100, 200, 300]) == 3
    assert tree.walk_text([0, 100]) == 2
    assert tree.walk_text([0, 999]) == 1
    assert tree.walk_text([55]) == 0
    assert tree.walk_text([]) == 0
    assert DraftTree().walk([3]) == [0]


def test_expected_accepted_is_the_sum_of_prefix_probabilities() -> None:
    marginals = _marginals([[math.log(0.5), math.log(0.3)], [math.log(0.6)]])
    assert build_tree(marginals, 3).expected_accepted() == pytest.approx(0.5 + 0.3 + 0.5 * 0.6)


def test_the_adaptive_budget_is_the_best_of_all_budgets() -> None:
    """Expected tokens per second at the chosen size equal the maximum over every size, by enumeration."""
    sizes = set()
    for seed in range(200):
        draw = random.Random(seed)
        marginals = _random_marginals(draw, ties=seed % 2 == 0)
        slope = draw.choice([0.001, 0.03, 0.1, 0.3])
        curve = CostCurve(draw.uniform(0, 0.5), ((0, 1.0), (5, 1.0 + 5 * slope), (40, 1.0 + 5 * slope + 70 * slope)))
        chosen = AdaptiveBudget(curve).grow(marginals)

        def rate(tree: DraftTree, curve: CostCurve = curve) -> float:
            return (1 + tree.expected_accepted()) / curve.round_s(len(tree))

        best = max(rate(build_tree(marginals, budget)) for budget in range(41))
        assert rate(chosen) == pytest.approx(best, rel=1e-12)
        assert chosen.nodes == build_tree(marginals, len(chosen)).nodes
        sizes.add(len(chosen))
    assert len(sizes) > 5


def test_the_measured_cost_of_a_tree_holds_its_own_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that only tree growth moves, a second a node, a tree of n drafts costs n seconds."""
    seconds = [0.0]

    def slow_nodes(marginals: Marginals) -> Iterator[Node]:
        for node in best_first(marginals):
            seconds[0] += 1.0
            yield node

    monkeypatch.setattr(budget_rules, "best_first", slow_nodes)
    monkeypatch.setattr(cost, "device_clock", lambda device: lambda: seconds[0])
    target = tiny_target(0, num_hidden_layers=1)
    drafter = NoisyDrafter(random_prompt(0, 30), 13, 4, seed=0)
    curve = cost.measure_cost_curve(target, drafter, random_prompt(0, 5), budgets=(0, 3, 9, 20), repeats=1)
    assert curve.largest == 20
    assert [curve.round_s(n) for n in (0, 3, 9, 20)] == [0.0, 3.0, 9.0, 20.0]


def test_a_fitted_cost_curve_is_convex_rising_and_never_above_its_measurements() -> None:
    for seed in range(100):
        draw = random.Random(seed)
        measured = [(n, 1.0 + 0.02 * n + draw.uniform(-0.2, 0.2)) for n in (0, 1, 3, 7, 15, 31, 63)]
        curve = CostCurve.fit(0.1, measured)
        assert (curve.points[0][0], curve.largest) == (0, 63)
        for nodes, seconds in measured:
            assert curve.round_s(nodes) <= 0.1 + seconds + 1e-12
        costs = [curve.round_s(n) for n in range(64)]
        steps = [b - a for a, b in itertools.pairwise(costs)]
        assert min(steps) >= -1e-12
        assert all(b >= a - 1e-12 for a, b in itertools.pairwise(steps))
    exact = CostCurve.fit(0.5, [(0, 1.0), (10, 2.0)])
    assert exact.round_s(4) == pytest.approx(1.9)
    with pytest.raises(UserError, match="ends at 10"):
        exact.round_s(11)


def test_budgets_that_draft_nothing_and_curves_without_points_are_refused() -> None:
    with pytest.raises(UserError, match="budget of 0"):
        FixedBudget(0)
    with pytest.raises(UserError, match="cost curve"):
        CostCurve(0.1, ((0, 1.0),))
