"""What W threads that launch kernels lose to one another: the share of Python's global lock, and of the host.

    python benchmarks/gil.py --output gil.json                     every GPU here gets a worker; CPU where there is none
    python benchmarks/gil.py --output gil.json --workers 8         eight workers, GPUs shared out in turn

A worker runs rounds of small eager kernels and waits for the device at the end of each, as a loop does for a row. One
worker alone is timed first, then all at once. `efficiency` is the rate of a worker among W over that of one alone: with
kernels so small that the host is the limit (`launch`), it is the worst that threads can do, 1/W if nothing overlaps.
What a run loses depends on the share h of a row that the host needs to launch it (`host_share`, given with
--host-s and --row-s): W workers need h W of one lock, so none of it costs anything as long as h W is well below 1.
The measured loss of the real stages is the part `together` of eight_gpus.py.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from typing import Any

import torch

from argtypes import json_file, positive, whole
from measure import environment

KERNELS = 200


class Launcher:
    """Rounds of KERNELS small kernels on one device, on a stream of its own."""

    def __init__(self, device: str, size: int) -> None:
        self.device = torch.device(device)
        self._x = torch.ones(size, size, device=self.device)
        self._y = torch.zeros_like(self._x)

    def round(self) -> None:
        for _ in range(KERNELS // 2):
            torch.add(self._x, 1.0, out=self._y)
            torch.mul(self._y, 0.5, out=self._x)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def run(self, seconds: float, ready: threading.Barrier, rates: list[float], number: int) -> None:
        """Rounds per second, counted from when all workers are ready."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            with torch.cuda.stream(torch.cuda.Stream(self.device)):
                rates[number] = self._count(seconds, ready)
        else:
            rates[number] = self._count(seconds, ready)

    def _count(self, seconds: float, ready: threading.Barrier) -> float:
        self.round()
        ready.wait()
        begin, rounds = time.perf_counter(), 0
        while time.perf_counter() - begin < seconds:
            self.round()
            rounds += 1
        return rounds / (time.perf_counter() - begin)


def rates_of(devices: list[str], size: int, seconds: float) -> list[float]:
    """Rounds per second of a worker on each of the devices, all at once."""
    launchers = [Launcher(device, size) for device in devices]
    ready, rates = threading.Barrier(len(devices)), [0.0] * len(devices)
    threads = [
        threading.Thread(target=launcher.run, args=(seconds, ready, rates, i)) for i, launcher in enumerate(launchers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return rates


def measure(workers: int, seconds: float, size: int) -> dict[str, Any]:
    """One worker alone, then 2, 4, ... up to `workers` at once."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    places = [f"cuda:{i % count}" if count else "cpu" for i in range(workers)]
    alone = rates_of(places[:1], size, seconds)[0]
    curve = {}
    steps = sorted({2**i for i in range(1, workers.bit_length()) if 2**i <= workers} | {workers})
    for number in steps:
        if number > 1:
            rates = rates_of(places[:number], size, seconds)
            curve[number] = {"rounds_per_s": rates, "efficiency": sum(rates) / number / alone}
    return {
        "devices": sorted(set(places)),
        "kernels_a_round": KERNELS,
        "alone_rounds_per_s": alone,
        "launch_us": 1e6 / (alone * KERNELS),
        "workers": curve,
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=json_file, required=True, help="JSON file to write")
    parser.add_argument("--workers", type=whole(1), default=None, help="default: one a GPU, at least 2")
    parser.add_argument("--seconds", type=positive, default=2.0)
    parser.add_argument("--size", type=whole(1), default=64, help="kernels work on size x size elements")
    parser.add_argument(
        "--host-s", type=positive, default=None, help="host seconds that launch a row (a profile tells)"
    )
    parser.add_argument("--row-s", type=positive, default=None, help="seconds of a row")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)
    on_gpu = torch.cuda.is_available()
    workers = arguments.workers or max(2, torch.cuda.device_count() if on_gpu else 2)
    found = measure(workers, arguments.seconds, arguments.size)
    if arguments.host_s and arguments.row_s:
        share = arguments.host_s / arguments.row_s
        found |= {"host_share": share, "lock_demand": share * workers}
    found |= {"load": os.getloadavg(), "environment": environment(torch.device("cuda" if on_gpu else "cpu"))}
    arguments.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for number, figures in found["workers"].items():
        print(f"{number} workers: {figures['efficiency']:.3f} of one alone each")


if __name__ == "__main__":
    main()
