"""At temperature above 0 the output distribution is the target's: chi-square against the enumerated one, fixed seeds.

Each test rejects below p = 0.001 (alpha). Under fixed seeds the outcome does not vary; a biased rule fails by far, as
the control at the end shows.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from decoding_kit import random_prompt, tiny_target
from draftline.decode.budget import AdaptiveBudget, CostCurve, FixedBudget
from draftline.decode.chain import chain_generate
from draftline.decode.linear import RoundContext
from draftline.decode.lookup import lookup_generate
from draftline.decode.plain import plain_generate
from draftline.decode.sampling import Proposal, Sampler, Sampling
from draftline.decode.tree_generate import tree_generate
from draftline.errors import UserError
from draftline.limits import MAX_SEED, MAX_TEMPERATURE, MIN_TEMPERATURE
from draftline.target.load import LoadedTarget

ALPHA = 0.001
VOCAB, TOKENS, RUNS = 5, 3, 350
PROMPT = random_prompt(0, 4, VOCAB)


@dataclass
class WrongDrafter:
    """Fixed random marginals, unlike the target's: what it drafts must not show in the output."""

    block_size: int = 4
    taps: tuple[int, ...] = (0,)

    def start(self) -> None:
        pass

    def block_logits(self, context: RoundContext) -> torch.Tensor:
        generator = torch.Generator().manual_seed(context.start)
        return torch.randn(self.block_size - 1, VOCAB, generator=generator)[: context.slots - 1] * 1.5


@pytest.fixture(scope="module")
def target() -> LoadedTarget:
    return tiny_target(4, vocab_size=VOCAB, num_hidden_layers=1, sharpness=0.6)


def _enumerated(target: LoadedTarget, sampling: Sampling) -> dict[tuple[int, ...], float]:
    """Exact probability of every text of TOKENS tokens."""
    sampler = Sampler(sampling, "cpu")
    prefixes = list(itertools.product(range(VOCAB), repeat=TOKENS - 1))
    batch = torch.tensor([[*PROMPT, *prefix] for prefix in prefixes])
    with torch.no_grad():
        logits = target.model(batch).logits[:, len(PROMPT) - 1 :]
    exact = {}
    for row, prefix in enumerate(prefixes):
        probs = sampler.probs(logits[row])
        before = math.prod(float(probs[i, token]) for i, token in enumerate(prefix))
        for last in range(VOCAB):
            exact[*prefix, last] = before * float(probs[TOKENS - 1, last])
    return exact


def _p_value(counts: Counter[Any], exact: dict[Any, float]) -> float:
    """Chi-square with cells of expectation below 5 put together; upper tail by the Wilson-Hilferty normal form."""
    n = sum(counts.values())
    assert all(exact.get(cell, 0.0) > 0 for cell in counts), "a text of probability 0 was written"
    large = {cell for cell, p in exact.items() if n * p >= 5}
    cells = [(counts[cell], n * exact[cell]) for cell in large]
    rest = (sum(counts[c] for c in counts if c not in large), n * sum(p for c, p in exact.items() if c not in large))
    if rest[1] >= 5:
        cells.append(rest)
    statistic, degrees = sum((seen - mean) ** 2 / mean for seen, mean in cells), len(cells) - 1
    z = ((statistic / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / math.sqrt(2 / (9 * degrees))
    return 0.5 * math.erfc(z / math.sqrt(2))


Generate = Callable[[Sampling], Sequence[int]]


def _check(generate: Generate, target: LoadedTarget, rule: Sampling, runs: int = RUNS) -> None:
    exact = _enumerated(target, rule)
    texts = [
        tuple(generate(Sampling(rule.temperature, rule.top_p, rule.top_k, seed, rule.proposals))[:TOKENS])
        for seed in range(runs)
    ]
    assert _p_value(Counter(texts), exact) > ALPHA
    for position in range(TOKENS):
        marginal: Counter[int] = Counter()
        for text, p in exact.items():
            marginal[text[position]] += p  # type: ignore[assignment]
        seen = Counter(text[position] for text in texts)
        assert _p_value(seen, dict(marginal)) > ALPHA, position


PLAIN, TOP_P, TOP_K = Sampling(1.0), Sampling(0.8, 0.8), Sampling(1.3, 1.0, 3)
OPTIONS: dict[str, Any] = {"max_new_tokens": TOKENS, "stop_token_ids": ()}
CASES = [
    *((method, PLAIN) for method in ("chain argmax", "chain sampled", "tree", "adaptive")),
    *((method, rule) for method in ("chain sampled", "tree") for rule in (TOP_P, TOP_K)),
]


@pytest.mark.parametrize(("method", "rule"), CASES)
def test_the_output_distribution_is_the_targets(target: LoadedTarget, method: str, rule: Sampling) -> None:
    drafter = WrongDrafter()
    curve = CostCurve(0.1, ((0, 1.0), (30, 1.5)))

    def generate(sampling: Sampling) -> Sequence[int]:
        if method.startswith("chain"):
            return chain_generate(target, drafter, PROMPT, sampling=sampling, **OPTIONS).output_ids
        budget = FixedBudget(12) if method == "tree" else AdaptiveBudget(curve)
        return tree_generate(target, drafter, PROMPT, budget=budget, sampling=sampling, **OPTIONS).output_ids

    proposals = "sampled" if method == "chain sampled" else "argmax"
    _check(generate, target, Sampling(rule.temperature, rule.top_p, rule.top_k, 0, proposals))


def test_plain_and_lookup_sample_the_targets_distribution_too(target: LoadedTarget) -> None:
    _check(lambda s: plain_generate(target, PROMPT, sampling=s, **OPTIONS).output_ids, target, Sampling(1.0), 250)
    _check(lambda s: lookup_generate(target, PROMPT, sampling=s, **OPTIONS).output_ids, target, Sampling(1.0), 250)


def test_a_biased_rule_is_caught_by_this_test(target: LoadedTarget) -> None:
    """Control: accepting each draft with a fixed chance is far below alpha."""

    def biased(sampling: Sampling) -> Sequence[int]:
        own = list(plain_generate(target, PROMPT, sampling=sampling, **OPTIONS).output_ids)
        draft = int(WrongDrafter().block_logits(RoundContext([*PROMPT, own[0]], None, 4))[0].argmax())
        return [own[0], draft if sampling.seed % 4 == 0 else own[1], own[2]]

    with pytest.raises(AssertionError):
        _check(biased, target, Sampling(1.0), 250)


def test_rejection_sampling_is_exact_for_a_single_slot() -> None:
    """Many draws of one slot: accepted or replaced, the token follows p, and is accepted with chance 1 - TV(p, q)."""
    p_logits = torch.tensor([[1.0, 0.2, -1.0, 0.5], [0.0, 0.0, 0.0, 0.0]])
    q_logits = torch.tensor([[-1.0, 1.5, 0.3, 0.1]])
    sampler = Sampler(Sampling(1.0, seed=3, proposals="sampled"), "cpu")
    p, q = p_logits[0].softmax(-1), q_logits[0].softmax(-1)
    counts: Counter[int] = Counter()
    accepted = 0
    for _ in range(6000):
        tokens = sampler.verify(sampler.propose(q_logits), p_logits)
        counts[tokens[0]] += 1
        accepted += len(tokens) == 2
    assert _p_value(counts, {i: float(x) for i, x in enumerate(p)}) > ALPHA
    expected = 1 - 0.5 * float((p - q).abs().sum())
    assert abs(accepted / 6000 - expected) < 4 * math.sqrt(expected * (1 - expected) / 6000)


def test_equal_distributions_accept_every_draft() -> None:
    logits = torch.tensor([[0.3, 1.0, -2.0], [0.3, 1.0, -2.0]])
    sampler = Sampler(Sampling(0.7, seed=1, proposals="sampled"), "cpu")
    assert all(len(sampler.verify(sampler.propose(logits[:1]), logits)) == 2 for _ in range(200))


def test_filters_keep_what_they_say() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    full = logits[0].softmax(-1)
    assert torch.allclose(Sampler(Sampling(1.0), "cpu").probs(logits)[0], full)
    two = Sampler(Sampling(1.0, 1.0, 2), "cpu").probs(logits)[0]
    assert torch.allclose(two, torch.cat([full[:2] / full[:2].sum(), torch.zeros(2)]))
    # The smallest set that reaches top_p: the first token has 0.64, so 0.65 needs two.
    assert (Sampler(Sampling(1.0, 0.65), "cpu").probs(logits)[0] > 0).tolist() == [True, True, False, False]
    assert (Sampler(Sampling(1.0, 0.6), "cpu").probs(logits)[0] > 0).tolist() == [True, False, False, False]
    tied = Sampler(Sampling(1.0, 0.5), "cpu").probs(torch.zeros(1, 4))[0]
    assert tied.tolist() == [0.5, 0.5, 0.0, 0.0]
    assert torch.allclose(Sampler(Sampling(0.5), "cpu").probs(logits)[0], (logits[0] * 2).softmax(-1))


def test_e28_greedy_ignores_the_seed_and_temperature_does_not() -> None:
    sampler = Sampler(Sampling(), "cpu")
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 0.0]])
    assert sampler.pick(logits).tolist() == [1, 0]
    assert sampler.verify(Proposal(torch.tensor([1])), logits) == [1, 0]
    assert sampler.verify(Proposal(torch.tensor([2])), logits) == [1]
    hot = {Sampler(Sampling(5.0, seed=s), "cpu").pick(logits)[0].item() for s in range(30)}
    assert hot == {0, 1, 2}


def test_the_same_seed_gives_the_same_text(target: LoadedTarget) -> None:
    drafter, options = WrongDrafter(), {"max_new_tokens": 20, "stop_token_ids": ()}
    runs = [
        chain_generate(target, drafter, PROMPT, sampling=Sampling(1.0, seed=s), **options).output_ids for s in (5, 5, 6)
    ]
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize(
    "bad",
    [
        *({"temperature": t} for t in (-1.0, 1e-40, 1e-5, 1e5, math.inf, math.nan)),
        *({"top_p": p} for p in (0.0, 1.1, math.nan)),
        {"top_k": -1},
        {"seed": -1},
        {"seed": 2**64},
    ],
)
def test_impossible_rules_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"cannot be sampled from|seed .* is none"):
        Sampling(**bad)


@pytest.mark.parametrize("temperature", [MIN_TEMPERATURE, MAX_TEMPERATURE])
def test_every_temperature_that_is_taken_gives_probabilities(temperature: float) -> None:
    probs = Sampler(Sampling(temperature, 0.9, seed=MAX_SEED), "cpu").probs(torch.tensor([[300.0, -300.0, 299.0]]))
    assert torch.isfinite(probs).all()
    assert float(probs.sum()) == pytest.approx(1.0)
    assert Sampler(Sampling(temperature, 1e-320), "cpu").probs(torch.tensor([[0.0, 1.0]])).tolist() == [[0.0, 1.0]]
