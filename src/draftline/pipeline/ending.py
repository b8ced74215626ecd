"""How a run that did not close by itself is told, on one host and on several."""

from __future__ import annotations

from pathlib import Path

from draftline.errors import RunFailedError, RunStoppedError
from draftline.pipeline.core import End, Failure

STOPPING = "rows in hand finish, then a checkpoint; again to end at once"


def raise_unless_closed(end: End, failure: Failure | None, checkpoint: Path | str | None, signal_number: int) -> None:
    """Returns if the run closed with every row committed.

    Raises:
        RunFailedError: names the worker at fault.
        RunStoppedError: stopped by a signal, after its checkpoint.
    """
    if end is End.FAILED:
        assert failure is not None
        raise RunFailedError(failure.reason, origin=failure.origin)
    if end is End.STOPPED:
        message = f"stopped; resume with --resume (checkpoint: {checkpoint})"
        raise RunStoppedError(message, signal_number=signal_number)
