"""A tracker in a thread of its own, so that a service that is slow or gone holds up no worker.

consumes     named numbers from the monitor thread and from drafters that scored validation rows (`log` never waits)
produces     calls of the tracker, one after the other, in its own daemon thread
waits for    numbers, or the end
on failure   the tracker's error is kept, and raised by the next `log` or by `close`: TrackerSet reports it once
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Mapping

from draftline.monitor.trackers import Tracker

# Curves come every few seconds; a service that is away for hours loses the oldest of them.
MOST_WAITING = 4096
CLOSE_WITHIN_S = 30.0
_log = logging.getLogger(__name__)


class TrackerGone(Exception):  # noqa: N818 - says what happened, in the one line that reports it
    """The service did not take what was left within the time there is at the end of a run."""


class BackgroundTracker:
    """Passes numbers on in order. At most `most_waiting` wait; then the oldest are left out, and counted.

    Args:
        tracker: called by this object's thread only.
        close_within_s: how long `close` waits for what is left.
    """

    def __init__(
        self, tracker: Tracker, *, most_waiting: int = MOST_WAITING, close_within_s: float = CLOSE_WITHIN_S
    ) -> None:
        self.name = tracker.name
        self.left_out = 0
        self._tracker, self._close_within_s = tracker, close_within_s
        self._waiting: deque[tuple[int, dict[str, float]]] = deque(maxlen=most_waiting)
        self._wake = threading.Condition()
        self._closing = False
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=f"tracker {tracker.name}", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the numbers, to be passed on soon."""
        with self._wake:
            self._raise_error()
            self.left_out += len(self._waiting) == self._waiting.maxlen
            self._waiting.append((step, dict(metrics)))
            self._wake.notify()

    def close(self) -> None:
        """Pass on what is left, and close the tracker."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(self._close_within_s)
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
            while (record := self._next()) is not None:
                self._tracker.log(*record)
            self._tracker.close()
        except Exception as error:  # noqa: BLE001 - third-party code; raised again where it is reported
            self._error = error

    def _next(self) -> tuple[int, dict[str, float]] | None:
        with self._wake:
            self._wake.wait_for(lambda: self._waiting or self._closing)
            return self._waiting.popleft() if self._waiting else None
