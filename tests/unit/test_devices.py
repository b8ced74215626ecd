"""Device names resolve in one place, and one that does not exist is refused with those that do."""

from __future__ import annotations

import subprocess
import sys

import pytest

from draftline import devices as devices_module
from draftline.devices import available_devices, device_memory_bytes, resolve_devices
from draftline.errors import UserError


def with_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(devices_module, "_cuda_names", lambda: [f"cuda:{i}" for i in range(count)])


def test_auto_is_every_gpu_or_else_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, 0)
    assert resolve_devices(["auto"]) == ["cpu"]
    with_gpus(monkeypatch, 3)
    assert resolve_devices(["auto"]) == ["cuda:0", "cuda:1", "cuda:2"]


def test_names_are_normalised_and_may_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, 2)
    assert resolve_devices(["cuda", " CUDA:1", "cpu", "cpu"]) == ["cuda:0", "cuda:1", "cpu", "cpu"]


@pytest.mark.parametrize("name", ["cuda:2", "cuda:-1", "gpu", "tpu:0", "", "cuda:x"])
def test_a_device_that_does_not_exist_names_those_that_do(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    with_gpus(monkeypatch, 2)
    with pytest.raises(UserError, match="does not exist; use cuda:0, cuda:1, cpu, auto") as caught:
        resolve_devices(["cpu", name])
    assert name in str(caught.value)


def test_without_any_name_there_is_no_device() -> None:
    with pytest.raises(UserError, match="no device"):
        resolve_devices([])


def test_the_cpu_is_always_there_with_its_memory() -> None:
    assert available_devices()[-1] == "cpu"
    free, total = device_memory_bytes("cpu")
    assert 0 < free <= total


def test_importing_devices_and_doctor_does_not_import_torch() -> None:
    code = "import sys, draftline.devices, draftline.doctor; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0
