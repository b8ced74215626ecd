"""Looks a run folder over for `draftline doctor RUN`: what is there, whether it is whole, and how the run ended.

Only reads. Each finding that is not ok says what to do. Nothing here raises for what a folder holds.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from draftline.config.load import load_config
from draftline.config.schema import RunConfig
from draftline.data.manifest import read_manifest
from draftline.doctor import Finding
from draftline.errors import DraftlineError, UserError
from draftline.export.zlab import load_export
from draftline.monitor.events import read_events
from draftline.monitor.run import EVENTS_FILE
from draftline.monitor.watch import read_status
from draftline.pipeline.checkpoint import (
    CheckpointError,
    checkpoint_root,
    list_checkpoints,
    read_state,
    verify_checkpoint,
)
from draftline.pipeline.core.ledger import LedgerState
from draftline.pipeline.run_folder import CONFIG_FILE, FAILURES_FILE, STACKS_FILE, read_identity

_RESUME = "go on with `draftline train --resume`"
_REFUSED = "restore it from a copy; until then a resume is refused"
_MOST_EVENT_BYTES = 256 << 20


def examine_run(run: Path) -> Iterator[Finding]:
    """All findings about one run folder.

    Raises:
        UserError: it is no run folder.
    """
    if not (run / CONFIG_FILE).is_file() and not checkpoint_root(run).is_dir():
        raise UserError("is no run folder", where=str(run), mend="give the output folder of `draftline train`")
    config = _config(run)
    yield config if isinstance(config, Finding) else Finding("ok", f"{run / CONFIG_FILE} can be read")
    if isinstance(config, RunConfig):
        yield _data(run, config)
    yield from _checkpoints(run)
    ledger = _newest_ledger(run)
    if ledger is not None:
        yield from _ledger(*ledger)
    state = ledger[1] if ledger else None
    complete = isinstance(state, LedgerState) and state.n_committed + state.n_set_aside == state.planned
    if not complete:
        yield from _space(run)
    yield _ending(run, complete=complete)
    yield from _logs(run)
    yield from _exports(run, complete=complete)


def _config(run: Path) -> RunConfig | Finding:
    path = run / CONFIG_FILE
    try:
        return load_config([path])
    except UserError as error:
        first, *others = str(error).splitlines()
        what = first if first.startswith(str(path)) else f"{path}: {first}"
        more = f" (and {len(others)} more)" if others else ""
        mend = f"{_REFUSED}; each checkpoint's state.json holds the same under `config`"
        return Finding("fail", f"{what}{more}", mend)


def _data(run: Path, config: RunConfig) -> Finding:
    try:
        stored = read_identity(run).get("data")
        found = read_manifest(config.data.path).fingerprint
    except UserError as error:
        return Finding("warn", f"data: {error.where}: {error.what}", _REFUSED)
    if stored != found:
        what = f"the data in {config.data.path} changed: fingerprint was {stored}, is {found}"
        return Finding("fail", what, "restore the data the run was started with; a resume would be refused")
    return Finding("ok", f"data {config.data.path} is what the run was started with")


def _checkpoints(run: Path) -> Iterator[Finding]:
    folders, whole = list_checkpoints(run), []
    broken: list[str] = []
    for folder in folders:
        try:
            verify_checkpoint(folder)
            whole.append(folder.name)
        except CheckpointError as error:
            broken.append(str(error))
    if not folders:
        yield Finding("warn", "no checkpoint yet", "a resumed run starts from its first row")
    elif not whole:
        yield Finding("fail", "no checkpoint is whole", f"{_REFUSED}; or start the run in a new folder")
    else:
        yield Finding("ok", f"{len(whole)} whole checkpoints, the newest {whole[-1]}; all hashes right")
    for line in broken:
        mend = "it is passed over at a resume, and may be deleted" if whole else _REFUSED
        yield Finding("warn" if whole else "fail", line, mend)
    if whole:
        yield _pointer(run, whole[-1])
    if leftovers := sorted(path.name for path in checkpoint_root(run).glob(".tmp-*")):
        what = f"{len(leftovers)} checkpoint writes or deletions were cut short ({', '.join(leftovers[:3])})"
        yield Finding("warn", what, "nothing is lost; the next checkpoint of the run removes them")


def _pointer(run: Path, newest: str) -> Finding:
    path = checkpoint_root(run) / "latest.json"
    try:
        content = json.loads(path.read_bytes()[:4096])
        named = content.get("name") if isinstance(content, dict) else None
    except (OSError, ValueError, RecursionError):
        named = None
    if named == newest:
        return Finding("ok", f"latest.json names {newest}")
    mend = "draftline itself goes by the checkpoints, not by this file; the next checkpoint sets it right"
    return Finding("warn", f"latest.json names {named!r}, the newest whole checkpoint is {newest}", mend)


def _newest_ledger(run: Path) -> tuple[Path, LedgerState | str] | None:
    """Of the newest whole checkpoint: its ledger, or why it cannot be read."""
    for folder in reversed(list_checkpoints(run)):
        try:
            verify_checkpoint(folder)
        except CheckpointError:
            continue
        try:
            return folder, LedgerState.from_json(read_state(folder)["ledger"])
        except DraftlineError as error:
            return folder, str(error)
    return None


def _ledger(folder: Path, state: LedgerState | str) -> Iterator[Finding]:
    if isinstance(state, str):
        yield Finding("fail", f"{folder.name}: {state}", "delete this checkpoint and resume from the one before it")
        return
    figures = state.to_json()
    line = (
        f"planned {state.planned} = committed {state.n_committed} + set aside {state.n_set_aside}"
        f" + in flight {state.in_flight} + remaining {figures['remaining']}"
    )
    if figures["remaining"] < 0 or state.in_flight < 0:
        mend = "delete this checkpoint and resume from the one before it"
        yield Finding("fail", f"ledger of {folder.name} does not add up: {line}", mend)
    else:
        yield Finding("ok", f"ledger of {folder.name}: {line}")
    if state.n_set_aside:
        yield Finding("warn", f"{state.n_set_aside} rows were set aside", f"see {FAILURES_FILE} for what they met")


def _ending(run: Path, *, complete: bool) -> Finding:
    traces = [name for name in (FAILURES_FILE, STACKS_FILE) if (run / name).exists()]
    see = f"see {' and '.join(traces)}; then {_RESUME}" if traces else _RESUME
    try:
        status = read_status(run)
    except UserError as error:
        return Finding("warn", str(error), see)
    if status.state in ("closed", "running"):
        return Finding("ok", f"run: {status.detail}")
    if status.state == "silent":
        return Finding("warn", f"run: {status.detail}", "see `draftline watch`; end the process if it hangs")
    if status.state == "elsewhere":
        return Finding("warn", f"run: {status.detail}", "look at it on that machine")
    mend = f"all rows are committed; {see}" if complete else see
    return Finding("fail" if status.state == "failed" else "warn", f"run: {status.detail}", mend)


def _space(run: Path) -> Iterator[Finding]:
    """The next checkpoint is written beside the others, before the oldest goes."""
    folders = list_checkpoints(run)
    try:
        needed = sum(path.stat().st_size for path in folders[-1].iterdir()) if folders else 0
        free = shutil.disk_usage(run).free
    except OSError:
        return
    what = f"{free / 2**30:.1f} GiB free on the disk, a checkpoint takes {needed / 2**30:.1f}"
    if free < 2 * needed:
        yield Finding("warn", what, "free some space before resuming, or lower checkpoint.keep")


def _logs(run: Path) -> Iterator[Finding]:
    """The log of spans, which reports and watchers read: lines that are torn are left out by them."""
    path = run / EVENTS_FILE
    try:
        if path.stat().st_size > _MOST_EVENT_BYTES:
            return
        torn = read_events(path).torn_lines
    except FileNotFoundError:
        return
    except UserError as error:
        yield Finding("warn", f"{error.where}: {error.what}", error.mend or "see the message")
        return
    if torn:
        yield Finding("warn", f"{path}: {torn} lines are torn", "nothing is lost but those spans; a kill leaves one")


def _exports(run: Path, *, complete: bool) -> Iterator[Finding]:
    if complete and not (run / "export").exists():
        mend = "make it with `draftline export RUN -o FOLDER`, or resume the run"
        yield Finding("warn", "all rows are committed, but there is no export", mend)
    for name in ("export", "best"):
        if (run / name).exists():
            yield _export(run / name)


def _export(folder: Path) -> Finding:
    """Reads all of it, as whoever serves it would."""
    mend = f"delete it and make it anew with `draftline export RUN -o {folder.name}`"
    if not folder.is_dir():
        return Finding("fail", f"export: {folder} is not a folder", mend)
    if not (folder / "model.safetensors").is_file():
        return Finding("fail", f"export: {folder} holds no weights", mend)
    try:
        spec = load_export(folder).spec
    except UserError as error:
        return Finding("fail", f"export: {error.where}: {error.what}", mend)
    return Finding("ok", f"export {folder}: {spec.num_layers} layers, block {spec.block_size}")
