"""`draftline capture`: the states of a run's data, computed once.

consumes     the rows of the plan's first epoch, and the validation rows, each sample once
produces     a folder of states (see states.py); goes on where a killed capture stopped
starts       one thread per target worker, each with a capture of its own; they share the list of rows and the writer
waits for    all of them; the first error stops the others at their next row
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from draftline.config.schema import RunConfig
from draftline.data.shards import TokenDataset
from draftline.pipeline.runplan import RunPlan, make_run_plan
from draftline.pipeline.states import (
    StatesPart,
    open_writer,
    require_may_add,
    require_room,
    size_lines,
    states_identity,
    states_parts,
)
from draftline.pipeline.workers import load_targets, make_captures, prove_targets
from draftline.records import PlannedRow
from draftline.target.door import check_row
from draftline.target.loop import Capture
from draftline.target.states.capture import keep_row
from draftline.target.states.store import StatesWriter
from draftline.target.states.stored_target import store_target

Say = Callable[[str], None]


def capture_states(config: RunConfig, *, dry_run: bool = False, say: Say = print) -> None:
    """Captures what is not there yet.

    Args:
        config: of the run that will train on it; states.path names the folder.
        dry_run: only tell how much it would be.

    Raises:
        UserError: the folder holds states of something else (both values are named), or the disk is too small.
    """
    plan = _online_plan(config)
    parts = states_parts(plan)
    for part in parts:  # before the target is loaded, and in a dry run too
        require_may_add(part, states_identity(plan, part.dataset.manifest.fingerprint))
    for line in size_lines(plan, parts):
        say(line)
    if dry_run:
        return
    require_room(plan, parts)
    targets = load_targets(plan)
    reports = prove_targets(plan, targets)
    for report in reports.values():
        say(report.line())
    captures = make_captures(plan, targets, reports)
    fingerprint = targets[0].fingerprint
    with ExitStack() as opened:
        writers = []
        for part in parts:  # all before the first state: another process may be at work on any of them
            identity = states_identity(plan, part.dataset.manifest.fingerprint, fingerprint)
            writers.append(open_writer(plan, part, identity))
            opened.callback(writers[-1].close)
        store_target(targets[0], parts[0].folder)
        for part, writer in zip(parts, writers, strict=True):
            _capture_part(part, captures, writer, say)


def _online_plan(config: RunConfig) -> RunPlan:
    states = config.states.model_copy(update={"mode": "online"})
    pipeline = config.pipeline.model_copy(update={"state_cache_bytes": 0})
    return make_run_plan(config.model_copy(update={"states": states, "pipeline": pipeline}))


def _capture_part(part: StatesPart, captures: Sequence[Capture], writer: StatesWriter, say: Say) -> None:
    reader = part.reader()
    rows = [row for row in part.rows if reader is None or not reader.has(row.samples)]
    try:
        _run_all(rows, part.dataset, captures, writer, say)
    finally:  # also after an interruption: what is finished stays
        manifest = writer.close()
    rounding = f", rounded to within {manifest.fp8_error:.1%}" if manifest.identity.dtype == "fp8" else ""
    say(f"captured: {manifest.n_samples} samples, {manifest.n_bytes / 2**30:.3f} GiB in {part.folder}{rounding}")


def _run_all(
    rows: Sequence[PlannedRow], dataset: TokenDataset, captures: Sequence[Capture], writer: StatesWriter, say: Say
) -> None:
    todo, stop = _Shared(rows), threading.Event()
    done = itertools.count(1)
    told = {0}

    def work(capture: Capture) -> None:
        try:
            for row in todo:
                if stop.is_set():
                    return
                _capture_row(row, dataset, capture, writer)
                tenth = 10 * next(done) // len(rows)
                if tenth not in told:
                    told.add(tenth)
                    say(f"{tenth * 10} % of {len(rows)} rows")
        except BaseException:
            stop.set()
            raise

    with ThreadPoolExecutor(len(captures), thread_name_prefix="target-") as pool:
        futures = [pool.submit(work, capture) for capture in captures]
        try:
            for future in futures:
                future.result()
        except BaseException:
            stop.set()
            raise


def _capture_row(row: PlannedRow, dataset: TokenDataset, capture: Capture, writer: StatesWriter) -> None:
    states = capture.capture(row, [dataset.sample(i) for i in row.samples])
    check_row(states, row)
    keep_row(writer, row, states)


class _Shared:
    """One list dealt out to several threads."""

    def __init__(self, rows: Iterable[PlannedRow]) -> None:
        self._rows, self._lock = iter(rows), threading.Lock()

    def __iter__(self) -> Iterator[PlannedRow]:
        while True:
            with self._lock:
                row = next(self._rows, None)
            if row is None:
                return
            yield row
