"""The queue over time, as lines of text for `draftline watch`: only the end of `metrics.jsonl` is read."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path

from draftline.monitor.render import duration, size

# A line holds a few KiB at most, so that this reaches back ten minutes or more.
_TAIL_BYTES = 512 * 1024
MOST_POINTS = 60
# From nothing to the highest value shown; each fills more of its place than the one before.
LEVELS = " .:-=+*#%@"


def queue_lines(metrics_file: Path, width: int) -> list[str]:
    """`queue over 9m50s, 0 to 4 rows`, `queue over 9m50s, 0 to 31.0 MiB`, each with its strip `|.:-=+*#|`.

    Nothing where the file holds no two points yet or cannot be read: the rest of the picture stands without it.
    """
    points = _points(metrics_file, min(MOST_POINTS, width - 2))
    if len(points) < 2:
        return []
    over = f"queue over {duration(points[-1][0] - points[0][0])}"
    rows, held = [p[1] for p in points], [p[2] for p in points]
    labelled = ((f"{over}, 0 to {max(rows):.0f} rows", rows), (f"{over}, 0 to {size(round(max(held)))}", held))
    widest = max(len(label) for label, _ in labelled)
    lines: list[str] = []
    for label, values in labelled:
        strip = f"|{bar(values)}|"
        one = f"{label:<{widest}} {strip}"
        lines += [one] if len(one) <= width else [label[:width], strip]
    return lines


def bar(values: Sequence[float]) -> str:
    """A character a value, as high as its share of the highest."""
    top = max(values)
    return "".join(LEVELS[math.ceil(v / top * (len(LEVELS) - 1)) if top > 0 and v > 0 else 0] for v in values)


def _points(file: Path, most: int) -> list[tuple[float, float, float]]:
    """The newest (wall seconds, rows, bytes), oldest first."""
    points: list[tuple[float, float, float]] = []
    for line in reversed(_tail(file)):
        try:
            record = json.loads(line)
            point = (float(record["wall"]), float(record["queue/rows"]), float(record["queue/bytes"]))
        except (ValueError, KeyError, TypeError, RecursionError):  # another kind of record, or a torn line
            continue
        if len(points) == most or not all(map(math.isfinite, point)) or (points and point[0] > points[-1][0]):
            break
        points.append(point)
    return points[::-1]


def _tail(file: Path) -> list[bytes]:
    try:
        with file.open("rb") as opened:
            length = opened.seek(0, os.SEEK_END)
            opened.seek(max(0, length - _TAIL_BYTES))
            lines = opened.read().splitlines()
    except OSError:
        return []
    return lines[1:] if length > _TAIL_BYTES else lines
