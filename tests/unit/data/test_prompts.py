"""Promises of the built-in prompts and their split."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from draftline.data.conversations import Tally, read_conversations
from draftline.data.prompts import builtin_prompts, hold_out, split_prompts


def test_built_in_prompts_are_about_250_short_different_single_turns() -> None:
    rows = list(read_conversations([str(builtin_prompts())], Tally(skip_bad_rows=False)))
    assert 240 <= len(rows) <= 270
    assert [row.id for row in rows] == [f"general-{i:03d}" for i in range(len(rows))]
    assert len({row.messages[0]["content"].lower() for row in rows}) == len(rows)
    for row in rows:
        assert [message["role"] for message in row.messages] == ["user"]
        assert 10 <= len(row.messages[0]["content"]) <= 160
    kinds = Counter(json.loads(line)["category"] for line in builtin_prompts().read_text().splitlines())
    assert len(kinds) >= 10 and min(kinds.values()) >= 15


def test_split_holds_out_exactly_n_conversations_the_same_each_time(tmp_path: Path) -> None:
    train, held = split_prompts(builtin_prompts(), held_out=24, seed=0)
    ids = [{row["id"] for row in part} for part in (train, held)]
    assert len(held) == 24 and not ids[0] & ids[1]
    assert len(train) + len(held) == sum(1 for _ in builtin_prompts().open())
    assert split_prompts(builtin_prompts(), held_out=24, seed=0) == (train, held)
    assert split_prompts(builtin_prompts(), held_out=24, seed=1)[1] != held


def test_split_keeps_what_rows_say_of_themselves(tmp_path: Path) -> None:
    """An evaluation tells its results by category."""
    rows = [
        {"id": f"r{i}", "category": f"kind {i % 2}", "messages": [{"role": "user", "content": f"Question {i}?"}]}
        for i in range(6)
    ]
    rows[3]["tools"] = [{"type": "function", "function": {"name": "f"}}]
    del rows[4]["category"]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    train, held = split_prompts(file, held_out=2)
    assert sorted(train + held, key=lambda row: row["id"]) == rows


def test_hold_out_does_not_depend_on_order_and_stays_when_others_come() -> None:
    ids = [f"p{i}" for i in range(100)]
    chosen = hold_out(ids, 10, seed=3)
    assert chosen == hold_out(reversed(ids), 10, seed=3) and len(chosen) == 10
    assert len(chosen & hold_out([*ids, "new"], 10, seed=3)) >= 9
    with pytest.raises(ValueError, match="cannot hold out 5 of 2"):
        hold_out(["a", "b", "a"], 5)
