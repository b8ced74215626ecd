"""What a source file is, told by its first bytes: names lie, and a packed file read as text gives a riddle."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Literal, cast
from zlib import error as BrokenStreamError

from draftline.errors import UserError

Kind = Literal["lines", "gzip", "parquet"]

_HEAD_BYTES = 32
_UNPACK = "unpack it first"
_SIGNATURES: tuple[tuple[bytes, str, str], ...] = (  # first bytes, what it is, mend
    (b"\x28\xb5\x2f\xfd", "packed by zstd", _UNPACK),
    (b"BZh", "packed by bzip2", _UNPACK),
    (b"\xfd7zXZ", "packed by xz", _UNPACK),
    (b"PK\x03\x04", "a zip archive", _UNPACK),
    (b"ARROW1", "an Arrow file", "read it as hf:FILE, or write JSON lines or Parquet"),
    (b"\xff\xfe", "UTF-16 text", "save it as UTF-8"),
    (b"\xfe\xff", "UTF-16 text", "save it as UTF-8"),
    (b"version https://git-lfs", "a Git LFS pointer, not the data", "fetch the data with `git lfs pull`"),
)


def source_kind(path: Path) -> Kind:
    """How a file is to be read.

    Raises:
        UserError: it cannot be read, or is of a known other kind.
    """
    if path.suffix == ".parquet":
        return "parquet"
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError as error:
        raise unreadable(path, error) from None
    for signature, what, mend in _SIGNATURES:
        if head.startswith(signature):
            raise UserError(what, where=str(path), mend=mend)
    if head.startswith(b"\x1f\x8b"):
        return "gzip"
    return "parquet" if head.startswith(b"PAR1") else "lines"


@contextmanager
def opened_lines(path: Path, *, packed: bool) -> Iterator[BinaryIO]:
    """The bytes of a file, unpacked if it is `packed` by gzip.

    Raises:
        UserError: it cannot be read to its end.
    """
    try:
        with gzip.open(path) if packed else path.open("rb") as file:
            yield cast(BinaryIO, file)  # all that is used of either is what both have
    except (EOFError, BrokenStreamError, gzip.BadGzipFile) as error:
        raise UserError(f"damaged or cut off ({error})", where=str(path), mend="copy it anew") from None
    except OSError as error:
        raise unreadable(path, error) from None


def unreadable(path: Path, error: OSError) -> UserError:
    """The refusal of a file that the system does not let us read."""
    return UserError(f"cannot be read ({error.strerror or error})", where=str(path))
