"""Host time of monitoring, in microseconds of processor time.

    python benchmarks/monitor_cost.py --output benchmarks/results/monitor-cost.json

A row's whole way through the real clocks, span log and reporter: a target waits for a slot, waits for samples and
works; a drafter waits for a row, works, waits for its device and reports what it trained. Beside it the monitor's own
thread, once a second: a snapshot of 8 workers with full windows and its picture, every two seconds `status.json` and
the spans, every ten seconds the curves. Both together are held against 1 % of a step of 130 ms.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console

from argtypes import json_file, whole
from draftline.config.schema import MonitorConfig
from draftline.drafter.loop import TrainedRow
from draftline.drafter.metrics import StepStats
from draftline.monitor.clock import WorkerClock
from draftline.monitor.console import StatusDisplay
from draftline.monitor.status import Wait
from draftline.pipeline.core import CoreSettings
from draftline.pipeline.reporting import RunReporter
from draftline.pipeline.threads import RowExchange
from draftline.records import PlannedRow
from measure import environment

REPEATS, TARGETS, DRAFTERS = 5, 6, 2
STEP_S, LIMIT_SHARE, BLOCK_SIZE, ROW_TOKENS = 0.130, 0.01, 8, 4096


def median_us(action: Callable[[], None], per: int = 1) -> float:
    """Median over repeats of the processor time of one of the `per` items that `action` does."""
    times = []
    for _ in range(REPEATS):
        start = time.thread_time()
        action()
        times.append((time.thread_time() - start) / per * 1e6)
    return sorted(times)[REPEATS // 2]


def made_reporter(folder: Path, rows: int) -> RunReporter:
    """The reporter of a run of so many rows; its thread does not run."""
    pipeline = SimpleNamespace(target_devices=(), drafter_devices=(), max_skipped_steps=0)
    plan: Any = SimpleNamespace(
        config=SimpleNamespace(monitor=MonitorConfig(), pipeline=pipeline), num_drafters=DRAFTERS
    )
    run_folder: Any = SimpleNamespace(path=folder)
    reporter = RunReporter(plan, run_folder)
    planned = [PlannedRow(i, 0, (i,), ROW_TOKENS, 3000) for i in range(rows)]
    settings = CoreSettings(TARGETS, DRAFTERS, 50)
    reporter.watch(RowExchange(planned, [1] * rows, settings, stall_timeout_s=600))
    return reporter


def one_row(reporter: RunReporter, target: WorkerClock, drafter: WorkerClock, number: int, stats: StepStats) -> None:
    """What the loops tell of a row."""
    with target.span("waiting", Wait.SLOT):
        pass
    with target.span("working", f"row {number}", tokens=ROW_TOKENS):
        with target.span("waiting", Wait.SAMPLES):
            pass
        target.done(rows=1, tokens=ROW_TOKENS)
    with drafter.span("waiting", Wait.ROW):
        pass
    with drafter.span("working", f"row {number}", tokens=ROW_TOKENS):
        pass
    with drafter.span("working", f"row {number} (device)"):
        pass
    drafter.done(rows=1, tokens=ROW_TOKENS)
    reporter.row_trained(TrainedRow(0, number, ROW_TOKENS, 3000, stats, 1e-4, 1.0, skipped=False))


def measured(folder: Path, rows: int) -> dict[str, float]:
    """Microseconds of each part."""
    reporter = made_reporter(folder, rows)
    monitor = reporter._monitor
    targets = [reporter.clock(f"target-{i}") for i in range(TARGETS)]
    drafters = [reporter.clock(f"drafter-{i}") for i in range(DRAFTERS)]
    stats = StepStats.of_empty_row(BLOCK_SIZE, "cpu")
    terminal = Console(file=io.StringIO(), force_terminal=True, width=120)
    display = StatusDisplay(terminal, 10.0)

    def spans() -> None:
        for _ in range(rows):
            with drafters[0].span("waiting", Wait.ROW):
                pass

    def all_rows() -> None:
        for number in range(rows):
            one_row(reporter, targets[number % TARGETS], drafters[number % DRAFTERS], number, stats)
        reporter.flush()

    found = {"span_us": median_us(spans, rows), "row_us": median_us(all_rows, rows)}
    display.start()
    found["snapshot_us"] = median_us(monitor._take_snapshot)
    found["picture_us"] = median_us(lambda: display.show(monitor._last))
    found["status_file_us"] = median_us(lambda: monitor._write_status(monitor._last))
    found["curves_us"] = median_us(lambda: monitor._log_snapshot(monitor._last))
    display.close(None)
    monitor.events.close()
    monitor.trackers.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=json_file, help="JSON file to write")
    parser.add_argument("--rows", type=whole(1), default=5_000)
    arguments = parser.parse_args()
    load = os.getloadavg()
    with tempfile.TemporaryDirectory() as folder:
        found = measured(Path(folder), arguments.rows)
    second_us = found["snapshot_us"] + found["picture_us"] + found["status_file_us"] / 2 + found["curves_us"] / 10
    step_us = found["row_us"] + second_us * STEP_S
    share = step_us / (STEP_S * 1e6)
    result = {
        **found,
        "monitor_thread_us_a_second": second_us,
        "step_us": step_us,
        "share_of_step": share,
        "met": share < LIMIT_SHARE,
        "limit_share": LIMIT_SHARE,
        "step_s": STEP_S,
        "cores": os.cpu_count(),
        "load_before": load,
        "environment": environment(torch.device("cpu")),
    }
    print(
        f"a span {found['span_us']:.1f} us; a row, from target to drafter, {found['row_us']:.0f} us; "
        f"the monitor's thread {second_us:.0f} us a second"
    )
    print(f"together {step_us:.0f} us a step of {STEP_S * 1e3:.0f} ms: {share:.2%} (limit {LIMIT_SHARE:.0%})")
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
