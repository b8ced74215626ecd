"""Scores of the validation rows: the same anchors, and the same walked samples, each time."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from draftline.config.schema import ValidationConfig
from draftline.decode.path_tree import accepted_in_path_trees
from draftline.decode.tree_batch import accepted_in_trees
from draftline.decode.walk import Answer, WalkSums, answers_of, walk_answers
from draftline.drafter.metrics import TreeMetric
from draftline.drafter.step import DrafterStep, StepStats
from draftline.records import HiddenStateRow
from draftline.target.loop import map_tensors


def tree_metric(config: ValidationConfig) -> TreeMetric | None:
    """The trees that a drafter's step scores; None without any."""
    if not config.tree_budgets:
        return None
    return TreeMetric(config.tree_budgets, accepted_in_trees, accepted_in_path_trees)


@dataclass(frozen=True, slots=True)
class ValidationScores:
    """Sums over all validation rows, on the host.

    Attributes:
        stats: of the blocks at the fixed anchors.
        walk: of the walked samples; None if none are walked.
    """

    stats: StepStats
    walk: WalkSums | None

    @property
    def loss(self) -> float | None:
        """The objective over all validation rows; None without any supervised slot."""
        denominator = float(self.stats.denominator)
        return float(self.stats.numerator) / denominator if denominator else None

    def acceptance_lengths(self) -> dict[str, float]:
        """Mean over whole blocks: `chain`, and `tree@N` for each budget; empty without any whole block."""
        blocks = float(self.stats.acceptance_blocks)
        if not blocks:
            return {}
        sums = [float(self.stats.acceptance_sum), *self.stats.tree_sums.tolist()]
        return {name: total / blocks for name, total in zip(self._methods(), sums, strict=True)}

    def walked_lengths(self) -> dict[str, float]:
        """Tokens per round along the walked samples, of the same methods; empty without any round."""
        if self.walk is None:
            return {}
        lengths = zip(self._methods(), self.walk.acceptance_lengths(), strict=True)
        return {name: length for name, length in lengths if length is not None}

    def _methods(self) -> list[str]:
        return ["chain", *(f"tree@{n}" for n in self.stats.tree_budgets)]


class Validator:
    """Scores drafters on captured rows.

    Args:
        rows: captured once, on the host; at least one.
        config: how many samples are walked. Trees are the step's own.
        stop_token_ids: tokens that end an answer.
    """

    def __init__(
        self, rows: Sequence[HiddenStateRow], config: ValidationConfig, stop_token_ids: Collection[int]
    ) -> None:
        self._rows = rows
        self._answers = choose_answers(rows, config.walk_samples, stop_token_ids)
        self._walks = config.walk_samples > 0

    def __len__(self) -> int:
        return len(self._rows)

    def score(self, step: DrafterStep) -> ValidationScores:
        """Scores one drafter, whose weights stand still meanwhile."""
        total: StepStats | None = None
        walk: WalkSums | None = None
        for host_row, answers in zip(self._rows, self._answers, strict=True):
            row = host_row
            if row.taps_TF.device != step.device:
                row = map_tensors(host_row, lambda t: t.to(step.device))
            stats = step.evaluate(row)
            total = stats if total is None else total + stats
            if self._walks:
                walked = walk_answers(step, row, answers)
                walk = walked if walk is None else walk + walked
        assert total is not None
        return ValidationScores(total.to("cpu"), walk)


def choose_answers(rows: Sequence[HiddenStateRow], samples: int, stop_token_ids: Collection[int]) -> list[list[Answer]]:
    """The answers of the first `samples` samples that have any, by row."""
    chosen: list[list[Answer]] = []
    left = samples
    for row in rows:
        answers = answers_of(row, stop_token_ids) if left else []
        documents = list(dict.fromkeys(answer.first for answer in answers))[:left]
        left -= len(documents)
        chosen.append([answer for answer in answers if answer.first in documents])
    return chosen
