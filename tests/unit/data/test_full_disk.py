"""Promises about a disk that fills up: one line, nothing half-written, and what was there stays as it was."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from draftline.data import shards
from draftline.data.manifest import DatasetFacts
from draftline.data.shards import ShardWriter
from draftline.data.storage import write_text_atomic
from draftline.errors import UserError

FACTS = DatasetFacts(tokenizer_fingerprint="a", template_hash="t", vocab_size=512, max_tokens=64)


class FullFile:
    """A file on a disk with room for `room` bytes: what is beyond it fails, also once more when the file is closed."""

    def __init__(self, path: Path, room: int) -> None:
        self._file, self._left, self._is_full = path.open("wb"), room, False

    def write(self, data: memoryview) -> int:
        self._left -= data.nbytes
        self._is_full = self._is_full or self._left < 0
        self._refuse()
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()
        self._refuse()

    @property
    def closed(self) -> bool:
        return self._file.closed

    def _refuse(self) -> None:
        if self._is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("room", [0, 700, 5000, 20000])
def test_a_full_disk_is_one_line_and_leaves_nothing_wherever_the_shard_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    begin = shards._HashingFile.__init__

    def begin_on_a_full_disk(sink: Any, path: Path) -> None:
        begin(sink, path)
        sink._file.close()
        sink._file = FullFile(path, room)

    monkeypatch.setattr(shards._HashingFile, "__init__", begin_on_a_full_disk)
    monkeypatch.setattr(shards, "BATCH_SAMPLES", 20)
    with (
        pytest.raises(UserError, match="no space left to write; free space or choose another disk"),
        ShardWriter(tmp_path / "data") as writer,
    ):
        for i in range(200):
            writer.add(str(i), list(range(50)), [True] * 50)
        writer.finish(FACTS)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_text_that_cannot_be_written_leaves_the_old_one_and_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    write_text_atomic(tmp_path / "manifest.json", "old")

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os if step == "fsync" else Path, step, refuse)
    with pytest.raises(UserError, match=r"manifest\.json: no space left to write"):
        write_text_atomic(tmp_path / "manifest.json", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]
    assert (tmp_path / "manifest.json").read_text() == "old"
