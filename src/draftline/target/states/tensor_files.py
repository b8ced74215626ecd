"""Files of tensors in a folder of states, each whole under its name or not there."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from draftline.data.storage import disk_errors
from draftline.errors import UserError


def save_whole(tensors: Mapping[str, torch.Tensor], path: Path) -> tuple[int, str]:
    """Writes tensors of any shapes under another name, syncs the file, and gives it its name.

    Returns:
        (bytes, sha256) of the file.

    Raises:
        UserError: the disk is full, or cannot be written to.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with disk_errors(path.parent):
            save_file(dict(tensors), temporary)
            n_bytes, digest = temporary.stat().st_size, sha256_of(temporary)
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(temporary, path)
    except SafetensorError as error:  # it has no other way to tell that the disk is full
        temporary.unlink(missing_ok=True)
        raise UserError(f"cannot be written ({error})", where=str(path.parent), mend="free space") from error
    return n_bytes, digest


def sha256_of(path: Path) -> str:
    """Hash of a whole file, as hex."""
    with path.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
