"""Promises of watch in surroundings of every kind: narrow, colourless, no terminal, another locale, two at once."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from monitor_fakes import FakeClock, work
from rich.console import Console

from draftline.config.schema import MonitorConfig
from draftline.monitor.console import make_console
from draftline.monitor.run import RunMonitor
from draftline.monitor.status import LedgerCounts
from draftline.monitor.watch import watch_run

COLOUR = re.compile(r"\x1b\[(?!0?m)[0-9;]+m")


@pytest.fixture
def run(tmp_path: Path, clock: FakeClock) -> Iterator[RunMonitor]:
    """A run in progress, one of whose workers failed with words that are no ASCII."""
    with RunMonitor(tmp_path, MonitorConfig(), show=False, clock=clock) as monitor:
        for name in ("target-0", "drafter-0"):
            work(clock, monitor.metrics.worker(name), 1)
        monitor.metrics.watch(ledger=lambda: LedgerCounts(planned=4, committed=1))
        monitor.metrics.worker("drafter-1").end("Gerät verloren")
        monitor.end("failed", "Gerät verloren")
        yield monitor


def seen(tmp_path: Path, **options: object) -> str:
    stream = io.StringIO()
    console = Console(file=stream, highlight=False, markup=False, emoji=False, **options)  # type: ignore[arg-type]
    watch_run(tmp_path, console=console)
    return stream.getvalue()


def test_forty_columns_are_enough(run: RunMonitor, tmp_path: Path) -> None:
    run.close()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen(tmp_path, force_terminal=True, width=40))
    assert max(len(line.rstrip()) for line in text.replace("\r", "\n").splitlines()) <= 40
    assert "failed at" in text and "drafter-1" in text


def test_no_colours_are_used_where_none_are_wanted(
    run: RunMonitor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.close()
    assert not COLOUR.search(seen(tmp_path, force_terminal=True, width=100, no_color=True))
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b" not in seen(tmp_path, force_terminal=True, width=100)


def test_without_a_terminal_plain_lines_are_printed(run: RunMonitor, tmp_path: Path) -> None:
    run.close()
    stream = io.StringIO()
    watch_run(tmp_path, console=make_console(stream))
    assert "\x1b" not in stream.getvalue() and "\r" not in stream.getvalue()
    assert stream.getvalue().startswith("failed at ")


def test_a_locale_that_is_not_utf8_shows_question_marks_and_breaks_nothing(run: RunMonitor, tmp_path: Path) -> None:
    run.close()
    code = "import sys, pathlib, draftline.monitor.watch as watch; watch.watch_run(pathlib.Path(sys.argv[1]))"
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, env=os.environ | locale, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert b"Ger?t verloren" in done.stdout


def test_two_watchers_at_once_see_the_same_and_change_nothing(run: RunMonitor, tmp_path: Path) -> None:
    run.close()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    streams = [io.StringIO(), io.StringIO()]
    consoles = [{"console": make_console(stream)} for stream in streams]
    threads = [threading.Thread(target=watch_run, args=(tmp_path,), kwargs=console) for console in consoles]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert streams[0].getvalue() == streams[1].getvalue() != ""
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
