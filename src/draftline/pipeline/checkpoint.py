"""Training checkpoints: written whole or not at all, hashed, verified on load. safetensors and JSON only.

A checkpoint is a folder `checkpoints/round-000042/`:
    weights.safetensors     fp32 masters (all drafters hold the same at a commit)
    moments-<d>.safetensors AdamW state, one file per drafter where they differ, one in all where they do not
    sync.safetensors        state of the outer optimizer, if any
    state.json              ledger, drafter spec, configuration, fingerprints
    manifest.json           size and sha256 of each file above; written last
It is made under a temporary name, synced to disk and renamed; `checkpoints/latest.json` is moved after that; old
checkpoints are deleted last, after they were renamed, so that a kill never leaves half a checkpoint under its name.
A cut or changed file is found by its hash. One process writes to a run (see run_folder.py), so every temporary name
found is a leftover.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftline.errors import DraftlineError, UserError

SCHEMA_VERSION = 1
_NAME = re.compile(r"round-(\d{8})")
_REQUIRED = ("state.json", "weights.safetensors")
_MOST_MANIFEST_BYTES, _MOST_STATE_BYTES = 1 << 20, 256 << 20
_log = logging.getLogger(__name__)


class CheckpointError(DraftlineError):
    """A checkpoint that is not whole, or was written by something newer."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Contents of a training checkpoint, on the CPU.

    Attributes:
        state: JSON part: `round_id`, `ledger`, `spec`, `config`, `fingerprints`.
        weights: fp32 masters by parameter name.
        moments: one mapping per drafter, or a single one when all were equal.
        sync: tensors of the synchronizer.
    """

    state: dict[str, Any]
    weights: dict[str, Tensor]
    moments: list[dict[str, Tensor]]
    sync: dict[str, Tensor]


def checkpoint_root(run: Path) -> Path:
    """Where a run keeps its checkpoints."""
    return run / "checkpoints"


def write_checkpoint(run: Path, round_id: int, checkpoint: Checkpoint, *, keep: int) -> Path:
    """Writes one checkpoint and makes it the latest. Returns its folder.

    Raises:
        UserError: the disk is full or not writable; the earlier checkpoints are untouched then.
    """
    root = checkpoint_root(run)
    final = root / f"round-{round_id:08d}"
    temporary = root / f".tmp-{final.name}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        _remove(temporary)
        temporary.mkdir()
        _write_files(temporary, checkpoint)
        _set_leaving(final)
        os.rename(temporary, final)
        _sync_folder(root)
        _write_json(root / ".latest.tmp", {"name": final.name})
        os.replace(root / ".latest.tmp", root / "latest.json")
        _sync_folder(root)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise UserError(
            f"checkpoint of round {round_id} could not be written ({error})",
            where=str(root),
            mend="free some space; earlier checkpoints are untouched, and the run can be resumed from them",
        ) from error
    _delete_old(root, keep=keep)
    return final


def _write_files(folder: Path, checkpoint: Checkpoint) -> None:
    _save(folder / "weights.safetensors", checkpoint.weights)
    for i, moments in enumerate(checkpoint.moments):
        _save(folder / f"moments-{i}.safetensors", moments)
    if checkpoint.sync:
        _save(folder / "sync.safetensors", checkpoint.sync)
    _write_json(folder / "state.json", {"schema_version": SCHEMA_VERSION, **checkpoint.state})
    files = {p.name: {"bytes": p.stat().st_size, "sha256": _sha256(p)} for p in sorted(folder.iterdir())}
    _write_json(folder / "manifest.json", {"schema_version": SCHEMA_VERSION, "files": files})
    _sync_folder(folder)


def _save(path: Path, tensors: Mapping[str, Tensor]) -> None:
    save_file({k: v.detach().to("cpu").contiguous() for k, v in tensors.items()}, path)
    with path.open("rb") as handle:
        os.fsync(handle.fileno())


def _write_json(path: Path, value: Any) -> None:
    with path.open("w", encoding="utf-8") as handle:
        json.dump(value, handle)
        handle.flush()
        os.fsync(handle.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def _set_leaving(folder: Path) -> None:
    """Renames a checkpoint that is to be deleted: one that is half deleted must not bear a checkpoint's name."""
    if folder.exists():
        leaving = folder.with_name(f".tmp-old-{folder.name}")
        _remove(leaving)
        os.rename(folder, leaving)


def list_checkpoints(run: Path) -> list[Path]:
    """Checkpoint folders of a run, oldest first (whole or not)."""
    root = checkpoint_root(run)
    if not root.is_dir():
        return []
    return sorted(p for p in root.iterdir() if p.is_dir() and _NAME.fullmatch(p.name))


def _delete_old(root: Path, *, keep: int) -> None:
    """What cannot be deleted now (a file held open on a network disk) is tried again at the next checkpoint."""
    whole = [p for p in list_checkpoints(root.parent) if (p / "manifest.json").exists()]
    for old in whole[:-keep]:
        try:
            _set_leaving(old)
        except OSError as error:
            _log.warning("%s cannot be deleted now: %s", old, error.strerror)
    for leftover in root.glob(".tmp-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def verify_checkpoint(folder: Path) -> None:
    """Checks every file's size and hash.

    Raises:
        CheckpointError: names the file and what is wrong.
    """
    for name, (n_bytes, sha256) in _read_manifest(folder).items():
        path = folder / name
        try:
            if not path.is_file():
                raise CheckpointError(f"{path}: missing")
            if path.stat().st_size != n_bytes:
                raise CheckpointError(f"{path}: {path.stat().st_size} bytes, expected {n_bytes} (cut off?)")
            if _sha256(path) != sha256:
                raise CheckpointError(f"{path}: content does not match its hash")
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error


def _read_manifest(folder: Path) -> dict[str, tuple[int, str]]:
    """Size and hash of each file; names are plain names, so nothing outside the folder is ever looked at."""
    path = folder / "manifest.json"
    manifest = _read_json(path, _MOST_MANIFEST_BYTES)
    version, files = manifest.get("schema_version"), manifest.get("files")
    if not isinstance(version, int) or not isinstance(files, dict):
        raise CheckpointError(f"{path}: is not the manifest of a checkpoint")
    if version > SCHEMA_VERSION:
        raise CheckpointError(f"{folder}: written by a newer draftline (schema {version})")
    found: dict[str, tuple[int, str]] = {}
    for name, facts in files.items():
        if Path(name).name != name or "\0" in name:
            raise CheckpointError(f"{path}: names a file outside its folder: {name!r}")
        if not isinstance(facts, dict) or not isinstance(facts.get("bytes"), int):
            raise CheckpointError(f"{path}: no size for {name!r}")
        found[name] = (facts["bytes"], str(facts.get("sha256")))
    if missing := [name for name in _REQUIRED if name not in found]:
        raise CheckpointError(f"{path}: does not name {' and '.join(missing)}")
    return found


def _read_json(path: Path, most_bytes: int) -> dict[str, Any]:
    try:
        if path.stat().st_size > most_bytes:
            raise CheckpointError(f"{path}: more than {most_bytes} bytes")
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: missing or unreadable ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not JSON ({error})") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: is not a JSON object")
    return content


def read_checkpoint(folder: Path) -> Checkpoint:
    """Verifies and reads one checkpoint.

    Raises:
        CheckpointError: it is not whole, or its files are not what a checkpoint holds.
    """
    verify_checkpoint(folder)
    names = _read_manifest(folder)
    state = read_state(folder)
    moments: list[dict[str, Tensor]] = []
    while (name := f"moments-{len(moments)}.safetensors") in names:
        moments.append(_load(folder / name))
    sync = "sync.safetensors"
    return Checkpoint(
        state, _load(folder / "weights.safetensors"), moments, _load(folder / sync) if sync in names else {}
    )


def read_state(folder: Path) -> dict[str, Any]:
    """The JSON part of a checkpoint, which holds a `ledger`.

    Raises:
        CheckpointError: it is not what a checkpoint holds.
    """
    state = _read_json(folder / "state.json", _MOST_STATE_BYTES)
    if not isinstance(state.get("ledger"), dict):
        raise CheckpointError(f"{folder / 'state.json'}: holds no ledger")
    return state


def _load(path: Path) -> dict[str, Tensor]:
    try:
        return dict(load_file(path))
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path}: is not a safetensors file ({error})") from error


def latest_checkpoint(run: Path) -> tuple[Path, list[str]] | None:
    """The newest whole checkpoint of a run, and one line for each newer one that had to be passed over.

    Returns None if the run has no checkpoint at all.

    Raises:
        UserError: there are checkpoints, but none is whole.
    """
    folders = list_checkpoints(run)
    problems = []
    for folder in reversed(folders):
        try:
            verify_checkpoint(folder)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        return folder, problems
    if problems:
        raise UserError(
            f"no checkpoint is whole: {'; '.join(problems)}", where=str(run), mend="start the run in a new folder"
        )
    return None
