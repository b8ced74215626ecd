"""The span log of a run: `events.jsonl`, append-only, the source of truth for watch, report and traces.

Consumes finished spans from every worker thread (a locked list append each); produces JSON lines. Nothing waits here:
the buffer is written out by `flush`, which the monitor thread, the syncs and the end of the run call, and by the worker
that fills it. A killed process loses at most the buffer; a line torn by the kill is passed over by the reader.

Lines. A session (one per process that wrote to the file) starts with an anchor that ties the monotonic clock to the
wall clock: `{"anchor": 1, "wall": .., "mono": .., "pid": ..}`; the number is the schema version. Then spans,
`{"w": worker, "a": activity, "d": what, "t0": .., "t1": .., "f": facts}`, and notes, `{"n": kind, "t": .., "f": ..}`.
Times are monotonic seconds.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from draftline.errors import UserError

SCHEMA_VERSION = 1
Activity = Literal["starting", "working", "waiting", "compiling", "averaging", "checkpointing", "validating"]
ACTIVITIES: tuple[Activity, ...] = (
    "starting",
    "working",
    "waiting",
    "compiling",
    "averaging",
    "checkpointing",
    "validating",
)
# One encoder for all: `json.dumps` with options builds one a call, which costs several times the encoding itself.
_ENCODER = json.JSONEncoder(separators=(",", ":"), default=str)
_NO_FACTS: Mapping[str, Any] = {}
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Span:
    """What one worker did from `t0_s` to `t1_s` (monotonic seconds of its session)."""

    worker: str
    activity: Activity
    what: str
    t0_s: float
    t1_s: float
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Note:
    """Something that happened at one moment: a failure, a restart, the end."""

    kind: str
    t_s: float
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Session:
    """What one process wrote, from `start_s` on. `wall_offset_s` + a time of this session = seconds since 1970."""

    pid: int
    wall_offset_s: float
    spans: list[Span] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    start_s: float = 0.0


@dataclass(slots=True)
class Events:
    """Everything read from a span log. `torn_lines` were cut by a kill and passed over."""

    sessions: list[Session] = field(default_factory=list)
    torn_lines: int = 0

    def spans(self) -> Iterator[Span]:
        """Spans of all sessions, in the order they ended."""
        for session in self.sessions:
            yield from session.spans


class EventLog:
    """Thread-safe writer of one session.

    Args:
        path: file to append to; its folder must exist.
        clock: monotonic seconds.
        wall: seconds since 1970.
        buffer_lines: lines held before the worker that adds the last one writes them out itself.

    A disk that fails later (full, gone) does not stop the run: the log ends there, with one warning.

    Raises:
        UserError: the file cannot be opened.
    """

    def __init__(
        self,
        path: Path,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        buffer_lines: int = 4096,
    ) -> None:
        self.path = path
        self._clock, self._buffer_lines = clock, buffer_lines
        self._buffer: list[tuple[Any, ...]] = []
        self._lock = threading.Lock()
        self._write_lock = threading.Lock()
        self._failed = False
        try:
            torn = _ends_torn(path)
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - held open for the life of the run
        except OSError as error:
            raise UserError(f"cannot write the event log: {error.strerror}", where=str(path)) from None
        anchor = {"anchor": SCHEMA_VERSION, "wall": wall(), "mono": clock(), "pid": os.getpid()}
        self._write((b"\n" if torn else b"") + _encode(anchor))

    def span(
        self,
        worker: str,
        activity: Activity,
        what: str,
        t0_s: float,
        t1_s: float,
        facts: Mapping[str, Any] = _NO_FACTS,
    ) -> None:
        """Add a finished span. Facts must be JSON values (numbers, text, lists of them)."""
        with self._lock:
            self._buffer.append((worker, activity, what, t0_s, t1_s, facts))
            full = len(self._buffer) >= self._buffer_lines
        if full:
            self.flush()

    def note(self, kind: str, **facts: Any) -> None:
        """Add a moment and write everything out: notes are rare and worth having after a kill."""
        with self._lock:
            self._buffer.append((kind, self._clock(), facts))
        self.flush()

    def flush(self) -> None:
        """Hand the buffer to the operating system (not to the platter: a power cut may lose seconds)."""
        with self._write_lock:
            with self._lock:
                lines, self._buffer = self._buffer, []
            if lines:
                self._write(b"".join(_encode_line(line) for line in lines))

    def close(self) -> None:
        """Flush and close. Later spans are dropped. Safe to call twice."""
        self.flush()
        with self._write_lock:
            self._failed = True
            self._file.close()

    def _write(self, data: bytes) -> None:
        if self._failed:
            return
        try:
            view = memoryview(data)
            while view:
                view = view[self._file.write(view) :]
        except OSError as error:
            self._failed = True
            _log.warning("%s: the event log ends here: %s", self.path, error.strerror)


def read_events(path: Path) -> Events:
    """Read a span log, of a finished run or of one that is being written.

    Raises:
        UserError: no such file, or written by a newer version.
    """
    events = Events()
    for record in iter_events(path):
        if record is None:
            events.torn_lines += 1
        elif isinstance(record, Session):
            events.sessions.append(record)
        elif isinstance(record, Span):
            events.sessions[-1].spans.append(record)
        else:
            events.sessions[-1].notes.append(record)
    return events


def iter_events(path: Path) -> Iterator[Session | Span | Note | None]:
    """The same line by line, for logs that are too long to hold: each session before its spans; None for a torn line.

    Raises:
        UserError: as `read_events`.
    """
    started = False
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                record = _parse_line(line, f"{path} line {number}")
                started = started or isinstance(record, Session)
                yield record if started else None
    except OSError as error:
        raise UserError(f"no event log here: {error.strerror}", where=str(path)) from None


def _parse_line(line: bytes, where: str) -> Session | Span | Note | None:
    try:
        record = json.loads(line)
        if "anchor" in record:
            return _session(record, where)
        facts = record.get("f", {})
        if "n" in record:
            return Note(record["n"], float(record["t"]), facts)
        return Span(record["w"], record["a"], record["d"], float(record["t0"]), float(record["t1"]), facts)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


def _session(record: Mapping[str, Any], where: str) -> Session:
    if record["anchor"] > SCHEMA_VERSION:
        raise UserError(
            f"event log of version {record['anchor']}; this draftline reads up to {SCHEMA_VERSION}",
            where=where,
            mend="use the draftline that wrote it, or a newer one",
        )
    return Session(int(record["pid"]), record["wall"] - record["mono"], start_s=float(record["mono"]))


def _encode_line(line: tuple[Any, ...]) -> bytes:
    if len(line) == 3:
        kind, t, facts = line
        return _encode({"n": kind, "t": round(t, 6), "f": facts})
    worker, activity, what, t0, t1, facts = line
    record = {"w": worker, "a": activity, "d": what, "t0": round(t0, 6), "t1": round(t1, 6)}
    return _encode({**record, "f": dict(facts)} if facts else record)


def _encode(record: Mapping[str, Any]) -> bytes:
    return _ENCODER.encode(record).encode() + b"\n"


def _ends_torn(path: Path) -> bool:
    """True if a killed process left the file without a final newline."""
    if not path.exists() or path.stat().st_size == 0:
        return False
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
