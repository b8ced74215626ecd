"""Folders written whole or not at all, and weights read with care."""

from __future__ import annotations

import glob
import json
import os
import shutil
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors import SafetensorError, safe_open

from draftline.errors import UserError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64", "F8_E4M3": "float8_e4m3fn"}
_NEW, _OLD = ".tmp", ".old"  # suffixes of folders on their way
_MOST_NAME = 255  # of a file's name, anywhere


@contextmanager
def whole_folder(path: Path, *, replaces: str) -> Iterator[Path]:
    """A temporary folder beside `path` that takes its name when the block ends well, and vanishes when it does not.

    Args:
        path: must not exist, be empty, or be an earlier folder of the same kind.
        replaces: file that marks a folder of the same kind.

    Raises:
        UserError: `path` holds something else.
    """
    path = path.expanduser()
    if path.is_symlink():
        path = path.resolve()  # the folder is replaced, not the link to it
    _tidy(path)
    refuse_foreign(path, marker=replaces)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        prefix = f".{path.name}.{os.getpid()}-"
        temporary = Path(tempfile.mkdtemp(prefix=prefix, suffix=_NEW, dir=path.parent))
    except OSError as error:
        reason = error.strerror
        raise UserError(f"cannot be written ({reason})", where=str(path), mend="choose another folder") from error
    try:
        yield temporary
        os.chmod(temporary, 0o755)
        _sync_files(temporary)
        if path.exists():
            aside = temporary.with_suffix(_OLD)
            os.replace(path, aside)  # whole under another name until the new one stands, whenever a kill comes
            os.replace(temporary, path)
            shutil.rmtree(aside)
        else:
            os.replace(temporary, path)
    except (SafetensorError, OSError) as error:  # safetensors has no other way to tell that the disk is full
        _undo(temporary, path)
        raise UserError(f"cannot be written ({error})", where=str(path), mend="free space or choose another") from error
    except BaseException:
        _undo(temporary, path)
        raise


def _undo(temporary: Path, path: Path) -> None:
    shutil.rmtree(temporary, ignore_errors=True)
    _tidy(path)


def _tidy(path: Path) -> None:
    """Takes away what killed writers of this folder left, and gives an old folder its name back if no new one came."""
    for left in [] if not path.parent.is_dir() else path.parent.glob(f".{glob.escape(path.name)}.*"):
        pid, dash, _ = left.name.removeprefix(f".{path.name}.").partition("-")
        if left.suffix not in (_NEW, _OLD) or not dash or not pid.isdigit():
            continue
        if int(pid) != os.getpid() and psutil.pid_exists(int(pid)):
            continue
        if left.suffix == _OLD and not path.exists():
            os.replace(left, path)
        else:
            shutil.rmtree(left, ignore_errors=True)


def refuse_foreign(path: Path, *, marker: str) -> None:
    """Raises UserError if `path` is a file, or a folder with other content than ours."""
    if path.is_file():
        raise UserError("is a file", where=str(path), mend="choose another output folder")
    if path.is_dir() and any(path.iterdir()) and not (path / marker).is_file():
        raise UserError(f"is not empty and holds no {marker}", where=str(path), mend="choose another output folder")


def _sync_files(folder: Path) -> None:
    for file in folder.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def read_json(path: Path) -> dict[str, Any]:
    """Raises UserError if the file is missing, not JSON, or not an object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError("no such file", where=str(path), mend="give the folder of a drafter") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"is not JSON ({error})", where=str(path), mend="export again") from error
    if not isinstance(content, dict):
        raise UserError("is not a JSON object", where=str(path), mend="export again")
    return content


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write an indented JSON file."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_weights(folder: Path, names: Collection[str] | None = None) -> dict[str, torch.Tensor]:
    """The tensors of a folder by name, in shape and dtype as stored, from one file or several.

    Args:
        names: only these, where they are there; None: all.

    Raises:
        UserError: no weights, a broken file, or a tensor in two files.
    """
    weights: dict[str, torch.Tensor] = {}
    for file, handle, keys in _opened(folder):
        with _broken(file):
            weights |= {key: handle.get_tensor(key) for key in keys if names is None or key in names}
    return weights


def read_headers(folder: Path) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """(shapes, dtypes) of a folder's tensors by name, without their numbers. Errors as for `read_weights`."""
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, str] = {}
    for file, handle, keys in _opened(folder):
        with _broken(file):
            for name in keys:
                part = handle.get_slice(name)
                kind = part.get_dtype()
                shapes[name], dtypes[name] = tuple(part.get_shape()), _DTYPES.get(kind, str(kind))
    return shapes, dtypes


def _opened(folder: Path) -> Iterator[tuple[Path, Any, list[str]]]:
    """The files of a folder one after the other, each with the names in it."""
    where: dict[str, str] = {}
    for file in weight_files(folder):
        with _broken(file):
            handle = safe_open(file, framework="pt")
            keys = list(handle.keys())
        twice = next((key for key in keys if key in where), None)
        if twice is not None:
            raise UserError(
                f"{twice} is in {where[twice]} and in {file.name}", where=str(folder), mend="keep the right one of them"
            )
        where |= dict.fromkeys(keys, file.name)
        yield file, handle, keys


@contextmanager
def _broken(file: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"broken file ({error})", where=str(file), mend="download or export it again") from error


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, one or several.

    Raises:
        UserError: a file is missing, lies elsewhere, or the index is none.
    """
    names = [WEIGHTS]
    if (folder / INDEX).is_file():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise UserError("holds no weight_map", where=str(folder / INDEX), mend="download or export it again")
        names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name or len(name) > _MOST_NAME or not (folder / name).is_file():
            raise UserError("no such file", where=str(folder / name), mend="download or export the drafter again")
    return [folder / name for name in names]
