"""The span log as a trace that Perfetto and chrome://tracing open (Chrome's trace event format, JSON).

Consumes `events.jsonl` line by line and writes event by event, so that a log of any length takes little memory. A
session is a process of the trace, a worker one of its threads; sessions lie where they lay in time.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, cast

from draftline.data.storage import disk_errors, require_writable_file
from draftline.errors import UserError
from draftline.monitor.events import Note, Session, Span, iter_events
from draftline.monitor.run import EVENTS_FILE

LONGEST_S = 1e9
_ROLES = {"coordinator": 0, "target": 1_000, "drafter": 100_000}
_OTHER_ROLE = 10_000_000


@dataclass(slots=True)
class TraceCounts:
    """What was written. `torn_lines` of the log were cut by a kill, or are no spans, and were passed over."""

    sessions: int = 0
    spans: int = 0
    torn_lines: int = 0


def write_trace(run: Path, file: Path, *, replace: bool = False) -> TraceCounts:
    """Write the spans of a run, in progress or finished, as a trace.

    Args:
        run: run folder.
        file: where to; compressed if its name ends with `.gz`.
        replace: overwrite an earlier trace.

    Raises:
        UserError: no run folder, no span in its log, or a file that exists or cannot be written.
    """
    if not run.is_dir():
        raise UserError("no such folder", where=str(run), mend="give the run's output folder")
    if file.exists() and not replace:
        raise UserError("is there already", where=str(file), mend="choose another name")
    require_writable_file(file)
    partial = file.with_name(f".{file.name}.partial")
    counts = TraceCounts()
    try:
        with disk_errors(file), _open(partial, compressed=file.suffix == ".gz") as out:
            _write_events(trace_events(iter_events(run / EVENTS_FILE), counts), out)
        if not counts.spans:
            raise UserError("holds no span yet", where=str(run / EVENTS_FILE), mend="look again when the run has begun")
        with disk_errors(file):
            partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)
    return counts


def trace_events(records: Iterable[Session | Span | Note | None], counts: TraceCounts) -> Iterator[dict[str, Any]]:
    """Events of the trace in the log's order; counts what it meets. Times are microseconds since the first session."""
    process: _Process | None = None
    first_wall_s: float | None = None
    for record in records:
        if isinstance(record, Session):
            counts.sessions += 1
            start_wall_s = record.wall_offset_s + record.start_s
            first_wall_s = start_wall_s if first_wall_s is None else first_wall_s
            process = _Process(counts.sessions, record, _microseconds(start_wall_s - first_wall_s) or 0)
            yield process.header()
        elif process is None or record is None:
            counts.torn_lines += 1
        else:
            events = process.span(record) if isinstance(record, Span) else process.note(record)
            counts.torn_lines += not events
            counts.spans += isinstance(record, Span) and bool(events)
            yield from events


class _Process:
    """One session of the run.

    Args:
        number: of the session, from 1.
        base_us: where it begins.
    """

    def __init__(self, number: int, session: Session, base_us: int) -> None:
        self._number, self._session, self._base_us = number, session, base_us
        self._threads: dict[str, int] = {}

    def header(self) -> dict[str, Any]:
        name = f"session {self._number} (process {self._session.pid})"
        return {"ph": "M", "name": "process_name", "pid": self._number, "args": {"name": name}}

    def span(self, span: Span) -> list[dict[str, Any]]:
        """The span, after the name of its thread where that is new; nothing if its times are none."""
        begin, end = self._place(span.t0_s), self._place(span.t1_s)
        if begin is None or end is None or end < begin:
            return []
        joined = "waiting for " if span.activity == "waiting" else f"{span.activity} "
        thread, events = self._thread(str(span.worker))
        event = {"ph": "X", "name": f"{joined}{span.what}".strip(), "cat": str(span.activity), "ts": begin}
        args = _plain(span.facts)
        return [*events, {**event, "dur": end - begin, "pid": self._number, "tid": thread, "args": args}]

    def note(self, note: Note) -> list[dict[str, Any]]:
        """A mark over all threads of the session."""
        at = self._place(note.t_s)
        if at is None:
            return []
        mark = {"ph": "i", "s": "p", "name": str(note.kind), "ts": at, "pid": self._number, "tid": 0}
        return [{**mark, "args": _plain(note.facts)}]

    def _place(self, t_s: float) -> int | None:
        since_start = _microseconds(t_s - self._session.start_s)
        return None if since_start is None or since_start < 0 else self._base_us + since_start

    def _thread(self, worker: str) -> tuple[int, list[dict[str, Any]]]:
        """Its number, and the events that name and sort it the first time."""
        if worker in self._threads:
            return self._threads[worker], []
        number = self._threads[worker] = len(self._threads) + 1
        where = {"ph": "M", "pid": self._number, "tid": number}
        name = {**where, "name": "thread_name", "args": {"name": worker}}
        return number, [name, {**where, "name": "thread_sort_index", "args": {"sort_index": _order(worker)}}]


def _order(worker: str) -> int:
    """Coordinator, targets, drafters, each by number."""
    role, _, number = worker.rpartition("-")
    if not role:
        return _ROLES.get(worker, _OTHER_ROLE)
    return _ROLES.get(role, _OTHER_ROLE) + (int(number) if number.isdecimal() and len(number) < 5 else 0)


def _microseconds(seconds: float) -> int | None:
    """None for what no run writes."""
    return round(seconds * 1e6) if math.isfinite(seconds) and abs(seconds) < LONGEST_S else None


def _plain(facts: object) -> dict[str, Any]:
    """Facts as JSON that every reader takes: numbers that are not finite become text."""
    if not isinstance(facts, Mapping):
        return {}
    return {str(k): str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in facts.items()}


def _open(path: Path, *, compressed: bool) -> TextIO:
    if compressed:
        return cast(TextIO, gzip.open(path, "wt", encoding="utf-8"))
    return path.open("w", encoding="utf-8")


def _write_events(events: Iterable[dict[str, Any]], out: TextIO) -> None:
    out.write('{"displayTimeUnit":"ms","traceEvents":[')
    for number, event in enumerate(events):
        out.write(",\n" if number else "\n")
        out.write(json.dumps(event, separators=(",", ":"), default=str))
    out.write("\n]}\n")
