"""Reading conversations from JSON lines, Parquet, or a Hugging Face data set, one row at a time.

A source is a path (`.jsonl`, `.json` with one object a line, also packed by gzip, or `.parquet`) or
`hf:NAME[@CONFIG][:SPLIT]`, where NAME is a hub name, a folder, or a data file that `datasets` can read; SPLIT is
`train` unless given.

Ids: a row without one gets a hash of its content. An id seen before gets `#2`, `#3`, ... behind it, in reading order,
so ids are unique over all sources and the same again on the next read.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from draftline.data.messages import BadRowError, Message, Row, Turns, canonical_json, parse_row
from draftline.data.source_files import opened_lines, source_kind
from draftline.errors import UserError

MAX_LINE_BYTES = 64 << 20
_HF_PREFIX = "hf:"
_HF_BUILDERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv", ".arrow": "arrow"}


@dataclass(frozen=True, slots=True)
class Conversation:
    """One conversation, checked.

    Attributes:
        id: unique over all sources read together.
        messages: `role`, `content` and what else the row gave; contents are text.
        tools: JSON schemas of the tools offered, or None.
        line: 1-based line or row number in `file`.
        file: the source as it was named.
        answer_cut: the last answer was cut by a length limit when it was generated.
        answer_token_ids: the very ids that the target generated for the last answer, where known.
        prompt_hash: hash of the prompt ids that it was served for that answer, where known.
        turns: which assistant turns may be supervised; `regenerate` writes `last`, for only that one is the target's.
        category: the row's own label, kept through `prepare`.
        language: the row's own label, for evaluation by group.
        rendered_on: the day that the chat template was told for that answer, where it asks for one.
    """

    id: str
    messages: list[Message]
    tools: list[Mapping[str, Any]] | None
    line: int
    file: str
    answer_cut: bool = False
    answer_token_ids: tuple[int, ...] | None = None
    prompt_hash: str | None = None
    turns: Turns = "all"
    category: str | None = None
    language: str | None = None
    rendered_on: date | None = None


@dataclass(slots=True)
class Tally:
    """Counts rows in, and rows turned away by reason; at the end `in_rows == out + sum(rejected)`.

    With `skip_bad_rows` False the first bad row ends the run instead.
    """

    skip_bad_rows: bool
    in_rows: int = 0
    rows_of_source: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)
    first_bad: str | None = None
    first_dropped: str | None = None

    def reject(self, reason: str, detail: str, where: str) -> None:
        """Count a bad row, or refuse it.

        Raises:
            UserError: bad rows are not to be skipped.
        """
        if not self.skip_bad_rows:
            raise UserError(detail, where=where, mend="mend the row or pass --skip-bad-rows")
        self.drop(reason)
        self.first_bad = self.first_bad or f"{where}: {detail}"

    def drop(self, reason: str, detail: str | None = None) -> None:
        """Count a row that is left out by rule (a duplicate, nothing left to learn from); never an error.

        Args:
            detail: file, line and why, kept of the first one.
        """
        self.rejected[reason] += 1
        self.first_dropped = self.first_dropped or detail

    @property
    def n_rejected(self) -> int:
        """Rows turned away, for whatever reason."""
        return self.rejected.total()


class IdRegistry:
    """Makes ids unique in reading order: `a`, `a#2`, `a#3`, ..."""

    def __init__(self) -> None:
        self._seen: dict[bytes, int] = {}

    def unique(self, name: str) -> str:
        """`name`, or `name` with a number behind it if it was given out before."""
        candidate, key = name, _short_hash(name.encode())
        while _short_hash(candidate.encode()) in self._seen:
            self._seen[key] = self._seen.get(key, 1) + 1
            candidate = f"{name}#{self._seen[key]}"
        self._seen[_short_hash(candidate.encode())] = 1
        return candidate


def read_conversations(sources: Sequence[str], tally: Tally) -> Iterator[Conversation]:
    """Stream the usable rows of all sources, in order; memory holds one row, and about 100 bytes for each id.

    Bad rows go to `tally`, which refuses or counts them.

    Raises:
        UserError: no such source, an empty source, or a bad row that is not to be skipped.
    """
    if not sources:
        raise UserError("no source was given", mend="name at least one file or data set")
    ids = IdRegistry()
    for source in sources:
        before = tally.in_rows
        for line, raw in raw_rows(source):
            tally.in_rows += 1
            tally.rows_of_source[source] += 1
            try:
                row = parse_raw(raw)
            except BadRowError as error:
                tally.reject(error.reason, str(error), f"{source}:{line}")
                continue
            yield _conversation(row, ids, source, line)
        if tally.in_rows == before:
            raise empty_source(source)


def parse_raw(raw: Any) -> Row:
    """Check one row as `raw_rows` gives it.

    Raises:
        BadRowError: with the reason it is counted by.
    """
    return parse_row(_decode(raw))


def row_name(row: Row, content: bytes) -> str:
    """The row's own id, or a hash of its content (`canonical_json`)."""
    return row.id or hashlib.sha256(content).hexdigest()[:16]


def empty_source(source: str) -> UserError:
    """The refusal of a source without rows."""
    return UserError("no rows in it", where=source, mend="give a source with at least one conversation")


def _conversation(row: Row, ids: IdRegistry, source: str, line: int) -> Conversation:
    return Conversation(
        id=ids.unique(row_name(row, canonical_json(row.messages, row.tools))),
        messages=row.messages,
        tools=row.tools,
        line=line,
        file=source,
        answer_cut=row.answer_cut,
        answer_token_ids=row.answer_token_ids,
        prompt_hash=row.prompt_hash,
        turns=row.turns,
        category=row.category,
        language=row.language,
        rendered_on=row.rendered_on,
    )


def _decode(raw: Any) -> Any:
    if isinstance(raw, BadRowError):
        raise raw
    if not isinstance(raw, bytes):
        return raw
    try:
        return json.loads(raw.decode())
    except UnicodeDecodeError as error:
        raise BadRowError("not UTF-8", f"not UTF-8 (byte {error.start + 1} of the line)") from None
    except RecursionError:
        raise BadRowError("not JSON", "not JSON that can be read (nested too deeply)") from None
    except ValueError as error:
        raise BadRowError("not JSON", f"not JSON ({error})") from None


def raw_rows(source: str) -> Iterator[tuple[int, Any]]:
    """Numbered rows of one source, not yet looked at: bytes of a JSON line, or an object.

    Raises:
        UserError: no such file or data set.
    """
    if source.startswith(_HF_PREFIX):
        return _hub_rows(source)
    path = Path(source)
    if not path.is_file():
        kind = "a folder" if path.is_dir() else "not a plain file" if path.exists() else "no such file"
        raise UserError(kind, where=source, mend="give a .jsonl or .parquet file, or hf:NAME[@CONFIG][:SPLIT]")
    kind = source_kind(path)
    return _parquet_rows(path) if kind == "parquet" else _json_lines(path, packed=kind == "gzip")


def _json_lines(path: Path, *, packed: bool) -> Iterator[tuple[int, Any]]:
    with opened_lines(path, packed=packed) as file:
        number, is_begun = 0, False
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                while line and not line.endswith(b"\n"):
                    line = file.readline(MAX_LINE_BYTES)
                yield number, BadRowError("line too long", f"the line is longer than {MAX_LINE_BYTES} bytes")
                continue
            line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if not line.strip():
                continue
            if not is_begun and line.lstrip().startswith(b"["):
                raise UserError("a JSON array, not one object a line", where=str(path), mend="write JSON lines")
            is_begun = True
            yield number, line


def _parquet_rows(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        for batch in pq.ParquetFile(path).iter_batches(batch_size=256):
            for row in batch.to_pylist():
                number += 1
                yield number, _without_nulls(row)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise UserError(f"not readable as Parquet ({_first_line(error)})", where=str(path)) from None


def _hub_rows(source: str) -> Iterator[tuple[int, Any]]:
    try:
        import datasets
    except ImportError:
        raise UserError("this source needs `datasets`", where=source, mend="pip install 'draftline[hub]'") from None
    name, config, split = _parse_hub_spec(source)
    try:
        if Path(name).is_file():
            builder = _HF_BUILDERS.get(Path(name).suffix, "json")
            data = datasets.load_dataset(builder, data_files=name, split=split, streaming=True)
        else:
            data = datasets.load_dataset(name, config, split=split, streaming=True)
        for number, row in enumerate(data, start=1):
            yield number, _without_nulls(row)
    except (datasets.exceptions.DatasetsError, OSError, ValueError, RuntimeError) as error:
        raise UserError(f"cannot be read ({_first_line(error)})", where=source) from None


def _parse_hub_spec(source: str) -> tuple[str, str | None, str]:
    name, _, split = source.removeprefix(_HF_PREFIX).partition(":")
    name, _, config = name.partition("@")
    if not name:
        raise UserError("no name in it", where=source, mend="write hf:NAME[@CONFIG][:SPLIT]")
    return name, config or None, split or "train"


def _without_nulls(value: Any) -> Any:
    """Arrow fills fields that some rows lack with nulls; a template would see them as given."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _short_hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
