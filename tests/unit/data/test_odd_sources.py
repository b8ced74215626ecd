"""Promises of reading whatever lies under a name: packed files, other formats, rows that say more than their turns."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import data_kit as kit
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from draftline.data.conversations import Conversation, Tally, read_conversations
from draftline.errors import UserError

LINE = json.dumps({"messages": kit.talk("hello", "yes")}).encode() + b"\n"


def read(source: Path, *, skip: bool = False) -> list[Conversation]:
    return list(read_conversations([str(source)], Tally(skip)))


def messages_of(tmp_path: Path, *rows: Any) -> list[list[dict[str, Any]]]:
    return [row.messages for row in read(kit.write_lines(tmp_path / "in.jsonl", rows))]


def test_lines_packed_by_gzip_are_read_whatever_the_name(tmp_path: Path) -> None:
    for name in ("in.jsonl.gz", "in.jsonl"):
        (tmp_path / name).write_bytes(gzip.compress(b"\xef\xbb\xbf" + LINE) + gzip.compress(b"\r\n" + LINE))
        assert [row.line for row in read(tmp_path / name)] == [1, 3]


@pytest.mark.parametrize("spoil", [lambda data: data[:-9], lambda data: data[:60] + b"\0" * 8 + data[68:]])
def test_a_packed_file_that_is_cut_off_or_damaged_is_refused_though_bad_rows_are_skipped(
    tmp_path: Path, spoil: Any
) -> None:
    file = tmp_path / "in.jsonl.gz"
    file.write_bytes(spoil(gzip.compress(b"".join(LINE.replace(b"hello", b"%d" % i) for i in range(99)))))
    with pytest.raises(UserError, match=r"in\.jsonl\.gz: damaged or cut off \(") as caught:
        read(file, skip=True)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("head", "says"),
    [
        (b"\x28\xb5\x2f\xfd", "packed by zstd; unpack it first"),
        (b"BZh9", "packed by bzip2; unpack it first"),
        (b"\xfd7zXZ\x00", "packed by xz; unpack it first"),
        (b"PK\x03\x04", "a zip archive; unpack it first"),
        (b"ARROW1\x00\x00", "an Arrow file; read it as hf:FILE"),
        ('{"a": 1}'.encode("utf-16"), "UTF-16 text; save it as UTF-8"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer, not the data; fetch the data"),
        (b'[{"messages": []}]\n', "a JSON array, not one object a line; write JSON lines"),
        (b"\xef\xbb\xbf \n\n [\n", "a JSON array, not one object a line; write JSON lines"),
    ],
)
def test_files_of_another_kind_are_told_by_their_content_and_how_to_mend(
    tmp_path: Path, head: bytes, says: str
) -> None:
    file = tmp_path / "in.jsonl"
    file.write_bytes(head)
    for skip in (False, True):
        with pytest.raises(UserError) as caught:
            read(file, skip=skip)
        assert str(caught.value).startswith(f"{file}: {says}") and "\n" not in str(caught.value)


def test_parquet_is_known_by_its_content(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist([json.loads(LINE)]), tmp_path / "data")
    assert read(tmp_path / "data")[0].messages == kit.talk("hello", "yes")


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="pipe: not a plain file; give a"):
        read(tmp_path / "pipe")


def test_a28_a_system_prompt_beside_the_turns_is_part_of_the_prompt(tmp_path: Path) -> None:
    system = {"role": "system", "content": "Be brief."}
    talk = kit.talk("a", "b")
    rows = [
        {"messages": talk, "system": "Be brief."},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "Be brief."},
        {"prompt": "a", "response": "b", "system_prompt": "Be brief."},
        {"messages": [system, *talk], "system": "Another."},
    ]
    assert messages_of(tmp_path, *rows) == [[system, *talk]] * 4
    assert messages_of(tmp_path, {"messages": talk, "system": " "}, {"messages": talk, "system": None}) == [talk] * 2
    with pytest.raises(UserError, match="the row's system prompt is a list, not text"):
        messages_of(tmp_path, {"messages": talk, "system": ["Be brief."]})


def test_a28_earlier_rounds_of_an_instruction_are_part_of_the_prompt(tmp_path: Path) -> None:
    row = {"instruction": "c", "input": "", "output": "d", "history": [["a", "b"]], "system": "e"}
    assert messages_of(tmp_path, row) == [[{"role": "system", "content": "e"}, *kit.talk("a", "b", "c", "d")]]
    assert messages_of(tmp_path, {"prompt": "a", "response": "b", "history": []}) == [kit.talk("a", "b")]
    for history in ("a", [["a"]], [{"user": "a"}]):
        with pytest.raises(UserError, match="`history` must be a list of pairs"):
            messages_of(tmp_path, row | {"history": history})
