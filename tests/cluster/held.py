"""Targets that a test makes slow and fast again: the run lasts, on any machine, until everything was done to it.

As a script it is `draftline` with such targets; Ray's workers, which do not see the tests, get the class by value.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import ray

from draftline.cli import main
from draftline.cluster import crew
from draftline.cluster.messages import Card
from draftline.cluster.workers import TargetActor

PAUSE_S, LOOK_S = 2.0, 0.1


class Hold:
    """While it is there, each target of the run waits `PAUSE_S` before each row; without it, not at all."""

    def __init__(self, run: Path) -> None:
        self._file = run.with_suffix(".hold")

    def on(self) -> None:
        self._file.touch()

    def off(self) -> None:
        self._file.unlink(missing_ok=True)

    def __bool__(self) -> bool:
        return self._file.exists()


class HeldCapture:
    """A capture that waits before each row."""

    def __init__(self, capture: Any, hold: Hold) -> None:
        self._capture, self._hold = capture, hold

    def capture(self, *arguments: Any) -> Any:
        until = time.monotonic() + PAUSE_S
        while time.monotonic() < until and self._hold:
            time.sleep(LOOK_S)
        return self._capture.capture(*arguments)


class HeldTarget(TargetActor):
    """See the module's text."""

    def load(self) -> Card:
        card = super().load()
        self._capture: Any = HeldCapture(self._capture, Hold(self._order.run_config().output))
        return card


if __name__ == "__main__":
    sys.argv[0] = "draftline"
    crew.TargetActor = HeldTarget  # type: ignore[misc]
    main()
else:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
