"""SIGTERM and SIGINT: the first asks the run to stop after a checkpoint, the second ends the process at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """Context manager that turns the first signal into one call of `on_stop`, from a thread of its own.

    The handler itself only sets an event: it may run while the main thread holds any lock. Outside the main thread
    (where Python allows no handlers) it does nothing.

    Attributes:
        received: number of the first signal, or None.
    """

    def __init__(self, on_stop: Callable[[str], None]) -> None:
        self._on_stop = on_stop
        self._wake = threading.Event()
        self._before: dict[int, Any] = {}
        self._thread = threading.Thread(target=self._wait, name="stop-signals", daemon=True)
        self.received: int | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._before[number] = signal.signal(number, self._handle)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.received is not None:
            os._exit(128 + number)
        self.received = number
        self._wake.set()

    def _wait(self) -> None:
        self._wake.wait()
        if self.received is not None:
            self._on_stop(f"signal {signal.Signals(self.received).name}")
