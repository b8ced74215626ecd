"""Writing folders and files so that a crash leaves either the whole thing or nothing.

A folder is written under `.NAME.partial` beside its final place, synced and renamed. The lock on that folder dies with
the process that holds it, so what a killed run left behind is told apart from one that is still at work.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from draftline.errors import UserError

_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_NO_ACCESS = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR}
    | {errno.ENOENT, errno.EEXIST, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.EIO}
)
_NO_LOCKS = frozenset({errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK})  # file systems that know no locks


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn a full or unwritable disk into one line for the user (UserError); other errors pass through."""
    try:
        yield
    except OSError as error:
        if error.errno in _NO_SPACE:
            raise UserError(
                "no space left to write", where=str(path), mend="free space or choose another disk"
            ) from None
        if error.errno in _NO_ACCESS:
            reason = os.strerror(error.errno or 0)
            raise UserError(f"cannot write ({reason})", where=str(path), mend="choose another output folder") from None
        raise


def sync_file(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text_atomic(path: Path, text: str) -> None:
    """Replace a small text file as a whole: temporary name, fsync, rename, fsync of the folder.

    Raises:
        UserError: it cannot be written; then the file is as it was, and nothing lies beside it.
    """
    temporary = path.with_name(f".{path.name}.partial")
    with disk_errors(path):
        try:
            with temporary.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        sync_file(path.parent)


def locked_file(path: Path, busy: UserError) -> BinaryIO:
    """Opens a file of its own for a lock, and locks it until it is closed or the process ends, however it ends.

    Raises:
        UserError: `busy`, if another process holds it.
        OSError: it cannot be made.
    """
    file = path.open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise busy from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            file.close()
            raise
    return file


def require_unused(output: Path) -> None:
    """Raises UserError if an output folder already holds something."""
    if output.is_dir() and not any(output.iterdir()):
        return
    if output.exists():
        raise UserError("the output folder already holds another run", where=str(output), mend="choose a new folder")


def require_writable_file(path: Path) -> None:
    """Make the folders above a file that will be written later, and refuse a place where that cannot work.

    Raises:
        UserError: `path` is a folder, or nothing can be made beside it.
    """
    if path.is_dir():
        raise UserError("is a folder, not a file", where=str(path), mend="choose another output")
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass


class StagingFolder:
    """A folder that appears at `output` whole and synced when `publish` is called, or not at all.

    Raises:
        UserError: `output` holds another run, another process is writing to it, or it cannot be written.
    """

    def __init__(self, output: Path) -> None:
        self.output = output
        self.path = output.with_name(f".{output.name}.partial")
        self._descriptor: int | None = None

    def __enter__(self) -> Self:
        with disk_errors(self.output):
            require_unused(self.output)
            self.path.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self.path, os.O_RDONLY)
            self._lock(self._descriptor)
            for entry in self.path.iterdir():  # left by a run that was killed
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._descriptor is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            self._release()

    def publish(self) -> None:
        """Sync all files and rename the folder to its final name."""
        with disk_errors(self.output):
            for root, _, names in os.walk(self.path):
                for name in names:
                    sync_file(Path(root, name))
                sync_file(Path(root))
            require_unused(self.output)
            self.path.rename(self.output)
            sync_file(self.output.parent)
        self._release()

    def _lock(self, descriptor: int) -> None:
        busy = UserError(
            "another process is writing to this folder", where=str(self.output), mend="choose a new folder"
        )
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._release()
            raise busy from None
        held, named = os.fstat(descriptor), self.path.stat() if self.path.exists() else None
        if named is None or (held.st_dev, held.st_ino) != (named.st_dev, named.st_ino):
            self._release()  # the other process published between our open and our lock
            raise busy

    def _release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
