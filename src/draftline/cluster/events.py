"""What the driver does with the queue's events: counts and shows what workers told, writes checkpoints.

consumes     batches of workers, orders of checkpoints, validation scores; in the driver's thread
produces     the monitor's curves, `failures.log`, checkpoints and `best/` in the run folder
starts       nothing: checkpoints are written in the one thread of `writer`, so that the driver goes on watching
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, cast

import ray
import torch
from ray import exceptions

from draftline.cluster.messages import Batch, CheckpointOrder, RowReport, Scale, Scores
from draftline.cluster.store import ObjectStore
from draftline.cluster.transport import RowLostError, unpack
from draftline.decode.walk import WalkSums
from draftline.drafter.loop import TrainedRow
from draftline.drafter.metrics import StepStats
from draftline.errors import DraftlineError
from draftline.export.zlab import export_zlab
from draftline.pipeline.checkpoint import Checkpoint, write_checkpoint
from draftline.pipeline.exporting import drafter_of_checkpoint
from draftline.pipeline.meeting import BEST, best_acceptance
from draftline.pipeline.reporting import RunReporter
from draftline.pipeline.runplan import RunPlan
from draftline.pipeline.traces import FailureTraces
from draftline.pipeline.validation import ValidationScores


class EventDesk:
    """Takes events; see the module's text.

    Args:
        plan: the run.
        queue: the actor, told of every checkpoint that is on the disk.
        reporter: where everything is counted and shown.
        traces: of the run folder.
        fingerprints: of data and target, kept in each checkpoint.

    Attributes:
        writer: where checkpoints are written; set while the run goes on.
        last_checkpoint: folder of the newest one of this process.
    """

    def __init__(
        self, plan: RunPlan, queue: Any, reporter: RunReporter, traces: FailureTraces, fingerprints: dict[str, str]
    ) -> None:
        self._plan, self._queue, self._reporter, self._traces = plan, queue, reporter, traces
        self._fingerprints = fingerprints
        self._wall_offset_s = time.time() - time.monotonic()
        self.writer: Executor | None = None
        self.last_checkpoint: Path | None = None

    def take(self, events: Sequence[Any]) -> list[Scale]:
        """Does what events ask for; gives back those that the driver itself has to see to.

        Raises:
            RunFailedError: a limit of the configuration is exceeded.
        """
        left = []
        for event in events:
            if isinstance(event, Batch):
                self._count(event)
            elif isinstance(event, CheckpointOrder):
                self._later(self._write, event)
            elif isinstance(event, Scores):
                self._later(self._score, event)
            else:
                left.append(event)
        return left

    def keep_trace(self, worker: str, trace: str) -> None:
        """The traceback of an error that a worker met."""
        self._traces.keep_text(worker, trace)

    # ---- what workers tell

    def _count(self, batch: Batch) -> None:
        clock = self._reporter.clock(batch.worker)
        for span in batch.spans:
            t0_s, t1_s = span.t0_wall_s - self._wall_offset_s, span.t1_wall_s - self._wall_offset_s
            clock.past(cast(Any, span.activity), span.what, t0_s, t1_s, dict(span.facts))
        for _, rows, tokens in batch.done:
            clock.done(rows=rows, tokens=tokens)
        for line in batch.lines:
            self._reporter.say(line)
        for trace in batch.failures:
            self.keep_trace(batch.worker, trace)
        seat = int(batch.worker.partition("-")[2])
        for row in batch.rows:
            self._reporter.row_trained(_trained(row, seat))
        for what in batch.skipped:
            self._reporter.step_skipped(seat, what)

    # ---- checkpoints, in the writer's thread

    def _later(self, act: Any, event: Any) -> None:
        assert self.writer is not None
        self.writer.submit(self._guarded, act, event)

    def _guarded(self, act: Any, event: Any) -> None:
        """What goes wrong here fails the run by name; a dead queue is the driver's own matter."""
        try:
            act(event)
        except RowLostError as error:
            self._reporter.say(f"a checkpoint waits for the next meeting: {error}")
        except exceptions.RayActorError:
            return
        except Exception as error:  # noqa: BLE001  told to everybody, by name
            reason = str(error) if isinstance(error, DraftlineError) else f"{type(error).__name__}: {error}"
            ray.get(self._queue.fail.remote("checkpoint", reason))

    def _write(self, order: CheckpointOrder) -> None:
        config, meeting, store = self._plan.config, order.turn.meeting, ObjectStore()
        with self._reporter.clock("coordinator").span("checkpointing", f"round {meeting.round_id}"):
            state = {
                "round_id": meeting.round_id,
                "ledger": order.ledger,
                "spec": self._plan.spec.model_dump(mode="json"),
                "config": config.model_dump(mode="json"),
                "fingerprints": self._fingerprints,
            }
            checkpoint = Checkpoint(
                state=state,
                weights=unpack(order.weights, store),
                moments=_moments(order, store),
                sync=unpack(order.sync, store),
            )
            path = write_checkpoint(config.output, meeting.round_id, checkpoint, keep=config.checkpoint.keep)
        self.last_checkpoint = path
        ray.get(self._queue.checkpoint_written.remote(meeting.round_id))

    def _score(self, scores: Scores) -> None:
        """Validation scores of the commit whose checkpoint was written last; the best drafter is kept in `best/`."""
        stats = StepStats(torch.tensor(scores.sums, dtype=torch.float64), scores.block_size, scores.tree_budgets)
        found = ValidationScores(stats, cast(WalkSums | None, scores.walk))
        self._reporter.validated(found, scores.committed_rows)
        best_by, folder = self._plan.config.validation.best_by, self._plan.config.output / BEST
        acceptance = found.acceptance_lengths().get(best_by)
        if acceptance is None or acceptance <= best_acceptance(folder, best_by) or self.last_checkpoint is None:
            return
        facts = {
            "validation_acceptance": acceptance,
            "best_by": best_by,
            "committed_rows": scores.committed_rows,
        }
        export_zlab(drafter_of_checkpoint(self.last_checkpoint), folder, provenance=facts)


def _moments(order: CheckpointOrder, store: ObjectStore) -> list[dict[str, torch.Tensor]]:
    """The leader's where all are alike; else each member's, as far as it still lives."""
    if order.moments is not None:
        return [unpack(order.moments, store)]
    found = []
    for packed in order.kept.values():
        try:
            found.append(unpack(packed, store))
        except RowLostError:
            continue  # whoever takes its place starts from another member's
    return [moments for moments in found if moments]


def _trained(row: RowReport, seat: int) -> TrainedRow:
    return TrainedRow(
        drafter=seat,
        row_id=row.row_id,
        tokens=row.tokens,
        supervised_tokens=row.supervised_tokens,
        stats=StepStats(torch.tensor(row.sums, dtype=torch.float64), row.block_size),
        learning_rate=row.learning_rate,
        gradient_norm=row.gradient_norm,
        skipped=row.skipped,
    )
