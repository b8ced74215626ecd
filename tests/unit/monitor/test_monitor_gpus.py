"""Promises of the GPU gauges: what NVML tells is shown and tracked; what it does not tell is unknown, no error."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from monitor_fakes import FakeClock, work

from draftline.monitor.gpus import GpuReader
from draftline.monitor.metrics import RunMetrics
from draftline.monitor.render import gpu_lines, status_line
from draftline.monitor.run import tracked_numbers
from draftline.monitor.status import GpuGauge

UUIDS = {"cuda:0": "aaaa", "cuda:1": "GPU-bbbb"}


class NotToldError(Exception):
    pass


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A library that knows two devices, the second of which tells no utilisation."""
    library: Any = ModuleType("pynvml")
    library.NVMLError = NotToldError

    def rates(handle: str) -> Any:
        if handle == "GPU-bbbb":
            raise NotToldError("not supported")
        return SimpleNamespace(gpu=97)

    library.nvmlInit = lambda: None
    library.nvmlDeviceGetHandleByUUID = lambda uuid: uuid
    library.nvmlDeviceGetUtilizationRates = rates
    library.nvmlDeviceGetMemoryInfo = lambda handle: SimpleNamespace(used=61 << 30, total=80 << 30)
    monkeypatch.setitem(sys.modules, "pynvml", library)
    return library


def test_devices_are_found_by_uuid_and_what_is_not_told_is_unknown(nvml: Any) -> None:
    known, silent = GpuReader(UUIDS).read()
    memory = {"memory_used_bytes": 61 << 30, "memory_total_bytes": 80 << 30}
    assert known == GpuGauge(device="cuda:0", busy_share=0.97, **memory)
    assert silent == GpuGauge(device="cuda:1", busy_share=None, **memory)


def test_without_library_driver_or_device_everything_is_unknown(nvml: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = (GpuGauge(device="cuda:0"), GpuGauge(device="cuda:1"))

    def refuse(*_: Any) -> None:
        raise NotToldError("no driver")

    nvml.nvmlDeviceGetHandleByUUID = refuse
    assert GpuReader(UUIDS).read() == unknown
    nvml.nvmlInit = refuse
    assert GpuReader(UUIDS).read() == unknown
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert GpuReader(UUIDS).read() == unknown
    assert GpuReader({}).read() == ()


def test_gauges_are_shown_and_tracked_and_unknown_ones_are_question_marks(nvml: Any, clock: FakeClock) -> None:
    metrics = RunMetrics(clock=clock)
    work(clock, metrics.worker("drafter-0"), 1)
    assert "gpu" not in status_line(metrics.snapshot())
    metrics.watch(gpus=GpuReader(UUIDS).read)
    snapshot = metrics.snapshot()
    assert "gpu 97% ?" in status_line(snapshot)
    assert gpu_lines(snapshot.gpus) == [
        "cuda:0      97% busy, 61.0 of 80.0 GiB",
        "cuda:1      ?% busy, 61.0 of 80.0 GiB",
    ]
    assert gpu_lines([GpuGauge(device="cuda:0")]) == ["cuda:0      ?% busy, memory unknown"]
    numbers = {name: value for name, value in tracked_numbers(snapshot).items() if name.startswith("gpu/")}
    assert numbers == {
        "gpu/cuda_0/busy_share": 0.97,
        "gpu/cuda_0/memory_bytes": float(61 << 30),
        "gpu/cuda_1/memory_bytes": float(61 << 30),
    }


def test_a_status_file_without_gauges_can_still_be_read(tmp_path: Path) -> None:
    from draftline.monitor.status import StatusSnapshot

    snapshot = RunMetrics().snapshot()
    document = snapshot.model_dump(mode="json")
    del document["gpus"]
    assert StatusSnapshot.model_validate(document) == snapshot.model_copy(update={"elapsed_s": document["elapsed_s"]})
