"""Promises of the run's monitor and of watching from outside: files, ends, kills, trackers that fail."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from monitor_fakes import FakeClock, work

from draftline.config.schema import MonitorConfig
from draftline.errors import RunFailedError, RunStoppedError, UserError
from draftline.monitor import trackers as trackers_module
from draftline.monitor.console import make_console
from draftline.monitor.events import read_events
from draftline.monitor.metrics import TrainingStats
from draftline.monitor.run import RunMonitor
from draftline.monitor.status import LedgerCounts
from draftline.monitor.trackers import TrackerSet, open_trackers
from draftline.monitor.watch import read_status, render_status, watch_run


def monitor(run_dir: Path, clock: FakeClock | None = None) -> RunMonitor:
    options = {"clock": clock} if clock else {}
    run_dir.mkdir(exist_ok=True)
    return RunMonitor(run_dir, MonitorConfig(), console=make_console(io.StringIO()), **options)  # type: ignore[arg-type]


def train_a_little(run: RunMonitor, clock: FakeClock) -> None:
    work(clock, run.metrics.worker("target-0"), 1)
    work(clock, run.metrics.worker("drafter-0"), 1)
    run.metrics.watch(ledger=lambda: LedgerCounts(planned=4, committed=1))
    run.metrics.record_training(TrainingStats(1, 1000, 500, 3.0, 2.0, terms={"ce": (3.0, 2.0)}))


def test_a_finished_run_leaves_spans_curves_and_its_end(tmp_path: Path, clock: FakeClock) -> None:
    with monitor(tmp_path, clock) as run:
        train_a_little(run, clock)
        run.log(1, {"validation/loss": float("nan")})
        assert read_status(tmp_path).state == "running"
    events = read_events(tmp_path / "events.jsonl")
    assert [(s.worker, s.activity) for s in events.spans()] == [("target-0", "working"), ("drafter-0", "working")]
    assert [n.facts["outcome"] for n in events.sessions[0].notes] == ["closed"]
    curves = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert curves[0]["validation/loss"] == "nan"
    assert (curves[-1]["step"], curves[-1]["train/loss"], curves[-1]["train/ce"]) == (1, 1.5, 1.5)
    status = read_status(tmp_path)
    assert status.state == "closed" and status.detail.startswith("finished at ")
    assert status.snapshot.loss == 1.5


@pytest.mark.parametrize(
    ("error", "state", "word"),
    [
        (RunFailedError("row 3: out of memory", origin="drafter-1"), "failed", "drafter-1: row 3: out of memory"),
        (RunStoppedError("stopped after its checkpoint", signal_number=15), "stopped", "stopped after its checkpoint"),
        (ZeroDivisionError("x"), "failed", "ZeroDivisionError: x"),
    ],
)
def test_an_exception_decides_the_end(tmp_path: Path, error: Exception, state: str, word: str) -> None:
    with pytest.raises(type(error)), monitor(tmp_path):
        raise error
    status = read_status(tmp_path)
    assert status.state == state
    assert word in status.detail


def test_a_gauge_that_raises_ends_the_watching_but_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> LedgerCounts:
        raise RuntimeError("no ledger")

    with monitor(tmp_path) as run:
        run.metrics.watch(ledger=broken)
    assert "the run goes on" in caplog.text and "no ledger" in caplog.text
    assert read_status(tmp_path).state == "closed"


def test_a_killed_run_is_told_with_its_time(tmp_path: Path) -> None:
    code = (
        "import time; from pathlib import Path\n"
        "from draftline.config.schema import MonitorConfig; from draftline.monitor.run import RunMonitor\n"
        f"with RunMonitor(Path({str(tmp_path)!r}), MonitorConfig(), show=False):\n"
        "    print('ready', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        assert read_status(tmp_path).state == "running"
        os.kill(process.pid, signal.SIGKILL)
    status = read_status(tmp_path)
    assert status.state == "killed"
    assert status.detail.startswith("killed at about 20")
    picture = render_status(status, 120)
    assert "left ?" not in picture and "before that: starting" in picture


def rewrite(tmp_path: Path, change: Callable[[dict], None]) -> None:
    path = tmp_path / "status.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def test_a_pid_taken_over_by_another_process_is_not_the_run(tmp_path: Path) -> None:
    with monitor(tmp_path):
        rewrite(tmp_path, lambda d: d["process"].update(start_wall_s=d["process"]["start_wall_s"] - 5000))
        assert read_status(tmp_path).state == "killed"


def test_silence_and_other_hosts_are_told(tmp_path: Path) -> None:
    with monitor(tmp_path):
        rewrite(tmp_path, lambda d: None)
        written = json.loads((tmp_path / "status.json").read_text())["written_wall_s"]
        late = read_status(tmp_path, wall=lambda: written + 125)
        assert (late.state, late.detail) == ("silent", "alive, but no status for 2m05s")
        rewrite(tmp_path, lambda d: d["process"].update(host="elsewhere.example"))
        away = read_status(tmp_path, wall=lambda: written + 3)
        assert (away.state, away.detail) == ("elsewhere", "runs on elsewhere.example; last status 3s ago")


def test_folders_that_are_no_runs_are_refused_with_one_clear_word(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        read_status(tmp_path / "absent")
    with pytest.raises(UserError, match=r"holds no status\.json"):
        read_status(tmp_path)
    for text in ('{"schema_version": 1, "proc', "[]", '{"schema_version": 1}'):
        (tmp_path / "status.json").write_text(text)
        with pytest.raises(UserError, match="is not whole"):
            read_status(tmp_path)
    with monitor(tmp_path / "new"):
        rewrite(tmp_path / "new", lambda d: d["snapshot"].update(colour="red"))
        with pytest.raises(UserError, match=r"holds what this draftline does not know: snapshot.colour; use the draft"):
            read_status(tmp_path / "new")
    (tmp_path / "status.json").write_text('{"schema_version": 7, "new": {}}')
    with pytest.raises(UserError, match="is of version 7; this draftline reads up to 1"):
        read_status(tmp_path)


@pytest.mark.parametrize("width", [40, 120])
def test_the_picture_fits_and_names_workers_and_end(tmp_path: Path, clock: FakeClock, width: int) -> None:
    with monitor(tmp_path, clock) as run:
        train_a_little(run, clock)
    picture = render_status(read_status(tmp_path), width)
    assert max(map(len, picture.splitlines())) <= width
    for part in ("finished at", "loss 1.500", "target-0", "drafter-0"):
        assert part in picture
    running = replace(read_status(tmp_path), state="running")
    lines = render_status(running, width).splitlines()
    place = next(i for i, line in enumerate(lines) if line.startswith("balanced"))
    assert place < next(i for i, line in enumerate(lines) if "loss 1.500" in line)  # a low terminal cuts the end


def test_watching_goes_on_until_the_end(tmp_path: Path, clock: FakeClock) -> None:
    stream = io.StringIO()
    run = monitor(tmp_path, clock)
    run.__enter__()
    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 2:
            run.__exit__(None, None, None)

    last = watch_run(tmp_path, console=make_console(stream), sleep=nap)
    assert (last.state, len(naps)) == ("closed", 2)
    assert stream.getvalue().count("running;") == 2 and stream.getvalue().count("finished at") == 1


def test_watching_once_prints_one_status(tmp_path: Path) -> None:
    stream = io.StringIO()
    with monitor(tmp_path):
        assert watch_run(tmp_path, once=True, console=make_console(stream)).state == "running"
    assert stream.getvalue().count("running;") == 1


class Broken:
    name = "broken"

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        raise ConnectionError("no route")

    def close(self) -> None:
        pass


class Kept:
    name = "kept"

    def __init__(self) -> None:
        self.steps: list[int] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.steps.append(step)

    def close(self) -> None:
        pass


def test_a_tracker_that_fails_is_reported_once_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    kept = Kept()
    several = TrackerSet([Broken(), kept])
    several.log(1, {"a": 1.0})
    several.log(2, {"a": 1.0})
    several.close()
    assert kept.steps == [1, 2]
    assert several.failed == {"broken": "ConnectionError: no route"}
    assert sum("switched off" in r.message for r in caplog.records) == 1


def test_a_tracker_that_is_not_installed_is_the_users_to_mend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(folder: Path) -> None:
        raise ImportError("tensorboard")

    monkeypatch.setattr(trackers_module, "TensorBoardTracker", missing)
    with pytest.raises(
        UserError, match=r"monitor.trackers: tensorboard is not installed; install draftline\[trackers\]"
    ):
        open_trackers(["tensorboard"], tmp_path)
    with pytest.raises(UserError, match="cannot be written"):
        open_trackers([], tmp_path / "absent")
