"""Reading and writing of states, sample by sample. Both are safe from several threads.

Samples of a row never see each other, so states are kept by sample and put together for whatever row comes next. A
shard appears whole under its name, then in the manifest: what a killed capture left is what it finished.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from draftline.data.storage import disk_errors, locked_file, write_text_atomic
from draftline.errors import RunFailedError, UserError
from draftline.target.cache import SampleStates
from draftline.target.states.manifest import (
    MANIFEST_NAME,
    StatesIdentity,
    StatesManifest,
    StatesShard,
    read_states_manifest,
    require_same_states,
)
from draftline.target.states.numbers import dequantize, final_dtype, quantize, relative_error
from draftline.target.states.tensor_files import save_whole, sha256_of

LOCK_NAME = "states.lock"
SHARD_BYTES = 1 << 29
_OPEN_SHARDS = 16  # a thread
_ORIGIN = "offline states"


class StatesReader:
    """States that are on disk, by the sample's index in its data set.

    Args:
        folder: with a manifest.
        n_samples: of the data set.

    Raises:
        UserError: see `read_states_manifest`; a sample that the data set does not have.
    """

    def __init__(self, folder: Path, n_samples: int) -> None:
        self.folder, self.manifest = folder, read_states_manifest(folder)
        self._shard_of = np.full(n_samples, -1, dtype=np.int32)
        for number, shard in enumerate(self.manifest.shards):
            samples = np.asarray(shard.samples, dtype=np.int64)
            if samples.size and samples.max() >= n_samples:
                raise UserError(
                    f"{shard.name} holds sample {samples.max()} of a data set of {n_samples}", where=str(folder)
                )
            self._shard_of[samples] = number
        self._local = threading.local()
        self._locks = [threading.Lock() for _ in self.manifest.shards]
        self._proven: set[int] = set()

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose states are stored."""
        return self.manifest.identity.taps

    @property
    def n_known(self) -> int:
        """Samples of the data set whose states are here."""
        return int((self._shard_of >= 0).sum())

    def has(self, samples: Sequence[int]) -> bool:
        """True if all these samples are there."""
        return bool((self._shard_of[list(samples)] >= 0).all())

    def missing(self, samples: Sequence[int]) -> list[int]:
        """Those of the samples, by index, whose states are not here."""
        return [i for i in samples if self._shard_of[i] < 0]

    def read(self, sample: int, n_tokens: int) -> SampleStates:
        """States of one sample, in the dtype of the target's forward, on the host.

        Raises:
            UserError: the shard is not the one that the manifest describes; found out when it is first read.
            RunFailedError: not there, or not of that length; a broken file.
        """
        number = int(self._shard_of[sample])
        if number < 0:
            raise RunFailedError(f"{self.folder} holds no states of sample {sample}", origin=_ORIGIN)
        file = self.folder / self.manifest.shards[number].name
        try:
            self._prove(number, file)
            states = self._decoded(self._handle(file), sample)
        except (SafetensorError, OSError, ValueError) as error:
            raise RunFailedError(f"{file}: sample {sample} cannot be read ({error})", origin=_ORIGIN) from error
        self._check_shapes(states, f"{file}: sample {sample}")
        if states.taps_TF.shape[0] != n_tokens:
            raise RunFailedError(
                f"{file}: sample {sample} has states of {states.taps_TF.shape[0]} tokens, the data has {n_tokens}",
                origin=_ORIGIN,
            )
        return states

    def _decoded(self, handle: Any, sample: int) -> SampleStates:
        identity = self.manifest.identity
        compute = getattr(torch, identity.compute_dtype)
        taps_TF = handle.get_tensor(f"{sample}.taps")
        if identity.dtype == "fp8":
            scales_TL = handle.get_tensor(f"{sample}.scales")
            if taps_TF.ndim != 2 or scales_TL.shape != (taps_TF.shape[0], len(identity.taps)):
                raise ValueError(f"scales of shape {list(scales_TL.shape)}")
            if taps_TF.shape[1] != len(identity.taps) * identity.hidden_size:
                raise ValueError(f"taps of shape {list(taps_TF.shape)}")
            taps_TF = dequantize(taps_TF, scales_TL, compute)
        final_TH = handle.get_tensor(f"{sample}.final") if identity.final_norm is not None else None
        return SampleStates(taps_TF.to(compute), None if final_TH is None else final_TH.to(compute))

    def _check_shapes(self, states: SampleStates, what: str) -> None:
        hidden, taps_TF, final_TH = self.manifest.identity.hidden_size, states.taps_TF, states.final_TH
        wanted = len(self.taps) * hidden
        if taps_TF.ndim != 2 or taps_TF.shape[1] != wanted:
            raise RunFailedError(f"{what} has taps of shape {list(taps_TF.shape)}, not {wanted} wide", origin=_ORIGIN)
        if final_TH is not None and final_TH.shape != (taps_TF.shape[0], hidden):
            raise RunFailedError(f"{what} has a last state of shape {list(final_TH.shape)}", origin=_ORIGIN)

    def _prove(self, number: int, file: Path) -> None:
        """Compares a shard with its hash, once: whoever comes first reads it whole, others who want it wait."""
        with self._locks[number]:
            if number in self._proven:
                return
            if sha256_of(file) != self.manifest.shards[number].sha256:
                raise UserError(
                    "was changed: its hash is not the recorded one", where=str(file), mend="capture the states again"
                )
            self._proven.add(number)

    def _handle(self, file: Path) -> Any:
        """A few files stay open for each thread, the last used ones."""
        handles: dict[Path, Any] = self._local.__dict__.setdefault("handles", {})
        handle = handles.pop(file, None)
        if handle is None:
            handle = safe_open(file, framework="pt")
            if len(handles) >= _OPEN_SHARDS:
                handles.pop(next(iter(handles)))
        handles[file] = handle
        return handle


class StatesWriter:
    """Adds states to a folder, which may already hold some. Call `close` at the end, or the last shard is lost.

    The folder is locked until then: two writers would give two shards one name.

    Args:
        folder: made if it does not exist.
        identity: must be that of the states already there.
        shard_bytes: a shard is written once it holds so much.

    Raises:
        UserError: another process adds to the folder; see also `require_same_states`.
    """

    def __init__(self, folder: Path, identity: StatesIdentity, *, shard_bytes: int = SHARD_BYTES) -> None:
        self.folder, self._identity, self._shard_bytes = folder, identity, shard_bytes
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            mend = "wait for it, or name another folder in states.path"
            busy = UserError("another process adds states to it", where=str(folder), mend=mend)
            self._held = locked_file(folder / LOCK_NAME, busy)
        there = (folder / MANIFEST_NAME).is_file()
        self.manifest = read_states_manifest(folder) if there else StatesManifest(identity=identity)
        require_same_states(self.manifest.identity, identity, folder, adds=True)
        self._known = {i for shard in self.manifest.shards for i in shard.samples}
        self._lock = threading.Lock()
        self._waiting: dict[str, torch.Tensor] = {}
        self._samples: list[int] = []
        self._n_waiting_bytes = self._n_waiting_tokens = 0
        self._error = self.manifest.fp8_error

    def add(self, sample: int, states: SampleStates) -> None:
        """Keeps a sample's states unless they are there already.

        Raises:
            UserError: the disk is full.
        """
        with self._lock:
            if sample in self._known:
                return
            self._known.add(sample)
            tensors = self._encoded(sample, states)
            self._waiting |= tensors
            self._samples.append(sample)
            self._n_waiting_tokens += states.taps_TF.shape[0]
            self._n_waiting_bytes += sum(t.numel() * t.element_size() for t in tensors.values())
            if self._n_waiting_bytes >= self._shard_bytes:
                self._flush()

    def close(self) -> StatesManifest:
        """Writes what is waiting, and lets others add to the folder. Returns the manifest as it is on disk."""
        with self._lock:
            try:
                self._flush()
            finally:
                self._waiting, self._samples = {}, []
                self._held.close()
            return self.manifest

    def _encoded(self, sample: int, states: SampleStates) -> dict[str, torch.Tensor]:
        identity = self._identity
        taps_TF = states.taps_TF.detach().cpu()
        tensors = {}
        if identity.dtype == "fp8":
            rounded_TF, scales_TL = quantize(taps_TF, len(identity.taps))
            self._error = max(self._error, relative_error(dequantize(rounded_TF, scales_TL, torch.float32), taps_TF))
            tensors = {f"{sample}.taps": rounded_TF, f"{sample}.scales": scales_TL}
        else:
            tensors[f"{sample}.taps"] = taps_TF.to(getattr(torch, identity.dtype), copy=True)
        if identity.final_norm is not None:
            assert states.final_TH is not None, "the last hidden state was not captured"
            kept = getattr(torch, final_dtype(identity.dtype, identity.compute_dtype))
            tensors[f"{sample}.final"] = states.final_TH.detach().cpu().to(kept, copy=True)
        return {name: tensor.contiguous() for name, tensor in tensors.items()}

    def _flush(self) -> None:
        """With the lock held."""
        if not self._samples:
            return
        name = f"shard-{len(self.manifest.shards):05d}.safetensors"
        with disk_errors(self.folder):
            record = self._write_shard(name)
            self.manifest = self.manifest.model_copy(
                update={
                    "shards": (*self.manifest.shards, record),
                    "n_tokens": self.manifest.n_tokens + self._n_waiting_tokens,
                    "fp8_error": self._error,
                }
            )
            text = json.dumps(self.manifest.model_dump(mode="json"))
            write_text_atomic(self.folder / MANIFEST_NAME, text + "\n")
        self._waiting, self._samples = {}, []
        self._n_waiting_bytes = self._n_waiting_tokens = 0

    def _write_shard(self, name: str) -> StatesShard:
        size, digest = save_whole(self._waiting, self.folder / name)
        return StatesShard(name=name, n_bytes=size, sha256=digest, samples=tuple(self._samples))
