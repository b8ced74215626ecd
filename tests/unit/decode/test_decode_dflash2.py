"""DFlash2 drafters decode without loss: chain and tree, alone, in a batch and with static shapes, greedy and drawn."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch

from decoding_kit import random_prompt, tiny_spec, tiny_target
from dflash2_kit import DFLASH2, greedy_row, trained_a_little
from draftline.config.drafter_spec import Dflash2Spec
from draftline.decode.batch import BatchedTarget, decode_together
from draftline.decode.budget import AdaptiveBudget, CostCurve, FixedBudget
from draftline.decode.chain import BoundDrafter, ChainSource, chain_generate
from draftline.decode.cost import measure_cost_curve
from draftline.decode.linear import linear_steps
from draftline.decode.path_tree import accepted_in_path_trees, path_marginals, tree_of
from draftline.decode.plain import plain_generate
from draftline.decode.sampling import Sampler, Sampling
from draftline.decode.static_call import StaticCompiler
from draftline.decode.static_drafter import StaticDrafter
from draftline.decode.static_target import StaticTarget
from draftline.decode.steps import Task, run_steps
from draftline.decode.tree_generate import tree_generate, tree_steps
from draftline.decode.tree_replay import tree_replay
from draftline.drafter.selector import PathScores
from draftline.target.load import LoadedTarget

PROMPTS = [random_prompt(seed, length) for seed, length in enumerate((1, 9, 4))]
OPTIONS: dict[str, Any] = {"max_new_tokens": 24, "stop_token_ids": ()}


@cache
def pair() -> tuple[LoadedTarget, BoundDrafter]:
    target = tiny_target()
    spec = tiny_spec(block_size=6, dflash2=Dflash2Spec(**DFLASH2))
    drafter = trained_a_little(spec, target, greedy_row(target, spec, PROMPTS, 24))
    return target, BoundDrafter(drafter, target)


def test_greedy_text_is_the_targets_and_trees_accept_more_than_the_chain() -> None:
    target, bound = pair()
    lengths: dict[str, list[int]] = {"chain": [], "tree": []}
    for prompt in PROMPTS:
        plain = plain_generate(target, prompt, **OPTIONS)
        chain = chain_generate(target, bound, prompt, **OPTIONS)
        tree = tree_generate(target, bound, prompt, budget=FixedBudget(40), **OPTIONS)
        adaptive = AdaptiveBudget(CostCurve(1.0, ((0, 1.0), (40, 2.0))))
        others = (chain, tree, tree_generate(target, bound, prompt, budget=adaptive, **OPTIONS))
        assert all(one.output_ids == plain.output_ids for one in others)
        replayed = tree_replay(target, bound, prompt, plain.output_ids, budget=FixedBudget(40), **OPTIONS)
        assert replayed.acceptance_lengths == tree.acceptance_lengths
        lengths["chain"] += chain.acceptance_lengths
        lengths["tree"] += tree.acceptance_lengths
    mean = {name: sum(found) / len(found) for name, found in lengths.items()}
    assert 1.2 < mean["chain"] <= mean["tree"]
    assert len(set(lengths["chain"])) >= 3


def test_a_batch_and_static_shapes_take_the_same_rounds() -> None:
    target, bound = pair()
    alone = [chain_generate(target, bound, prompt, **OPTIONS) for prompt in PROMPTS]
    tasks = [Task(prompt, 24, ()) for prompt in PROMPTS]
    batch = BatchedTarget(target, bound.taps, 2, columns=60)
    openers = [lambda s, t=task: linear_steps(s, ChainSource(bound.fork()), t) for task in tasks]
    for found, wanted in zip(decode_together(batch, openers), alone, strict=True):
        assert (found.output_ids, found.acceptance_lengths) == (wanted.output_ids, wanted.acceptance_lengths)
    compiler = StaticCompiler("graph", torch.device("cpu"))
    drafter = StaticDrafter(bound, 60, compiler)
    with StaticTarget(target, 60, compiler) as static:
        for prompt, task, wanted in zip(PROMPTS, tasks, alone, strict=True):
            session = static.session(bound.taps, (6,))
            found = run_steps(session, linear_steps(session, ChainSource(drafter), task))
            assert (found.output_ids, found.acceptance_lengths) == (wanted.output_ids, wanted.acceptance_lengths)
            session = static.session(bound.taps, (12,))
            tree = run_steps(session, tree_steps(session, drafter, task, FixedBudget(11)))
            expected = tree_generate(target, bound, prompt, budget=FixedBudget(11), **OPTIONS)
            assert tree.acceptance_lengths == expected.acceptance_lengths


def test_a_cost_curve_can_be_measured() -> None:
    target, bound = pair()
    assert measure_cost_curve(target, bound, PROMPTS[1], budgets=(0, 3), repeats=1).largest == 3


@pytest.mark.parametrize("proposals", ["argmax", "sampled"])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.8, "top_k": 5}])
def test_what_a_round_commits_has_the_targets_distribution(proposals: Any, filters: dict[str, Any]) -> None:
    """First token, and second behind each first one that was accepted, against enumerated distributions."""
    generator, vocab = torch.Generator().manual_seed(3), 8
    first_V, second_VV, third_V = (torch.randn(*shape, vocab, generator=generator) for shape in ((), (vocab,), ()))
    paths = _paths(1, 2, 4, 5)
    paths = PathScores(paths.tokens_AKC % vocab, paths.scores_AKCC)
    assert all(len(set(row)) == 4 for row in paths.tokens_AKC[0].tolist())
    first_V[paths.chain()[0, 0]] += 2.5  # so that drafts are accepted often enough to look behind them
    sampler = Sampler(Sampling(temperature=0.9, seed=4, proposals=proposals, **filters), "cpu")
    counts, n_rounds = Counter[tuple[int, ...]](), 1200
    for _ in range(n_rounds):
        proposal = sampler.propose(paths)
        logits_NV = torch.stack((first_V, second_VV[proposal.drafts_K[0]], third_V))
        tokens = sampler.verify(proposal, logits_NV)
        counts[(tokens[0],)] += 1
        counts[tuple(tokens[:2])] += len(tokens) > 1
    _assert_drawn_from(sampler.probs(first_V[None])[0], [counts[(token,)] for token in range(vocab)])
    accepted = 0
    for first in range(vocab):
        drawn = [counts[(first, token)] for token in range(vocab)]
        accepted += sum(drawn)
        _assert_drawn_from(sampler.probs(second_VV[first][None])[0], drawn)
    assert accepted > 100


def _assert_drawn_from(probs_V: torch.Tensor, drawn: list[int]) -> None:
    n = sum(drawn)
    for p, count in zip(probs_V.tolist(), drawn, strict=True):
        assert (p > 0 or count == 0) and abs(count - n * p) <= 4.5 * math.sqrt(n * p * (1 - p)) + 3


def _paths(blocks: int, depth: int, width: int, seed: int, *, ties: bool = False) -> PathScores:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(blocks, depth, width, width, generator=generator).double()
    if ties:
        scores = scores.round()
    scores[:, 0] = scores[:, 0, :1]
    tokens = torch.stack([torch.randperm(30, generator=generator)[:width] for _ in range(blocks * depth)])
    return PathScores(tokens.view(blocks, depth, width), scores)


def _all_prefixes(paths: PathScores) -> list[tuple[float, tuple[int, ...]]]:
    """(probability, tokens) of every prefix, by brute force."""
    steps, tokens = paths.scores_AKCC[0].softmax(-1), paths.tokens_AKC[0]
    depth, width = tokens.shape
    found = []
    for d in range(1, depth + 1):
        for walk in itertools.product(range(width), repeat=d):
            p, at = 1.0, 0
            for k, j in enumerate(walk):
                p, at = p * float(steps[k, at, j]), j
            found.append((p, tuple(int(tokens[k, j]) for k, j in enumerate(walk))))
    return found


@pytest.mark.parametrize("seed", range(4))
def test_a_tree_holds_the_likeliest_prefixes_of_the_chain_of_candidates(seed: int) -> None:
    paths = _paths(1, 3, 4, seed)
    ranked = heapq.nlargest(20, _all_prefixes(paths))
    tree = tree_of(path_marginals(paths), 20)
    texts: list[tuple[int, ...]] = [()]
    for node in tree.nodes:
        texts.append((*texts[node.parent], node.token))
    assert texts[1:] == [text for _, text in ranked]
    assert [math.exp(node.log_prob) for node in tree.nodes] == pytest.approx([p for p, _ in ranked])
    assert len(tree_of(path_marginals(paths), 1000)) == 4 + 16 + 64
    assert len(tree_of(path_marginals(paths), 0)) == 0


@pytest.mark.parametrize("ties", [False, True])
def test_counting_in_all_blocks_at_once_is_growing_each_tree(ties: bool) -> None:
    paths = _paths(24, 3, 4, 1, ties=ties)
    generator = torch.Generator().manual_seed(2)
    places = torch.randint(0, 5, (24, 3), generator=generator)  # 4: a token that is no candidate
    labels = torch.where(places < 4, paths.tokens_AKC.gather(-1, places.clamp(max=3)[..., None])[..., 0], 77)
    known = torch.rand(24, 3, generator=generator) > 0.1
    budgets = (1, 3, 10, 60)
    found = accepted_in_path_trees(paths, labels, known, budgets)
    for block in range(24):
        steps = path_marginals(paths.block(block))
        text = labels[block][known[block].cumprod(0).bool()].tolist()
        assert found[block].tolist() == [tree_of(steps, b).walk_text(text) for b in budgets]
