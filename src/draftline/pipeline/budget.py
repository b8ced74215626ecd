"""How many failures a run may survive, counted over all its workers."""

from __future__ import annotations

import threading
from collections.abc import Callable

from draftline.errors import RunFailedError

# An error of these kinds leaves the device's context broken for the rest of the process.
_STICKY = ("cuda error", "device-side assert", "illegal memory access", "cublas_status_execution_failed")


class FailureBudget:
    """Thread-safe count of caught worker failures.

    Args:
        allowed: failures that may be survived; one more fails the run.
        keep: called with the worker and each error, to keep its traceback.
    """

    def __init__(self, allowed: int, keep: Callable[[str, BaseException], None] | None = None) -> None:
        self._allowed, self._keep = allowed, keep
        self._lock = threading.Lock()
        self.failures: list[str] = []

    def spend(self, worker: str, error: BaseException, what: str) -> None:
        """Counts one failure of `worker` at `what`.

        Raises:
            RunFailedError: the budget is spent, or the device cannot be used any more in this process.
        """
        line = f"{what}: {type(error).__name__}: {error}"
        if self._keep is not None:
            self._keep(worker, error)
        with self._lock:
            self.failures.append(f"{worker}: {line}")
            spent = len(self.failures)
        if is_sticky(error):
            raise RunFailedError(
                f"{line} (the device is lost for this process; resume the run)", origin=worker
            ) from error
        if spent > self._allowed:
            raise RunFailedError(f"{line} (failure {spent}, {self._allowed} allowed)", origin=worker) from error


def is_sticky(error: BaseException) -> bool:
    """True if the device cannot be used any more in this process."""
    text = str(error).lower()
    return "out of memory" not in text and any(s in text for s in _STICKY)
