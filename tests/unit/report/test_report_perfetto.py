"""Promises of the trace: every span where it was, workers apart, sessions in time, and files that are never spoilt."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from draftline.errors import UserError
from draftline.monitor.events import EventLog
from draftline.report.perfetto import write_trace


class Time:
    def __init__(self, mono: float, wall: float) -> None:
        self.mono_s, self.wall_s = mono, wall

    def log(self, path: Path) -> EventLog:
        return EventLog(path, clock=lambda: self.mono_s, wall=lambda: self.wall_s)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two sessions, the second an hour later on another monotonic clock."""
    folder = tmp_path / "run"
    folder.mkdir()
    log = Time(100.0, 1_700_000_000.0).log(folder / "events.jsonl")
    log.span("drafter-0", "waiting", "a row", 100.25, 100.5)
    log.span("drafter-0", "working", "row 1", 100.5, 101.5, {"tokens": 64})
    log.span("target-1", "working", "row 2", 100.0, 100.75, {"share": float("nan")})
    log.note("end", outcome="stopped")
    log.close()
    log = Time(5.0, 1_700_003_600.0).log(folder / "events.jsonl")
    log.span("drafter-0", "working", "row 2", 6.0, 7.0)
    log.close()
    return folder


def trace(file: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    return events


def test_every_span_lies_where_it_was_in_microseconds(run: Path, tmp_path: Path) -> None:
    counts = write_trace(run, tmp_path / "trace.json")
    assert (counts.sessions, counts.spans, counts.torn_lines) == (2, 4, 0)
    spans = [e for e in trace(tmp_path / "trace.json") if e["ph"] == "X"]
    assert [(e["name"], e["cat"], e["ts"], e["dur"], e["pid"]) for e in spans] == [
        ("waiting for a row", "waiting", 250_000, 250_000, 1),
        ("working row 1", "working", 500_000, 1_000_000, 1),
        ("working row 2", "working", 0, 750_000, 1),
        ("working row 2", "working", 3_601_000_000, 1_000_000, 2),
    ]


def test_workers_are_threads_of_their_own_named_and_sorted(run: Path, tmp_path: Path) -> None:
    write_trace(run, tmp_path / "trace.json")
    events = trace(tmp_path / "trace.json")
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {(1, 1): "drafter-0", (1, 2): "target-1", (2, 1): "drafter-0"}
    order = [(e["args"]["sort_index"], e["tid"]) for e in events if e["name"] == "thread_sort_index" and e["pid"] == 1]
    assert [tid for _, tid in sorted(order)] == [2, 1]
    sessions = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert [name.split(" (")[0] for name in sessions] == ["session 1", "session 2"]
    assert [(e["name"], e["args"]["outcome"]) for e in events if e["ph"] == "i"] == [("end", "stopped")]


def test_a_trace_is_json_for_every_reader_also_compressed(run: Path, tmp_path: Path) -> None:
    def refuse(word: str) -> None:
        raise AssertionError(word)

    write_trace(run, tmp_path / "trace.json.gz")
    text = gzip.decompress((tmp_path / "trace.json.gz").read_bytes()).decode()
    events = json.loads(text, parse_constant=refuse)["traceEvents"]
    assert [e["args"] for e in events if e["ph"] == "X" and e["args"]] == [{"tokens": 64}, {"share": "nan"}]


def test_torn_and_hostile_lines_are_passed_over_and_counted(run: Path, tmp_path: Path) -> None:
    with (run / "events.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"w":"target-0","a":"working","d":"x","t0":NaN,"t1":9}\n')
        file.write('{"w":"target-0","a":"working","d":"x","t0":9,"t1":8}\n')
        file.write('{"w":"target-0","a":"working","d":"x","t0":1e300,"t1":1e301}\n')
        file.write('{"w":"target-0","a":"working","d":"x","t0":6,"t1":7,"f":3}\n{"w": "target-0", "a')
    counts = write_trace(run, tmp_path / "trace.json")
    assert (counts.spans, counts.torn_lines) == (5, 4)
    assert [e["args"] for e in trace(tmp_path / "trace.json") if e["name"] == "working x"] == [{}]


def test_what_cannot_be_a_trace_is_refused_and_leaves_nothing(run: Path, tmp_path: Path) -> None:
    before = (run / "events.jsonl").read_bytes()
    with pytest.raises(UserError, match=r"events\.jsonl: is there already; choose another name"):
        write_trace(run, run / "events.jsonl")
    assert (run / "events.jsonl").read_bytes() == before
    with pytest.raises(UserError, match="no such folder"):
        write_trace(tmp_path / "absent", tmp_path / "trace.json")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no event log here"):
        write_trace(tmp_path / "empty", tmp_path / "trace.json")
    Time(0.0, 0.0).log(tmp_path / "empty" / "events.jsonl").close()
    with pytest.raises(UserError, match="holds no span yet"):
        write_trace(tmp_path / "empty", tmp_path / "trace.json")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "run"]


def test_a_trace_is_replaced_only_when_asked(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    file.write_text("mine")
    with pytest.raises(UserError, match="is there already"):
        write_trace(run, file)
    assert file.read_text() == "mine"
    write_trace(run, file, replace=True)
    assert len(trace(file)) > 4
