"""SIGTERM as a polite end: what is half-written goes away, as it does after Ctrl-C."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from draftline.errors import RunStoppedError


class _TerminatedError(KeyboardInterrupt):
    """Raised by the handler in the main thread; no `except Exception` of a library may swallow it."""


@contextmanager
def unwound_by_sigterm(what: str) -> Iterator[None]:
    """While the body runs in the main thread, SIGTERM unwinds it; a second one ends the process at once.

    Args:
        what: for the message, for example "prepare".

    Raises:
        RunStoppedError: SIGTERM came.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        del frame
        signal.signal(number, signal.SIG_DFL)
        raise _TerminatedError

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    except _TerminatedError:
        message = f"{what} was stopped by SIGTERM; nothing was written"
        raise RunStoppedError(message, signal_number=signal.SIGTERM) from None
    finally:
        signal.signal(signal.SIGTERM, before)
