"""A run's status as text: for the live display, the log and watch. ASCII only, readable from 40 columns up."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence

from draftline.monitor.status import GpuGauge, QueueGauge, StatusSnapshot, WorkerStatus
from draftline.monitor.verdict import rate

SEPARATOR = " | "
# Least widths of a worker's name, what it does, and its rows, so that columns seldom move.
_COLUMNS = (11, 28, 20, 0)


def status_line(snapshot: StatusSnapshot) -> str:
    """All of it on one line, for a log."""
    return SEPARATOR.join(status_segments(snapshot))


def status_lines(snapshot: StatusSnapshot, width: int) -> list[str]:
    """The status line, the verdict, then workers and GPUs, broken to `width` columns.

    What matters most stands first: a terminal that is too low cuts the end.
    """
    return [*flow(status_segments(snapshot), width), *wrap(snapshot.verdict.sentence, width), *parts(snapshot, width)]


def parts(snapshot: StatusSnapshot, width: int) -> list[str]:
    """What each worker and each GPU does."""
    gpus = (line for text in gpu_lines(snapshot.gpus) for line in hanging(text, width))
    return [*worker_lines(snapshot.workers, width), *gpus]


def status_segments(snapshot: StatusSnapshot, *, over: bool = False) -> list[str]:
    """rows, loss, acceptance estimate, trained rate, capacities, queue, waiting shares; time left unless it is over."""
    ledger, capacities = snapshot.ledger, snapshot.capacities
    done = ledger.committed + ledger.trained
    segments = [f"{done}/{ledger.planned} rows" if ledger.planned else f"{snapshot.rows_trained} rows"]
    if ledger.set_aside:
        segments.append(f"{ledger.set_aside} set aside")
    segments += [
        f"loss {number(snapshot.loss, 3)}",
        f"acc {number(snapshot.acceptance, 2)}",
        rate(snapshot.tokens_per_s),
        f"can: data {rate(capacities.data_tokens_per_s)}, targets {rate(capacities.target_tokens_per_s)}, "
        f"drafters {rate(capacities.drafter_tokens_per_s)}",
    ]
    if snapshot.validation_acceptance is not None:
        segments[3:3] = validation_segments(snapshot)
    if snapshot.queue is not None:
        segments.append(queue_text(snapshot.queue))
    if snapshot.workers:
        segments.append("wait " + " ".join(f"{short_name(w)} {waiting_share(w):.0%}" for w in snapshot.workers))
    if snapshot.gpus:
        segments.append("gpu " + " ".join(_percent(gpu.busy_share) for gpu in snapshot.gpus))
    if not over:
        segments.append(f"left {duration(snapshot.time_left_s)}")
    return segments


def validation_segments(snapshot: StatusSnapshot) -> list[str]:
    """`val acc 2.31`, `tree@16 2.80 tree@64 3.01`, `walk 2.20 tree@16 2.64`: at fixed anchors, then walked."""

    def lengths(by_method: Mapping[str, float]) -> str:
        return " ".join(f"{name} {number(length, 2)}" for name, length in by_method.items() if name != "chain")

    segments = [f"val acc {number(snapshot.validation_acceptance, 2)}", lengths(snapshot.validation_trees)]
    if snapshot.validation_walk:
        chain = number(snapshot.validation_walk.get("chain"), 2)
        segments.append(f"walk {chain} {lengths(snapshot.validation_walk)}".strip())
    return [segment for segment in segments if segment]


def queue_text(queue: QueueGauge) -> str:
    """`queue 2/4 rows 31.0 MiB`."""
    bound = f"/{queue.max_rows}" if queue.max_rows is not None else ""
    limit = f"/{size(queue.max_bytes)}" if queue.max_bytes is not None else ""
    return f"queue {queue.rows}{bound} rows {size(queue.bytes)}{limit}"


def worker_lines(workers: Sequence[WorkerStatus], width: int) -> list[str]:
    """What each worker does now and where its time went: a table, or several lines a worker where it is too narrow."""
    rows = [(w.name, doing(w), f"{w.rows} rows, {rate(w.tokens_per_s)}", _shares(w)) for w in workers]
    columns = [
        max([least, *map(len, column)]) for least, column in zip(_COLUMNS, zip(*rows, strict=True), strict=False)
    ]
    table = ["  ".join(f"{cell:<{c}}" for cell, c in zip(row, columns, strict=True)).rstrip() for row in rows]
    if all(len(line) <= width for line in table):
        return table
    lines = []
    for name, now, facts, shares in rows:
        lines += hanging(f"{name}: {now}", width)
        lines += [f"  {line}" for line in wrap(f"{facts}; {shares}", width - 2)]
    return lines


def _shares(worker: WorkerStatus) -> str:
    return " ".join(f"{name} {share:.0%}" for name, share in sorted(worker.shares.items(), key=_by_share))


def gpu_lines(gpus: Sequence[GpuGauge]) -> list[str]:
    """`cuda:0      97% busy, 61.2 of 79.6 GiB`."""
    return [f"{gpu.device:<11} {_percent(gpu.busy_share, '?%')} busy, {_memory(gpu)}" for gpu in gpus]


def short_name(worker: WorkerStatus) -> str:
    """`target-0` -> `t0`."""
    role, dash, number_ = worker.name.rpartition("-")
    return f"{role[0]}{number_}" if dash and role and number_.isdigit() else worker.name


def waiting_share(worker: WorkerStatus) -> float:
    """Share of the recent window in which a worker waited, 0..1."""
    return worker.shares.get("waiting", 0.0)


def number(value: float | None, digits: int) -> str:
    """A number with so many digits, `?` where it is not known."""
    return "?" if value is None else f"{value:.{digits}f}"


def size(n_bytes: int) -> str:
    """Bytes for people, in powers of 1024."""
    value, units = float(n_bytes), ("B", "KiB", "MiB", "GiB")
    for unit in units:
        if value < 1024 or unit == units[-1]:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def duration(seconds: float | None) -> str:
    """`12s`, `3m05s`, `1h02m`, `2d03h`."""
    if seconds is None:
        return "?"
    total = round(seconds)
    if total < 60:
        return f"{total}s"
    if total < 3600:
        return f"{total // 60}m{total % 60:02d}s"
    if total < 86400:
        return f"{total // 3600}h{total % 3600 // 60:02d}m"
    return f"{total // 86400}d{total % 86400 // 3600:02d}h"


def printable(text: str, encoding: str | None) -> str:
    """The text with what the stream cannot show, or a terminal would obey, replaced by `?`; line feeds stay."""
    shown = "".join(c if c == "\n" or unicodedata.category(c)[0] != "C" else "?" for c in text)
    return shown.encode(encoding or "ascii", "replace").decode(encoding or "ascii")


def wrap(text: str, width: int) -> list[str]:
    """Break at spaces, and inside a word that is longer than a line."""
    lines = [""]
    for word in text.split():
        joined = f"{lines[-1]} {word}".strip()
        if len(joined) <= width:
            lines[-1] = joined
        else:
            lines += [word[at : at + width] for at in range(0, len(word), width)]
    return [line for line in lines if line]


def hanging(text: str, width: int) -> list[str]:
    """The text as it is where it fits; else broken, all lines but the first indented."""
    if len(text) <= width:
        return [text]
    first, *rest = wrap(text, width - 2)
    return [first, *(f"  {line}" for line in rest)]


def flow(segments: Sequence[str], width: int) -> list[str]:
    """Segments side by side, in lines of at most `width` columns."""
    lines: list[str] = []
    for segment in segments:
        if lines and len(lines[-1]) + len(SEPARATOR) + len(segment) <= width:
            lines[-1] += SEPARATOR + segment
        else:
            lines += wrap(segment, width)
    return lines


def _percent(share: float | None, unknown: str = "?") -> str:
    return unknown if share is None else f"{share:.0%}"


def _memory(gpu: GpuGauge) -> str:
    if gpu.memory_used_bytes is None or gpu.memory_total_bytes is None:
        return "memory unknown"
    return f"{gpu.memory_used_bytes / 2**30:.1f} of {gpu.memory_total_bytes / 2**30:.1f} GiB"


def doing(worker: WorkerStatus) -> str:
    """`working row 7 (3s)`, `waiting for a row (12s)`, `failed: out of memory`."""
    if worker.state != "running":
        return f"{worker.state}{': ' + worker.reason if worker.reason else ''}"
    if worker.activity is None:
        return "idle"
    joined = "waiting for " if worker.activity == "waiting" else f"{worker.activity} "
    return f"{joined}{worker.what}".strip() + f" ({duration(worker.since_s)})"


def _by_share(item: tuple[str, float]) -> float:
    return -item[1]
