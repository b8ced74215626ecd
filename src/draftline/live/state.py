"""What the live page shows, as plain data: the state of a run, and its charts. Only reads the run folder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from draftline.errors import UserError
from draftline.monitor.render import doing, duration, number, queue_text, size
from draftline.monitor.run import EVENTS_FILE
from draftline.monitor.status import GpuGauge, StatusSnapshot, WorkerStatus
from draftline.monitor.verdict import rate
from draftline.monitor.watch import OVER, RunStatus, read_status, verdict_of
from draftline.report.charts import Axis, Chart, line_chart
from draftline.report.curves import Curve, Metrics, read_metrics
from draftline.report.figures import curve_charts, timeline_chart
from draftline.report.timeline import read_timeline

_SHARE = Axis("share of time", {"range": [0, 1]})
_MIB, _GIB = 2**20, 2**30


def run_state(run: Path) -> dict[str, Any]:
    """The state of a run, or one line that says why it cannot be told just now."""
    try:
        return _state(run.resolve().name, read_status(run))
    except UserError as error:
        return {"error": str(error)}


def run_charts(run: Path) -> dict[str, Any]:
    """The charts of a run in reading order; none before there are figures."""
    try:
        metrics = read_metrics(run / "metrics.jsonl")
    except UserError as error:
        return {"charts": [], "note": error.what}
    found = [*curve_charts(metrics), *worker_charts(metrics), *_timeline(run)]
    return {"charts": [_plain(chart) for chart in found if chart is not None]}


def worker_charts(metrics: Metrics) -> Iterator[Chart | None]:
    """Queue in bytes, waiting of each worker, and the GPUs, over rows trained."""
    held = metrics.curves.get("queue/bytes")
    queue = {"in the queue": _scaled(held, _MIB)} if held else {}
    yield line_chart("queue-bytes", "Hidden states waiting for a drafter", queue, Axis("MiB", {"rangemode": "tozero"}))
    note = "Of the minute before; a target waits for a slot or samples, a drafter for a row or the other drafters."
    yield line_chart("waiting", "Waiting, by worker", metrics.named("waiting/"), _SHARE, note=note)
    gpus = metrics.named("gpu/")
    busy = {_device(name): curve for name, curve in gpus.items() if name.endswith("/busy_share")}
    yield line_chart("gpu-busy", "GPUs busy", busy, _SHARE)
    memory = {_device(name): _scaled(c, _GIB) for name, c in gpus.items() if name.endswith("/memory_bytes")}
    yield line_chart("gpu-memory", "Memory of the GPUs in use", memory, Axis("GiB", {"rangemode": "tozero"}))


def _timeline(run: Path) -> list[Chart | None]:
    try:
        return [timeline_chart(read_timeline(run / EVENTS_FILE))]
    except UserError:  # the log is gone or of a newer version; the curves are there all the same
        return []


def _state(name: str, status: RunStatus) -> dict[str, Any]:
    snapshot = status.snapshot
    return {
        "run": name,
        "state": status.state,
        "detail": f"{status.detail}; {duration(snapshot.elapsed_s)} in all",
        "verdict": verdict_of(status),
        "figures": list(_figures(snapshot, over=status.state in OVER).items()),
        "workers": [_worker(worker) for worker in snapshot.workers],
        "gpus": [_gpu(gpu) for gpu in snapshot.gpus],
    }


def _figures(snapshot: StatusSnapshot, *, over: bool) -> dict[str, str]:
    ledger, can = snapshot.ledger, snapshot.capacities
    done = ledger.committed + ledger.trained
    figures = {
        "rows trained": f"{done} of {ledger.planned}" if ledger.planned else str(snapshot.rows_trained),
        "rows set aside": str(ledger.set_aside),
        "time left": duration(snapshot.time_left_s),
        "loss": number(snapshot.loss, 3),
        "acceptance length, training blocks": number(snapshot.acceptance, 2),
        "acceptance length, validation": number(snapshot.validation_acceptance, 2),
        "trained": rate(snapshot.tokens_per_s),
        "data loading could": rate(can.data_tokens_per_s),
        "targets could": rate(can.target_tokens_per_s),
        "drafters could": rate(can.drafter_tokens_per_s),
    }
    if over:
        del figures["time left"]
    if snapshot.queue is not None:
        figures["waiting rows"] = queue_text(snapshot.queue).removeprefix("queue ")
    return figures


def _worker(worker: WorkerStatus) -> list[str]:
    """Name, what it does, rows, speed, and its shares of the last minute."""
    shares = sorted(worker.shares.items(), key=lambda item: -item[1])
    told = ", ".join(f"{name} {share:.0%}" for name, share in shares)
    return [worker.name, doing(worker), str(worker.rows), rate(worker.tokens_per_s), told]


def _gpu(gpu: GpuGauge) -> list[str]:
    busy = "?" if gpu.busy_share is None else f"{gpu.busy_share:.0%}"
    if gpu.memory_used_bytes is None or gpu.memory_total_bytes is None:
        return [gpu.device, busy, "?"]
    return [gpu.device, busy, f"{size(gpu.memory_used_bytes)} of {size(gpu.memory_total_bytes)}"]


def _device(name: str) -> str:
    """`cuda:0` of the curve `cuda_0/busy_share`, as it is called everywhere else."""
    return name.partition("/")[0].replace("_", ":")


def _scaled(curve: Curve, unit: int) -> Curve:
    return Curve(list(curve.steps), [None if value is None else value / unit for value in curve.values])


def _plain(chart: Chart) -> dict[str, Any]:
    content = asdict(chart)
    del content["header"], content["rows"]
    return content
