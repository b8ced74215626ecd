"""The errors that draftline raises on purpose, and the exit code that each one means.

Everything else that escapes is a fault of draftline itself and keeps its traceback.
"""

from __future__ import annotations


class DraftlineError(Exception):
    """Base of all errors with a message meant for the user. `exit_code` is what the process ends with."""

    exit_code = 1


class UserError(DraftlineError):
    """Bad input: one line that says what is wrong, where, and how to mend it. Exit code 2.

    Args:
        what: what is wrong, without a full stop.
        where: file, line or field; put in front of the message.
        mend: what to do about it; put behind the message.
    """

    exit_code = 2

    def __init__(self, what: str, *, where: str | None = None, mend: str | None = None) -> None:
        self.what, self.where, self.mend = what, where, mend
        line = f"{where}: {what}" if where else what
        super().__init__(f"{line}; {mend}" if mend else line)


class RunFailedError(DraftlineError):
    """A run that ended FAILED. Names the worker, and the row and sample where known. Exit code 1.

    Args:
        reason: what happened.
        origin: the worker in whose hands it happened, for example `target-2`.
    """

    def __init__(self, reason: str, *, origin: str) -> None:
        self.reason, self.origin = reason, origin
        super().__init__(f"{origin}: {reason}")


class RunStoppedError(DraftlineError):
    """A run that was asked to stop and did, after its checkpoint. Exit code 128 + signal number (130 or 143)."""

    def __init__(self, message: str, *, signal_number: int) -> None:
        self.exit_code = 128 + signal_number
        super().__init__(message)
