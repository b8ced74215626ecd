"""What nvidia-smi says of each GPU while something runs: busy share, power, clock. Empty where it is not installed."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import threading
import time

FIELDS = ("utilization.gpu", "power.draw", "clocks.sm")


class GpuWatch:
    """One nvidia-smi for the life of the `with` block, a line a second and GPU."""

    def __init__(self) -> None:
        self._lines: list[tuple[float, list[str]]] = []
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> GpuWatch:
        if shutil.which("nvidia-smi"):
            query = f"--query-gpu=index,{','.join(FIELDS)}"
            command = ["nvidia-smi", query, "--format=csv,noheader,nounits", "-l", "1"]
            self._process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL, text=True
            )
            threading.Thread(target=self._read, args=(self._process,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._lines.append((time.monotonic(), [part.strip() for part in line.split(",")]))

    def means(self, begin_s: float, end_s: float) -> dict[str, dict[str, float]]:
        """GPU index -> mean of each field over a stretch (time.monotonic)."""
        by_gpu: dict[str, list[list[float]]] = {}
        for at_s, (index, *values) in list(self._lines):
            if begin_s <= at_s <= end_s and all(_is_number(v) for v in values):
                by_gpu.setdefault(index, []).append([float(v) for v in values])
        return {
            index: {
                name: statistics.fmean(column) for name, column in zip(FIELDS, zip(*rows, strict=True), strict=True)
            }
            for index, rows in by_gpu.items()
        }


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdigit()
