"""`train --profile ROWS`: what torch did for the first rows of every worker, and the run's own spans.

consumes     the workers' spans and rows, through their clocks
produces     profile/torch.json.gz (torch's trace, our spans among it) and profile/spans.json.gz, in the run folder
waits for    in its own thread: a first row and ROWS more of every worker, or the end of the run
on failure   one line for people; the run goes on without a trace

torch profiles a whole process or one thread: here all threads, so that targets and drafters lie in one trace.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from draftline.errors import UserError
from draftline.report.perfetto import write_trace
from draftline.target.loop import Clock

FOLDER, TORCH_TRACE, SPANS_TRACE = "profile", "torch.json.gz", "spans.json.gz"
# A first row pays for what libraries do once; it does not count, for it tells nothing of a usual row.
WARM_ROWS = 1
# Where one worker gets hardly any rows, the others end the trace: it is held in memory.
MOST_ROWS_FACTOR = 4
EXPORT_WITHIN_S = 300.0


class RunProfiler:
    """Profiles one stretch of a run.

    Args:
        run: run folder.
        rows: of each worker in the trace, after its first.
        say: shows a line to people.
        flush: writes out the span log.
    """

    def __init__(self, run: Path, rows: int, *, say: Callable[[str], None], flush: Callable[[], None]) -> None:
        self._folder, self._run, self._rows = run / FOLDER, run, rows
        self._say, self._flush = say, flush
        self._counts: dict[str, int] = {}
        self._changed = threading.Condition()
        self._over = False
        self._profiler: Any = None
        self._thread = threading.Thread(target=lambda: self._guarded(self._end), name="profiler", daemon=True)

    def clock(self, worker: str, clock: Clock) -> Clock:
        """The worker's clock, whose spans stand in torch's trace too, and whose rows are counted."""
        self._counts[worker] = 0
        return ProfiledClock(clock, lambda rows: self._count(worker, rows))

    def start(self) -> None:
        """Begin; call it once all clocks are made, before the workers start."""
        self._guarded(self._begin)
        if self._profiler is not None:
            self._thread.start()

    def close(self) -> None:
        """End the stretch if it has not ended, and write both files."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
        if self._profiler is not None:
            self._thread.join(EXPORT_WITHIN_S)
        self._flush()
        try:
            counts = write_trace(self._run, self._folder / SPANS_TRACE, replace=True)
            self._say(f"profile: {counts.spans} spans in {self._folder / SPANS_TRACE}")
        except UserError as error:
            self._say(f"profile: {error}")

    def _count(self, worker: str, rows: int) -> None:
        with self._changed:
            self._counts[worker] += rows
            self._changed.notify_all()

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - a profiler that fails must not stop a run; said to people
            self._say(f"profile: torch wrote no trace: {type(error).__name__}: {error}")

    def _begin(self) -> None:
        self._folder.mkdir(exist_ok=True)
        profiler = profile(
            activities=_activities(),
            experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True),
        )
        profiler.start()
        self._profiler = profiler

    def _end(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._over or self._is_enough())
            rows = ", ".join(f"{worker} {n}" for worker, n in self._counts.items())
        self._profiler.stop()
        path = self._folder / TORCH_TRACE
        path.unlink(missing_ok=True)
        self._profiler.export_chrome_trace(str(path))
        self._say(f"profile: torch's trace in {path} (rows: {rows})")

    def _is_enough(self) -> bool:
        wanted, counts = WARM_ROWS + self._rows, self._counts.values()
        return min(counts) >= wanted or sum(counts) >= MOST_ROWS_FACTOR * wanted * len(counts)


class ProfiledClock:
    """A worker's clock for a run that is profiled.

    Args:
        clock: the clock itself.
        on_rows: told of finished rows.
    """

    def __init__(self, clock: Clock, on_rows: Callable[[int], None]) -> None:
        self._clock, self._on_rows = clock, on_rows

    @contextmanager
    def span(self, activity: Any, what: str, **facts: Any) -> Iterator[Any]:
        """Times what stands inside it, under a name that the profile shows."""
        with record_function(f"{activity} {what}"), self._clock.span(activity, what, **facts) as span:
            yield span

    def done(self, *, rows: int, tokens: int) -> None:
        """Counts rows and tokens, and tells the profile."""
        self._clock.done(rows=rows, tokens=tokens)
        self._on_rows(rows)


def _activities() -> list[ProfilerActivity]:
    kinds = [ProfilerActivity.CPU]
    return [*kinds, ProfilerActivity.CUDA] if torch.cuda.is_available() else kinds
