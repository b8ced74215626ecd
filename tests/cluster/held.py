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

HELD_S, STEP_S, LOOK_S = 10.0, 0.25, 0.1


class Hold:
    """How long each target of a run waits before each row: nearly without end while it is on, else a moment, so that a
    run is not over before a test has looked; not at all once it is let go."""

    def __init__(self, run: Path) -> None:
        self._held, self._free = run.with_suffix(".held"), run.with_suffix(".free")

    def on(self) -> None:
        self._held.touch()

    def off(self) -> None:
        self._held.unlink(missing_ok=True)

    def let_go(self) -> None:
        self._free.touch()

    @property
    def pause_s(self) -> float:
        if self._free.exists():
            return 0.0
        return HELD_S if self._held.exists() else STEP_S


class HeldCapture:
    """A capture that waits before each row."""

    def __init__(self, capture: Any, hold: Hold) -> None:
        self._capture, self._hold = capture, hold

    def capture(self, *arguments: Any) -> Any:
        begun = time.monotonic()
        while time.monotonic() - begun < self._hold.pause_s:
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
