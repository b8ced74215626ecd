"""The output folder of a run: who may write into it, and whether a resumed run is still the same run.

config.yaml      resolved configuration
run.json         fingerprints of data and target, drafter spec
events.jsonl, metrics.jsonl, status.json    the monitor's
checkpoints/     see checkpoint.py
export/          the finished drafter, z-lab format
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from draftline.config.load import config_differences, dump_config, load_config
from draftline.errors import UserError
from draftline.pipeline.checkpoint import Checkpoint, latest_checkpoint, read_checkpoint
from draftline.pipeline.runplan import RunPlan


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A claimed output folder.

    Attributes:
        path: the folder.
        checkpoint: where a resumed run goes on, or None for a new run.
        passed_over: one line for each newer checkpoint that was not whole.
    """

    path: Path
    checkpoint: Checkpoint | None
    passed_over: tuple[str, ...] = ()


def claim_run_folder(plan: RunPlan, *, target_fingerprint: str, resume: bool) -> RunFolder:
    """Makes or reopens the run's folder.

    Raises:
        UserError: the folder holds another run, or a resumed run would not be the same run (both values are named).
    """
    path = plan.config.output
    identity = {"data": plan.dataset.manifest.fingerprint, "target": target_fingerprint}
    config_file = path / "config.yaml"
    if not resume:
        _require_empty(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            _write(path / "run.json", json.dumps({"fingerprints": identity, "spec": plan.spec.model_dump(mode="json")}))
            _write(config_file, dump_config(plan.config))
        except OSError as error:
            raise UserError(f"cannot be written ({error.strerror})", where=str(path)) from error
        return RunFolder(path, None)
    if not config_file.exists():
        raise UserError("holds no run to resume", where=str(path), mend="leave out --resume to start one")
    _refuse_changes(plan, path, identity)
    found = latest_checkpoint(path)
    if found is None:
        return RunFolder(path, None, ("no checkpoint yet: the run starts from its first row",))
    return RunFolder(path, read_checkpoint(found[0]), tuple(found[1]))


def _require_empty(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise UserError("is not a folder", where=str(path), mend="choose another output")
    if path.exists() and any(path.iterdir()):
        raise UserError("holds another run", where=str(path), mend="use --resume to go on with it, or another output")


def _refuse_changes(plan: RunPlan, path: Path, identity: dict[str, str]) -> None:
    before = load_config([path / "config.yaml"])
    changed = [f"{field} was {old!r}, is {new!r}" for field, old, new in config_differences(before, plan.config)]
    stored = json.loads((path / "run.json").read_text(encoding="utf-8"))["fingerprints"]
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


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as handle:
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(temporary, path)
