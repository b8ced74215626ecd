"""What people see while it runs: the status display and progress bars.

On a terminal `rich` redraws in place; anywhere else plain lines are printed now and then. Text is ASCII where it is
ours; what else a stream cannot show becomes `?`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TextIO, TypeVar

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from draftline.monitor.render import duration, printable, status_line, status_lines
from draftline.monitor.status import StatusSnapshot

T = TypeVar("T")
PROGRESS_EVERY_S = 5.0


def make_console(stream: TextIO | None = None) -> Console:
    """A console on standard error (results go to standard output)."""
    return Console(file=stream or sys.stderr, highlight=False, markup=False, emoji=False, soft_wrap=False)


def is_live(console: Console) -> bool:
    """True if lines can be redrawn in place."""
    return console.is_terminal and not console.is_dumb_terminal


class StatusDisplay:
    """Shows snapshots: in place on a terminal, else one line every `every_s` seconds.

    In a log the verdict gets a line of its own when its cause has changed.
    Used by one thread. `clock` is monotonic seconds.
    """

    def __init__(self, console: Console, every_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._every_s, self._clock = console, every_s, clock
        self._last_s = clock()
        self._last_cause = ""
        self._live = Live(console=console, auto_refresh=False) if is_live(console) else None

    def start(self) -> None:
        """Begin to redraw; nothing where lines are printed."""
        if self._live:
            self._live.start()

    def show(self, snapshot: StatusSnapshot) -> None:
        """Show it now on a terminal; in a log only when its time has come."""
        if self._live:
            self._live.update(self._text(snapshot), refresh=True)
        elif self._clock() - self._last_s >= self._every_s:
            self._print_line(snapshot)

    def close(self, snapshot: StatusSnapshot | None) -> None:
        """Show a last snapshot and leave it on the screen; with None, leave nothing there."""
        if self._live:
            if snapshot:
                self._live.update(self._text(snapshot), refresh=True)
            self._live.transient = snapshot is None
            self._live.stop()
        elif snapshot:
            self._print_line(snapshot)

    def _print_line(self, snapshot: StatusSnapshot) -> None:
        self._last_s = self._clock()
        plain(self._console, status_line(snapshot))
        if snapshot.verdict.cause != self._last_cause:
            plain(self._console, snapshot.verdict.sentence)
        self._last_cause = snapshot.verdict.cause

    def _text(self, snapshot: StatusSnapshot) -> Text:
        lines = status_lines(snapshot, max(20, self._console.width - 1))
        return Text(printable("\n".join(lines), self._console.encoding))


def plain(console: Console, text: str) -> None:
    """One line, never wrapped or coloured."""
    console.file.write(printable(text, console.encoding) + "\n")
    console.file.flush()


def progress(
    iterable: Iterable[T],
    label: str,
    total: int | None = None,
    *,
    console: Console | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[T]:
    """Pass items through and show how far it is: a bar on a terminal, else a line every few seconds.

    Args:
        label: what is being done, for example `answering prompts`.
        total: number of items, if known and not `len(iterable)`.
    """
    console = console or make_console()
    if total is None and hasattr(iterable, "__len__"):
        total = len(iterable)  # type: ignore[arg-type]
    label = printable(label, console.encoding)
    if is_live(console):
        yield from _bar(iterable, label, total, console)
    else:
        yield from _lines(iterable, label, total, console, clock)


def _bar(iterable: Iterable[T], label: str, total: int | None, console: Console) -> Iterator[T]:
    columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(label, total=total)
        for item in iterable:
            yield item
            bar.advance(task)


def _lines(
    iterable: Iterable[T], label: str, total: int | None, console: Console, clock: Callable[[], float]
) -> Iterator[T]:
    start = last = clock()
    done = 0
    for item in iterable:
        yield item
        done += 1
        now = clock()
        if now - last >= PROGRESS_EVERY_S and done != total:
            last = now
            left = f", {duration((now - start) / done * (total - done))} left" if total else ""
            plain(console, f"{label}: {done}{f'/{total}' if total else ''}{left}")
    if last != start or clock() - start >= PROGRESS_EVERY_S:
        plain(console, f"{label}: {done} done in {duration(clock() - start)}")
