"""The parts of a data set in the making: training and validation, each with what it counts.

A conversation is in one part as a whole, and so are all that open with the same words.
"""

from __future__ import annotations

from array import array
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from draftline.data.manifest import DatasetFacts, DatasetManifest, DatasetStatistics, Spread
from draftline.data.shards import ShardWriter
from draftline.errors import UserError

VALIDATION_FOLDER = "validation"
PartName = Literal["all", "train", "validation"]


class SampleFacts(NamedTuple):
    """What is known of a sample besides its tokens.

    Attributes:
        source: index of its source.
        is_cut: a length limit cut its answer.
    """

    source: int
    n_prompt_tokens: int
    n_turns: int
    turns_left_out: int
    is_cut: bool
    category: str | None


def _ints() -> array[int]:
    return array("i")


@dataclass(slots=True)
class Part:
    """One part; 24 bytes are kept for each sample, besides what its writer holds.

    Attributes:
        sources, prompts, turns, left_out: one entry a sample, in order.
    """

    writer: ShardWriter
    name: PartName
    sources: array[int] = field(default_factory=_ints)
    prompts: array[int] = field(default_factory=_ints)
    turns: array[int] = field(default_factory=_ints)
    left_out: array[int] = field(default_factory=_ints)
    _sizes: array[int] = field(default_factory=_ints)
    _supervised: array[int] = field(default_factory=_ints)
    _categories: Counter[str] = field(default_factory=Counter)
    _n_cut: int = 0

    def add(self, name: str, ids: npt.NDArray[np.int32], mask: npt.NDArray[np.bool_], facts: SampleFacts) -> None:
        """Append a sample: ids int32 [T], mask bool [T]."""
        self.writer.add(name, ids, mask, answer_cut=facts.is_cut, category=facts.category or "")
        self.sources.append(facts.source)
        self.prompts.append(facts.n_prompt_tokens)
        self.turns.append(facts.n_turns)
        self.left_out.append(facts.turns_left_out)
        self._sizes.append(len(ids))
        self._supervised.append(int(np.count_nonzero(mask)))
        self._n_cut += facts.is_cut
        if facts.category:
            self._categories[facts.category] += 1

    def finish(self, facts: DatasetFacts) -> DatasetManifest:
        """Write the manifest and publish the part."""
        counts = np.bincount(np.asarray(self.sources), minlength=len(facts.sources)).tolist()
        sources = [s.model_copy(update={"n_samples": n}) for s, n in zip(facts.sources, counts, strict=True)]
        own = {
            "part": self.name,
            "sources": tuple(sources),
            "n_answer_cut": self._n_cut,
            "n_turns_left_out": sum(self.left_out),
            "statistics": self._statistics() if self.writer.n_samples else None,
        }
        return self.writer.finish(facts.model_copy(update=own))

    def _statistics(self) -> DatasetStatistics:
        return DatasetStatistics(
            tokens=_spread(self._sizes),
            prompt_tokens=_spread(self.prompts),
            supervised_tokens=_spread(self._supervised),
            n_turns=sum(self.turns),
            categories=dict(sorted(self._categories.items())),
        )


@dataclass(slots=True)
class Parts:
    """Both parts; `validation` is None without a split."""

    train: Part
    validation: Part | None
    fraction: float

    @property
    def named(self) -> list[Part]:
        """The parts that there are, training first."""
        return [self.train, *([self.validation] if self.validation else [])]

    def part_of(self, opening: bytes) -> Part:
        """The part of a conversation, by the seeded hash of how it opens."""
        if self.validation is None:
            return self.train
        return self.validation if int.from_bytes(opening[:8], "big") < self.fraction * 2**64 else self.train

    def finish(self, facts: DatasetFacts) -> tuple[DatasetManifest, DatasetManifest | None]:
        """Publish both.

        Raises:
            UserError: a part would be empty.
        """
        held = self.validation
        if held is None:
            return self.train.finish(facts), None
        if held.writer.n_samples == 0 and self.train.writer.n_samples > 0:
            raise UserError("the validation part would be empty", mend="raise validation_fraction or give more rows")
        if held.writer.n_samples > 0 and self.train.writer.n_samples == 0:
            raise UserError("the training part would be empty", mend="lower validation_fraction or give more rows")
        validation = held.finish(facts)
        return self.train.finish(facts), validation


def open_parts(stack: ExitStack, writer: ShardWriter, fraction: float) -> Parts:
    """Parts under an entered writer; the validation part lies in a folder below it."""
    if fraction == 0:
        return Parts(Part(writer, "all"), None, fraction)
    inner = stack.enter_context(ShardWriter(writer.staging_path / VALIDATION_FOLDER))
    return Parts(Part(writer, "train"), Part(inner, "validation"), fraction)


def _spread(values: array[int]) -> Spread:
    ordered = np.sort(np.asarray(values))
    at = [int(ordered[round(share * (len(ordered) - 1))]) for share in (0, 0.5, 0.9, 0.99, 1)]
    return Spread(min=at[0], median=at[1], p90=at[2], p99=at[3], max=at[4])
