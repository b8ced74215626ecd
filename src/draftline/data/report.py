"""What `prepare` did, for the user."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from draftline.data.manifest import DatasetManifest, DatasetStatistics


@dataclass(frozen=True, slots=True)
class PrepareReport:
    """What `prepare` did. `in_rows == out_rows + rejected` always holds.

    Attributes:
        output: the folder written.
        manifest: of the training part.
        validation: of the validation part in `output/validation`, or None.
        rejected_by_reason: rows turned away.
        first_bad: the first row that was skipped as bad, for the reader to look at.
    """

    output: Path
    manifest: DatasetManifest
    validation: DatasetManifest | None
    in_rows: int
    rejected_by_reason: dict[str, int]
    first_bad: str | None = None

    @property
    def out_rows(self) -> int:
        """Samples written, of both parts."""
        return self.manifest.n_samples + (self.validation.n_samples if self.validation else 0)

    @property
    def rejected(self) -> int:
        """Rows rejected, for whatever reason."""
        return sum(self.rejected_by_reason.values())

    def summary_lines(self) -> list[str]:
        """A few lines for the user."""
        balance = "==" if self.in_rows == self.out_rows + self.rejected else "!="
        lines = [f"rows: {self.in_rows} in {balance} {self.out_rows} out + {self.rejected} rejected"]
        lines += [f"  rejected, {reason}: {count}" for reason, count in sorted(self.rejected_by_reason.items())]
        if self.first_bad:
            lines.append(f"  first bad row: {self.first_bad}")
        for manifest in filter(None, (self.manifest, self.validation)):
            lines += part_lines(manifest)
        return [*lines, f"written to {self.output}"]


def part_lines(manifest: DatasetManifest) -> Iterator[str]:
    """One part of a data set in a few lines."""
    share = 100 * manifest.n_supervised / manifest.n_tokens
    yield (
        f"{'samples' if manifest.part == 'all' else manifest.part}: {manifest.n_samples} with "
        f"{manifest.n_tokens} tokens, {manifest.n_supervised} supervised ({share:.0f} %), "
        f"{manifest.n_answer_cut} with a cut answer"
    )
    if manifest.n_turns_left_out:
        yield f"  turns unsupervised because the template rewrites them: {manifest.n_turns_left_out}"
    if any(source.weight is not None for source in manifest.sources):
        mix = ", ".join(
            f"{s.name} {s.n_samples} ({(s.n_samples or 0) / manifest.n_samples:.1%})" for s in manifest.sources
        )
        yield f"  mixed: {mix}"
    if manifest.statistics is not None:
        yield from _statistics_lines(manifest.statistics)


def _statistics_lines(statistics: DatasetStatistics) -> Iterator[str]:
    for name in ("tokens", "prompt_tokens", "supervised_tokens"):
        spread = getattr(statistics, name)
        yield (
            f"  {name.replace('_', ' ')} a sample: {spread.min} at least, {spread.median} median, "
            f"{spread.p90} / {spread.p99} (90 / 99 %), {spread.max} at most"
        )
    if statistics.categories:
        yield "  categories: " + ", ".join(f"{name} {count}" for name, count in statistics.categories.items())
