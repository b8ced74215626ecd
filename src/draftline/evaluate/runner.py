"""Runs an evaluation: every method on every prompt, one prompt at a time, methods in turn on each prompt.

Taking turns spreads a machine's ups and downs evenly over the methods, so that their times can be compared.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import transformers

from draftline import __version__
from draftline.decode.budget import AdaptiveBudget, BudgetRule, FixedBudget
from draftline.decode.chain import BoundDrafter, DraftModel, chain_generate
from draftline.decode.cost import measure_cost_curve
from draftline.decode.generation import Generation, check_context
from draftline.decode.lookup import lookup_generate
from draftline.decode.plain import plain_generate
from draftline.decode.sampling import GREEDY, Sampling
from draftline.decode.tree_generate import check_tree_memory, tree_generate
from draftline.decode.tree_replay import tree_replay
from draftline.drafter.model import Drafter
from draftline.errors import UserError
from draftline.evaluate.methods import Method, parse_methods
from draftline.evaluate.prompts import EvalPrompt, check_prompts
from draftline.evaluate.report import ALL_SETS, Comparison, EvalReport, MethodResult
from draftline.evaluate.stats import paired_difference
from draftline.evaluate.summary import Case, Sample, machine_eps, summarise

if TYPE_CHECKING:
    from draftline.target.load import LoadedTarget

LOOKUP_BLOCK = 16
WARM_UP_TOKENS = 4
# called with (generations done, generations in all, what is decoded now)
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class _Entry:
    """One line of the evaluation: a method, with a drafter where it needs one."""

    method: Method
    drafter_name: str | None
    replayed: bool
    drafter: DraftModel | None
    budget: BudgetRule | None


@dataclass(slots=True)
class _Run:
    """What all generations of an evaluation share."""

    target: LoadedTarget
    max_new_tokens: int
    sampling: Sampling
    samples: dict[tuple[str, str | None], list[Sample]] = field(default_factory=dict)

    def generate(self, entry: _Entry, prompt_ids: Sequence[int], plain: Generation | None) -> Generation:
        options: dict[str, Any] = {"max_new_tokens": self.max_new_tokens}
        if entry.replayed:
            assert plain is not None
            assert entry.budget is not None
            assert entry.drafter is not None
            return tree_replay(self.target, entry.drafter, prompt_ids, plain.output_ids, budget=entry.budget, **options)
        options["sampling"] = self.sampling
        if entry.method.name == "plain":
            return plain_generate(self.target, prompt_ids, record_top2=self.sampling.is_greedy, **options)
        if entry.method.name == "lookup":
            return lookup_generate(self.target, prompt_ids, block_size=LOOKUP_BLOCK, **options)
        assert entry.drafter is not None
        if entry.budget is None:
            return chain_generate(self.target, entry.drafter, prompt_ids, **options)
        return tree_generate(self.target, entry.drafter, prompt_ids, budget=entry.budget, **options)


def evaluate(
    target: LoadedTarget,
    drafters: Mapping[str, Drafter | DraftModel],
    prompt_sets: Mapping[str, Sequence[EvalPrompt]],
    *,
    methods: Sequence[str] = ("plain", "lookup", "chain"),
    max_new_tokens: int = 256,
    seed: int = 0,
    sampling: Sampling = GREEDY,
    progress: Progress | None = None,
) -> EvalReport:
    """Decodes every prompt with every method and sums up.

    Args:
        target: the frozen model.
        drafters: by name; on the target's device. More than one are compared pairwise.
        prompt_sets: by name.
        methods: `plain`, `lookup`, `chain`, `tree@N`, `adaptive`. Those that need a drafter run once a drafter. Without
            `plain` there is neither a speed-up nor a check of the output.
        max_new_tokens: most new tokens a prompt.
        seed: of the bootstrap, and added to the sampling seed of each prompt's place.
        sampling: the request's rule; greedy outputs are compared with the plain ones.
        progress: called before each generation.

    Raises:
        UserError: an empty suite, prompts longer than the context, unknown methods, a drafter for another target, a
            target or device that cannot verify the asked trees.
    """
    wanted = parse_methods(methods)
    check_prompts(prompt_sets, vocab_size=target.vocab_size)
    for members in prompt_sets.values():
        for prompt in members:
            check_context(target, len(prompt.input_ids), max_new_tokens)
    if ALL_SETS in prompt_sets:
        raise UserError(f"a prompt set cannot be called {ALL_SETS!r}", where="evaluate", mend="rename it")
    bound = _bind(target, drafters, wanted)
    longest = max(len(p.input_ids) for members in prompt_sets.values() for p in members) + max_new_tokens
    for method in wanted:
        if method.budget is not None:
            check_tree_memory(target, method.budget, longest)
    entries = _entries(target, wanted, bound, next(iter(prompt_sets.values()))[0].input_ids, sampling)
    run = _Run(target, max_new_tokens, sampling)
    _warm_up(run, entries, prompt_sets)
    _decode_all(run, entries, prompt_sets, seed, progress)
    results = _results(run, entries, list(prompt_sets), seed)
    return EvalReport(
        target=_target_facts(target),
        drafters={name: _drafter_facts(drafter) for name, drafter in bound.items()},
        settings=_settings(entries, prompt_sets, max_new_tokens, seed, sampling),
        versions=_versions(),
        results=results,
        comparisons=_comparisons(run, list(bound), wanted, seed),
        warnings=_warnings(run, bound),
    )


def _bind(
    target: LoadedTarget, drafters: Mapping[str, Drafter | DraftModel], methods: Sequence[Method]
) -> dict[str, DraftModel]:
    needing = [m.name for m in methods if m.needs_drafter]
    if needing and not drafters:
        raise UserError(f"{', '.join(needing)} needs a drafter", where="evaluate", mend="give one, or drop the method")
    return {
        name: BoundDrafter(drafter, target) if isinstance(drafter, Drafter) else drafter
        for name, drafter in drafters.items()
    }


def _entries(
    target: LoadedTarget,
    methods: Sequence[Method],
    drafters: Mapping[str, DraftModel],
    typical_prompt: Sequence[int],
    sampling: Sampling,
) -> list[_Entry]:
    """Plain first, for the others are measured against it."""
    replayed = target.has_recurrent_layers
    trees = [m.name for m in methods if m.is_tree]
    if replayed and trees and not (sampling.is_greedy and any(m.name == "plain" for m in methods)):
        raise UserError(
            f"{', '.join(trees)} on a target with recurrent layers is counted along its plain greedy output",
            where="evaluate",
            mend="add the method plain and decode greedily",
        )
    entries = [_Entry(m, None, False, None, None) for m in methods if not m.needs_drafter]
    entries.sort(key=lambda entry: entry.method.name != "plain")
    for name, drafter in drafters.items():
        for method in methods:
            if not method.needs_drafter:
                continue
            budget: BudgetRule | None = FixedBudget(method.budget) if method.budget else None
            if method.name == "adaptive":
                if replayed:
                    raise UserError(
                        "adaptive needs the time of a verified tree, which a recurrent target cannot give",
                        where="evaluate",
                        mend="use tree@N",
                    )
                budget = AdaptiveBudget(measure_cost_curve(target, drafter, typical_prompt))
            entries.append(_Entry(method, name, replayed and method.is_tree, drafter, budget))
    return entries


def _warm_up(run: _Run, entries: Sequence[_Entry], prompt_sets: Mapping[str, Sequence[EvalPrompt]]) -> None:
    """A few tokens of every method, untimed: first calls allocate and compile. Meets bad drafters early, too."""
    prompt = next(iter(prompt_sets.values()))[0]
    short = _Run(run.target, min(WARM_UP_TOKENS, run.max_new_tokens), run.sampling)
    plain = None
    for entry in entries:
        generation = short.generate(entry, prompt.input_ids, plain)
        plain = generation if entry.method.name == "plain" else plain


def _decode_all(
    run: _Run,
    entries: Sequence[_Entry],
    prompt_sets: Mapping[str, Sequence[EvalPrompt]],
    seed: int,
    progress: Progress | None,
) -> None:
    places = [(name, prompt) for name, members in prompt_sets.items() for prompt in members]
    total, done = len(places) * len(entries), 0
    rule = run.sampling
    for place, (set_name, prompt) in enumerate(places):
        run.sampling = Sampling(rule.temperature, rule.top_p, rule.top_k, rule.seed + seed + place, rule.proposals)
        plain: Generation | None = None
        for entry in entries:
            if progress is not None:
                progress(done, total, _label(entry))
            generation = run.generate(entry, prompt.input_ids, plain)
            plain = generation if entry.method.name == "plain" else plain
            key = (entry.method.name, entry.drafter_name)
            run.samples.setdefault(key, []).append(Sample(set_name, prompt, generation, plain))
            done += 1
    run.sampling = rule
    if progress is not None:
        progress(total, total, "done")


def _results(run: _Run, entries: Sequence[_Entry], set_names: Sequence[str], seed: int) -> list[MethodResult]:
    eps = machine_eps(run.target.dtype)
    results = []
    for entry in entries:
        samples = run.samples[entry.method.name, entry.drafter_name]
        case = Case(entry.method.name, entry.drafter_name, entry.replayed, eps, seed)
        results += [summarise(case, samples, name) for name in (*set_names, ALL_SETS)]
    return results


def _comparisons(run: _Run, names: Sequence[str], methods: Sequence[Method], seed: int) -> list[Comparison]:
    found = []
    for method in (m for m in methods if m.needs_drafter):
        for first in range(len(names)):
            for second in range(first + 1, len(names)):
                a, b = names[first], names[second]
                left, right = ([s.counts for s in run.samples[method.name, name]] for name in (a, b))
                difference = paired_difference(left, right, seed)
                if difference is not None:
                    found.append(
                        Comparison(
                            method=method.name,
                            a=a,
                            b=b,
                            difference=difference.value,
                            interval=(difference.low, difference.high),
                            verdict=difference.verdict(a, b),
                            n_prompts=difference.n_prompts,
                            prompts_needed=difference.n_needed,
                        )
                    )
    return found


def _warnings(run: _Run, drafters: Mapping[str, DraftModel]) -> list[str]:
    """Things that do not stop an evaluation but must be known."""
    found = []
    outputs = [s.generation.output_ids for s in run.samples.get(("plain", None), next(iter(run.samples.values()), []))]
    for name, drafter in drafters.items():
        mask = getattr(drafter, "mask_token_id", None)
        count = sum(ids.count(mask) for ids in outputs) if mask is not None else 0
        if count:
            found.append(
                f"drafter {name}: the target wrote its mask token {mask} {count} times; decoding stays exact, but the "
                "drafter cannot tell a mask from that token: choose one that text never uses"
            )
    if run.target.dtype != torch.float32 and run.sampling.is_greedy:
        found.append(
            f"the target computes in {str(run.target.dtype).removeprefix('torch.')}: kernels of different shapes round "
            "differently, so equality is judged with a wider tie tolerance"
        )
    return found


def _label(entry: _Entry) -> str:
    return entry.method.name if entry.drafter_name is None else f"{entry.drafter_name} {entry.method.name}"


def _target_facts(target: LoadedTarget) -> dict[str, Any]:
    return {
        "model": target.config.model,
        "fingerprint": target.fingerprint,
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": str(target.device),
        "attention": target.attention,
        "layers": target.num_layers,
        "recurrent": target.has_recurrent_layers,
    }


def _drafter_facts(drafter: DraftModel) -> dict[str, Any]:
    facts: dict[str, Any] = {"block_size": drafter.block_size, "taps": list(drafter.taps)}
    if isinstance(drafter, BoundDrafter):
        facts["spec"] = drafter.spec.model_dump(mode="json")
    return facts


def _settings(
    entries: Sequence[_Entry],
    prompt_sets: Mapping[str, Sequence[EvalPrompt]],
    max_new_tokens: int,
    seed: int,
    sampling: Sampling,
) -> dict[str, Any]:
    curves = {
        _label(e): {"draft_s": e.budget.curve.draft_s, "points": e.budget.curve.points}
        for e in entries
        if isinstance(e.budget, AdaptiveBudget)
    }
    return {
        "max_new_tokens": max_new_tokens,
        "seed": seed,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "proposals": sampling.proposals,
        "batch": 1,
        "lookup": {"block_size": LOOKUP_BLOCK, "max_ngram": 3},
        "prompts": {name: len(members) for name, members in prompt_sets.items()},
        "cost_curves": curves,
    }


def _versions() -> dict[str, str]:
    return {
        "draftline": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "threads": str(torch.get_num_threads()),
    }
