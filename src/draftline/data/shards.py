"""Token shards: Arrow IPC files, memory-mapped, under one manifest. pyarrow is loaded when a shard is met.

Columns of a shard: `sample_id` string, `input_ids` list<int32>, `loss_mask` list<bool>, `n_supervised` int32,
`answer_cut` bool, `category` string (empty where a row had none; older shards lack the column). Reading touches only
the pages of the samples asked for, and is safe from several threads.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt

from draftline.data.arrow import numbers
from draftline.data.manifest import (
    MANIFEST_NAME,
    DatasetFacts,
    DatasetManifest,
    ShardRecord,
    read_manifest,
    require_tokenizer,
)
from draftline.data.shard_files import read_shard, shard_schema
from draftline.data.storage import StagingFolder, disk_errors, write_text_atomic
from draftline.errors import UserError

if TYPE_CHECKING:
    import pyarrow as pa

BATCH_SAMPLES = 1024
BATCH_TOKENS = 1 << 20
SHARD_TOKENS = 64 << 20


@dataclass(frozen=True, slots=True)
class Sample:
    """One conversation as tokens.

    Attributes:
        sample_id: unique in the data set; the seed of every draw for this sample.
        input_ids: int32 [T].
        loss_mask: bool [T], True where the token was written by the target (supervised).
        answer_cut: the last answer ends where a length limit cut it.
        category: the label that its row had, or empty.
    """

    sample_id: str
    input_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.bool_]
    answer_cut: bool = False
    category: str = ""


class _HashingFile:
    """A binary file that hashes what is written; the sink of the Arrow writer."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = path.open("wb")
        self._digest = hashlib.sha256()
        self.n_bytes = 0

    def write(self, data: Any) -> int:
        view = memoryview(data)
        self._file.write(view)
        self._digest.update(view)
        self.n_bytes += view.nbytes
        return view.nbytes

    def tell(self) -> int:
        return self.n_bytes

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    @property
    def closed(self) -> bool:
        return self._file.closed

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


@dataclass(slots=True)
class _Batch:
    """Samples waiting to be written as one Arrow record batch."""

    samples: list[Sample] = field(default_factory=list)
    n_tokens: int = 0

    def to_arrow(self) -> pa.RecordBatch:
        import pyarrow as pa

        offsets = np.cumsum([0] + [len(s.input_ids) for s in self.samples], dtype=np.int32)
        ids = np.concatenate([s.input_ids for s in self.samples])
        mask = np.concatenate([s.loss_mask for s in self.samples])
        columns = [
            pa.array([s.sample_id for s in self.samples], pa.string()),
            pa.ListArray.from_arrays(offsets, pa.array(ids, pa.int32())),
            pa.ListArray.from_arrays(offsets, pa.array(mask, pa.bool_())),
            pa.array([int(s.loss_mask.sum()) for s in self.samples], pa.int32()),
            pa.array([s.answer_cut for s in self.samples], pa.bool_()),
            pa.array([s.category for s in self.samples], pa.string()),
        ]
        return pa.record_batch(columns, schema=shard_schema())


class ShardWriter:
    """Writes a data set into `output`, which appears as a whole when `finish` is called, or not at all.

    Use as a context manager: leaving it without `finish` removes what was written.

    Args:
        output: folder that must not hold anything yet.
        shard_tokens: a shard is closed once it holds this many tokens.
    """

    def __init__(self, output: Path, *, shard_tokens: int = SHARD_TOKENS) -> None:
        self._staging = StagingFolder(output)
        self._shard_tokens = shard_tokens
        self._batch = _Batch()
        self._shards: list[ShardRecord] = []
        self._sink: _HashingFile | None = None
        self._writer: pa.RecordBatchFileWriter | None = None
        self._tokens_in_shard = self._samples_in_shard = 0
        self.n_samples = self.n_tokens = self.n_supervised = 0

    @property
    def staging_path(self) -> Path:
        """Where the data set lies until it is finished; further parts may be written below it."""
        return self._staging.path

    def __enter__(self) -> Self:
        self._staging.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._sink is not None:
            with suppress(OSError):  # a full disk takes no last bytes either, and what is here goes away
                self._sink.close()
        self._staging.__exit__(kind, error, trace)

    def add(
        self,
        sample_id: str,
        input_ids: npt.ArrayLike,
        loss_mask: npt.ArrayLike,
        *,
        answer_cut: bool = False,
        category: str = "",
    ) -> None:
        """Append one sample; ids and mask are [T] with the same T >= 1, else ValueError."""
        ids, mask = np.asarray(input_ids, dtype=np.int32), np.asarray(loss_mask, dtype=np.bool_)
        if ids.ndim != 1 or ids.shape != mask.shape or ids.size == 0:
            raise ValueError(f"sample {sample_id}: ids {ids.shape} and mask {mask.shape} must be alike and not empty")
        self._batch.samples.append(Sample(sample_id, ids, mask, answer_cut, category))
        self._batch.n_tokens += ids.size
        self.n_samples, self.n_tokens = self.n_samples + 1, self.n_tokens + ids.size
        self.n_supervised += int(mask.sum())
        if len(self._batch.samples) >= BATCH_SAMPLES or self._batch.n_tokens >= BATCH_TOKENS:
            self._flush_batch()

    def finish(self, facts: DatasetFacts) -> DatasetManifest:
        """Write the manifest and publish the folder.

        Raises:
            UserError: no sample was added, or the disk is full.
        """
        if self.n_samples == 0:
            raise UserError(
                "the data set would have no samples", where=str(self._staging.output), mend=_rejected_line(facts)
            )
        self._flush_batch()
        self._close_shard()
        manifest = DatasetManifest(
            **dict(facts),
            n_samples=self.n_samples,
            n_tokens=self.n_tokens,
            n_supervised=self.n_supervised,
            shards=tuple(self._shards),
        )
        write_text_atomic(self.staging_path / MANIFEST_NAME, manifest.model_dump_json(indent=2) + "\n")
        self._staging.publish()
        return manifest

    def _flush_batch(self) -> None:
        import pyarrow as pa

        if not self._batch.samples:
            return
        with disk_errors(self._staging.output):
            if self._writer is None:
                self._sink = _HashingFile(self.staging_path / self._shard_name())
                self._writer = pa.ipc.new_file(self._sink, shard_schema())
            self._writer.write_batch(self._batch.to_arrow())
        self._tokens_in_shard += self._batch.n_tokens
        self._samples_in_shard += len(self._batch.samples)
        self._batch = _Batch()
        if self._tokens_in_shard >= self._shard_tokens:
            self._close_shard()

    def _close_shard(self) -> None:
        if self._writer is None or self._sink is None:
            return
        with disk_errors(self._staging.output):
            self._writer.close()
            self._sink.flush()
            self._sink.close()
        record = ShardRecord(
            name=self._shard_name(),
            n_samples=self._samples_in_shard,
            n_bytes=self._sink.n_bytes,
            sha256=self._sink.hexdigest(),
        )
        self._shards.append(record)
        self._writer = self._sink = None
        self._tokens_in_shard = self._samples_in_shard = 0

    def _shard_name(self) -> str:
        return f"shard-{len(self._shards):05d}.arrow"


class TokenDataset:
    """A prepared data set, memory-mapped. Made by `TokenDataset.open`.

    Attributes:
        path: its folder.
        manifest: its description.
        lengths: int32 [N], tokens of each sample.
        supervised: int32 [N], supervised tokens of each sample.
    """

    def __init__(self, path: Path, manifest: DatasetManifest, batches: list[pa.RecordBatch]) -> None:
        self.path, self.manifest = path, manifest
        self._batches = batches
        self._starts = np.cumsum([0] + [batch.num_rows for batch in batches])
        empty = np.empty(0, np.int32)
        self.lengths = np.concatenate([empty] + [np.diff(numbers(b.column("input_ids").offsets)) for b in batches])
        self.supervised = np.concatenate([empty] + [numbers(b.column("n_supervised")) for b in batches])

    @classmethod
    def open(cls, path: Path, *, verify: bool = True) -> TokenDataset:
        """Open the data set in folder `path`.

        Args:
            verify: compare each shard's hash with the manifest, which reads the whole data once.

        Raises:
            UserError: missing, foreign, newer, cut off, changed or empty.
        """
        manifest = read_manifest(path)
        if manifest.n_samples == 0:
            raise UserError("the data set has no samples", where=str(path), mend="prepare other data")
        batches = [
            batch
            for shard in manifest.shards
            for batch in read_shard(path, shard, vocab_size=manifest.vocab_size, verify=verify)
        ]
        dataset = cls(path, manifest, batches)
        counts = (len(dataset), int(dataset.lengths.sum()), int(dataset.supervised.sum()))
        if counts != (manifest.n_samples, manifest.n_tokens, manifest.n_supervised):
            raise UserError("the shards do not hold what the manifest says", where=str(path), mend="prepare again")
        return dataset

    def __len__(self) -> int:
        return int(self._starts[-1])

    def sample(self, index: int) -> Sample:
        """The sample at `index` (0..N-1), copied out of the mapped file."""
        batch, row = self._place(index)
        ids, mask = batch.column("input_ids"), batch.column("loss_mask")
        start, stop = ids.offsets[row].as_py(), ids.offsets[row + 1].as_py()
        return Sample(
            sample_id=batch.column("sample_id")[row].as_py(),
            input_ids=numbers(ids.values.slice(start, stop - start)).copy(),
            loss_mask=numbers(mask.values.slice(start, stop - start)),
            answer_cut=batch.column("answer_cut")[row].as_py(),
            category=batch.column("category")[row].as_py() if "category" in batch.schema.names else "",
        )

    def sample_id(self, index: int) -> str:
        """The id of the sample at `index`."""
        batch, row = self._place(index)
        return str(batch.column("sample_id")[row].as_py())

    def _place(self, index: int) -> tuple[pa.RecordBatch, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        batch_index = int(np.searchsorted(self._starts, index, side="right")) - 1
        return self._batches[batch_index], index - int(self._starts[batch_index])

    def count_token(self, token_id: int) -> int:
        """How often a token occurs in all samples; reads the ids once, batch by batch."""
        columns = (numbers(batch.column("input_ids").flatten()) for batch in self._batches)
        return sum(int(np.count_nonzero(ids == token_id)) for ids in columns)

    def require_tokenizer(self, tokenizer: Any) -> None:
        """Refuse (UserError) a target whose tokenizer is not the one that made the ids."""
        require_tokenizer(self.manifest, tokenizer, where=str(self.path))


def _rejected_line(facts: DatasetFacts) -> str:
    reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(facts.rejected.items())) or "none"
    return f"{facts.in_rows} rows were read; rejected: {reasons}"
