"""From single generations to results: pooling, groups, equality with plain decoding. No model, no clock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from draftline.decode.generation import Generation
from draftline.evaluate.prompts import EvalPrompt
from draftline.evaluate.report import ALL_SETS, Divergence, Equality, GroupResult, MethodResult, PromptResult
from draftline.evaluate.stats import PromptCounts, first_length, interval, length_range, pooled, speedup_interval

NEAR_TIE = 1e-4


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt's generation, and the plain one it is measured against (None if not decoded)."""

    prompt_set: str
    prompt: EvalPrompt
    generation: Generation
    plain: Generation | None

    @property
    def counts(self) -> PromptCounts:
        """Tokens committed, and rounds."""
        return PromptCounts(sum(self.generation.acceptance_lengths), len(self.generation.acceptance_lengths))


def by_prompt(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Samples of the same prompt together, token for token the same, in the order of their first ones.

    Intervals and comparisons count prompts. One that is asked again, whatever its id, set or seed, is no second prompt.
    """
    found: dict[tuple[int, ...], list[Sample]] = {}
    for sample in samples:
        found.setdefault(sample.prompt.input_ids, []).append(sample)
    return list(found.values())


def counts_by_prompt(samples: Sequence[Sample]) -> list[PromptCounts]:
    """Tokens and rounds of each different prompt."""
    return [sum((s.counts for s in same), PromptCounts(0, 0)) for same in by_prompt(samples)]


@dataclass(frozen=True, slots=True)
class Case:
    """What a result is about. `near_tie_eps` is the target dtype's machine epsilon."""

    method: str
    drafter: str | None
    replayed: bool
    near_tie_eps: float


def summarise(
    case: Case,
    samples: Sequence[Sample],
    prompt_set: str = ALL_SETS,
    *,
    timed: Sequence[Sample] | None = None,
    batch_s: float | None = None,
) -> MethodResult:
    """One result over the samples of `prompt_set`, or over all of them.

    Args:
        timed: samples decoded one at a time, for the times; None: all of them were.
        batch_s: seconds of all batches, where there were any.
    """
    chosen = [s for s in samples if prompt_set in (ALL_SETS, s.prompt_set)]
    timed = [s for s in (samples if timed is None else timed) if prompt_set in (ALL_SETS, s.prompt_set)]
    runs, counts = [s.generation for s in chosen], [s.counts for s in chosen]
    forwards, committed = sum(g.target_forwards for g in runs), sum(c.tokens for c in counts)
    return MethodResult(
        prompt_set=prompt_set,
        method=case.method,
        drafter=case.drafter,
        replayed=case.replayed,
        n_prompts=len(chosen),
        output_tokens=sum(len(g.output_ids) for g in runs),
        acceptance_length=pooled(counts),
        interval=interval(counts_by_prompt(chosen)),
        acceptance_length_unclipped=pooled([_unclipped(g) for g in runs]),
        target_forwards=forwards,
        replay_forwards=sum(g.replay_forwards for g in runs),
        forwards_per_token=forwards / committed if committed else None,
        drafted_by_position=_sum_columns([g.drafted_by_position for g in runs]),
        accepted_by_position=_sum_columns([g.accepted_by_position for g in runs]),
        full_block_share=_full_block_share(runs),
        mean_tree_nodes=_mean([n for g in runs for n in g.tree_nodes]),
        timed_prompts=0 if case.replayed else len(timed),
        prefill_s=sum(s.generation.prefill_s for s in timed),
        decode_s=sum(s.generation.decode_s for s in timed),
        tokens_per_s=None if case.replayed else _rate(*_tokens_and_s([s.generation for s in timed])),
        speedup=None if case.replayed else _speedup(timed),
        speedup_interval=None if case.replayed else _speedup_interval(timed),
        batch_tokens_per_s=_rate(sum(len(g.output_ids) for g in runs), batch_s) if batch_s else None,
        equality=None if case.replayed else _equality(chosen, case.near_tie_eps),
        groups=_groups(chosen),
        prompts=[_prompt_result(s) for s in chosen],
    )


def compare_outputs(sample: Sample, eps: float) -> tuple[Divergence, bool] | None:
    """First difference from the plain output and whether it is a near-tie; None where both are equal.

    A near-tie is a token whose own logit, in plain decoding, is within the tolerance of the best one there.
    """
    plain, output = sample.plain, sample.generation.output_ids
    assert plain is not None
    assert plain.leaders is not None
    if output == plain.output_ids:
        return None
    position = next(
        (i for i, (one, other) in enumerate(zip(output, plain.output_ids, strict=False)) if one != other),
        min(len(output), len(plain.output_ids)),
    )
    # Where one text merely ends earlier, no tie excuses it.
    within = position < min(len(output), len(plain.output_ids))
    leaders = plain.leaders[position if within else position - 1]
    best, gap = leaders.logits[0], leaders.gap(output[position]) if within else None
    tolerance = max(NEAR_TIE, 2 * eps * abs(best)) if eps > 1e-6 else NEAR_TIE
    divergence = Divergence(
        prompt_id=sample.prompt.prompt_id,
        position=position,
        plain_token=plain.output_ids[position] if position < len(plain.output_ids) else None,
        token=output[position] if position < len(output) else None,
        gap=gap,
        tolerance=tolerance,
    )
    return divergence, gap is not None and gap <= tolerance


def machine_eps(dtype: torch.dtype) -> float:
    """Spacing of the dtype at 1."""
    return float(torch.finfo(dtype).eps)


def _equality(samples: Sequence[Sample], eps: float) -> Equality | None:
    if any(s.plain is None or s.plain.leaders is None for s in samples):
        return None
    found = [compare_outputs(s, eps) for s in samples]
    return Equality(
        equal=sum(f is None for f in found),
        near_ties=[f[0] for f in found if f is not None and f[1]],
        divergences=[f[0] for f in found if f is not None and not f[1]],
    )


def _unclipped(generation: Generation) -> PromptCounts:
    lengths = [n for n, cut in zip(generation.acceptance_lengths, generation.clipped, strict=True) if not cut]
    return PromptCounts(sum(lengths), len(lengths))


def _full_block_share(runs: Sequence[Generation]) -> float | None:
    block_size = max(len(g.drafted_by_position) for g in runs) + 1 if runs else 1
    lengths = [
        n for g in runs for n, cut in zip(g.acceptance_lengths, g.clipped, strict=True) if not cut and block_size > 1
    ]
    return sum(n == block_size for n in lengths) / len(lengths) if lengths else None


def _tokens_and_s(runs: Sequence[Generation]) -> tuple[int, float]:
    """Tokens committed after the prefill, and the seconds that took."""
    return sum(sum(g.acceptance_lengths) for g in runs), sum(g.decode_s for g in runs)


def _speedup(samples: Sequence[Sample]) -> float | None:
    """Plain decoding's seconds per committed token over this method's, on the same prompts."""
    plains = [s.plain for s in samples if s.plain is not None]
    own, plain = _rate(*_tokens_and_s([s.generation for s in samples])), _rate(*_tokens_and_s(plains))
    return own / plain if own is not None and plain is not None and len(plains) == len(samples) else None


def _speedup_interval(samples: Sequence[Sample]) -> tuple[float, float] | None:
    prompts = by_prompt([s for s in samples if s.plain is not None])
    own = [_tokens_and_s([s.generation for s in same]) for same in prompts]
    plain = [_tokens_and_s([s.plain for s in same if s.plain is not None]) for same in prompts]
    return speedup_interval(own, plain)


def _groups(samples: Sequence[Sample]) -> list[GroupResult]:
    kinds: tuple[tuple[Literal["category", "language", "prompt length"], list[str | None]], ...] = (
        ("category", [s.prompt.category for s in samples]),
        ("language", [s.prompt.language for s in samples]),
        ("prompt length", [length_range(len(s.prompt.input_ids)) for s in samples]),
    )
    groups = []
    for kind, names in kinds:
        members: dict[str, list[Sample]] = defaultdict(list)
        for name, sample in zip(names, samples, strict=True):
            if name is not None:
                members[name].append(sample)
        for name in sorted(members, key=lambda n: (first_length(n), n) if kind == "prompt length" else (0, n)):
            own = members[name]
            groups.append(
                GroupResult(
                    kind=kind,
                    name=name,
                    n_prompts=len(own),
                    acceptance_length=pooled([s.counts for s in own]),
                    interval=interval(counts_by_prompt(own)),
                )
            )
    return groups


def _prompt_result(sample: Sample) -> PromptResult:
    generation, counts = sample.generation, sample.counts
    return PromptResult(
        prompt_id=sample.prompt.prompt_id,
        prompt_set=sample.prompt_set,
        prompt_tokens=generation.prompt_tokens,
        output_tokens=len(generation.output_ids),
        tokens=counts.tokens,
        rounds=counts.rounds,
        prefill_s=generation.prefill_s,
        decode_s=generation.decode_s,
    )


def _sum_columns(rows: Sequence[Sequence[int]]) -> list[int]:
    width = max((len(row) for row in rows), default=0)
    return [sum(row[i] for row in rows if i < len(row)) for i in range(width)]


def _mean(values: Sequence[int]) -> float | None:
    return sum(values) / len(values) if values else None


def _rate(tokens: int, seconds: float) -> float | None:
    return tokens / seconds if seconds > 0 and tokens else None
