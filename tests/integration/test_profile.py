"""`train --profile ROWS`: a trace of torch with the run's own spans in it, the spans alone, and a run that goes on."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from draftline.pipeline import profiling
from draftline.pipeline.coordinator import train
from draftline.pipeline.profiling import RunProfiler
from draftline.pipeline.runplan import make_run_plan


def events(file: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    return found


def test_a_profiled_run_leaves_torchs_trace_of_all_workers_and_its_own_spans(make_run) -> None:
    config = make_run("max_rows=10", "pipeline.drafter_devices=[cpu,cpu]")
    assert train(make_run_plan(config), profile_rows=1).ledger.committed == 10
    torch_events = events(config.output / "profile" / "torch.json.gz")
    spans = [e for e in torch_events if str(e.get("name", "")).startswith("working row")]
    assert len({e["tid"] for e in spans}) >= 2
    operations = {e["tid"] for e in torch_events if str(e.get("name", "")).startswith("aten::")}
    assert {e["tid"] for e in spans} <= operations
    own = [e for e in events(config.output / "profile" / "spans.json.gz") if e["ph"] == "X"]
    assert len({e["args"]["tokens"] for e in own if "tokens" in e["args"]}) > 1
    assert sum(e["name"].startswith("averaging") for e in own) >= 2


def test_a_profiler_that_fails_is_said_and_the_run_goes_on(
    make_run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(**options: Any) -> None:
        raise RuntimeError("no tracing library")

    monkeypatch.setattr(profiling, "profile", broken)
    config = make_run("max_rows=4")
    assert train(make_run_plan(config), profile_rows=1).ledger.committed == 4
    assert "profile: torch wrote no trace: RuntimeError: no tracing library" in capsys.readouterr().err


class Still:
    """A clock that measures nothing."""

    def done(self, *, rows: int, tokens: int) -> None:
        pass


def test_the_stretch_ends_when_every_worker_has_its_rows_or_the_others_have_many(tmp_path: Path) -> None:
    profiler = RunProfiler(tmp_path, 2, say=lambda line: None, flush=lambda: None)
    fast, slow = (profiler.clock(name, Still()) for name in ("drafter-0", "drafter-1"))  # type: ignore[arg-type]
    slow.done(rows=2, tokens=1)
    for enough in (False, True):
        fast.done(rows=21 if not enough else 1, tokens=1)
        assert profiler._is_enough() is enough
    slow.done(rows=1, tokens=1)
    assert profiler._is_enough()


def test_a_run_that_fails_at_once_still_leaves_what_there_is(tmp_path: Path) -> None:
    said: list[str] = []
    profiler = RunProfiler(tmp_path, 2, say=said.append, flush=lambda: None)
    profiler.clock("drafter-0", Still())  # type: ignore[arg-type]
    profiler.start()
    profiler.close()
    assert (tmp_path / "profile" / "torch.json.gz").exists() and "(rows: drafter-0 0)" in said[0]
    assert "no event log here" in said[1]
