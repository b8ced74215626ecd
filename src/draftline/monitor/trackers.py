"""Where training curves go. `metrics.jsonl` always; TensorBoard and the services of services.py when configured.

A tracker that is not installed or not logged in is the user's to mend before the run; one that fails, at its start (a
service that is away) or later, is reported once and left out, and the run goes on. Only numbers are ever handed over,
never configuration, so nothing secret can be logged.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from draftline.errors import UserError

# Name of a tracker, which is its package too -> extra of this package that brings it.
EXTRAS = {"tensorboard": "trackers", "wandb": "wandb", "trackio": "trackio", "mlflow": "mlflow"}
_log = logging.getLogger(__name__)


class Tracker(Protocol):
    """Takes named numbers at rising steps (rows trained)."""

    name: str

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the numbers of one moment."""

    def close(self) -> None:
        """Write everything out; nothing is logged afterwards."""


class JsonlTracker:
    """One JSON object a line: step, wall (seconds since 1970), then the metrics. NaN and infinities become text."""

    name = "metrics.jsonl"

    def __init__(self, path: Path, wall: Callable[[], float] = time.time) -> None:
        self._wall = wall
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - held open for the life of the run

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line, handed to the operating system at once."""
        values = {name: value if math.isfinite(value) else str(value) for name, value in metrics.items()}
        self._file.write(json.dumps({"step": step, "wall": round(self._wall(), 3), **values}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoardTracker:
    """Scalars in `folder`, for `tensorboard --logdir`. Needs the extra `trackers`."""

    name = "tensorboard"

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(log_dir=str(folder))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One scalar a metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, global_step=step)

    def close(self) -> None:
        """Write out what is buffered."""
        self._writer.close()


@runtime_checkable
class Unhurried(Protocol):
    """A tracker that may take long to close."""

    def begin_close(self) -> None:
        """Begin it, without waiting."""


class TrackerSet:
    """Several trackers as one that never raises. Thread-safe.

    A tracker that raises is recorded in `failed` (name -> reason), warned about once, and not called again.
    """

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = list(trackers)
        self._lock = threading.Lock()
        self.failed: dict[str, str] = {}

    def add(self, tracker: Tracker) -> None:
        """One more, which has started."""
        with self._lock:
            self._trackers.append(tracker)

    def left_out(self, name: str, error: Exception) -> None:
        """Record and report a tracker that failed."""
        from draftline.monitor.services import without_secrets

        self.failed[name] = without_secrets(f"{type(error).__name__}: {error}")
        _log.warning("tracker %s failed and is switched off: %s", name, self.failed[name])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand the numbers to each tracker that still works."""
        with self._lock:
            for tracker in list(self._trackers):
                self._guard(tracker, lambda t=tracker: t.log(step, metrics))  # type: ignore[misc]

    def close(self) -> None:
        """Close each tracker, those that may take long at the same time. Safe to call twice."""
        with self._lock:
            for tracker in self._trackers:
                if isinstance(tracker, Unhurried):
                    tracker.begin_close()
            for tracker in list(self._trackers):
                self._guard(tracker, tracker.close)
            self._trackers.clear()

    def _guard(self, tracker: Tracker, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - third-party code; recorded, reported and disabled, as documented
            self._trackers.remove(tracker)
            self.left_out(tracker.name, error)


def open_trackers(names: Sequence[str], run_dir: Path, project: str = "draftline") -> TrackerSet:
    """Start `metrics.jsonl` and every configured tracker.

    Args:
        names: keys of EXTRAS.
        project: under which services file the run.

    Raises:
        UserError: a tracker is not installed or not logged in.
    """
    try:
        several = TrackerSet([JsonlTracker(run_dir / "metrics.jsonl")])
    except OSError as error:
        raise UserError(f"cannot be written: {error.strerror}", where=str(run_dir / "metrics.jsonl")) from None
    for name in names:
        try:
            several.add(_start(name, run_dir, project))
        except ImportError:
            several.close()
            raise not_installed(name) from None
        except UserError:
            several.close()
            raise
        except Exception as error:  # noqa: BLE001 - third-party code; recorded and reported, as documented
            several.left_out(name, error)
    return several


def not_installed(name: str) -> UserError:
    """What to say of a configured tracker whose package is not there."""
    mend = f"install draftline[{EXTRAS[name]}], or leave it out"
    return UserError(f"{name} is not installed", where="monitor.trackers", mend=mend)


def _start(name: str, run_dir: Path, project: str) -> Tracker:
    if name == "tensorboard":
        return TensorBoardTracker(run_dir / "tensorboard")
    from draftline.monitor import services
    from draftline.monitor.background import BackgroundTracker

    kinds: dict[str, Callable[[Path, str], Tracker]] = {
        "wandb": services.WandbTracker,
        "trackio": services.TrackioTracker,
        "mlflow": services.MlflowTracker,
    }
    tracker = BackgroundTracker(name, partial(kinds[name], run_dir, project))
    if not tracker.await_start():
        _log.warning("tracker %s takes long to start; the run goes on, and its figures wait for it", name)
    return tracker
