"""A tracker in a thread of its own, so that a service that is slow or gone holds up no worker.

consumes     named numbers from the monitor thread and from drafters that scored validation rows (`log` never waits)
produces     the tracker and calls of it, one after the other, in its own daemon thread
waits for    numbers, or the end
on failure   the tracker's error is kept, and raised by the next `log` or by `close`: TrackerSet reports it once
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

from draftline.monitor.trackers import Tracker

# Curves come every few seconds; a service that is away for hours loses the oldest of them.
MOST_WAITING = 4096
START_WITHIN_S = 30.0
CLOSE_WITHIN_S = 30.0
_log = logging.getLogger(__name__)


class TrackerGone(Exception):  # noqa: N818 - says what happened, in the one line that reports it
    """The service did not take what was left within the time there is at the end of a run."""


class BackgroundTracker:
    """Starts a tracker and passes numbers on in order. At most `most_waiting` wait; then the oldest are left out.

    Args:
        name: of the tracker.
        start: makes it; called, as the tracker then is, by this object's thread only.
        close_within_s: how long `close` waits for what is left, from `begin_close` on.
    """

    def __init__(
        self,
        name: str,
        start: Callable[[], Tracker],
        *,
        most_waiting: int = MOST_WAITING,
        close_within_s: float = CLOSE_WITHIN_S,
    ) -> None:
        self.name = name
        self.left_out = 0
        self._start, self._close_within_s = start, close_within_s
        self._waiting: deque[tuple[int, dict[str, float]]] = deque(maxlen=most_waiting)
        self._wake = threading.Condition()
        self._started = threading.Event()
        self._close_by_s: float | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def await_start(self, within_s: float = START_WITHIN_S) -> bool:
        """True once it has started; False if that takes longer: numbers wait for it, and the run need not.

        Raises:
            Exception: whatever kept it from starting.
        """
        started = self._started.wait(within_s)
        self._raise_error()
        return started

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the numbers, to be passed on soon."""
        with self._wake:
            self._raise_error()
            self.left_out += len(self._waiting) == self._waiting.maxlen
            self._waiting.append((step, dict(metrics)))
            self._wake.notify()

    def begin_close(self) -> None:
        """Let it end once it has passed on what is left; does not wait for that."""
        with self._wake:
            if self._close_by_s is None:
                self._close_by_s = time.monotonic() + self._close_within_s
            self._wake.notify()

    def close(self) -> None:
        """Pass on what is left, and close the tracker."""
        self.begin_close()
        assert self._close_by_s is not None
        self._thread.join(max(0.0, self._close_by_s - time.monotonic()))
        if self.left_out:
            _log.warning("tracker %s was too slow: %d oldest records were left out", self.name, self.left_out)
        if self._thread.is_alive():
            raise TrackerGone(f"gave no answer within {self._close_within_s:g} s")
        self._raise_error()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            tracker = self._start()
            self._started.set()
            while (record := self._next()) is not None:
                tracker.log(*record)
            tracker.close()
        except Exception as error:  # noqa: BLE001 - third-party code; raised again where it is reported
            self._error = error
        finally:
            self._started.set()

    def _next(self) -> tuple[int, dict[str, float]] | None:
        with self._wake:
            self._wake.wait_for(lambda: self._waiting or self._close_by_s is not None)
            return self._waiting.popleft() if self._waiting else None
