"""States on disk in a run: what a folder must hold, how large it gets, and who reads and adds to it.

A folder of states holds those of the training data, `validation/` with those of the validation data if there is any,
and what a drafter borrows of the target.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from draftline.data.shards import TokenDataset
from draftline.errors import UserError
from draftline.records import PlannedRow
from draftline.target.capture import TargetCapture
from draftline.target.spread import first_device
from draftline.target.states.capture import OfflineCapture, StoringCapture
from draftline.target.states.manifest import (
    MANIFEST_NAME,
    StatesIdentity,
    StoredDtype,
    facts_hash,
    model_name,
    require_same_states,
)
from draftline.target.states.numbers import token_bytes
from draftline.target.states.store import StatesReader, StatesWriter
from draftline.target.states.stored_target import StoredTarget, load_stored_target, store_target

if TYPE_CHECKING:
    from draftline.pipeline.runplan import RunPlan
    from draftline.target.load import LoadedTarget
    from draftline.target.loop import Capture

VALIDATION = "validation"
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class StatesPart:
    """The states of one data set: where they are, of which samples, and what they must be.

    Attributes:
        rows: each sample once, packed as the run's first epoch packs them.
    """

    folder: Path
    dataset: TokenDataset
    rows: list[PlannedRow]

    @property
    def n_tokens(self) -> int:
        """Tokens of its rows."""
        return sum(row.n_tokens for row in self.rows)

    def reader(self) -> StatesReader | None:
        """None if nothing is there yet."""
        there = (self.folder / MANIFEST_NAME).is_file()
        return StatesReader(self.folder, self.dataset.manifest.n_samples) if there else None


def states_parts(plan: RunPlan) -> list[StatesPart]:
    """Training data, and validation data where the run has it.

    Raises:
        UserError: no folder is named.
    """
    from draftline.pipeline.runplan import validation_rows

    config = plan.config
    if config.states.path is None:
        raise UserError("is not set", where="states.path", mend="name the folder of the states, states.path=FOLDER")
    root = config.states.path.expanduser()
    parts = [StatesPart(root, plan.dataset, [row for row in plan.rows if row.epoch == 0])]
    if config.data.validation_path is not None:
        dataset = TokenDataset.open(config.data.validation_path)
        parts.append(StatesPart(root / VALIDATION, dataset, validation_rows(dataset, config)))
    return parts


def states_identity(plan: RunPlan, data: str, fingerprint: str = "") -> StatesIdentity:
    """What the states of this run are."""
    from draftline.pipeline.runplan import compute_dtype

    config = plan.config
    compute = compute_dtype(config.target.dtype, config.pipeline.target_devices[0])
    stored = compute if config.states.dtype == "target" else config.states.dtype
    return StatesIdentity(
        model=model_name(config.target.model),
        revision=config.target.revision,
        facts=facts_hash(plan.facts),
        fingerprint=fingerprint,
        quantization=config.target.quantization,
        backend=config.target.backend.kind,
        fused_norms=config.target.fused_norms,
        taps=plan.spec.taps,
        final_norm="post" if config.objective.needs_teacher else None,
        hidden_size=plan.spec.hidden_size,
        dtype=cast("StoredDtype", stored),
        compute_dtype=compute,  # type: ignore[arg-type]
        data=data,
    )


def check_offline(plan: RunPlan) -> None:
    """Refuses an offline run whose states are of something else, or not all there. Loads nothing.

    Raises:
        UserError: names what differs, or how many samples are missing.
    """
    for part in states_parts(plan):
        reader = _reader(part)
        wanted = states_identity(plan, part.dataset.manifest.fingerprint)
        require_same_states(reader.manifest.identity, wanted, part.folder, adds=False)
        missing = sum(len(reader.missing(row.samples)) for row in part.rows)
        if missing:
            raise UserError(
                f"lacks {missing} of {sum(len(row.samples) for row in part.rows)} samples",
                where=str(part.folder),
                mend="go on with `draftline capture`, or set states.mode: cache",
            )


def load_stored_targets(plan: RunPlan) -> list[StoredTarget]:
    """One for each target worker: embedding and head only, shared by workers on one device."""
    root = states_parts(plan)[0].folder
    loaded: list[StoredTarget] = []
    for name in plan.config.pipeline.target_devices:
        device = torch.device(first_device(name))
        same = next((t for t in loaded if t.device == device), None)
        loaded.append(load_stored_target(root, device, share_with=same))
    return loaded


def offline_captures(plan: RunPlan) -> list[Capture]:
    """One for each target worker, over one reader."""
    reader = _reader(states_parts(plan)[0])
    want_final = plan.config.objective.needs_teacher
    return [
        OfflineCapture(reader, torch.device(first_device(name)), want_final=want_final)
        for name in plan.config.pipeline.target_devices
    ]


class StateStores:
    """The states of one run while it trains. Use as a context manager: leaving it writes what waits.

    Args:
        plan: the run; with states.mode `online` this does nothing at all.
        target: with states.mode `cache`, the loaded one.
    """

    def __init__(self, plan: RunPlan, target: LoadedTarget | StoredTarget) -> None:
        self._plan, self._mode = plan, plan.config.states.mode
        self._parts = [] if self._mode == "online" else states_parts(plan)
        self._writers: list[StatesWriter] = []
        if self._mode == "cache":
            require_room(plan, self._parts)  # now, not in the middle of the run
            for part in self._parts:
                identity = states_identity(plan, part.dataset.manifest.fingerprint, target.fingerprint)
                self._writers.append(open_writer(plan, part, identity))
            store_target(target, self._parts[0].folder)

    def captures(self, captures: Sequence[Capture]) -> list[Capture]:
        """The run's captures, over the disk where the mode says so."""
        return [self._storing(capture, 0) for capture in captures] if self._writers else list(captures)

    def validation(self, capture: Capture) -> Capture:
        """What captures the validation rows, whose samples are those of another data set."""
        if len(self._parts) < 2:
            return capture
        if self._mode == "offline":
            device = torch.device(first_device(self._plan.config.pipeline.target_devices[0]))
            return OfflineCapture(_reader(self._parts[1]), device, want_final=self._plan.config.objective.needs_teacher)
        return self._storing(capture, 1)

    def lines(self) -> list[str]:
        """What is there and what may be added, for the log."""
        return [] if self._mode == "online" else size_lines(self._plan, self._parts)

    def close(self) -> None:
        """Finish the files that are being written."""
        for writer in self._writers:
            writer.close()

    def _storing(self, capture: Capture, number: int) -> Capture:
        return StoringCapture(cast("TargetCapture", capture), self._parts[number].reader(), self._writers[number])


def open_writer(plan: RunPlan, part: StatesPart, identity: StatesIdentity) -> StatesWriter:
    """A writer that adds to what is there, if it is the same.

    Raises:
        UserError: names what differs.
    """
    require_may_add(part, identity)
    return StatesWriter(part.folder, identity, shard_bytes=plan.config.states.shard_bytes)


def require_may_add(part: StatesPart, identity: StatesIdentity) -> None:
    """Refuses (UserError, with both values) to add to a folder that holds other states."""
    reader = part.reader()
    if reader is not None:
        require_same_states(reader.manifest.identity, identity, part.folder, adds=True)


def size_lines(plan: RunPlan, parts: Sequence[StatesPart]) -> list[str]:
    """Samples, tokens and bytes, there and in all, and the free disk."""
    per_token, lines = bytes_per_token(plan), []
    for part in parts:
        reader = part.reader()
        there = 0 if reader is None else reader.n_known
        samples = sum(len(row.samples) for row in part.rows)
        lines.append(
            f"states in {part.folder}: {samples} samples, {part.n_tokens} tokens, {per_token} bytes a token, "
            f"{part.n_tokens * per_token / _GIB:.3f} GiB in all; {there} samples are there"
        )
    return [*lines, f"free there: {_free_bytes(parts[0].folder) / _GIB:.1f} GiB"]


def require_room(plan: RunPlan, parts: Sequence[StatesPart]) -> None:
    """Refuses (UserError, with the numbers) what the disk cannot hold."""
    missing = 0
    for part in parts:
        reader = part.reader()
        missing += sum(row.n_tokens for row in part.rows if reader is None or not reader.has(row.samples))
    needed, free = missing * bytes_per_token(plan), _free_bytes(parts[0].folder)
    if needed > free:
        raise UserError(
            f"needs {needed / _GIB:.2f} GiB more, {free / _GIB:.2f} GiB are free",
            where=str(parts[0].folder),
            mend="free space, choose another disk, or set states.dtype: fp8",
        )


def bytes_per_token(plan: RunPlan) -> int:
    """Bytes that a token's states take on disk."""
    identity = states_identity(plan, "")
    with_final = identity.final_norm is not None
    return token_bytes(
        len(identity.taps), identity.hidden_size, identity.dtype, identity.compute_dtype, with_final=with_final
    )


def _free_bytes(folder: Path) -> int:
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(existing).free


def _reader(part: StatesPart) -> StatesReader:
    reader = part.reader()
    if reader is None:
        raise UserError("holds no states", where=str(part.folder), mend="capture them first: `draftline capture`")
    return reader
