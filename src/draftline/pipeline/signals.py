"""SIGTERM and SIGINT: the first asks the run to stop after a checkpoint, the second ends the process at once.

While nothing is being trained (loading, self-test, the final export) there is nothing to save: the first signal ends
the run where it stands, and what is written whole or not at all stays so.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

from draftline.errors import RunStoppedError

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class _EndHereError(KeyboardInterrupt):
    """Raised by the handler in the main thread; no `except Exception` of a library may swallow it."""


class StopSignals:
    """Context manager around a run, loading included.

    Inside `stopping_by`, the first signal becomes one call of `on_stop`, from a thread of its own: the handler itself
    only sets an event, for it may run while the main thread holds any lock. Outside of it, the first signal ends the
    run by RunStoppedError; should a library swallow that, the next `end_if_received` or `stopping_by` stops the run.
    The second signal ends the process at once, always. Outside the main thread (where Python allows no handlers)
    nothing is done.

    Attributes:
        received: number of the first signal, or None.
    """

    def __init__(self) -> None:
        self._wake = threading.Event()
        self._on_stop: Callable[[str], None] | None = None
        self._before: dict[int, Any] = {}
        self.received: int | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if isinstance(error, _EndHereError):
            raise RunStoppedError(
                f"stopped by {self._name()} while nothing was being trained; nothing is lost",
                signal_number=self.received or signal.SIGINT,
            ) from None

    def end_if_received(self) -> None:
        """Ends the run here if a signal came that a library swallowed: some catch everything while they import."""
        if self.received is not None:
            raise _EndHereError

    @contextmanager
    def stopping_by(self, on_stop: Callable[[str], None]) -> Iterator[None]:
        """While the body runs, the first signal is one call of `on_stop` with what to tell people."""
        waiter = threading.Thread(target=self._wait, name="stop-signals", daemon=True)
        waiter.start()
        self._on_stop = on_stop
        if self.received is not None:
            self._wake.set()
        try:
            yield
        finally:
            self._on_stop = None
            self._wake.set()
            waiter.join()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.received = number
        # The kernel ends the process at the second signal: no Python has to run, wherever the main thread waits.
        for each in self._before:
            signal.signal(each, signal.SIG_DFL)
        if self._on_stop is None:
            raise _EndHereError
        self._wake.set()

    def _wait(self) -> None:
        self._wake.wait()
        on_stop = self._on_stop
        if self.received is not None and on_stop is not None:
            on_stop(f"signal {self._name()}")

    def _name(self) -> str:
        return signal.Signals(self.received or signal.SIGINT).name
