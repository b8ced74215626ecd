"""Every reader of data meets files made to hurt it: one line for the user, never a traceback, a hang or a write."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hostile_kit import FUZZ, check_meets, hostile, put_back, torn
from hypothesis import given
from hypothesis import strategies as st

from draftline.data import conversations as conversations_module
from draftline.data import messages as messages_module
from draftline.data.answer_log import AnswerLog
from draftline.data.conversations import Tally, read_conversations
from draftline.data.manifest import DatasetFacts
from draftline.data.shards import ShardWriter, TokenDataset
from draftline.errors import UserError

CONVERSATION = {
    "id": "a",
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": "yes", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
    ],
    "tools": [{"name": "f"}],
    "answer_token_ids": [1, 2],
}


@FUZZ
@given(data=hostile(CONVERSATION), skip=st.booleans())
def test_conversation_lines(tmp_path: Path, data: bytes, skip: bool):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(data + b"\n" + json.dumps(CONVERSATION).encode())
    check_meets(tmp_path, lambda: list(read_conversations([str(file)], Tally(skip_bad_rows=skip))))


@FUZZ
@given(data=st.data())
def test_parquet_files(tmp_path: Path, data: st.DataObject):
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"prompt": ["a", "b"], "response": ["c", "d"]}), file)
    file.write_bytes(data.draw(torn(file.read_bytes())))
    check_meets(tmp_path, lambda: list(read_conversations([str(file)], Tally(skip_bad_rows=True))))


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    with ShardWriter(tmp_path / "data") as writer:
        for i in range(3):
            writer.add(f"s{i}", list(range(5 + i)), [False, *[True] * (4 + i)])
        writer.finish(DatasetFacts(tokenizer_fingerprint="t", template_hash="t", vocab_size=16, max_tokens=16))
    return tmp_path / "data"


@FUZZ
@given(data=st.data())
def test_data_manifests(tmp_path: Path, dataset: Path, data: st.DataObject):
    file = dataset / "manifest.json"
    with put_back(dataset):
        file.write_bytes(data.draw(hostile(json.loads(file.read_bytes()))))
        check_meets(tmp_path, lambda: TokenDataset.open(dataset))


@FUZZ
@given(data=st.data())
def test_shards_whose_hash_is_right(tmp_path: Path, dataset: Path, data: st.DataObject):
    """Whoever makes a hostile shard also writes its hash into the manifest."""
    manifest, shard = dataset / "manifest.json", dataset / "shard-00000.arrow"

    def read() -> None:
        opened = TokenDataset.open(dataset)
        for i in range(len(opened)):
            opened.sample(i)

    with put_back(dataset):
        spoilt = data.draw(torn(shard.read_bytes()))
        content = json.loads(manifest.read_bytes())
        content["shards"][0] |= {"n_bytes": len(spoilt), "sha256": hashlib.sha256(spoilt).hexdigest()}
        shard.write_bytes(spoilt)
        manifest.write_text(json.dumps(content))
        check_meets(tmp_path, read)


@FUZZ
@given(line=hostile({"id": "a", "answer_cut": False, "messages": []}), manifest=st.data())
def test_answer_logs(tmp_path: Path, line: bytes, manifest: st.DataObject):
    settings_now = {"target": "t", "seed": 1}
    output = tmp_path / "answers.jsonl"
    for path in tmp_path.iterdir():
        path.unlink()
    with AnswerLog(output) as log:
        log.settle(settings_now)
        log.append([{"id": "x", "answer_cut": True}], [("y", "why")])
    output.write_bytes(output.read_bytes() + line + b"\n")
    log.manifest_path.write_bytes(manifest.draw(hostile(json.loads(log.manifest_path.read_bytes()))))
    try:
        with AnswerLog(output) as again:
            again.settle(settings_now)
    except UserError as error:
        assert "\n" not in str(error)
    assert {path.parent for path in tmp_path.rglob("*")} == {tmp_path}


def test_a_line_of_ten_gigabytes_is_never_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The limit is lowered instead of the line being made longer; what is read at once stays below it."""
    monkeypatch.setattr(conversations_module, "MAX_LINE_BYTES", 1000)
    file = tmp_path / "rows.jsonl"
    row = json.dumps({"prompt": "a", "response": "b"})
    file.write_text(row + "\n" + "x" * 1_000_000 + "\n" + row + "\n")
    tally = Tally(skip_bad_rows=True)
    assert [row.line for row in read_conversations([str(file)], tally)] == [1, 3]
    assert tally.rejected == {"line too long": 1}
    with pytest.raises(UserError, match=r"rows.jsonl:2: the line is longer than 1000 bytes"):
        list(read_conversations([str(file)], Tally(skip_bad_rows=False)))


def test_a_conversation_of_ten_million_turns_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(messages_module, "MAX_MESSAGES", 10)
    file = tmp_path / "rows.jsonl"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    file.write_text("".join(json.dumps({"messages": turns * n}) + "\n" for n in (5, 6)))
    with pytest.raises(UserError, match=r"rows.jsonl:2: 12 messages, at most 10 are read"):
        list(read_conversations([str(file)], Tally(skip_bad_rows=False)))


def ids(column: Any, wrong: int) -> Any:
    values = column.to_pylist()
    values[1][2] = wrong
    return pa.array(values, column.type)


def short_mask(column: Any) -> Any:
    values = column.to_pylist()
    values[0] = values[0][:-1]
    return pa.array(values, column.type)


SPOILT: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "an id as large as the vocabulary": (
        "input_ids",
        lambda c: ids(c, 16),
        "token id 16, outside the vocabulary of 16",
    ),
    "a negative id": ("input_ids", lambda c: ids(c, -1), "token id -1, outside the vocabulary of 16"),
    "a mask that is too short": ("loss_mask", short_mask, "samples whose mask does not fit their tokens"),
    "a wrong number of labels": (
        "n_supervised",
        lambda c: pa.array([n - 1 for n in c.to_pylist()], c.type),
        "samples with another number of labels than it says",
    ),
}


@pytest.mark.parametrize("what", SPOILT)
def test_a_shard_with_content_that_no_data_set_has_is_refused_in_one_line(dataset: Path, what: str):
    """The hash and the counts in the manifest are made to fit, as whoever spoilt it would."""
    column, change, says = SPOILT[what]
    shard, manifest = dataset / "shard-00000.arrow", dataset / "manifest.json"
    table = pa.ipc.open_file(pa.BufferReader(shard.read_bytes())).read_all().combine_chunks()
    place = table.schema.get_field_index(column)
    table = table.set_column(place, table.schema.field(place), change(table.column(column).chunk(0)))
    with pa.ipc.new_file(str(shard), table.schema) as writer:
        writer.write_table(table)
    content = json.loads(manifest.read_bytes())
    spoilt = shard.read_bytes()
    content["shards"][0] |= {"n_bytes": len(spoilt), "sha256": hashlib.sha256(spoilt).hexdigest()}
    content["n_supervised"] = sum(table.column("n_supervised").to_pylist())
    manifest.write_text(json.dumps(content))
    with pytest.raises(UserError, match=says) as error:
        TokenDataset.open(dataset)
    assert "\n" not in str(error.value) and str(shard) in str(error.value)
