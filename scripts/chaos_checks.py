"""What must be left of a run after a kill, read without any code of the project."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

Entries = set[tuple[str, int, int]]


class BrokenPromiseError(Exception):
    """Something that a kill must never do was found."""


def entries(run: Path) -> Entries:
    """Folders below `checkpoints/`, each with what tells it from an earlier one of the same name."""
    found = set()
    try:
        with os.scandir(run / "checkpoints") as folders:
            for entry in folders:
                if entry.is_dir():
                    stat = entry.stat()
                    found.add((entry.name, stat.st_ino, stat.st_ctime_ns if entry.name.startswith("round-") else 0))
    except FileNotFoundError:  # not begun, or renamed while we looked
        return found
    return found


def being_written(names: Entries) -> bool:
    return any(name.startswith(".tmp-round-") for name, _, _ in names)


def check_checkpoint(folder: Path) -> set[int]:
    """Every file is what the manifest says, and the ledger adds up; returns the committed rows."""
    try:
        files = json.loads((folder / "manifest.json").read_bytes())["files"]
        present = {path.name for path in folder.iterdir()} - {"manifest.json"}
        if present != set(files) or "weights.safetensors" not in files:
            raise BrokenPromiseError(f"{folder.name} holds {sorted(present)}, its manifest names {sorted(files)}")
        for name, facts in files.items():
            if hashlib.sha256((folder / name).read_bytes()).hexdigest() != facts["sha256"]:
                raise BrokenPromiseError(f"{folder.name}/{name} is not what its manifest says")
        ledger = json.loads((folder / "state.json").read_bytes())["ledger"]
    except (OSError, ValueError, KeyError) as error:
        raise BrokenPromiseError(f"{folder.name} is unreadable: {error!r}") from error
    rows = [row for a, b in ledger["committed"] for row in range(int(a), int(b))]
    if len(set(rows)) != len(rows) or len(rows) != ledger["n_committed"] or ledger["n_set_aside"] != 0:
        raise BrokenPromiseError(f"{folder.name}: the ledger's rows are not unique or not counted: {ledger}")
    if ledger["planned"] != len(rows) + ledger["in_flight"] + ledger["remaining"]:
        raise BrokenPromiseError(f"{folder.name}: the ledger does not add up: {ledger}")
    return set(rows)


def check_run(run: Path) -> tuple[int, set[int]]:
    """Every checkpoint is whole, and `latest.json` names one of them. Returns their number and the committed rows."""
    folders = sorted(run.glob("checkpoints/round-*"))
    rows: set[int] = set()
    for folder in folders:
        newer = check_checkpoint(folder)
        if not newer >= rows:
            raise BrokenPromiseError(f"{folder.name} lost rows that an older checkpoint had committed")
        rows = newer
    latest = run / "checkpoints" / "latest.json"
    if latest.exists():
        named = json.loads(latest.read_bytes())["name"]
        if named not in [folder.name for folder in folders]:
            raise BrokenPromiseError(f"latest.json names {named}, which is not there")
    return len(folders), rows


def check_end(run: Path, weights_sha256: str) -> None:
    """A run that ended by itself: all rows once, the weights of the unbroken run, and an export."""
    folders = sorted(run.glob("checkpoints/round-*"))
    ledger = json.loads((folders[-1] / "state.json").read_bytes())["ledger"]
    if ledger["committed"] != [[0, ledger["planned"]]]:
        raise BrokenPromiseError(f"{run.name} ended with {ledger}")
    if not (run / "export" / "model.safetensors").exists():
        raise BrokenPromiseError(f"{run.name} ended without an export")
    if weights_sha256 and weights_of(run) != weights_sha256:
        raise BrokenPromiseError(f"{run.name} ended with other weights than the run that nobody killed")


def weights_of(run: Path) -> str:
    last = sorted(run.glob("checkpoints/round-*"))[-1]
    return hashlib.sha256((last / "weights.safetensors").read_bytes()).hexdigest()
