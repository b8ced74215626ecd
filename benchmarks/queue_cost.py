"""Host time of the exchange, in microseconds a row, with 8 producers and 8 consumers that do nothing else.

    python benchmarks/queue_cost.py --output benchmarks/results/queue-cost.json

Rows carry metadata only. A row's way is lease, put, get, trained; every 400 rows all consumers meet. Wall time over
rows, so thread switches and waiting for the lock are in it; the median of some runs. Processor time is told beside it
for machines that do other things too. A run of the product moves a few
rows a second, so the exchange then is idle nearly always.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import threading
import time

import torch

from argtypes import json_file, whole
from draftline.pipeline.core import CoreSettings, End, Meeting, StopItem, SyncItem
from draftline.pipeline.threads import RowExchange
from draftline.records import PlannedRow
from measure import environment

LIMIT_US = 100.0
ROWS_PER_DRAFTER = 50


def produce(exchange: RowExchange[int], target: int) -> None:
    while (lease := exchange.lease(target)) is not None:
        exchange.put(target, lease.row_id, lease.row_id)
    exchange.producer_done(target)


def consume(exchange: RowExchange[int], drafter: int) -> None:
    while True:
        item = exchange.get(drafter)
        if isinstance(item, StopItem):
            return
        if isinstance(item, SyncItem):
            exchange.meet(drafter, item.round_id, _nothing)
        else:
            exchange.trained(drafter, item.row_id)


def _nothing(meeting: Meeting) -> None:
    del meeting


def seconds_of(rows: int, producers: int, consumers: int) -> tuple[float, float]:
    """Wall and processor seconds of a whole run."""
    plan = [PlannedRow(i, 0, (i,), 4096, 3000) for i in range(rows)]
    settings = CoreSettings(producers, consumers, ROWS_PER_DRAFTER)
    exchange: RowExchange[int] = RowExchange(plan, [1] * rows, settings, stall_timeout_s=60)
    threads = [threading.Thread(target=produce, args=(exchange, i)) for i in range(producers)]
    threads += [threading.Thread(target=consume, args=(exchange, i)) for i in range(consumers)]
    begin, cpu = time.perf_counter(), time.process_time()
    for thread in threads:
        thread.start()
    end = exchange.wait_end()
    for thread in threads:
        thread.join()
    spent = time.perf_counter() - begin, time.process_time() - cpu
    assert end is End.CLOSED and exchange.stats().ledger.committed == rows
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=json_file, help="JSON file to write")
    parser.add_argument("--rows", type=whole(1), default=20_000)
    parser.add_argument("--workers", type=whole(1), default=8, help="producers, and as many consumers")
    parser.add_argument("--runs", type=whole(1), default=5)
    arguments = parser.parse_args()
    load = os.getloadavg()
    times = [seconds_of(arguments.rows, arguments.workers, arguments.workers) for _ in range(arguments.runs)]
    runs_us, cpu_us = ([seconds / arguments.rows * 1e6 for seconds in kind] for kind in zip(*times, strict=True))
    found = {
        "us_a_row": statistics.median(runs_us),
        "runs_us_a_row": runs_us,
        "cpu_us_a_row": statistics.median(cpu_us),
        "met": statistics.median(runs_us) < LIMIT_US,
        "limit_us": LIMIT_US,
        "rows": arguments.rows,
        "producers": arguments.workers,
        "consumers": arguments.workers,
        "cores": os.cpu_count(),
        "load_before": load,
        "environment": environment(torch.device("cpu")),
    }
    runs = ", ".join(f"{us:.1f}" for us in runs_us)
    print(
        f"{found['us_a_row']:.1f} us a row by the wall clock (runs: {runs}; load {load[0]:.1f}), "
        f"{found['cpu_us_a_row']:.1f} us of processor time"
    )
    if arguments.output:
        arguments.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
