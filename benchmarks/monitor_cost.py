"""Host time of monitoring, in microseconds a span and a row. Run: `python benchmarks/monitor_cost.py`."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from draftline.monitor.events import EventLog
from draftline.monitor.metrics import RunMetrics, TrainingStats
from draftline.monitor.status import Wait

ROWS = 20_000
REPEATS = 5


def median_us(action: Callable[[], None], per: int) -> float:
    """Median over repeats of the processor time of one of the `per` items that `action` does."""
    times = []
    for _ in range(REPEATS):
        start = time.thread_time()
        action()
        times.append((time.thread_time() - start) / per * 1e6)
    return sorted(times)[REPEATS // 2]


def main() -> None:
    """Prints both figures; writing the log out is counted."""
    with tempfile.TemporaryDirectory() as folder:
        log = EventLog(Path(folder) / "events.jsonl")
        metrics = RunMetrics(events=log)
        clock = metrics.worker("drafter-0")
        stats = TrainingStats(1, 4096, 2000, 3.0, 1.0, {"ce": (3.0, 1.0)}, 9.0, 4.0, 1e-4, 1.0)

        def spans() -> None:
            for _ in range(ROWS):
                with clock.span("waiting", Wait.ROW):
                    pass

        def rows() -> None:
            for number in range(ROWS):
                with clock.span("waiting", Wait.ROW):
                    pass
                with clock.span("working", f"row {number}", tokens=4096):
                    pass
                clock.done(rows=1, tokens=4096)
                metrics.record_training(stats)

        print(f"a span: {median_us(spans, ROWS):.1f} us; a trained row: {median_us(rows, ROWS):.1f} us")
        log.close()


if __name__ == "__main__":
    main()
