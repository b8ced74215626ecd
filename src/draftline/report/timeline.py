"""What each worker did when, from the span log: streamed, so that a log of any length takes little memory.

Consumes the spans of `events.jsonl` one by one; produces shares of time per worker, label and bin. Bins are made wider
(two into one) whenever the run outgrows them, so their number is bounded. An outer span counts without the spans inside
it. Sessions of a resumed run follow each other without the pauses between them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from draftline.monitor.events import Note, Session, Span, iter_events

BINS = 240
FIRST_BIN_S = 0.01
LONGEST_S = 1e9
_REMEMBERED_SPANS = 4096


@dataclass(slots=True)
class Timeline:
    """Where the time went.

    Attributes:
        bin_s: seconds of a bin.
        length_s: seconds of all sessions together.
        seconds: worker -> label -> seconds in each bin. Labels: an activity, or `waiting for WHAT`.
        session_starts_s: where sessions begin; the first at 0.
        notes: (seconds, kind, text) of what happened at one moment.
        torn_lines: of the log, passed over.
    """

    bin_s: float = FIRST_BIN_S
    length_s: float = 0.0
    seconds: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    session_starts_s: list[float] = field(default_factory=list)
    notes: list[tuple[float, str, str]] = field(default_factory=list)
    torn_lines: int = 0

    @property
    def n_bins(self) -> int:
        """Bins that the run reaches."""
        return min(2 * BINS, int(self.length_s / self.bin_s) + 1)

    def totals(self, worker: str) -> dict[str, float]:
        """Seconds of each label of a worker, most first."""
        sums = {label: sum(bins) for label, bins in self.seconds[worker].items()}
        return dict(sorted(sums.items(), key=lambda item: -item[1]))


def read_timeline(path: Path) -> Timeline:
    """Fold a span log into a timeline.

    Raises:
        UserError: no such file, or written by a newer version.
    """
    folder = _Folder()
    for record in iter_events(path):
        if record is None:
            folder.timeline.torn_lines += 1
        elif isinstance(record, Session):
            folder.begin(record)
        elif isinstance(record, Span):
            folder.add(record)
        else:
            folder.note(record)
    return folder.timeline


class _Folder:
    def __init__(self) -> None:
        self.timeline = Timeline()
        self._shift_s = 0.0
        self._recent: dict[str, deque[tuple[float, float]]] = {}

    def begin(self, session: Session) -> None:
        self._shift_s = self.timeline.length_s - session.start_s
        self._recent.clear()
        self.timeline.session_starts_s.append(self.timeline.length_s)

    def note(self, note: Note) -> None:
        moment = note.t_s + self._shift_s
        if not 0 <= moment < LONGEST_S or not isinstance(note.facts, Mapping):
            self.timeline.torn_lines += 1
            return
        words = ", ".join(f"{name} {value}" for name, value in note.facts.items() if value not in ("", None))
        self.timeline.notes.append((moment, str(note.kind), words))
        self.timeline.length_s = max(self.timeline.length_s, moment)

    def add(self, span: Span) -> None:
        start, end = span.t0_s + self._shift_s, span.t1_s + self._shift_s
        if not 0 <= start <= end < LONGEST_S:  # no run writes such a span; not a number is caught too
            self.timeline.torn_lines += 1
            return
        worker = str(span.worker)
        recent = self._recent.setdefault(worker, deque(maxlen=_REMEMBERED_SPANS))
        inner = []
        while recent and recent[-1][0] >= start:
            inner.append(recent.pop())
        recent.append((start, end))
        label = f"waiting for {span.what}" if span.activity == "waiting" else str(span.activity)
        for t0, t1 in _without(start, end, reversed(inner)):
            self._book(worker, label, t0, t1)
        self.timeline.length_s = max(self.timeline.length_s, end)

    def _book(self, worker: str, label: str, t0: float, t1: float) -> None:
        line = self.timeline
        while t1 >= 2 * BINS * line.bin_s:
            self._widen()
        bins = line.seconds.setdefault(worker, {}).setdefault(label, [0.0] * (2 * BINS))
        for number in range(int(t0 / line.bin_s), int(t1 / line.bin_s) + 1):
            left, right = number * line.bin_s, (number + 1) * line.bin_s
            bins[number] += max(0.0, min(t1, right) - max(t0, left))

    def _widen(self) -> None:
        self.timeline.bin_s *= 2
        for labels in self.timeline.seconds.values():
            for label, bins in labels.items():
                halves = [bins[i] + bins[i + 1] for i in range(0, 2 * BINS, 2)]
                labels[label] = halves + [0.0] * BINS


def _without(start: float, end: float, inner: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The parts of [start, end] outside the inner stretches, which are in order and do not overlap."""
    parts, at = [], start
    for t0, t1 in inner:
        if t0 > at:
            parts.append((at, t0))
        at = max(at, t1)
    if end > at:
        parts.append((at, end))
    return parts
