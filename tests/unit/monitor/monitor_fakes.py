"""A clock that stands still until it is told to move."""

from __future__ import annotations

from draftline.monitor.clock import WorkerClock


class FakeClock:
    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def move(self, seconds: float) -> None:
        self.now += seconds


def spend(clock: FakeClock, worker: WorkerClock, activity: str, seconds: float, what: str = "") -> None:
    with worker.span(activity, what):  # type: ignore[arg-type]
        clock.move(seconds)


def work(clock: FakeClock, worker: WorkerClock, seconds: float, tokens: int = 1000) -> None:
    with worker.span("working", "a row"):
        clock.move(seconds)
        worker.done(rows=1, tokens=tokens)
