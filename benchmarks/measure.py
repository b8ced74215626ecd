"""What the benchmarks share: a stopwatch, the matmul ceiling, and what has to be known about a run of them."""

from __future__ import annotations

import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

GIB = 2**30


class Stopwatch:
    """Seconds of a call: by CUDA events on a GPU, by the wall clock elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

    def time(self, call: Callable[[], Any]) -> float:
        if not self._cuda:
            start = time.perf_counter()
            call()
            return time.perf_counter() - start
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def median(self, call: Callable[[], Any], rounds: int) -> float:
        return statistics.median(self.time(call) for _ in range(rounds))


def measure_ceiling(device: torch.device, dtype: torch.dtype, size: int, watch: Stopwatch) -> float:
    """FLOP/s of a square product of random data."""
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    for _ in range(3):
        a @ b
    return 2 * size**3 / watch.median(lambda: a @ b, 11)


def peak_bytes(device: torch.device, call: Callable[[], Any]) -> int | None:
    """Most bytes allocated during a call beyond what is there before; None off the GPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated(device) - before


def graph_pool_bytes(device: torch.device) -> int:
    """What CUDA graphs hold for their replays: reserved in pools of their own, where it counts as free."""
    if device.type != "cuda":
        return 0
    segments = (s for s in torch.cuda.memory_snapshot() if s["device"] == torch.device(device).index)
    return sum(s["total_size"] - s["allocated_size"] for s in segments if tuple(s["segment_pool_id"]) != (0, 0))


def environment(device: torch.device) -> dict[str, Any]:
    """Device, versions, commit and command."""

    def git(*arguments: str) -> str | None:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else None

    try:
        from triton import __version__ as triton_version
    except ImportError:
        triton_version = None
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "triton": triton_version,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "commit": git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(git("status", "--porcelain", "--untracked-files=no")),
        "command": " ".join(["python", *sys.argv]),
    }
