"""Curves of a run: read from `metrics.jsonl`, and thinned so that a page stays small without losing a spike."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftline.errors import UserError

MOST_POINTS = 1200
_DIGITS = 6


@dataclass(slots=True)
class Curve:
    """Values at rising rows trained; `None` among the values is a gap (where a session went back to a checkpoint)."""

    steps: list[int] = field(default_factory=list)
    values: list[float | None] = field(default_factory=list)

    def add(self, step: int, value: float) -> None:
        """Append a point; a step that lies before the last one opens a new stretch."""
        if self.steps and step < self.steps[-1]:
            self.steps.append(step)
            self.values.append(None)
        self.steps.append(step)
        self.values.append(value)

    def points(self) -> list[tuple[int, float]]:
        """(rows trained, value), gaps left out."""
        return [(s, v) for s, v in zip(self.steps, self.values, strict=True) if v is not None]

    def last(self) -> float | None:
        """The newest value; None without any."""
        return next((v for v in reversed(self.values) if v is not None), None)


@dataclass(slots=True)
class Metrics:
    """All curves of a run by name. `torn_lines` were cut by a kill and passed over."""

    curves: dict[str, Curve] = field(default_factory=dict)
    torn_lines: int = 0

    def named(self, prefix: str) -> dict[str, Curve]:
        """Curves whose name begins so, by the rest of the name."""
        return {name[len(prefix) :]: curve for name, curve in self.curves.items() if name.startswith(prefix)}


def read_metrics(path: Path) -> Metrics:
    """Read `metrics.jsonl`, of a finished run or of one that is being written. Values that are no number are left out.

    Raises:
        UserError: the file cannot be read, or nothing has been trained yet.
    """
    metrics = Metrics()
    mend = "no row has been trained yet: look again later, or use `draftline watch`"
    try:
        with path.open("rb") as file:
            for record in _records(file, metrics):
                _add(metrics, record)
    except FileNotFoundError:
        raise UserError("holds no metrics.jsonl", where=str(path.parent), mend=mend) from None
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", where=str(path)) from None
    if not metrics.curves:
        raise UserError("holds no figures", where=str(path), mend=mend)
    return metrics


def _records(lines: Iterator[bytes], metrics: Metrics) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            metrics.torn_lines += bool(line.strip())
            continue
        if isinstance(record, dict) and type(record.get("step")) is int:
            yield record
        else:
            metrics.torn_lines += 1


def _add(metrics: Metrics, record: dict[str, Any]) -> None:
    for name, value in record.items():
        if name in ("step", "wall") or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if math.isfinite(value):
            metrics.curves.setdefault(name, Curve()).add(record["step"], float(value))


def thin(curve: Curve, most: int = MOST_POINTS) -> tuple[list[int], list[float | None]]:
    """At most about `most` points: of each stretch of equal length its lowest and its highest value, and both ends.

    Values are rounded to six significant digits; gaps are kept.
    """
    steps, values = curve.steps, curve.values
    keep = range(len(steps)) if len(steps) <= most else _chosen(values, most)
    return [steps[i] for i in keep], [rounded(values[i]) for i in keep]


def _chosen(values: Sequence[float | None], most: int) -> list[int]:
    count, buckets = len(values), max(1, (most - 2) // 2)
    chosen = {0, count - 1}
    for bucket in range(buckets):
        part = range(bucket * count // buckets, (bucket + 1) * count // buckets)
        known = [i for i in part if values[i] is not None]
        chosen.update(i for i in part if values[i] is None)
        if known:
            chosen.add(min(known, key=lambda i: values[i] or 0.0))
            chosen.add(max(known, key=lambda i: values[i] or 0.0))
    return sorted(chosen)


def rounded(value: float | None) -> float | None:
    """Six significant digits: more cannot be seen, and cost space."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.{_DIGITS}g}")
