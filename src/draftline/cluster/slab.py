"""Slots of shared memory: one file a host and run, mapped by every worker there.

consumes     slot numbers, which the queue hands out with leases; among all admitted rows no two have the same
produces     memory that a target writes and a drafter on the same host reads in place; nothing is allocated twice
frees        the file goes with the last process that closes it. Each holds a shared lock on it, which the system drops
             however the process ends; whoever opens a slab removes files that nobody holds any more
"""

from __future__ import annotations

import fcntl
import mmap
import os
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from draftline.errors import RunFailedError

FOLDER = Path("/dev/shm")
PREFIX = "draftline-slab-"


class Slab:
    """Slots of one host.

    Args:
        name: of the run and the host; equal names on one host are one slab.
        n_slots, n_bytes: slots, and bytes of each; a multiple of the page size.
        folder: where shared memory is mounted.

    Raises:
        RunFailedError: the file cannot be made.
    """

    def __init__(self, name: str, n_slots: int, n_bytes: int, folder: Path = FOLDER) -> None:
        self.path, self.n_slots, self.n_bytes = folder / f"{PREFIX}{name}", n_slots, n_bytes
        self._reserved: set[int] = set()
        remove_abandoned(folder)
        try:
            self._file = self._open()
            os.ftruncate(self._file, n_slots * n_bytes)
            self._map = mmap.mmap(self._file, n_slots * n_bytes)
        except OSError as error:
            raise RunFailedError(f"{self.path}: {error.strerror}", origin="row transport") from error

    def _open(self) -> int:
        """Locked for as long as it is open; tried again if it was removed between opening and locking."""
        while True:
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(file, fcntl.LOCK_SH)
            if os.fstat(file).st_nlink:
                return file
            os.close(file)

    def slot(self, number: int) -> Tensor:
        """uint8 [n_bytes], the memory itself."""
        if not 0 <= number < self.n_slots:
            raise RunFailedError(f"slot {number} of {self.n_slots} does not exist", origin="row transport")
        return torch.frombuffer(self._map, dtype=torch.uint8, count=self.n_bytes, offset=number * self.n_bytes)

    def reserve(self, number: int) -> None:
        """Takes the slot's memory now: writing to a mapped file on a full disk would end the process instead.

        Raises:
            RunFailedError: there is no room for it.
        """
        if number in self._reserved:
            return
        try:
            os.posix_fallocate(self._file, number * self.n_bytes, self.n_bytes)
        except OSError as error:
            raise RunFailedError(
                f"{self.path.parent} has no room for slot {number} of {self.n_bytes} bytes ({error.strerror}); "
                "give it more memory or set cluster.transport: objects",
                origin="row transport",
            ) from error
        self._reserved.add(number)

    def close(self) -> None:
        """Removes the file if nobody else holds it. Memory that is still in use stays mapped."""
        with suppress(OSError):
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.path.unlink(missing_ok=True)
        with suppress(OSError):
            os.close(self._file)


def remove_abandoned(folder: Path = FOLDER) -> int:
    """Removes slabs that no process holds (their run was killed); returns how many."""
    removed = 0
    for path in folder.glob(f"{PREFIX}*"):
        try:
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            removed += 1
        except OSError:
            pass  # in use, or another user's
        finally:
            os.close(file)
    return removed
