"""Promises of the span log: nothing whole is lost, torn lines are survived, sessions keep their own time."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from monitor_fakes import FakeClock

from draftline.errors import UserError
from draftline.monitor.events import EventLog, read_events


class FullDisk:
    def write(self, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def close(self) -> None:
        pass


def make_log(path: Path, clock: FakeClock, wall: float = 1e9, **options: int) -> EventLog:
    return EventLog(path, clock=clock, wall=lambda: wall, **options)


def test_spans_and_notes_come_back_as_written(tmp_path: Path, clock: FakeClock) -> None:
    log = make_log(tmp_path / "e.jsonl", clock)
    log.span("target-0", "working", "row 17", 101.0, 102.5, {"tokens": 4096})
    log.note("restart", worker="target-0")
    log.close()
    (session,) = read_events(tmp_path / "e.jsonl").sessions
    (span,) = session.spans
    assert (span.worker, span.activity, span.what, span.t0_s, span.t1_s) == (
        "target-0",
        "working",
        "row 17",
        101.0,
        102.5,
    )
    assert span.facts == {"tokens": 4096}
    assert [(n.kind, n.facts) for n in session.notes] == [("restart", {"worker": "target-0"})]
    assert session.wall_offset_s + span.t0_s == pytest.approx(1e9 + 1.0)


def test_nothing_is_written_before_a_flush_and_all_of_it_after(tmp_path: Path, clock: FakeClock) -> None:
    log = make_log(tmp_path / "e.jsonl", clock)
    log.span("a", "working", "", 1, 2)
    assert list(read_events(tmp_path / "e.jsonl").spans()) == []
    log.flush()
    assert len(list(read_events(tmp_path / "e.jsonl").spans())) == 1
    log.close()


def test_a_full_buffer_writes_itself_out(tmp_path: Path, clock: FakeClock) -> None:
    log = make_log(tmp_path / "e.jsonl", clock, buffer_lines=3)
    for i in range(7):
        log.span("a", "working", str(i), i, i + 1)
    assert [s.what for s in read_events(tmp_path / "e.jsonl").spans()] == ["0", "1", "2", "3", "4", "5"]
    log.close()


def test_threads_lose_and_tear_nothing(tmp_path: Path, clock: FakeClock) -> None:
    log = make_log(tmp_path / "e.jsonl", clock, buffer_lines=5)

    def write(worker: str) -> None:
        for i in range(200):
            log.span(worker, "working", str(i), i, i + 1)

    threads = [threading.Thread(target=write, args=(f"w{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.close()
    events = read_events(tmp_path / "e.jsonl")
    assert events.torn_lines == 0
    assert sorted((s.worker, int(s.what)) for s in events.spans()) == [
        (f"w{n}", i) for n in range(4) for i in range(200)
    ]


def test_a_torn_last_line_is_passed_over_and_the_next_session_starts_clean(tmp_path: Path, clock: FakeClock) -> None:
    path = tmp_path / "e.jsonl"
    log = make_log(path, clock, wall=1000.0)
    log.span("a", "working", "first", 1, 2)
    log.span("a", "working", "second", 2, 3)
    log.close()
    path.write_bytes(path.read_bytes()[:-9])
    assert [s.what for s in read_events(path).spans()] == ["first"]

    clock.now = 5.0
    again = make_log(path, clock, wall=2000.0)
    again.span("a", "working", "third", 6, 7)
    again.close()
    events = read_events(path)
    assert events.torn_lines == 1
    assert [s.what for s in events.spans()] == ["first", "third"]
    assert [s.wall_offset_s for s in events.sessions] == [900.0, 1995.0]


def test_a_killed_process_keeps_what_was_flushed(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    code = (
        "import sys, time; from pathlib import Path; from draftline.monitor.events import EventLog\n"
        f"log = EventLog(Path({str(path)!r}))\n"
        "log.span('a', 'working', 'kept', 1, 2); log.flush(); log.span('a', 'working', 'lost', 2, 3)\n"
        "print('ready', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        os.kill(process.pid, signal.SIGKILL)
    assert [s.what for s in read_events(path).spans()] == ["kept"]


def test_a_newer_log_and_a_missing_one_are_refused(tmp_path: Path) -> None:
    (tmp_path / "new.jsonl").write_text('{"anchor": 99, "wall": 1, "mono": 1, "pid": 1}\n')
    with pytest.raises(UserError, match="event log of version 99"):
        read_events(tmp_path / "new.jsonl")
    with pytest.raises(UserError, match="no event log here"):
        read_events(tmp_path / "absent.jsonl")
    with pytest.raises(UserError, match="cannot write the event log"):
        EventLog(tmp_path / "no" / "folder.jsonl")


def test_a_disk_that_fails_ends_the_log_with_one_warning_and_no_error(
    tmp_path: Path, clock: FakeClock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = make_log(tmp_path / "e.jsonl", clock)
    monkeypatch.setattr(log, "_file", FullDisk())
    log.note("one")
    log.note("two")
    log.close()
    assert sum("the event log ends here: No space left" in r.message for r in caplog.records) == 1
