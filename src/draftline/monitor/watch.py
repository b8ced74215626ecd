"""Look at a run from outside: read its folder, say how it goes or how it ended, draw it.

Only reads, so any number of watchers may look at once. `status.json` is replaced whole by the run every few seconds.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
from pydantic import ValidationError
from rich.console import Console
from rich.live import Live
from rich.text import Text

from draftline.errors import UserError
from draftline.monitor.console import is_live, make_console, plain
from draftline.monitor.history import queue_lines
from draftline.monitor.render import duration, flow, parts, printable, status_segments, wrap
from draftline.monitor.run import METRICS_FILE, STATUS_FILE
from draftline.monitor.status import SCHEMA_VERSION, ProcessInfo, StatusFile, StatusSnapshot

RunState = Literal["running", "silent", "closed", "stopped", "failed", "killed", "elsewhere"]
# The run writes every two seconds; a busy disk may delay it, a minute without a word is worth saying.
SILENT_AFTER_S = 60.0
WATCH_EVERY_S = 2.0
WATCH_LOG_EVERY_S = 10.0
LOG_COLUMNS = 120
OVER: frozenset[RunState] = frozenset({"closed", "stopped", "failed", "killed"})
# Process start times are read with a resolution of about 10 ms, and shift with corrections of the wall clock.
SAME_PROCESS_S = 2.0


@dataclass(frozen=True, slots=True)
class RunStatus:
    """A run as seen from outside.

    Attributes:
        state: running; silent (alive, but no status for a minute); closed, stopped or failed as the run said itself;
            killed (its process is gone and never said an end); elsewhere (on another host, cannot be told).
        detail: the same in words, with the time.
        age_s: seconds since the snapshot was written.
    """

    state: RunState
    detail: str
    age_s: float
    snapshot: StatusSnapshot


def read_status(run_dir: Path, *, wall: Callable[[], float] = time.time) -> RunStatus:
    """Status of a run in progress or finished.

    Raises:
        UserError: not a run folder, not started yet, half-written, or of a newer version.
    """
    path = run_dir / STATUS_FILE
    if not run_dir.is_dir():
        raise UserError("no such folder", where=str(run_dir), mend="give the run's output folder")
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        mend = "the run has not started yet, or this is not the output folder of a run"
        raise UserError(f"holds no {STATUS_FILE}", where=str(run_dir), mend=mend) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot be read: {error}", where=str(path)) from None
    status = _parse(text, path)
    age_s = max(0.0, wall() - status.written_wall_s)
    state, detail = _judge(status, age_s)
    return RunStatus(state=state, detail=detail, age_s=age_s, snapshot=status.snapshot)


def watch_run(
    run_dir: Path,
    *,
    once: bool = False,
    console: Console | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> RunStatus:
    """Show a run until it is over (or once); in place on a terminal, else a report every ten seconds.

    Returns the last status seen. An interrupt from the keyboard ends the watching, not the run.

    Raises:
        UserError: see `read_status`.
    """
    console = console or make_console(sys.stdout)
    status = read_status(run_dir)
    if once or not is_live(console):
        return _watch_log(run_dir, status, once, console, sleep)
    with Live(_picture(run_dir, status, console), console=console, auto_refresh=False) as live:
        try:
            while status.state not in OVER:
                sleep(WATCH_EVERY_S)
                status = read_status(run_dir)
                live.update(_picture(run_dir, status, console), refresh=True)
        except KeyboardInterrupt:
            return status
    return status


def _watch_log(
    run_dir: Path, status: RunStatus, once: bool, console: Console, sleep: Callable[[float], None]
) -> RunStatus:
    columns = console.width if is_live(console) else LOG_COLUMNS
    try:
        while True:
            plain(console, render_status(status, columns, queue_lines(run_dir / METRICS_FILE, columns)))
            if once or status.state in OVER:
                return status
            sleep(WATCH_LOG_EVERY_S)
            status = read_status(run_dir)
    except KeyboardInterrupt:
        return status


def _picture(run_dir: Path, status: RunStatus, console: Console) -> Text:
    width = max(20, console.width - 1)
    picture = render_status(status, width, queue_lines(run_dir / METRICS_FILE, width))
    return Text(printable(picture, console.encoding))


def render_status(status: RunStatus, width: int, history: Sequence[str] = ()) -> str:
    """The whole of it as text, at most `width` columns wide: state, verdict, figures, workers.

    The verdict stands above what a low terminal may cut off.

    Args:
        history: lines on how it has been, shown below the figures.
    """
    snapshot = status.snapshot
    head = f"{status.detail}; {duration(snapshot.elapsed_s)} in all"
    figures = flow(status_segments(snapshot, over=status.state in OVER), width)
    return "\n".join(
        [*wrap(head, width), *wrap(verdict_of(status), width), *figures, *history, *parts(snapshot, width)]
    )


def verdict_of(status: RunStatus) -> str:
    """The verdict, as it was where the run is over by accident; nothing of one that ended as it should."""
    if status.state in ("closed", "stopped"):
        return ""
    sentence = status.snapshot.verdict.sentence
    return f"before that: {sentence}" if status.state == "killed" else sentence


def _parse(text: str, path: Path) -> StatusFile:
    broken = UserError("is not whole", where=str(path), mend="look again in a few seconds; else the run is damaged")
    try:
        document: Any = json.loads(text)
    except (ValueError, RecursionError):
        raise broken from None
    if not isinstance(document, dict):
        raise broken
    version = document.get("schema_version")
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise UserError(
            f"is of version {version}; this draftline reads up to {SCHEMA_VERSION}",
            where=str(path),
            mend="use the draftline that wrote it, or a newer one",
        )
    try:
        return StatusFile.model_validate_json(text)
    except ValidationError as error:
        unknown = [".".join(map(str, e["loc"])) for e in error.errors() if e["type"] == "extra_forbidden"]
        if unknown:
            mend = "use the draftline that wrote it, or a newer one"
            raise UserError(
                f"holds what this draftline does not know: {unknown[0]}", where=str(path), mend=mend
            ) from None
        raise broken from None


def _judge(status: StatusFile, age_s: float) -> tuple[RunState, str]:
    if status.end is not None:
        reason = f": {status.end.reason}" if status.end.reason else ""
        return status.end.outcome, f"{_WORDS[status.end.outcome]} at {_when(status.end.wall_s)}{reason}"
    if status.process.host != socket.gethostname():
        return "elsewhere", f"runs on {status.process.host}; last status {duration(age_s)} ago"
    if not _alive(status.process):
        return "killed", f"killed at about {_when(status.written_wall_s)}: its process is gone and left no end"
    if age_s > SILENT_AFTER_S:
        return "silent", f"alive, but no status for {duration(age_s)}"
    return "running", "running"


_WORDS = {"closed": "finished", "stopped": "stopped on request", "failed": "failed"}


def _alive(process: ProcessInfo) -> bool:
    """Same pid AND same start time: a pid may be taken again by another process."""
    try:
        found = psutil.Process(process.pid)
        running = found.status() != psutil.STATUS_ZOMBIE
        return running and abs(found.create_time() - process.start_wall_s) < SAME_PROCESS_S
    except (psutil.NoSuchProcess, ValueError, OverflowError):  # a number that no process can have
        return False
    except psutil.AccessDenied:
        return True


def _when(wall_s: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(wall_s))
    except (ValueError, OverflowError, OSError):  # no calendar goes so far
        return f"second {wall_s:g}"
