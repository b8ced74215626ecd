"""The clock of one worker: how long it worked, waited, compiled, and how many rows came of it.

Written by the worker's own thread, read by the monitor thread; one lock, held for a few assignments. Spans may nest:
time inside an inner span counts for the inner one only, while the event log gets both whole.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

from draftline.monitor.events import Activity
from draftline.monitor.status import Role, WorkerState, WorkerStatus

# Pieces kept to tell shares of the window: a minute at 250 changes a second. Their sums are kept too, so that a look
# costs the pieces that left the window since the last one, and not all that are in it.
RECENT_PIECES = 16384
RECENT_ROWS = 64
_NOTHING_S = 1e-9  # what rounding leaves of a sum from which all was taken
# Records kept to compute rates over the window: enough for a minute of rows at 60 rows a second.
RECENT_DONE = 4096

OnSpan = Callable[[str, Activity, str, float, float, dict[str, Any]], None]


class OpenSpan:
    """A span being measured. `facts` may be added to until it ends."""

    __slots__ = ("_clock", "activity", "facts", "t0_s", "what")

    def __init__(self, clock: WorkerClock, activity: Activity, what: str, facts: dict[str, Any]) -> None:
        self._clock, self.activity, self.what, self.facts = clock, activity, what, facts
        self.t0_s = 0.0

    def __enter__(self) -> OpenSpan:
        self._clock._enter(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.facts["error"] = kind.__name__
        self._clock._exit(self)


class RecentCounts:
    """Pairs of counts with their times, and their sums since a moment that never goes back. Not thread-safe.

    A look costs the pairs that it leaves behind. At most `most` are kept.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._pairs: deque[tuple[float, int, int]] = deque()
        self._first = self._second = 0

    def add(self, t_s: float, first: int, second: int = 0) -> None:
        """Counts of one moment."""
        self._pairs.append((t_s, first, second))
        self._first, self._second = self._first + first, self._second + second
        if len(self._pairs) > self._most:
            self._drop()

    def since(self, begin_s: float) -> tuple[int, int]:
        """Sums of what came after a moment; what came before is forgotten."""
        while self._pairs and self._pairs[0][0] <= begin_s:
            self._drop()
        return self._first, self._second

    def _drop(self) -> None:
        _, first, second = self._pairs.popleft()
        self._first, self._second = self._first - first, self._second - second


class WorkerClock:
    """Time per activity, rows and tokens of one worker.

    Args:
        name: for example `drafter-1`.
        role: which side it belongs to.
        clock: monotonic seconds.
        on_span: called with every finished span, in the worker's thread.
    """

    def __init__(self, name: str, role: Role, clock: Callable[[], float], on_span: OnSpan | None = None) -> None:
        self.name, self.role = name, role
        self.first_work_s: float | None = None
        self._clock, self._on_span = clock, on_span
        self._lock = threading.Lock()
        self._born_s = clock()
        self._open: list[OpenSpan] = []
        self._piece_start_s = 0.0
        self._pieces: deque[tuple[float, float, tuple[Activity, str]]] = deque()
        self._window: dict[tuple[Activity, str], float] = {}
        self._window_from_s = self._born_s
        self._seconds: dict[str, float] = {}
        self._wait_seconds: dict[str, float] = {}
        self._done = RecentCounts(RECENT_DONE)
        self._row_costs: deque[tuple[int, int, float]] = deque(maxlen=RECENT_ROWS)
        self._working_at_last_done_s = 0.0
        self._rows = self._tokens = 0
        self._state: WorkerState = "running"
        self._reason = ""

    def span(self, activity: Activity, what: str = "", **facts: Any) -> OpenSpan:
        """Measure the body of a `with`. For `waiting`, `what` is one of `Wait`, so that verdicts can be reached."""
        return OpenSpan(self, activity, what, facts)

    def past(self, activity: Activity, what: str, t0_s: float, t1_s: float, facts: dict[str, Any]) -> None:
        """A span that was measured elsewhere and is over; times are those of this clock."""
        with self._lock:
            self._book(t0_s, t1_s, activity, what)
            if activity == "working" and self.first_work_s is None:
                self.first_work_s = t0_s
        if self._on_span is not None:
            self._on_span(self.name, activity, what, t0_s, t1_s, facts)

    def done(self, *, rows: int = 1, tokens: int = 0) -> None:
        """Rows finished, whose work lies in `working` spans since the last call (the open one counts)."""
        now = self._clock()
        with self._lock:
            self._rows, self._tokens = self._rows + rows, self._tokens + tokens
            working = self._seconds.get("working", 0.0)
            if self._open and self._open[-1].activity == "working":
                working += now - self._piece_start_s
            self._row_costs.append((rows, tokens, working - self._working_at_last_done_s))
            self._working_at_last_done_s = working
            self._done.add(now, rows, tokens)

    def end(self, reason: str | None = None) -> None:
        """The worker is gone: by itself, or failed with `reason`, of which the first line is kept."""
        with self._lock:
            self._state, self._reason = (
                ("ended", "") if reason is None else ("failed", reason.strip().partition("\n")[0])
            )

    def revive(self) -> None:
        """The worker was started again."""
        with self._lock:
            self._state, self._reason = "running", ""

    def totals(self) -> tuple[int, int]:
        """Rows and tokens of the session."""
        with self._lock:
            return self._rows, self._tokens

    def done_since(self, begin_s: float) -> tuple[int, int]:
        """Rows and tokens finished after a moment."""
        with self._lock:
            return self._done.since(begin_s)

    def status(self, now: float, window_s: float) -> WorkerStatus:
        """What the worker does now, its shares of the last `window_s` seconds, its totals."""
        with self._lock:
            spent, length = self._spent(now - window_s, now)
            top = self._open[-1] if self._open else None
            tokens, cost_s = sum(t for _, t, _ in self._row_costs), sum(s for _, _, s in self._row_costs)
            rows = sum(r for r, _, _ in self._row_costs)
            return WorkerStatus(
                name=self.name,
                role=self.role,
                state=self._state,
                reason=self._reason,
                activity=top.activity if top else None,
                what=str(top.what) if top else "",
                since_s=now - top.t0_s if top else 0.0,
                shares=_shares(((activity, s) for (activity, _), s in spent.items()), length),
                wait_shares=_shares(
                    ((what, s) for (activity, what), s in spent.items() if activity == "waiting"), length
                ),
                seconds=dict(self._seconds),
                wait_seconds=dict(self._wait_seconds),
                rows=self._rows,
                tokens=self._tokens,
                tokens_per_s=tokens / cost_s if tokens and cost_s > 0 else None,
                row_s=cost_s / rows if rows and cost_s > 0 else None,
            )

    def _spent(self, begin: float, now: float) -> tuple[dict[tuple[Activity, str], float], float]:
        """Seconds by activity and, where it waits, by what for, since `begin` or since pieces are known; and how long
        that is."""
        while self._pieces and self._pieces[0][1] <= begin:
            self._drop_oldest()
        begin = max(begin, self._window_from_s)
        spent = dict(self._window) if self._pieces else {}
        for t0, t1, kind in self._pieces:
            if t0 >= begin:
                break
            spent[kind] -= min(begin, t1) - t0
        if self._open:
            kind = _kind(self._open[-1].activity, str(self._open[-1].what))
            spent[kind] = spent.get(kind, 0.0) + now - max(begin, self._piece_start_s)
        return {kind: seconds for kind, seconds in spent.items() if seconds > _NOTHING_S}, max(now - begin, 1e-9)

    def _drop_oldest(self) -> None:
        t0, t1, kind = self._pieces.popleft()
        self._window[kind] -= t1 - t0
        self._window_from_s = max(self._window_from_s, t1)
        if not self._pieces:
            self._window.clear()  # so that rounding never adds up

    def _enter(self, span: OpenSpan) -> None:
        now = self._clock()
        with self._lock:
            if self._open:
                self._end_piece(now)
            span.t0_s = self._piece_start_s = now
            self._open.append(span)
            if span.activity == "working" and self.first_work_s is None:
                self.first_work_s = now

    def _exit(self, span: OpenSpan) -> None:
        now = self._clock()
        with self._lock:
            self._end_piece(now)
            self._open.pop()
            self._piece_start_s = now
        if self._on_span is not None:
            self._on_span(self.name, span.activity, str(span.what), span.t0_s, now, span.facts)

    def _end_piece(self, now: float) -> None:
        """Book the time since the last change to the innermost open span."""
        top = self._open[-1]
        self._book(self._piece_start_s, now, top.activity, str(top.what))

    def _book(self, t0_s: float, t1_s: float, activity: Activity, what: str) -> None:
        kind = _kind(activity, what)
        self._pieces.append((t0_s, t1_s, kind))
        self._window[kind] = self._window.get(kind, 0.0) + t1_s - t0_s
        if len(self._pieces) > RECENT_PIECES:
            self._drop_oldest()
        self._seconds[activity] = self._seconds.get(activity, 0.0) + t1_s - t0_s
        if activity == "waiting":
            self._wait_seconds[what] = self._wait_seconds.get(what, 0.0) + t1_s - t0_s


def _kind(activity: Activity, what: str) -> tuple[Activity, str]:
    """What time is summed by: of working, which row is no matter."""
    return (activity, what) if activity == "waiting" else (activity, "")


def _shares(spent: Iterable[tuple[str, float]], length: float) -> dict[str, float]:
    shares: dict[str, float] = {}
    for name, seconds in spent:
        shares[name] = shares.get(name, 0.0) + seconds / length
    return shares
