"""One shard on disk: its columns, and reading it so that nothing foreign, damaged or made to hurt gets further."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from draftline.data.arrow import numbers
from draftline.data.manifest import ShardRecord
from draftline.errors import UserError

if TYPE_CHECKING:
    import pyarrow as pa

_MEND = "prepare the data again or copy it anew"


def shard_schema() -> pa.Schema:
    """Arrow schema of a shard: one sample a row."""
    import pyarrow as pa

    return pa.schema(
        [
            ("sample_id", pa.string()),
            ("input_ids", pa.list_(pa.int32())),
            ("loss_mask", pa.list_(pa.bool_())),
            ("n_supervised", pa.int32()),
            ("answer_cut", pa.bool_()),
            ("category", pa.string()),
        ]
    )


def read_shard(folder: Path, shard: ShardRecord, *, vocab_size: int, verify: bool) -> list[pa.RecordBatch]:
    """The mapped record batches of one shard.

    Args:
        vocab_size: token ids must be below it.
        verify: look at the content too: the hash, every id, every mask.

    Raises:
        UserError: missing, cut off, changed, foreign, or with content that no data set of ours has.
    """
    import pyarrow as pa

    file = folder / shard.name
    if Path(shard.name).name != shard.name or len(shard.name) > 255 or not file.is_file():
        raise UserError("shard is missing", where=str(file), mend=_MEND)
    size = file.stat().st_size
    if size != shard.n_bytes:
        raise UserError(f"shard has {size} bytes, the manifest says {shard.n_bytes}", where=str(file), mend=_MEND)
    if verify and _file_sha256(file) != shard.sha256:
        raise UserError("shard was changed: its hash is not the manifest's", where=str(file), mend=_MEND)
    try:
        reader = pa.ipc.open_file(pa.memory_map(str(file)))
        batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
        for batch in batches:
            batch.validate(full=verify)
        is_ours = _is_ours(reader.schema)
    except (pa.ArrowException, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"shard is not readable ({reason})", where=str(file), mend=_MEND) from None
    if any(column.null_count for batch in batches for column in batch.columns):
        raise UserError("shard has empty fields", where=str(file), mend=_MEND)
    if not is_ours or sum(batch.num_rows for batch in batches) != shard.n_samples:
        raise UserError("shard does not hold what the manifest says", where=str(file), mend=_MEND)
    for batch in batches if verify else ():
        _check_content(batch, vocab_size, file)
    return batches


def _is_ours(schema: pa.Schema) -> bool:
    ours = shard_schema()
    return bool(schema == ours or schema == ours.remove(ours.get_field_index("category")))


def _check_content(batch: pa.RecordBatch, vocab_size: int, file: Path) -> None:
    """Refuse (UserError) ids outside the vocabulary, masks that do not fit their ids, and wrong counts of labels."""
    ids, mask = batch.column("input_ids"), batch.column("loss_mask")
    tokens = numbers(ids.flatten())
    if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
        wrong = tokens.min() if tokens.min() < 0 else tokens.max()
        raise UserError(
            f"shard holds token id {wrong}, outside the vocabulary of {vocab_size}", where=str(file), mend=_MEND
        )
    sizes = np.diff(numbers(ids.offsets))
    if not np.array_equal(sizes, np.diff(numbers(mask.offsets))) or (sizes < 1).any():
        raise UserError("shard has samples whose mask does not fit their tokens", where=str(file), mend=_MEND)
    flags = numbers(mask.flatten())
    counts = np.add.reduceat(flags, np.cumsum([0, *sizes[:-1]]), dtype=np.int64) if len(sizes) else sizes
    if not np.array_equal(counts, numbers(batch.column("n_supervised"))):
        raise UserError("shard has samples with another number of labels than it says", where=str(file), mend=_MEND)


def _file_sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
