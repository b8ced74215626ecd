"""The output folder of a run: who may write into it, and whether a resumed run is still the same run.

config.yaml      resolved configuration
run.json         fingerprints of data and target, drafter spec, versions of what started the run
events.jsonl, metrics.jsonl, status.json    the monitor's
checkpoints/     see checkpoint.py
export/          the finished drafter, z-lab format
failures.log, stacks.txt    tracebacks of failed workers, and where each thread stood when the run stalled
run.lock         held, by the operating system, as long as a process writes here
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import BinaryIO

import torch

from draftline.config.load import config_differences, dump_config, load_config
from draftline.data.storage import locked_file
from draftline.errors import UserError
from draftline.pipeline.checkpoint import Checkpoint, latest_checkpoint, list_checkpoints, read_checkpoint
from draftline.pipeline.runplan import RunPlan

CONFIG_FILE, IDENTITY_FILE, LOCK_FILE = "config.yaml", "run.json", "run.lock"
FAILURES_FILE, STACKS_FILE = "failures.log", "stacks.txt"
# Written before the configuration, whose presence makes the folder a run: a start killed in between left nothing else.
_BEFORE_START = {LOCK_FILE, IDENTITY_FILE, f"{IDENTITY_FILE}.tmp", f"{CONFIG_FILE}.tmp"}
_MOST_IDENTITY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A claimed output folder.

    Attributes:
        path: the folder.
        checkpoint: where a resumed run goes on, or None for a new run.
        passed_over: one line for each newer checkpoint that was not whole.
        lock: locked until `close`, or until the process ends, however it ends.
        is_new: claimed for a new run, empty before.
    """

    path: Path
    checkpoint: Checkpoint | None
    passed_over: tuple[str, ...] = ()
    lock: BinaryIO | None = None
    is_new: bool = False

    def close(self) -> None:
        """Lets another process write here. Safe to call twice."""
        if self.lock is not None:
            self.lock.close()


def check_run_folder(plan: RunPlan, *, resume: bool) -> None:
    """What `claim_run_folder` would refuse, as far as it can be told before the target is loaded. Leaves nothing.

    Raises:
        UserError: as `claim_run_folder`.
    """
    path = plan.config.output
    try:
        if not resume:
            _require_empty(path)
            with tempfile.TemporaryFile(dir=next(p for p in (path, *path.absolute().parents) if p.exists())):
                return
        if not (path / CONFIG_FILE).exists():
            raise UserError("holds no run to resume", where=str(path), mend="leave out --resume to start one")
        _refuse_changes(plan, path, {"data": plan.dataset.manifest.fingerprint})
    except OSError as error:
        raise UserError(f"cannot be used ({error.strerror})", where=str(path), mend="choose another output") from error


@contextmanager
def undone_if_refused(folder: RunFolder) -> Iterator[None]:
    """Bad input that shows only after the folder was claimed leaves nothing in it, so that the mended run can start."""
    try:
        yield
    except UserError:
        if folder.is_new and not list_checkpoints(folder.path):
            for entry in folder.path.iterdir():
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
            with suppress(OSError):  # a folder that the disk needs, for example a mount point, stays
                folder.path.rmdir()
        raise


def claim_run_folder(plan: RunPlan, *, target_fingerprint: str, resume: bool) -> RunFolder:
    """Makes or reopens the run's folder.

    Raises:
        UserError: the folder holds another run, or a resumed run would not be the same run (both values are named).
    """
    path = plan.config.output
    identity = {"data": plan.dataset.manifest.fingerprint, "target": target_fingerprint}
    check_run_folder(plan, resume=resume)
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = _lock(path / LOCK_FILE)
        if not resume:
            content = {"fingerprints": identity, "spec": plan.spec.model_dump(mode="json"), "versions": versions()}
            _write(path / IDENTITY_FILE, json.dumps(content))
            _write(path / CONFIG_FILE, dump_config(plan.config))
            return RunFolder(path, None, lock=lock, is_new=True)
    except OSError as error:
        raise UserError(f"cannot be written ({error.strerror})", where=str(path)) from error
    _refuse_changes(plan, path, identity)
    found = latest_checkpoint(path)
    if found is None:
        return RunFolder(path, None, ("no checkpoint yet: the run starts from its first row",), lock)
    return RunFolder(path, read_checkpoint(found[0]), tuple(found[1]), lock)


def _lock(path: Path) -> BinaryIO:
    """The lock dies with the process that holds it, so a killed run can be resumed at once."""
    mend = "wait for it, or choose another output"
    return locked_file(path, UserError("another process writes to this run", where=str(path.parent), mend=mend))


def _require_empty(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise UserError("is not a folder", where=str(path), mend="choose another output")
    if path.exists() and any(entry.name not in _BEFORE_START for entry in path.iterdir()):
        raise UserError("holds another run", where=str(path), mend="use --resume to go on with it, or another output")


def _refuse_changes(plan: RunPlan, path: Path, identity: dict[str, str]) -> None:
    before = load_config([path / CONFIG_FILE])
    changed = [f"{field} was {old!r}, is {new!r}" for field, old, new in config_differences(before, plan.config)]
    stored = read_identity(path)
    changed += [
        f"{what} fingerprint was {stored.get(what)}, is {now}"
        for what, now in identity.items()
        if stored.get(what) != now
    ]
    if changed:
        raise UserError(
            f"a resumed run must be the same run: {'; '.join(changed)}",
            where=str(path),
            mend="give the old values, or start a new run in another folder",
        )


def read_identity(path: Path) -> dict[str, str]:
    """Fingerprints of the data and the target that a run was started with.

    Raises:
        UserError: the file is missing or is not what a run writes.
    """
    file, mend = path / IDENTITY_FILE, "restore the file, or start a new run in another folder"
    try:
        if file.stat().st_size > _MOST_IDENTITY_BYTES:
            raise UserError("is far too large", where=str(file), mend=mend)
        stored = json.loads(file.read_bytes())["fingerprints"]
    except OSError as error:
        raise UserError(f"cannot be read ({error.strerror})", where=str(file), mend=mend) from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"holds no fingerprints ({error!r})", where=str(file), mend=mend) from error
    if not isinstance(stored, dict):
        raise UserError("holds no fingerprints", where=str(file), mend=mend)
    return {str(name): str(value) for name, value in stored.items()}


def versions() -> dict[str, str]:
    """Of draftline, Python, the libraries that compute, and the GPUs that are here."""
    found = {"python": platform.python_version()}
    for name in ("draftline", "torch", "transformers", "triton"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return found | ({"gpus": ", ".join(gpus)} if gpus else {})


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as handle:
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(temporary, path)
