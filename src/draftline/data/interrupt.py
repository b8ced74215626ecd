"""SIGINT and SIGTERM as a polite end: what is half-written goes away, and one line says so."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from draftline.errors import RunStoppedError

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class _StoppedHereError(KeyboardInterrupt):
    """Raised by the handler in the main thread; no `except Exception` of a library may swallow it."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__()


@contextmanager
def unwound_by_signals(what: str) -> Iterator[None]:
    """While the body runs in the main thread, the first signal unwinds it, and the second ends the process at once.

    Args:
        what: for the message, for example "prepare".

    Raises:
        RunStoppedError: a signal came.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        del frame
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        raise _StoppedHereError(number)

    before = {number: signal.signal(number, handle) for number in _SIGNALS}
    try:
        yield
    except _StoppedHereError as stop:
        name = signal.Signals(stop.number).name
        raise RunStoppedError(f"{what} was stopped by {name}; nothing was written", signal_number=stop.number) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
