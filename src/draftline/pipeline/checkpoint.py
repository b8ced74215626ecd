"""Training checkpoints: written whole or not at all, hashed, verified on load. safetensors and JSON only.

A checkpoint is a folder `checkpoints/round-000042/`:
    weights.safetensors     fp32 masters (all drafters hold the same at a commit)
    moments-<d>.safetensors AdamW state, one file per drafter where they differ, one in all where they do not
    sync.safetensors        state of the outer optimizer, if any
    state.json              ledger, drafter spec, configuration, fingerprints
    manifest.json           size and sha256 of each file above; written last
It is made under a temporary name, synced to disk and renamed; `checkpoints/latest.json` is moved after that; old
checkpoints are deleted last. A cut or changed file is found by its hash.
"""

from __future__ import annotations

import hashlib
import json
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
    return run / "checkpoints"


def write_checkpoint(run: Path, round_id: int, checkpoint: Checkpoint, *, keep: int) -> Path:
    """Writes one checkpoint and makes it the latest. Returns its folder.

    Raises:
        UserError: the disk is full or not writable; the earlier checkpoints are untouched then.
    """
    root = checkpoint_root(run)
    final = root / f"round-{round_id:08d}"
    temporary = root / f".tmp-{os.getpid()}-{round_id:08d}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        _remove(temporary)
        temporary.mkdir()
        _write_files(temporary, checkpoint)
        _remove(final)
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


def list_checkpoints(run: Path) -> list[Path]:
    """Checkpoint folders of a run, oldest first (whole or not)."""
    root = checkpoint_root(run)
    if not root.is_dir():
        return []
    return sorted(p for p in root.iterdir() if p.is_dir() and _NAME.fullmatch(p.name))


def _delete_old(root: Path, *, keep: int) -> None:
    whole = [p for p in list_checkpoints(root.parent) if (p / "manifest.json").exists()]
    for old in whole[:-keep]:
        shutil.rmtree(old)
    for leftover in root.glob(".tmp-*"):
        if leftover.name.split("-")[1] != str(os.getpid()):
            shutil.rmtree(leftover)


def verify_checkpoint(folder: Path) -> None:
    """Checks every file's size and hash.

    Raises:
        CheckpointError: names the file and what is wrong.
    """
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        files = manifest["files"]
        if manifest["schema_version"] > SCHEMA_VERSION:
            raise CheckpointError(f"{folder}: written by a newer draftline (schema {manifest['schema_version']})")
        for name, facts in files.items():
            path = folder / Path(name).name
            if not path.is_file():
                raise CheckpointError(f"{path}: missing")
            if path.stat().st_size != facts["bytes"]:
                raise CheckpointError(f"{path}: {path.stat().st_size} bytes, expected {facts['bytes']} (cut off?)")
            if _sha256(path) != facts["sha256"]:
                raise CheckpointError(f"{path}: content does not match its hash")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder}: manifest.json is missing or unreadable ({error})") from error


def read_checkpoint(folder: Path) -> Checkpoint:
    """Verifies and reads one checkpoint.

    Raises:
        CheckpointError: it is not whole.
    """
    verify_checkpoint(folder)
    state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    moments: list[dict[str, Tensor]] = []
    while (path := folder / f"moments-{len(moments)}.safetensors").exists():
        moments.append(load_file(path))
    sync = folder / "sync.safetensors"
    return Checkpoint(
        state, load_file(folder / "weights.safetensors"), moments, load_file(sync) if sync.exists() else {}
    )


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
