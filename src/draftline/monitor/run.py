"""Everything that watches one run, behind one context manager.

One thread of its own consumes nothing and produces, every second or two: a snapshot on the display, `status.json` for
watchers, the buffered spans in `events.jsonl`, and numbers for the trackers. It waits on one event, which `close` sets.
A fault in here is logged and ends the watching, never the run.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Literal

import psutil
from rich.console import Console

from draftline.config.schema import MonitorConfig
from draftline.errors import DraftlineError, RunStoppedError, UserError
from draftline.monitor.console import StatusDisplay, is_live, make_console
from draftline.monitor.events import EventLog
from draftline.monitor.metrics import RunMetrics, ValidationLengths
from draftline.monitor.status import ProcessInfo, RunEnd, StatusFile, StatusSnapshot
from draftline.monitor.trackers import open_trackers

EVENTS_FILE, STATUS_FILE, METRICS_FILE = "events.jsonl", "status.json", "metrics.jsonl"
STATUS_FILE_EVERY_S = 2.0
REFRESH_S = 1.0
_log = logging.getLogger(__name__)


class RunMonitor:
    """Watches a run that writes to `run_dir`; use as a context manager around it.

    Args:
        run_dir: existing folder of the run.
        config: how often to show, which trackers.
        console: where the status is shown; standard error by default.
        show: False keeps the display off (files are still written).

    Attributes:
        metrics: hand its worker clocks to the loops.
        events: the span log.

    Raises:
        UserError: a file cannot be written or a tracker cannot start.
    """

    def __init__(
        self,
        run_dir: Path,
        config: MonitorConfig,
        *,
        console: Console | None = None,
        show: bool = True,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._run_dir, self._config, self._clock, self._wall = run_dir, config, clock, wall
        self.trackers = open_trackers(config.trackers, run_dir, config.project)
        self.events = EventLog(run_dir / EVENTS_FILE, clock=clock, wall=wall)
        self.metrics = RunMetrics(clock=clock, events=self.events)
        console = console or make_console()
        self._display = StatusDisplay(console, config.status_every_s, clock) if show else None
        self._tick_s = REFRESH_S if show and is_live(console) else min(STATUS_FILE_EVERY_S, config.status_every_s)
        self._process = ProcessInfo(
            pid=os.getpid(), start_wall_s=psutil.Process().create_time(), host=socket.gethostname()
        )
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="monitor")
        self._end: RunEnd | None = None
        self._was_refused = False
        self._status_file_works = True
        self._last_file_s = self._last_log_s = clock()
        self._last = self.metrics.snapshot()

    def __enter__(self) -> RunMonitor:
        self._write_status(self._last)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._was_refused = isinstance(error, UserError) and not self._last.rows_trained
        if self._end is None:
            self.end(*_outcome_of(error))
        self.close()

    def end(self, outcome: Literal["closed", "stopped", "failed"], reason: str = "") -> None:
        """Say how the run ended. Left out, leaving the `with` block decides it from the exception."""
        self._end = RunEnd(outcome=outcome, reason=reason, wall_s=self._wall())

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Numbers of one moment for the trackers, for example validation scores. `step`: rows trained."""
        self.trackers.log(step, metrics)

    def close(self) -> None:
        """Stop the thread, write everything out."""
        if self._end is None:
            self.end("closed")
        self._stop.set()
        self._thread.join()
        if self._end:
            self.events.note("end", outcome=self._end.outcome, reason=self._end.reason)
        self.events.close()
        self.trackers.close()

    def _loop(self) -> None:
        self._guard(self._watch)
        self._stop.wait()
        self._guard(self._take_snapshot)
        self._guard(self._show_last)
        self._write_status(self._last)

    def _guard(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception:  # noqa: BLE001 - watching must never stop a run; logged with its traceback
            _log.exception("the monitor failed and shows nothing more; the run goes on")

    def _watch(self) -> None:
        if self._display:
            self._display.start()
        while not self._stop.wait(self._tick_s):
            self._take_snapshot()
            self._tick(self._last)

    def _take_snapshot(self) -> None:
        self._last = self.metrics.snapshot()

    def _show_last(self) -> None:
        if self._display:
            self._display.close(None if self._was_refused else self._last)  # then one line says why, and no other
        self._log_snapshot(self._last)

    def _tick(self, snapshot: StatusSnapshot) -> None:
        now = self._clock()
        if self._display:
            self._display.show(snapshot)
        if now - self._last_file_s >= STATUS_FILE_EVERY_S:
            self._last_file_s = now
            self._write_status(snapshot)
            self.events.flush()
        if now - self._last_log_s >= self._config.status_every_s:
            self._last_log_s = now
            self._log_snapshot(snapshot)

    def _log_snapshot(self, snapshot: StatusSnapshot) -> None:
        """By rows of the whole run: a resumed one goes on where it was."""
        ledger = snapshot.ledger
        if snapshot.rows_trained:
            step = ledger.committed + ledger.trained if ledger.planned else snapshot.rows_trained
            self.trackers.log(step, tracked_numbers(snapshot))

    def _write_status(self, snapshot: StatusSnapshot) -> None:
        if not self._status_file_works:
            return
        status = StatusFile(
            process=self._process, written_wall_s=self._wall(), end=self._end, snapshot=snapshot
        ).model_dump_json()
        path = self._run_dir / STATUS_FILE
        try:
            temporary = path.with_suffix(".json.tmp")
            temporary.write_text(status, encoding="utf-8")
            os.replace(temporary, path)
        except OSError as error:
            self._status_file_works = False
            _log.warning("%s is no longer written: %s", path, error.strerror)


def tracked_numbers(snapshot: StatusSnapshot) -> dict[str, float]:
    """The curves: losses, acceptance, rates, waiting shares; what is not known yet is left out."""
    numbers: dict[str, float | None] = {
        "train/loss": snapshot.loss,
        "train/acceptance": snapshot.acceptance,
        "train/learning_rate": snapshot.learning_rate,
        "train/grad_norm": snapshot.grad_norm,
        "train/tokens_per_s": snapshot.tokens_per_s,
        "train/supervised_tokens_per_s": snapshot.supervised_tokens_per_s,
        "validation/loss": snapshot.validation_loss,
        "capacity/targets_tokens_per_s": snapshot.capacities.target_tokens_per_s,
        "capacity/drafters_tokens_per_s": snapshot.capacities.drafter_tokens_per_s,
        "capacity/data_tokens_per_s": snapshot.capacities.data_tokens_per_s,
        "queue/rows": snapshot.queue.rows if snapshot.queue else None,
        "queue/bytes": snapshot.queue.bytes if snapshot.queue else None,
    }
    numbers.update(snapshot_lengths(snapshot).curves())
    numbers.update({f"train/{name}": value for name, value in snapshot.terms.items()})
    for gpu in snapshot.gpus:
        name = f"gpu/{gpu.device.replace(':', '_')}"
        numbers.update({f"{name}/busy_share": gpu.busy_share, f"{name}/memory_bytes": gpu.memory_used_bytes})
    numbers.update({f"waiting/{w.name}": w.shares.get("waiting", 0.0) for w in snapshot.workers})
    return {name: float(value) for name, value in numbers.items() if value is not None}


def snapshot_lengths(snapshot: StatusSnapshot) -> ValidationLengths:
    """The newest acceptance lengths of the validation rows."""
    chain = {} if snapshot.validation_acceptance is None else {"chain": snapshot.validation_acceptance}
    return ValidationLengths({**chain, **snapshot.validation_trees}, snapshot.validation_walk)


def _outcome_of(error: BaseException | None) -> tuple[Literal["closed", "stopped", "failed"], str]:
    if error is None:
        return "closed", ""
    if isinstance(error, (RunStoppedError, KeyboardInterrupt)):
        return "stopped", str(error)
    if isinstance(error, (UserError, DraftlineError)):
        return "failed", str(error)
    return "failed", f"{type(error).__name__}: {error}"
