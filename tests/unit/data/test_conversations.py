"""Promises of reading: every bad row is one clear line with file and line number, good rows come in one form."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import data_kit as kit
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from draftline.data import conversations
from draftline.data.conversations import Conversation, IdRegistry, Tally, read_conversations
from draftline.errors import UserError

GOOD = {"messages": kit.talk("hello", "yes")}


def read(*sources: Path | str, skip: bool = False) -> tuple[list[Conversation], Tally]:
    tally = Tally(skip)
    return list(read_conversations([str(source) for source in sources], tally)), tally


def rows_of(tmp_path: Path, *rows: Any) -> list[Conversation]:
    return read(kit.write_lines(tmp_path / "in.jsonl", rows))[0]


def user(content: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "yes"}], **more}


BAD_ROWS = [
    (b"{not json", "not JSON", "not JSON (Expecting property name"),
    (b'{"messages": [}', "not JSON", "not JSON ("),
    (b"[" * 100_000, "not JSON", "nested too deeply"),
    ("Grüße".encode("latin-1"), "not UTF-8", "not UTF-8 (byte 3 of the line)"),
    (b'{"prompt": "half \\ud83e of a smile", "response": "a"}', "not UTF-8", "half of a surrogate pair"),
    (b"[1, 2]", "not an object", "the row is a list, not a JSON object"),
    ({"text": "a"}, "no messages", "neither `messages` nor `prompt`"),
    ({"messages": []}, "no messages", "a list with at least one message"),
    ({"messages": ["hi"]}, "bad message", "message 1 is a str, not an object"),
    ({"messages": [{"role": "robot", "content": "a"}]}, "unknown role", "message 1 has the unknown role 'robot'"),
    ({"messages": [{"content": "a"}]}, "unknown role", "unknown role None"),
    (user(" \n"), "empty content", "message 1 (user) has empty content"),
    (user(None), "empty content", "message 1 (user) has empty content"),
    (user(7), "bad message", "message 1: content is a int, not text"),
    (user([{"type": "image_url", "image_url": {"url": "x"}}]), "multimodal", "a part of type 'image_url'"),
    (user([{"type": "text", "text": "a"}, {"type": "audio"}]), "multimodal", "only text is supported"),
    (user([{"type": "text", "text": ["a"]}]), "bad message", "message 1: the text of a part is a list"),
    (user([["a"]]), "bad message", "message 1: a part of the content is a list, not an object"),
    (user("a", images=["x.png"]), "multimodal", "`images`: images, audio and video are not supported"),
    ({"messages": [{"role": "user", "content": "a", "images": ["x"]}]}, "multimodal", "message 1 has `images`"),
    (user("a", tools="[{broken"), "bad tools", "tools is a string that is not JSON"),
    (user("a", tools={"name": "f"}), "bad tools", "tools must be a list"),
    (user("a", tools=[1]), "bad tools", "tools must be a list of JSON schemas"),
    (user("a", id=[1]), "bad id", "id is a list"),
    (user("a", rendered_on="today"), "bad rendered_on", "a date like 2026-01-31"),
    (user("a", answer_token_ids=["x"]), "bad answer_token_ids", "a list of token ids"),
    (
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"function": {"arguments": "{}"}}]}]},
        "bad tool call",
        "a tool call has no function name",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
        "bad tool call",
        "arguments is a string that is not JSON",
    ),
]


@pytest.mark.parametrize(("row", "reason", "says"), BAD_ROWS, ids=[f"{i}-{c[1]}" for i, c in enumerate(BAD_ROWS)])
def test_a_bad_row_is_one_line_with_file_and_number_or_counted(
    tmp_path: Path, row: Any, reason: str, says: str
) -> None:
    file = kit.write_lines(tmp_path / "in.jsonl", [GOOD, row, GOOD | {"id": "last"}])
    with pytest.raises(UserError) as caught:
        read(file)
    message = str(caught.value)
    assert message.startswith(f"{file}:2: ") and says in message and "\n" not in message
    assert message.endswith("mend the row or pass --skip-bad-rows")
    rows, tally = read(file, skip=True)
    assert [row.line for row in rows] == [1, 3]
    assert (tally.in_rows, tally.rejected) == (3, {reason: 1})
    assert tally.in_rows == len(rows) + tally.n_rejected
    assert tally.first_bad is not None and says in tally.first_bad


def test_sources_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    empty = kit.write_lines(tmp_path / "empty.jsonl", [])
    blank = kit.write_lines(tmp_path / "blank.jsonl", [b"", b"  "])
    array = tmp_path / "array.json"
    array.write_text(json.dumps([GOOD], indent=1))
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"PAR1 nothing")
    for source, says in [
        (empty, "no rows in it"),
        (blank, "no rows in it"),
        (tmp_path, "a folder"),
        (tmp_path / "none.jsonl", "no such file"),
        (array, "a JSON array, not one object a line"),
        (broken, "not readable as Parquet"),
        ("hf:", "no name in it"),
        (f"hf:{tmp_path / 'nothing'}", "cannot be read"),
    ]:
        with pytest.raises(UserError, match=says) as caught:
            read(source)
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="no source was given"):
        read()


def test_an_empty_source_beside_a_good_one_is_refused_too(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"empty\.jsonl: no rows in it"):
        read(kit.write_lines(tmp_path / "a.jsonl", [GOOD]), kit.write_lines(tmp_path / "empty.jsonl", []))


def test_all_shapes_of_a_row_become_messages(tmp_path: Path) -> None:
    shapes = [
        {"messages": kit.talk("a", "b")},
        {"messages": json.dumps(kit.talk("a", "b"))},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        {"prompt": "a", "response": "b"},
        {"prompt": kit.talk("a"), "response": "b"},
        {"prompt": "a", "completion": [{"role": "assistant", "content": "b"}]},
        {"instruction": "a", "input": "", "output": "b"},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}, *kit.talk("", "b")[1:]]},
        {"messages": [{"role": "user", "content": ["a"]}, *kit.talk("", "b")[1:]]},
    ]
    for row in rows_of(tmp_path, *shapes):
        assert row.messages == kit.talk("a", "b")
    (only,) = rows_of(tmp_path, {"prompt": "a"})
    assert only.messages == kit.talk("a")


def test_a28_instruction_and_input_are_both_in_the_prompt(tmp_path: Path) -> None:
    (row,) = rows_of(tmp_path, {"instruction": "Sort this.", "input": "3 1 2", "output": "1 2 3"})
    assert row.messages[0]["content"] == "Sort this.\n\n3 1 2"


def test_a11_tools_as_list_text_or_nothing_work(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    given = [tools, json.dumps(tools), None, "", []]
    rows = rows_of(tmp_path, *(user("a", tools=t, id=i) for i, t in enumerate(given)))
    assert [row.tools for row in rows] == [tools, tools, None, None, None]


def test_tool_calls_get_their_arguments_as_objects(tmp_path: Path) -> None:
    call = {"type": "function", "id": "1", "function": {"name": "add", "arguments": '{"a": 1}'}}
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    (row,) = rows_of(tmp_path, {"messages": [*talk, {"role": "tool", "content": ""}]})
    assert row.messages[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert row.messages[1]["content"] == row.messages[2]["content"] == ""


def test_ids_are_kept_derived_and_made_unique_the_same_way_each_time(tmp_path: Path) -> None:
    rows = [user("a", id="x"), user("b", id="x"), user("c"), user("c"), user("d", id=7), user("e", id="x#2")]
    first = [row.id for row in rows_of(tmp_path, *rows)]
    assert first == [row.id for row in rows_of(tmp_path, *rows)]
    assert first[:2] == ["x", "x#2"] and first[4:] == ["7", "x#2#2"]
    assert first[3] == f"{first[2]}#2" and len(first[2]) == 16
    assert len(set(first)) == len(first)
    moved = rows_of(tmp_path, *reversed(rows[:4]))
    assert moved[0].id == first[2], "a derived id follows the content, not the place"


def test_ids_are_unique_over_sources(tmp_path: Path) -> None:
    a = kit.write_lines(tmp_path / "a.jsonl", [user("a", id="x")])
    b = kit.write_lines(tmp_path / "b.jsonl", [user("b", id="x")])
    assert [row.id for row in read(a, b)[0]] == ["x", "x#2"]


def test_id_registry_never_gives_an_id_twice() -> None:
    ids = IdRegistry()
    given = [ids.unique(name) for name in ["a", "a#2", "a", "a", "a#2", "a#3", "a"]]
    assert len(set(given)) == len(given)
    assert given[:3] == ["a", "a#2", "a#3"]


def test_byte_order_mark_blank_lines_and_a_missing_last_newline_are_fine(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    line = json.dumps(GOOD).encode()
    file.write_bytes(b"\xef\xbb\xbf" + line + b"\r\n\n" + line)
    rows, tally = read(file)
    assert [row.line for row in rows] == [1, 3] and tally.in_rows == 2


def test_a_line_over_the_bound_is_never_held_and_its_neighbours_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversations, "MAX_LINE_BYTES", 1000)
    file = kit.write_lines(tmp_path / "in.jsonl", [GOOD, b"x" * 5_000_000, GOOD])
    tracemalloc.start()
    rows, tally = read(file, skip=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [row.line for row in rows] == [1, 3] and tally.rejected == {"line too long": 1}
    assert peak < 1_000_000
    with pytest.raises(UserError, match=r"in\.jsonl:2: the line is longer than 1000 bytes"):
        read(file)


def test_d10_reading_holds_one_row_at_a_time(tmp_path: Path) -> None:
    file = kit.write_lines(tmp_path / "in.jsonl", [user("a" * 2000, id=i) for i in range(3000)])
    assert file.stat().st_size > 6_000_000
    tracemalloc.start()
    n = sum(1 for _ in read_conversations([str(file)], Tally(False)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert n == 3000 and peak < 2_000_000


def test_parquet_rows_read_like_json_rows(tmp_path: Path) -> None:
    rows = [user("a"), {"messages": [*user("b")["messages"], {"role": "tool", "content": "c", "name": "f"}]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "in.parquet")
    from_parquet = read(tmp_path / "in.parquet")[0]
    assert [row.messages for row in from_parquet] == [row.messages for row in rows_of(tmp_path, *rows)]
    assert "name" not in from_parquet[0].messages[0]


def test_hugging_face_data_sets_are_read_from_local_files(tmp_path: Path) -> None:
    file = kit.write_lines(tmp_path / "in.json", [user("a", id="x"), user("b", id="y")])
    for source in (f"hf:{file}", f"hf:{file}:train", f"hf:{tmp_path}"):
        rows, tally = read(source)
        assert [(row.id, row.line) for row in rows] == [("x", 1), ("y", 2)]
        assert tally.in_rows == 2
    with pytest.raises(UserError, match="cannot be read"):
        read(f"hf:{file}:nosuchsplit")
