"""What is kept of a failure for whoever looks into it later: tracebacks of workers, stacks of a stalled run."""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from datetime import UTC, datetime
from pathlib import Path

from draftline.pipeline.run_folder import FAILURES_FILE, STACKS_FILE

MOST_FAILURE_BYTES = 16 << 20
_log = logging.getLogger(__name__)


class FailureTraces:
    """Appends to `failures.log` and `stacks.txt` of a run folder. Thread-safe; a disk that fails is only warned about.

    Args:
        run: the run folder.
    """

    def __init__(self, run: Path) -> None:
        self._failures, self._stacks = run / FAILURES_FILE, run / STACKS_FILE
        self._lock = threading.Lock()

    def keep(self, worker: str, error: BaseException) -> None:
        """The traceback of an error that a worker met, whether or not the run survives it."""
        lines = traceback.format_exception(error)
        self._append(self._failures, f"{_now()} {worker}\n{''.join(lines)}\n")

    def keep_text(self, worker: str, trace: str) -> None:
        """The same of a worker in another process."""
        self._append(self._failures, f"{_now()} {worker}\n{trace}\n")

    def dump_stacks(self, reason: str) -> None:
        """Where every Python thread of this process stands now."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        parts = [f"{_now()} {reason}\n"]
        for ident, frame in sys._current_frames().items():
            parts.append(f"\nthread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}")
        self._append(self._stacks, "".join(parts) + "\n")

    def _append(self, path: Path, text: str) -> None:
        try:
            with self._lock, path.open("a", encoding="utf-8", errors="replace") as file:
                if file.tell() < MOST_FAILURE_BYTES:
                    file.write(text)
        except OSError as error:
            _log.warning("%s cannot be written: %s", path, error.strerror)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
