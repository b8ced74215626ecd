"""RunReporter: what the loops report, counted, checked against the run's limits, and shown by the monitor."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

import torch

from draftline.drafter.loop import TrainedRow
from draftline.errors import RunFailedError
from draftline.monitor.clock import WorkerClock
from draftline.monitor.console import make_console, plain
from draftline.monitor.gpus import GpuReader
from draftline.monitor.metrics import TrainingStats, ValidationLengths
from draftline.monitor.run import RunMonitor
from draftline.monitor.status import LedgerCounts, QueueGauge
from draftline.pipeline.recall import RecentRecall, recall_curves
from draftline.pipeline.run_folder import RunFolder
from draftline.pipeline.runplan import RunPlan
from draftline.pipeline.threads import RowExchange
from draftline.pipeline.validation import ValidationScores
from draftline.target.spread import device_parts


class RunReporter:
    """Everything a run tells; use as a context manager around it. Thread-safe.

    Args:
        plan: the run.
        folder: where the monitor writes.

    Attributes:
        tokens, supervised_tokens: trained in this process.
    """

    def __init__(self, plan: RunPlan, folder: RunFolder) -> None:
        self._plan = plan
        self._console = make_console()
        self._monitor = RunMonitor(folder.path, plan.config.monitor, console=self._console)
        self._monitor.metrics.watch(gpus=GpuReader(_gpu_uuids(plan)).read)
        self._lock = threading.Lock()
        self._rows = [0] * plan.num_drafters
        self._recall = RecentRecall()
        self._exchange: RowExchange | None = None
        self._skipped = 0
        self.tokens = self.supervised_tokens = 0

    def __enter__(self) -> Self:
        self._monitor.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tell_recall(last=True)
        self._monitor.__exit__(kind, error, trace)

    @property
    def rows_by_drafter(self) -> tuple[int, ...]:
        """Rows trained by each drafter in this process."""
        return tuple(self._rows)

    def say(self, line: str) -> None:
        """One plain line for people."""
        plain(self._console, line)

    def clock(self, worker: str) -> WorkerClock:
        """The clock of a worker."""
        return self._monitor.metrics.worker(worker)

    def flush(self) -> None:
        """Writes out the spans so far."""
        self._monitor.events.flush()

    def watch(self, exchange: RowExchange) -> None:
        """Reads the queue and the ledger from now on."""
        self._exchange = exchange

        def queue() -> QueueGauge:
            stats = exchange.stats()
            return QueueGauge(
                rows=stats.waiting_rows,
                bytes=stats.waiting_bytes,
                max_rows=stats.max_rows,
                max_bytes=stats.max_bytes,
            )

        def ledger() -> LedgerCounts:
            stats = exchange.stats()
            counts = stats.ledger
            return LedgerCounts(
                planned=counts.planned,
                committed=counts.committed,
                set_aside=counts.set_aside,
                trained=stats.handed_rows,
            )

        self._monitor.metrics.watch(queue=queue, ledger=ledger)

    def row_trained(self, report: TrainedRow) -> None:
        """A drafter finished a row.

        Raises:
            RunFailedError: more steps were skipped for non-finite gradients than the configuration allows.
        """
        stats = report.stats
        with self._lock:
            self._rows[report.drafter] += 1
            self.tokens += report.tokens
            self.supervised_tokens += report.supervised_tokens
        self._monitor.metrics.record_training(
            TrainingStats(
                rows=1,
                tokens=report.tokens,
                supervised_tokens=report.supervised_tokens,
                numerator=float(stats.numerator),
                denominator=float(stats.denominator),
                terms={name: (float(n), float(d)) for name, (n, d) in stats.terms.items()},
                acceptance_sum=float(stats.acceptance_sum - stats.acceptance_blocks),  # the monitor counts drafts alone
                acceptance_blocks=float(stats.acceptance_blocks),
                learning_rate=report.learning_rate,
                grad_norm=report.gradient_norm,
            )
        )
        self._recall.add(stats)
        self._tell_recall()
        if report.skipped:
            self.step_skipped(report.drafter, f"row {report.row_id}")

    def _tell_recall(self, *, last: bool = False) -> None:
        """Once a minute, and at the end: by rows of the whole run, as the other curves."""
        curves = self._recall.curves(last=last)
        if curves and self._exchange is not None:
            stats = self._exchange.stats()
            self._monitor.log(stats.ledger.committed + stats.handed_rows, curves)

    def step_skipped(self, drafter: int, what: str) -> None:
        """An optimizer step changed nothing, because its gradient was not finite.

        Raises:
            RunFailedError: more steps were skipped than the configuration allows.
        """
        with self._lock:
            self._skipped += 1
            skipped = self._skipped
        limit = self._plan.config.pipeline.max_skipped_steps
        if skipped > limit:
            raise RunFailedError(
                f"{what}: the gradient is not finite ({skipped} steps skipped, {limit} allowed)",
                origin=f"drafter-{drafter}",
            )

    def validated(self, scores: ValidationScores, step: int) -> None:
        """Validation rows were scored, after `step` committed rows."""
        lengths = ValidationLengths(scores.acceptance_lengths(), scores.walked_lengths())
        self._monitor.metrics.record_validation(loss=scores.loss, lengths=lengths)
        loss = {} if scores.loss is None else {"validation/loss": scores.loss}
        self._monitor.log(step, {**lengths.curves(), **loss, **recall_curves(scores.stats, "validation")})

    def ended(self, worker: str, error: BaseException | None) -> None:
        """A worker thread is over. One that was woken by the failure of another has ended, but not failed."""
        reason = None if error is None else f"{type(error).__name__}: {error}"
        if isinstance(error, RunFailedError):
            reason = error.reason if error.origin == worker else None
        self.clock(worker).end(reason)


def _gpu_uuids(plan: RunPlan) -> dict[str, str]:
    """The CUDA devices of the run, in order, with their UUIDs."""
    pipeline = plan.config.pipeline
    parts = [part for place in (*pipeline.target_devices, *pipeline.drafter_devices) for part in device_parts(place)]
    names = sorted({name for name in parts if name.startswith("cuda")}, key=lambda name: int(name.partition(":")[2]))
    return {name: str(torch.cuda.get_device_properties(name).uuid) for name in names}
