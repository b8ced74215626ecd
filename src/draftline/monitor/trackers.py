"""Where training curves go. `metrics.jsonl` always; TensorBoard and the services of services.py when configured.

A tracker that cannot start is the user's to mend before the run; one that fails later is reported once and left out,
and the run goes on. Only numbers are ever handed over, never configuration, so nothing secret can be logged.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

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


class TrackerSet:
    """Several trackers as one that never raises. Thread-safe.

    A tracker that raises is recorded in `failed` (name -> reason), warned about once, and not called again.
    """

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = list(trackers)
        self._lock = threading.Lock()
        self.failed: dict[str, str] = {}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand the numbers to each tracker that still works."""
        with self._lock:
            for tracker in list(self._trackers):
                self._guard(tracker, lambda t=tracker: t.log(step, metrics))  # type: ignore[misc]

    def close(self) -> None:
        """Close each tracker. Safe to call twice."""
        with self._lock:
            for tracker in list(self._trackers):
                self._guard(tracker, tracker.close)
            self._trackers.clear()

    def _guard(self, tracker: Tracker, action: Callable[[], None]) -> None:
        from draftline.monitor.services import without_secrets

        try:
            action()
        except Exception as error:  # noqa: BLE001 - third-party code; recorded, reported and disabled, as documented
            self.failed[tracker.name] = without_secrets(f"{type(error).__name__}: {error}")
            self._trackers.remove(tracker)
            _log.warning("tracker %s failed and is switched off: %s", tracker.name, self.failed[tracker.name])


def open_trackers(names: Sequence[str], run_dir: Path, project: str = "draftline") -> TrackerSet:
    """Start `metrics.jsonl` and every configured tracker.

    Args:
        names: keys of EXTRAS.
        project: under which services file the run.

    Raises:
        UserError: a tracker is not installed or cannot start.
    """
    try:
        trackers: list[Tracker] = [JsonlTracker(run_dir / "metrics.jsonl")]
    except OSError as error:
        raise UserError(f"cannot be written: {error.strerror}", where=str(run_dir / "metrics.jsonl")) from None
    try:
        for name in names:
            trackers.append(_start(name, run_dir, project))
    except UserError:
        TrackerSet(trackers).close()
        raise
    return TrackerSet(trackers)


def not_installed(name: str) -> UserError:
    """What to say of a configured tracker whose package is not there."""
    mend = f"install draftline[{EXTRAS[name]}], or leave it out"
    return UserError(f"{name} is not installed", where="monitor.trackers", mend=mend)


def _start(name: str, run_dir: Path, project: str) -> Tracker:
    from draftline.monitor.services import without_secrets

    try:
        if name == "tensorboard":
            return TensorBoardTracker(run_dir / "tensorboard")
        return _service(name, run_dir, project)
    except ImportError:
        raise not_installed(name) from None
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001 - third-party code; whatever it is, the user must mend it first
        reason = without_secrets(f"{type(error).__name__}: {error}")
        mend = "see what it says, or leave it out"
        raise UserError(f"{name} cannot start: {reason}", where="monitor.trackers", mend=mend) from None


def _service(name: str, run_dir: Path, project: str) -> Tracker:
    from draftline.monitor import services
    from draftline.monitor.background import BackgroundTracker

    kinds: dict[str, Callable[[Path, str], Tracker]] = {
        "wandb": services.WandbTracker,
        "trackio": services.TrackioTracker,
        "mlflow": services.MlflowTracker,
    }
    return BackgroundTracker(kinds[name](run_dir, project))
