"""Runs an evaluation: every method on every prompt.

One prompt at a time, methods take turns on each prompt: that spreads a machine's ups and downs evenly over them, so
that their times can be compared. With a batch the prompts of one method are decoded together, which is faster and
gives the same texts and acceptance lengths; times then come from a few prompts decoded once more one at a time.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from draftline.decode.batch import BatchedTarget, RowSession, decode_together, require_rows
from draftline.decode.generation import Generation, check_context, device_clock
from draftline.decode.sampling import Sampling
from draftline.decode.steps import DraftModel, Steps, Task, run_steps
from draftline.decode.tree_generate import check_tree_memory
from draftline.decode.tree_replay import tree_replay
from draftline.drafter.model import Drafter
from draftline.errors import UserError
from draftline.evaluate.entries import LOOKUP_BLOCK, Decoding, Entry, bind, build_entries, widths_of
from draftline.evaluate.facts import drafter_facts, dtype_name, mask_token_warnings, settings, target_facts, versions
from draftline.evaluate.methods import Method, parse_methods
from draftline.evaluate.prompts import EvalPrompt, check_prompts
from draftline.evaluate.report import ALL_SETS, Comparison, EvalReport, MethodResult, TreeRounds
from draftline.evaluate.rounds import tree_rounds
from draftline.evaluate.solo import Sessions
from draftline.evaluate.stats import LEAST_PROMPTS, paired_difference
from draftline.evaluate.summary import (
    Case,
    Sample,
    by_prompt,
    compare_outputs,
    counts_by_prompt,
    machine_eps,
    summarise,
)
from draftline.limits import MAX_SEED

if TYPE_CHECKING:
    from draftline.target.load import LoadedTarget

WARM_UP_TOKENS = 4
# called with (generations done, generations in all, what is decoded now)
Progress = Callable[[int, int, str], None]
Key = tuple[str, str | None]
ONE_AT_A_TIME = Decoding()


@dataclass(slots=True)
class _Run:
    """What all generations of an evaluation share.

    Attributes:
        samples: what is reported, by entry, in the order of the prompts.
        timed: those that were decoded one at a time; the same as `samples` without a batch.
        batch_s: seconds of all of an entry's batches.
    """

    target: LoadedTarget
    sessions: Sessions
    max_new_tokens: int
    decoding: Decoding
    seed: int
    samples: dict[Key, list[Sample]] = field(default_factory=dict)
    timed: dict[Key, list[Sample]] = field(default_factory=dict)
    batch_s: dict[Key, float] = field(default_factory=dict)

    def task(self, prompt: EvalPrompt, place: int) -> Task:
        """The prompt with a sampling seed of its place."""
        rule = self.decoding.sampling
        sampling = Sampling(rule.temperature, rule.top_p, rule.top_k, rule.seed + self.seed + place, rule.proposals)
        return Task(prompt.input_ids, self.max_new_tokens, None, sampling)

    def generate(self, entry: Entry, task: Task, plain: Generation | None) -> Generation:
        """One prompt, by itself."""
        if entry.replayed:
            assert plain is not None
            assert entry.budget is not None
            assert entry.drafter is not None
            return tree_replay(
                self.target,
                entry.drafter,
                task.prompt_ids,
                plain.output_ids,
                budget=entry.budget,
                max_new_tokens=task.max_new_tokens,
            )
        session = self.sessions.open(entry.taps, widths_of(entry.method, self.target, entry.drafter))
        return run_steps(session, entry.steps(session, task, entry.drafter))


def evaluate(
    target: LoadedTarget,
    drafters: Mapping[str, Drafter | DraftModel],
    prompt_sets: Mapping[str, Sequence[EvalPrompt]],
    *,
    methods: Sequence[str] = ("plain", "lookup", "chain"),
    max_new_tokens: int = 256,
    seed: int = 0,
    decoding: Decoding = ONE_AT_A_TIME,
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
        seed: added to the sampling seed of each prompt's place.
        decoding: sampling rule, batch, compilation. Greedy outputs are compared with the plain ones.
        progress: called before each generation.

    Raises:
        UserError: an empty suite, prompts longer than the context, unknown methods, a drafter for another target, a
            target or device that cannot verify the asked trees, batches or compiled forwards.
    """
    wanted = parse_methods(methods)
    if not 0 <= seed <= MAX_SEED:
        raise UserError(f"seed {seed} is none", where="evaluate", mend=f"give 0 to {MAX_SEED}")
    _check_suite(target, prompt_sets, max_new_tokens)
    if decoding.batch > 1:
        require_rows(target)
    bound = bind(target, drafters, wanted)
    columns = _columns(target, prompt_sets, max_new_tokens, wanted, bound)
    for method in wanted:
        if method.budget is not None:
            rows = min(decoding.batch, sum(map(len, prompt_sets.values())))
            check_tree_memory(target, method.budget, columns, rows=rows)
    with Sessions(target, bound, decoding.compile, columns) as sessions:
        first = next(iter(prompt_sets.values()))[0]
        entries = build_entries(target, wanted, sessions, first.input_ids, decoding.sampling)
        run = _Run(target, sessions, max_new_tokens, decoding, seed)
        _warm_up(run, entries, first)
        _decode_all(run, entries, prompt_sets, columns, progress)
    found_rounds = _tree_rounds(run, entries, bound)
    return EvalReport(
        target=target_facts(target),
        drafters={name: drafter_facts(drafter) for name, drafter in bound.items()},
        settings=settings(entries, prompt_sets, max_new_tokens, seed, decoding),
        versions=versions(),
        results=_results(run, entries, list(prompt_sets)),
        comparisons=_comparisons(run, bound, wanted),
        tree_rounds=found_rounds,
        warnings=_warnings(run, bound) + [f"{r.promise}: a fault" for r in found_rounds if r.rounds_below_chain],
    )


def _check_suite(target: LoadedTarget, prompt_sets: Mapping[str, Sequence[EvalPrompt]], max_new_tokens: int) -> None:
    check_prompts(prompt_sets, vocab_size=target.vocab_size)
    for name, members in prompt_sets.items():
        for prompt in members:
            where = f"{name}, {prompt.prompt_id}"
            check_context(target, len(prompt.input_ids), max_new_tokens, where=where)
    if ALL_SETS in prompt_sets:
        raise UserError(f"a prompt set cannot be called {ALL_SETS!r}", where="evaluate", mend="rename it")


def _columns(
    target: LoadedTarget,
    prompt_sets: Mapping[str, Sequence[EvalPrompt]],
    max_new_tokens: int,
    methods: Sequence[Method],
    drafters: Mapping[str, DraftModel],
) -> int:
    """Tokens of the longest text with the drafts of its last round."""
    longest = max(len(p.input_ids) for members in prompt_sets.values() for p in members) + max_new_tokens
    widest = [LOOKUP_BLOCK]
    for method in methods:
        for drafter in drafters.values() if method.needs_drafter else (None,):
            widest.append(widths_of(method, target, drafter)[-1])
    return longest + max(widest)


def _warm_up(run: _Run, entries: Sequence[Entry], prompt: EvalPrompt) -> None:
    """A few tokens of every method, untimed: first calls allocate and compile. Meets bad drafters early, too."""
    task = dataclasses.replace(run.task(prompt, 0), max_new_tokens=min(WARM_UP_TOKENS, run.max_new_tokens))
    plain = None
    for entry in entries:
        generation = run.generate(entry, task, plain)
        plain = generation if entry.method.name == "plain" else plain


def _decode_all(
    run: _Run,
    entries: Sequence[Entry],
    prompt_sets: Mapping[str, Sequence[EvalPrompt]],
    columns: int,
    progress: Progress | None,
) -> None:
    places = [(name, prompt) for name, members in prompt_sets.items() for prompt in members]
    batched = run.decoding.batch > 1
    alone = places[: run.decoding.timed_prompts] if batched else places
    counter = _Counter(progress, (len(places) if batched else 0, len(alone)), len(entries))
    if batched:
        for entry in entries:
            _decode_batched(run, entry, places, columns, counter)
    _decode_alone(run, entries, alone, counter)
    if not batched:
        run.samples = run.timed
    counter.end()


class _Counter:
    """Progress over both passes."""

    def __init__(self, progress: Progress | None, passes: tuple[int, int], n_entries: int) -> None:
        self._progress = progress
        self._total, self._done = sum(passes) * n_entries, 0

    def show(self, label: str, ahead: int = 0) -> None:
        if self._progress is not None:
            self._progress(self._done + ahead, self._total, label)

    def add(self, count: int) -> None:
        self._done += count

    def end(self) -> None:
        if self._progress is not None:
            self._progress(self._total, self._total, "done")


def _decode_alone(
    run: _Run, entries: Sequence[Entry], places: Sequence[tuple[str, EvalPrompt]], counter: _Counter
) -> None:
    for place, (set_name, prompt) in enumerate(places):
        plain: Generation | None = None
        for entry in entries:
            counter.show(entry.label)
            generation = run.generate(entry, run.task(prompt, place), plain)
            plain = generation if entry.method.name == "plain" else plain
            run.timed.setdefault(entry.key, []).append(Sample(set_name, prompt, generation, plain))
            counter.add(1)


def _decode_batched(
    run: _Run, entry: Entry, places: Sequence[tuple[str, EvalPrompt]], columns: int, counter: _Counter
) -> None:
    """All prompts of one entry together; those of similar length share a prefill."""
    counter.show(entry.label)
    order = sorted(range(len(places)), key=lambda place: len(places[place][1].input_ids))
    openers = [_opener(entry, run.task(places[place][1], place)) for place in order]
    rows = min(run.decoding.batch, len(places))
    clock = device_clock(run.target.device)
    batch = BatchedTarget(run.target, entry.taps, rows, columns)
    started_s = clock()
    generations = decode_together(batch, openers, lambda done: counter.show(entry.label, done))
    run.batch_s[entry.key] = clock() - started_s
    by_place = dict(zip(order, generations, strict=True))
    plains = run.samples.get(("plain", None))
    run.samples[entry.key] = [
        Sample(name, prompt, by_place[i], _plain_of(entry, by_place[i], plains, i))
        for i, (name, prompt) in enumerate(places)
    ]
    counter.add(len(places))


def _plain_of(entry: Entry, own: Generation, plains: Sequence[Sample] | None, place: int) -> Generation | None:
    if entry.method.name == "plain":
        return own
    return None if plains is None else plains[place].generation


def _opener(entry: Entry, task: Task) -> Callable[[RowSession], Steps]:
    def open_steps(session: RowSession) -> Steps:
        return entry.steps(session, task, None if entry.drafter is None else _fork(entry))

    return open_steps


def _fork(entry: Entry) -> DraftModel:
    fork = getattr(entry.drafter, "fork", None)
    if fork is None:
        raise UserError(
            f"drafter {entry.drafter_name} serves one prompt only",
            where="evaluate",
            mend="use batch 1, or give it fork()",
        )
    forked: DraftModel = fork()
    return forked


def _results(run: _Run, entries: Sequence[Entry], set_names: Sequence[str]) -> list[MethodResult]:
    eps = machine_eps(run.target.dtype)
    results = []
    for entry in entries:
        case = Case(entry.method.name, entry.drafter_name, entry.replayed, eps)
        samples, timed = run.samples[entry.key], run.timed.get(entry.key, [])
        for name in (*set_names, ALL_SETS):
            batch_s = run.batch_s.get(entry.key) if name == ALL_SETS else None
            results.append(summarise(case, samples, name, timed=timed, batch_s=batch_s))
    return results


def _comparisons(run: _Run, drafters: Mapping[str, DraftModel], methods: Sequence[Method]) -> list[Comparison]:
    pairs = list(itertools.combinations(drafters.items(), 2))
    found = [_compared(run, method.name, a, b) for method in methods if method.needs_drafter for a, b in pairs]
    return [comparison for comparison in found if comparison is not None]


def _compared(run: _Run, method: str, a: tuple[str, DraftModel], b: tuple[str, DraftModel]) -> Comparison | None:
    left, right = (counts_by_prompt(run.samples[method, name]) for name, _ in (a, b))
    difference = paired_difference(left, right)
    if difference is None:
        return None
    sizes = a[1].block_size, b[1].block_size
    return Comparison(
        method=method,
        a=a[0],
        b=b[0],
        difference=difference.value,
        interval=(difference.low, difference.high),
        verdict=difference.verdict(a[0], b[0]),
        n_prompts=difference.n_prompts,
        prompts_needed=difference.n_needed,
        note=None if sizes[0] == sizes[1] else f"block sizes differ: {a[0]} {sizes[0]}, {b[0]} {sizes[1]}",
    )


def _tree_rounds(run: _Run, entries: Sequence[Entry], drafters: Mapping[str, DraftModel]) -> list[TreeRounds]:
    """Trees against the chain on the rounds that the chain took; greedy decoding only, as both walk a known text."""
    if not run.decoding.sampling.is_greedy:
        return []
    found: list[TreeRounds] = []
    for name, drafter in drafters.items():
        trees = {e.method.name: e.budget for e in entries if e.drafter_name == name and e.budget is not None}
        chain = run.samples.get(("chain", name))
        if trees and chain:
            texts = [(s.prompt.input_ids, s.generation) for s in chain]
            found += tree_rounds(run.target, name, drafter, texts, trees, run.max_new_tokens)
    return found


def _warnings(run: _Run, drafters: Mapping[str, DraftModel]) -> list[str]:
    """Things that do not stop an evaluation but must be known."""
    samples = run.samples.get(("plain", None), next(iter(run.samples.values()), []))
    found = mask_token_warnings([s.generation.output_ids for s in samples], drafters)
    different = by_prompt(samples)
    if repeated := len(samples) - len(different):
        found.append(
            f"{repeated} of {len(samples)} prompts repeat others token for token: intervals and comparisons count each "
            "prompt once"
        )
    if len(drafters) > 1 and sum(any(s.counts.rounds for s in same) for same in different) < 2:
        found.append(
            "the drafters are not compared: that takes two different prompts with a round each, and "
            f"{LEAST_PROMPTS} before one is called better"
        )
    greedy = run.decoding.sampling.is_greedy
    if run.target.dtype != torch.float32 and greedy:
        found.append(
            f"the target computes in {dtype_name(run.target)}: kernels of different shapes round "
            "differently, so equality is judged with a wider tie tolerance"
        )
    if run.decoding.batch > 1 and greedy:
        found += _batch_differences(run)
    return found


def _batch_differences(run: _Run) -> list[str]:
    """Timed prompts whose text in the batch was another than alone, ties apart."""
    eps, found = machine_eps(run.target.dtype), []
    for key, timed in run.timed.items():
        label = " ".join(part for part in (key[1], key[0]) if part)
        for alone, together in zip(timed, run.samples[key], strict=False):
            if alone.generation.output_ids == together.generation.output_ids:
                continue
            plain = alone.plain
            differs = plain is None or plain.leaders is None
            if not differs:
                against = compare_outputs(dataclasses.replace(together, plain=plain), eps)
                differs = against is not None and not against[1]
            if differs:
                found.append(f"{label}: prompt {alone.prompt.prompt_id} has another text in the batch than alone")
    return found
