"""PipelineCoordinator: owns a run in one process.

consumes     a RunPlan, and a checkpoint when resumed
produces     a trained drafter: checkpoints, an export, and the ledger's closing line
starts       one thread per target and drafter, the monitor, the signal watcher
waits for    the end of the exchange: CLOSED, STOPPED or FAILED; every worker thread ends by itself
on failure   RunFailedError with the worker's name; the checkpoints written so far stay. A thread that gives no sign
             any more is not waited for: it is a daemon and ends with the process
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftline.data.shards import TokenDataset
from draftline.drafter.loop import DrafterTrainLoop
from draftline.drafter.schedule import LearningRate
from draftline.drafter.sync import Synchronizer
from draftline.errors import DraftlineError, RunFailedError
from draftline.export.zlab import export_zlab
from draftline.pipeline.budget import FailureBudget, is_sticky
from draftline.pipeline.core import End, LedgerCounts, LedgerState, PipelineCore, drafter_worker
from draftline.pipeline.ending import STOPPING, raise_unless_closed
from draftline.pipeline.exporting import drafter_of_run
from draftline.pipeline.meeting import MeetingRoom, Seat, UnhurriedClock
from draftline.pipeline.profiling import RunProfiler
from draftline.pipeline.provenance import provenance
from draftline.pipeline.reporting import RunReporter
from draftline.pipeline.run_folder import RunFolder, check_run_folder, claim_run_folder, undone_if_refused
from draftline.pipeline.runplan import RunPlan, validation_rows
from draftline.pipeline.signals import StopSignals
from draftline.pipeline.states import StateStores
from draftline.pipeline.threads import RowExchange
from draftline.pipeline.traces import FailureTraces
from draftline.pipeline.validation import Validator
from draftline.pipeline.workers import (
    DrafterWorker,
    Target,
    load_targets,
    make_captures,
    make_drafters,
    prove_targets,
    warm_drafters,
)
from draftline.records import HiddenStateRow
from draftline.target.loop import Capture, Clock, TargetForwardLoop, map_tensors
from draftline.target.spread import first_device

GRACE_S = 10.0  # for threads to end by themselves once the run has failed


@dataclass(frozen=True, slots=True)
class TrainResult:
    """How a run ended.

    Attributes:
        end: CLOSED.
        ledger: `planned = committed + set aside + in flight + remaining`.
        export: the finished drafter.
        training_s: from the start of the loops to their end; loading and the final export not counted.
        tokens, supervised_tokens: trained in this process.
        rows_by_drafter: rows each drafter trained in this process.
    """

    end: End
    ledger: LedgerCounts
    output: Path
    export: Path
    training_s: float
    tokens: int
    supervised_tokens: int
    rows_by_drafter: tuple[int, ...]

    def summary_lines(self) -> list[str]:
        """Plain lines for the end of a run."""
        return [
            f"ledger: {self.ledger}",
            f"trained {self.tokens} tokens ({self.supervised_tokens} supervised) in {self.training_s:.1f} s; "
            f"rows by drafter: {', '.join(map(str, self.rows_by_drafter))}",
            f"drafter: {self.export}",
        ]


def train(
    plan: RunPlan,
    *,
    resume: bool = False,
    export_initial: Path | None = None,
    profile_rows: int | None = None,
    signals: StopSignals | None = None,
) -> TrainResult:
    """Runs a plan to its end.

    Args:
        resume: go on from the last whole checkpoint in the run's folder.
        export_initial: also export the drafter as it was before its first row (for comparisons).
        profile_rows: write traces of so many rows of each worker into the run folder; see profiling.py.
        signals: of a caller who watches for them already.

    Raises:
        UserError: bad input, found before the first row.
        RunFailedError: the run failed; names the worker.
        RunStoppedError: stopped by a signal, after its checkpoint.
    """
    with StopSignals() if signals is None else nullcontext(signals) as signals, _shared_cores(plan):
        check_run_folder(plan, resume=resume)
        learning_rate = LearningRate(plan.config.optimizer, len(plan.rows))
        targets = load_targets(plan)
        signals.end_if_received()
        claimed = claim_run_folder(plan, target_fingerprint=targets[0].fingerprint, resume=resume)
        with closing(claimed) as folder, undone_if_refused(folder), RunReporter(plan, folder) as reporter:
            profiler = None
            if profile_rows is not None:
                profiler = RunProfiler(folder.path, profile_rows, say=reporter.say, flush=reporter.flush)
            coordinator = PipelineCoordinator(plan, folder, targets, learning_rate, reporter, profiler=profiler)
            if export_initial is not None:
                export_zlab(coordinator.drafters[0].module, export_initial, dtype="float32")
            return coordinator.run(signals)


class PipelineCoordinator:
    """Builds the workers, runs them, and closes the run.

    Args:
        plan: the run.
        folder: its claimed folder.
        targets: loaded, one per target worker.
        learning_rate: the checked schedule.
        reporter: where everything is counted and shown.
        core_class: another set of rules for the exchange; benchmarks compare with it.
        profiler: of a run that is profiled.
    """

    def __init__(
        self,
        plan: RunPlan,
        folder: RunFolder,
        targets: Sequence[Target],
        learning_rate: LearningRate,
        reporter: RunReporter,
        core_class: type[PipelineCore] = PipelineCore,
        profiler: RunProfiler | None = None,
    ) -> None:
        self._plan, self._folder, self._reporter, self._profiler = plan, folder, reporter, profiler
        self._traces = FailureTraces(folder.path)
        for line in folder.passed_over:
            reporter.say(f"checkpoint passed over: {line}")
        reports = prove_targets(plan, targets)
        for report in reports.values():
            for line in (report.line(), *report.notes):
                reporter.say(line)
        checkpoint = folder.checkpoint
        self.drafters = make_drafters(plan, targets[0], checkpoint)
        with reporter.clock("coordinator").span("compiling", "all drafters"):
            warm_drafters(self.drafters)
        self._stores = StateStores(plan, targets[0])
        for line in self._stores.lines():
            reporter.say(line)
        captures = make_captures(plan, targets, reports)
        synchronizer = Synchronizer(plan.config.sync)
        synchronizer.begin([w.replica for w in self.drafters])
        state = None
        if checkpoint is not None:
            synchronizer.load_state(checkpoint.sync)
            state = LedgerState.from_json(checkpoint.state["ledger"])
        self.exchange: RowExchange[HiddenStateRow] = RowExchange(
            plan.rows,
            plan.row_bytes,
            plan.settings,
            state=state,
            stall_timeout_s=plan.config.pipeline.stall_timeout_s,
            on_stall=self._traces.dump_stacks,
            core_class=core_class,
        )
        room = MeetingRoom(
            plan,
            self.drafters,
            synchronizer,
            learning_rate,
            ledger=lambda: self.exchange.snapshot().to_json(),
            fingerprints={"data": plan.dataset.manifest.fingerprint, "target": targets[0].fingerprint},
            validator=_validator(plan, self._stores.validation(captures[0]), targets[0].stop_token_ids),
            on_validation=reporter.validated,
        )
        pipeline = plan.config.pipeline
        budget = FailureBudget(pipeline.max_restarts + 2 * pipeline.max_set_aside, keep=self._traces.keep)
        stored = self._stores.captures(captures)
        self._targets = [self._target_loop(i, capture, budget) for i, capture in enumerate(stored)]
        self._drafter_loops = [self._drafter_loop(i, w, room, learning_rate) for i, w in enumerate(self.drafters)]
        self._room = room
        reporter.watch(self.exchange)

    def _target_loop(self, number: int, capture: Capture, budget: FailureBudget) -> TargetForwardLoop:
        pipeline = self._plan.config.pipeline
        return TargetForwardLoop(
            number,
            self.exchange,
            self._plan.dataset,
            capture,
            self._clock(f"target-{number}"),
            budget,
            device=first_device(pipeline.target_devices[number]),
            hold_on_host=pipeline.hold_on == "host",
        )

    def _drafter_loop(
        self, number: int, worker: DrafterWorker, room: MeetingRoom, learning_rate: LearningRate
    ) -> DrafterTrainLoop:
        clock = self._clock(f"drafter-{number}")
        unhurried = UnhurriedClock(clock, lambda what: self.exchange.busy(drafter_worker(number), what))
        return DrafterTrainLoop(
            number,
            self.exchange,
            worker.step,
            worker.replica,
            learning_rate,
            meetings=Seat(room, number, unhurried),
            log=self._reporter,
            clock=clock,
            accumulate_rows=0
            if self._plan.config.sync.kind == "gradient"
            else self._plan.config.optimizer.accumulate_rows,
            prefetch_rows=self._plan.config.pipeline.prefetch_rows,
        )

    def _clock(self, worker: str) -> Clock:
        clock = self._reporter.clock(worker)
        return clock if self._profiler is None else self._profiler.clock(worker, clock)

    def run(self, signals: StopSignals) -> TrainResult:
        """Starts the threads, waits for the end, joins them, exports.

        Raises:
            RunFailedError, RunStoppedError: see `train`.
        """
        threads = [self._thread(loop.name, loop.run) for loop in self._targets]
        threads += [self._thread(loop.name, loop.run) for loop in self._drafter_loops]
        started = time.monotonic()
        if self._profiler is not None:
            self._profiler.start()
        with signals.stopping_by(self._stop):
            for thread in threads:
                thread.start()
            end = self.exchange.wait_end()
            _join(threads, within_s=GRACE_S if end is End.FAILED else None)
        training_s = time.monotonic() - started
        self._stores.close()
        if self._profiler is not None:
            self._profiler.close()
        self._reporter.say(f"ledger: {self.exchange.stats().ledger}")
        raise_unless_closed(end, self.exchange.failure, self._room.last_checkpoint, signals.received or signal.SIGTERM)
        return self._result(training_s)

    def _stop(self, reason: str) -> None:
        self._reporter.say(f"stop asked for by {reason}: {STOPPING}")
        self.exchange.request_stop()

    def _thread(self, name: str, run: Callable[[], None]) -> threading.Thread:
        return threading.Thread(target=self._guarded, args=(name, run), name=name, daemon=True)

    def _guarded(self, name: str, run: Callable[[], None]) -> None:
        """A worker thread that ends by an exception is never silent: the run goes on without it or fails by name."""
        try:
            run()
            self._reporter.ended(name, None)
        except BaseException as error:  # noqa: BLE001  reported by name; the exchange wakes everybody
            failed_already = isinstance(error, RunFailedError) and self.exchange.failure is not None
            if not failed_already:
                self._traces.keep(name, error)
            self._reporter.ended(name, error)
            self._lost(name, error)

    def _lost(self, name: str, error: BaseException) -> None:
        reason = str(error) if isinstance(error, DraftlineError) else f"{type(error).__name__}: {error}"
        role, _, number = name.partition("-")
        alone = self._plan.num_drafters == 1
        if role == "drafter" and not alone and not isinstance(error, DraftlineError) and not is_sticky(error):
            self.exchange.drafter_lost(int(number))
            return
        origin = error.origin if isinstance(error, RunFailedError) else name
        self.exchange.fail(origin, reason.removeprefix(f"{origin}: "))

    def _provenance(self) -> dict[str, Any]:
        """What the export's card tells: which target, which data, how much of it."""
        known = provenance(self._plan.config, self._plan.facts, self._plan.dataset.manifest)
        return {**known, "committed_rows": self.exchange.stats().ledger.committed}

    def _result(self, training_s: float) -> TrainResult:
        output = self._plan.config.output
        export = output / "export"
        if not export.exists():
            export_zlab(drafter_of_run(output), export, provenance=self._provenance())
        return TrainResult(
            end=End.CLOSED,
            ledger=self.exchange.stats().ledger,
            output=output,
            export=export,
            training_s=training_s,
            tokens=self._reporter.tokens,
            supervised_tokens=self._reporter.supervised_tokens,
            rows_by_drafter=self._reporter.rows_by_drafter,
        )


def _join(threads: Sequence[threading.Thread], *, within_s: float | None) -> None:
    """Wait for threads that end by themselves; after a failure one of them may never do so."""
    deadline = None if within_s is None else time.monotonic() + within_s
    for thread in threads:
        thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))


def _validator(plan: RunPlan, capture: Capture, stop_token_ids: frozenset[int]) -> Validator | None:
    """Captures the validation rows once, to the host."""
    path = plan.config.data.validation_path
    if path is None:
        return None
    dataset = TokenDataset.open(path)
    captured = []
    for row in validation_rows(dataset, plan.config):
        states = capture.capture(row, [dataset.sample(i) for i in row.samples])
        captured.append(_to_host(states))
    return Validator(captured, plan.config.validation, stop_token_ids) if captured else None


def _to_host(row: HiddenStateRow) -> HiddenStateRow:
    return map_tensors(row, lambda t: t.to("cpu"))


class _shared_cores:  # noqa: N801  used as a function-like context manager
    """Divides the CPU's cores among the workers that compute on it; restores the setting at the end."""

    def __init__(self, plan: RunPlan) -> None:
        devices = (*plan.config.pipeline.target_devices, *plan.config.pipeline.drafter_devices)
        self._workers = sum(first_device(device) == "cpu" for device in devices)
        self._before = torch.get_num_threads()

    def __enter__(self) -> None:
        if self._workers > 1:
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // self._workers))

    def __exit__(self, *exc: Any) -> None:
        torch.set_num_threads(self._before)
