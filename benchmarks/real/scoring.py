"""Acceptance of a drafter: walked along the target's kept answers, and decoded for real from its export."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from draftline.config.drafter_spec import DrafterSpec
from draftline.config.schema import ObjectiveConfig, ValidationConfig
from draftline.data.shards import Sample
from draftline.decode.batch import BatchedTarget, RowSession, decode_together
from draftline.decode.budget import FixedBudget
from draftline.decode.chain import BoundDrafter, ChainSource
from draftline.decode.generation import Generation
from draftline.decode.linear import linear_steps
from draftline.decode.lookup import LookupSource, NgramIndex
from draftline.decode.steps import Steps, Task
from draftline.decode.tree_generate import tree_steps
from draftline.decode.walk import WalkSums, answers_of, walk_each
from draftline.drafter.compile_cache import process_cache
from draftline.drafter.metrics import StepStats
from draftline.drafter.model import Drafter
from draftline.drafter.step import DrafterStep
from draftline.evaluate.stats import PromptCounts, interval, pooled
from draftline.export.zlab import export_zlab, load_export
from draftline.pipeline.validation import tree_metric
from draftline.pipeline.workers import borrow
from draftline.records import HiddenStateRow
from draftline.target.load import LoadedTarget
from settings import Settings
from training import Weights, compute_dtype, make_module, synchronize

Opener = Callable[[RowSession], Steps]
LOOKUP_BLOCK, LOOKUP_NGRAM = 16, 3
# Rows of trees verified together times their nodes: bounds the memory of the logits.
_NODES_AT_ONCE = 16_384
Figures = dict[str, Any]


def counted(counts: Sequence[PromptCounts]) -> Figures:
    """Acceptance length with its interval by prompt, and the counts of each prompt."""
    return {
        "acceptance_length": pooled(counts),
        "interval": interval(counts),
        "prompts": len(counts),
        "tokens": [c.tokens for c in counts],
        "rounds": [c.rounds for c in counts],
    }


@dataclass(frozen=True)
class Kept:
    """A set of prompts that was kept from training.

    Attributes:
        samples: prompts with the target's answers.
        rows: the same, captured.
    """

    samples: list[Sample]
    rows: list[HiddenStateRow]


class Scorer:
    """Scores drafters on kept sets.

    Args:
        capture: states of samples, as rows.
        folder: for exports.
    """

    def __init__(
        self,
        target: LoadedTarget,
        kept: dict[str, Kept],
        capture: Callable[[list[Sample]], list[HiddenStateRow]],
        settings: Settings,
        folder: Path,
    ) -> None:
        self._target, self._kept, self._capture = target, kept, capture
        self._settings, self._folder = settings, folder

    def walk(
        self,
        spec: DrafterSpec,
        weights: Weights,
        sets: Sequence[str],
        budgets: tuple[int, ...] = (),
        limit: int | None = None,
    ) -> Figures:
        """Rounds that greedy decoding would take along the first kept answers: `{set: {method: figures}}`.

        An answer that the length limit cut is walked as if its text went on unknown: blocks are not shortened there.
        """
        step = self._step(spec, weights, budgets)
        names = ("chain", *(f"tree@{n}" for n in budgets))
        found: Figures = {}
        for name in sets:
            sums = self._walk_set(step, self._kept[name], limit)
            columns = [[PromptCounts(s.tokens[i], s.rounds[i]) for s in sums] for i in range(len(names))]
            found[name] = {method: counted(column) for method, column in zip(names, columns, strict=True)}
        return found

    def _walk_set(self, step: DrafterStep, kept: Kept, limit: int | None) -> list[WalkSums]:
        """Sums of the first samples, in their order (rows hold them packed in another one)."""
        wanted = dict.fromkeys(sample.sample_id for sample in kept.samples[:limit])
        by_id: dict[str, WalkSums] = {}
        for row in kept.rows:
            starts = dict(zip(accumulate(row.lengths, initial=0), row.sample_ids, strict=False))
            found = answers_of(row, self._target.stop_token_ids)
            answers = [replace(a, limited=False) for a in found if starts[a.first] in wanted]
            for answer, sums in zip(answers, walk_each(step, row, answers), strict=True):
                by_id[starts[answer.first]] = sums
        return [by_id[name] for name in wanted]

    def estimate(self, spec: DrafterSpec, weights: Weights, name: str, budgets: tuple[int, ...]) -> Figures:
        """What validation reports: the mean over blocks at fixed anchors, with calibration and recall."""
        step = self._step(spec, weights, budgets)
        none = StepStats.zeros(spec.block_size, self._target.device, budgets)
        summary = sum((step.evaluate(row) for row in self._kept[name].rows), none).summary()
        names = ("acceptance_length", "tree_acceptance_length", "recall", "calibration_error", "counts")
        return {key: summary[key] for key in names}

    def _step(self, spec: DrafterSpec, weights: Weights, budgets: tuple[int, ...]) -> DrafterStep:
        """One shape for all drafters of a block size, whatever they are trained with."""
        settings, device = self._settings, self._target.device
        module = make_module(spec, weights, device)
        embedding, head, _ = borrow(spec, self._target, device, compute_dtype(device))
        step = DrafterStep(
            module,
            embedding,
            head,
            ObjectiveConfig(anchors=max(1, 512 // settings.anchor_divisor)),
            row_tokens=settings.row_tokens,
            seed=0,
            trees=tree_metric(ValidationConfig(tree_budgets=budgets)),
        )
        if device.type == "cuda":
            row = next(iter(self._kept.values())).rows[0]

            def run() -> None:
                step.evaluate(row)

            process_cache().device(str(device)).warm(run)
        return step

    def exported(self, spec: DrafterSpec, weights: Weights) -> Drafter:
        """The drafter as servers would load it: written to a folder and read back."""
        drafter = Drafter(spec)
        drafter.load_state_dict(weights)
        folder = self._folder / "export"
        shutil.rmtree(folder, ignore_errors=True)
        return load_export(export_zlab(drafter, folder), self._target.device, compute_dtype(self._target.device))

    def decode(
        self, drafter: Drafter, limits: Mapping[str, int], budget: int | None = None, *, walk_again: bool = False
    ) -> Figures:
        """Real greedy decoding of the first prompts of some sets, all together: the chain, or trees of `budget` drafts.

        Args:
            limits: how many prompts of each set.
            walk_again: walk along the decoded texts, too: they are not always the kept answers, for bf16 breaks ties
                differently in batches of other sizes.

        Returns:
            Figures by set; `decode_s` is of all together, `walked_along_it` the acceptance length of the walk.
        """
        bound = BoundDrafter(drafter, self._target)
        width = drafter.spec.block_size if budget is None else budget + 1

        def opener(sample: Sample) -> Opener:
            def steps(session: RowSession) -> Steps:
                own, task = bound.fork(), self._task(sample)
                if budget is None:
                    return linear_steps(session, ChainSource(own), task)
                return tree_steps(session, own, task, FixedBudget(budget))

            return steps

        found, texts = self._decode(bound.taps, opener, limits, width)
        for name, decoded in texts.items() if walk_again else ():
            samples = [sample for sample in decoded if sample.loss_mask.sum() > 1]  # one token takes no round
            kept = Kept(samples, self._capture(samples))
            step = self._step(drafter.spec, dict(drafter.state_dict()), () if budget is None else (budget,))
            sums = self._walk_set(step, kept, None)  # the last method is the one that was decoded
            found[name]["walked_along_it"] = pooled([PromptCounts(s.tokens[-1], s.rounds[-1]) for s in sums])
        return found

    def decode_lookup(self, limits: Mapping[str, int]) -> Figures:
        """Real decoding by prompt lookup, as `decode`."""

        def opener(sample: Sample) -> Opener:
            source = LookupSource(LOOKUP_BLOCK, LOOKUP_NGRAM)
            return lambda session: linear_steps(session, source, self._task(sample))

        return self._decode((), opener, limits, LOOKUP_BLOCK)[0]

    def walk_lookup(self, name: str) -> Figures:
        """Prompt lookup along the kept answers."""
        return counted([lookup_counts(*split_sample(sample)) for sample in self._kept[name].samples])

    def _task(self, sample: Sample) -> Task:
        return Task(split_sample(sample)[0], self._settings.max_new_tokens)

    def _decode(
        self, taps: Sequence[int], opener: Callable[[Sample], Opener], limits: Mapping[str, int], width: int
    ) -> tuple[Figures, dict[str, list[Sample]]]:
        """Figures and decoded texts by set."""
        chosen = [(name, sample) for name, limit in limits.items() for sample in self._kept[name].samples[:limit]]
        longest = max(len(split_sample(sample)[0]) for _, sample in chosen)
        rows = max(1, min(len(chosen), _NODES_AT_ONCE // width))
        batch = BatchedTarget(self._target, taps, rows, longest + self._settings.max_new_tokens + width)
        begin = time.perf_counter()
        generations = decode_together(batch, [opener(sample) for _, sample in chosen])
        synchronize(self._target.device)
        decode_s, found = time.perf_counter() - begin, {}
        texts: dict[str, list[Sample]] = {}
        for name in limits:
            own = [(g, s) for g, (set_name, s) in zip(generations, chosen, strict=True) if set_name == name]
            same = sum(generation.output_ids == split_sample(sample)[1] for generation, sample in own)
            found[name] = counted([_counts(g) for g, _ in own]) | {"decode_s": decode_s, "texts_as_answered": same}
            texts[name] = [with_answer(sample, generation.output_ids) for generation, sample in own]
        return found, texts


def split_sample(sample: Sample) -> tuple[list[int], list[int]]:
    """Ids of the prompt and of the answer."""
    first = int(sample.loss_mask.argmax())
    ids = sample.input_ids.tolist()
    return ids[:first], ids[first:]


def with_answer(sample: Sample, answer_ids: Sequence[int]) -> Sample:
    """The sample's prompt with another answer."""
    prompt = split_sample(sample)[0]
    ids = np.array([*prompt, *answer_ids], np.int32)
    return replace(sample, input_ids=ids, loss_mask=np.arange(len(ids)) >= len(prompt))


def _counts(generation: Generation) -> PromptCounts:
    return PromptCounts(sum(generation.acceptance_lengths), len(generation.acceptance_lengths))


def lookup_counts(prompt: Sequence[int], answer: Sequence[int]) -> PromptCounts:
    """Tokens and rounds of prompt lookup along a known answer, whose first token comes from the prefill."""
    index, text, rounds = NgramIndex(LOOKUP_NGRAM), [*prompt, answer[0]], 0
    while len(text) < len(prompt) + len(answer):
        ahead = answer[len(text) - len(prompt) :]
        drafts = index.continuation(text, LOOKUP_BLOCK - 1)
        pairs = zip(drafts, ahead, strict=False)
        right = next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(drafts), len(ahead)))
        text.extend(ahead[: right + 1])
        rounds += 1
    return PromptCounts(len(answer) - 1, rounds)


def set_block(spec: DrafterSpec, block_size: int) -> DrafterSpec:
    """The same drafter drafting blocks of another size."""
    return spec.model_copy(update={"block_size": block_size})
