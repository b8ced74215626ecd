"""Promises of the queue over time in `draftline watch`: drawn from the newest figures, inside any width."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from monitor_fakes import FakeClock, work

from draftline.config.schema import MonitorConfig
from draftline.monitor.console import make_console
from draftline.monitor.history import bar, queue_lines
from draftline.monitor.run import RunMonitor
from draftline.monitor.status import QueueGauge
from draftline.monitor.watch import watch_run


def write(file: Path, rows: list[float], *, start: int = 0) -> Path:
    lines = [
        {"step": i, "wall": 100.0 + 10 * (start + i), "queue/rows": r, "queue/bytes": r * 2**20}
        for i, r in enumerate(rows)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def test_rows_and_bytes_are_drawn_with_their_units_and_the_time_they_span(tmp_path: Path) -> None:
    lines = queue_lines(write(tmp_path / "m", [0, 1, 2, 4]), 80)
    assert lines == ["queue over 30s, 0 to 4 rows  | -+@|", "queue over 30s, 0 to 4.0 MiB | -+@|"]


def test_a_narrow_terminal_gets_the_strip_below_its_words(tmp_path: Path) -> None:
    lines = queue_lines(write(tmp_path / "m", [0, 4] * 40), 30)
    assert max(map(len, lines)) <= 30 and len(lines) == 4
    assert lines[0] == "queue over 4m30s, 0 to 4 rows" and lines[1] == "|" + " @" * 14 + "|"


def test_an_empty_queue_is_an_empty_strip_and_a_little_is_seen() -> None:
    assert bar([0, 0]) == "  " and bar([0.001, 1000]) == ".@"


@pytest.mark.parametrize(
    "text", [None, "", "{", '{"wall": 1}\n[]\n7', '{"wall": 1, "queue/rows": NaN, "queue/bytes": 1}']
)
def test_where_there_is_nothing_to_draw_nothing_is_drawn(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "m").write_text(text)
    assert queue_lines(tmp_path / "m", 80) == []


def test_a_long_log_is_read_from_its_end_alone(tmp_path: Path) -> None:
    file = write(tmp_path / "m", [9.0] * 20_000 + [1.0] * 59 + [2.0])
    assert file.stat().st_size > 2**20
    assert queue_lines(file, 200)[0] == "queue over 9m50s, 0 to 2 rows  |" + "+" * 59 + "@|"
    with file.open("a") as log:
        log.write('{"torn')
    assert "0 to 2 rows" in queue_lines(file, 200)[0]


def test_watch_shows_it(tmp_path: Path, clock: FakeClock) -> None:
    stream = io.StringIO()
    with RunMonitor(tmp_path, MonitorConfig(), show=False, clock=clock) as monitor:
        work(clock, monitor.metrics.worker("drafter-0"), 1)
        write(tmp_path / "metrics.jsonl", [1, 2, 3])
        monitor.metrics.watch(queue=lambda: QueueGauge(rows=2, bytes=5))
        watch_run(tmp_path, once=True, console=make_console(stream))
    assert "queue over 20s, 0 to 3 rows" in stream.getvalue()
