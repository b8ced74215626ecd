"""What the last drafter to arrive does for all: average, score the validation rows, write a checkpoint.

Consumes: a Meeting (who is here, which rows the round trained). Produces: equal replicas, and now and then a
checkpoint whose ledger counts the rows of this meeting as committed. Runs in one drafter's thread while the others
wait, so weights stand still meanwhile.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

from draftline.drafter.schedule import LearningRate
from draftline.drafter.step import StepStats
from draftline.drafter.sync import Synchronizer
from draftline.errors import DraftlineError, RunFailedError
from draftline.export.zlab import CARD, export_zlab
from draftline.pipeline.checkpoint import Checkpoint, write_checkpoint
from draftline.pipeline.runplan import RunPlan
from draftline.pipeline.threads import Meeting
from draftline.pipeline.workers import DrafterWorker
from draftline.records import HiddenStateRow

BEST = "best"


def best_acceptance(folder: Path) -> float:
    """Validation acceptance length of the drafter kept in `folder`; 0.0 if there is none."""
    card = folder / CARD
    if not card.is_file():
        return 0.0
    return float(json.loads(card.read_text(encoding="utf-8"))["provenance"]["validation_acceptance"])


class MeetingClock(Protocol):
    """Spans of the worker in whose thread a meeting is held."""

    def span(self, activity: Any, what: str, **facts: Any) -> AbstractContextManager[Any]: ...


class UnhurriedClock:
    """The clock of a worker whose spans are also declared busy: many validation rows, or a large checkpoint on a slow
    disk, are no stall.

    Args:
        clock: records the spans.
        busy: declares them, see `RowExchange.busy`.
    """

    def __init__(self, clock: MeetingClock, busy: Callable[[str], AbstractContextManager[None]]) -> None:
        self._clock, self._busy = clock, busy

    @contextmanager
    def span(self, activity: Any, what: str, **facts: Any) -> Iterator[Any]:
        with self._busy(str(activity)), self._clock.span(activity, what, **facts) as span:
            yield span


class MeetingRoom:
    """Holds the meetings of a run.

    Args:
        plan: the run.
        drafters: all workers, by number.
        synchronizer: what is done with their weights.
        learning_rate: the run's schedule.
        ledger: gives the ledger as it will be once the meeting is committed.
        fingerprints: of data and target, kept in each checkpoint.
        validation: rows captured once, on the host.
        on_validation: receives the summed statistics of the validation rows.
    """

    def __init__(
        self,
        plan: RunPlan,
        drafters: Sequence[DrafterWorker],
        synchronizer: Synchronizer,
        learning_rate: LearningRate,
        *,
        ledger: Callable[[Meeting], dict[str, Any]],
        fingerprints: dict[str, str],
        validation: Sequence[HiddenStateRow] = (),
        on_validation: Callable[[StepStats, int], float | None] | None = None,
    ) -> None:
        self._plan, self._drafters, self._synchronizer = plan, drafters, synchronizer
        self._learning_rate, self._ledger, self._fingerprints = learning_rate, ledger, fingerprints
        self._validation, self._on_validation = validation, on_validation
        self.last_checkpoint: Path | None = None
        self._lock = threading.Lock()

    def hold(self, meeting: Meeting, clock: MeetingClock) -> None:
        """One meeting, before it is committed.

        Raises:
            RunFailedError, UserError: the round stays uncommitted, and the run has to fail: the replicas may have been
                written in part, and only the last checkpoint is known to be good.
        """
        try:
            self._hold(meeting, clock)
        except DraftlineError:
            raise
        except Exception as error:
            raise RunFailedError(
                f"round {meeting.round_id} could not be averaged: {type(error).__name__}: {error}",
                origin=f"drafter-{meeting.leader}",
            ) from error

    def _hold(self, meeting: Meeting, clock: MeetingClock) -> None:
        with self._lock:
            present = [self._drafters[d].replica for d in meeting.members]
            self._synchronizer.run(present, self._learning_rate.at(meeting.committed_rows - 1))
            due = meeting.is_last or (meeting.round_id + 1) % self._plan.config.checkpoint.every_rounds == 0
            if not due:
                return
            if self._validation and self._on_validation is not None:
                with clock.span("validating", f"{len(self._validation)} rows"):
                    self._score(meeting, self._on_validation)
            with clock.span("checkpointing", f"round {meeting.round_id}"):
                self.last_checkpoint = self._write(meeting)

    def _score(self, meeting: Meeting, report: Callable[[StepStats, int], float | None]) -> None:
        """Scores the validation rows; the best drafter by acceptance length, never by loss, is kept in `best/`."""
        drafter = meeting.members[0]
        acceptance = report(self._validate(drafter), meeting.committed_rows)
        folder = self._plan.config.output / BEST
        if acceptance is None or acceptance <= best_acceptance(folder):
            return
        facts = {"validation_acceptance": acceptance, "committed_rows": meeting.committed_rows}
        export_zlab(self._drafters[drafter].module, folder, provenance=facts)

    def _validate(self, drafter: int) -> StepStats:
        step = self._drafters[drafter].step
        total = step.evaluate(self._validation[0])
        for row in self._validation[1:]:
            total = total + step.evaluate(row)
        return total.to("cpu")

    def _write(self, meeting: Meeting) -> Path:
        config = self._plan.config
        members = [self._drafters[d].replica.optimizer for d in meeting.members]
        alike = config.sync.kind == "gradient" or (config.sync.kind == "average" and config.sync.moments != "keep")
        state = {
            "round_id": meeting.round_id,
            "ledger": self._ledger(meeting),
            "spec": self._plan.spec.model_dump(mode="json"),
            "config": config.model_dump(mode="json"),
            "fingerprints": self._fingerprints,
        }
        checkpoint = Checkpoint(
            state=state,
            weights=dict(zip(members[0].names, members[0].masters, strict=True)),
            moments=[dict(optimizer.moments()) for optimizer in (members[:1] if alike else members)],
            sync=self._synchronizer.state(),
        )
        return write_checkpoint(config.output, meeting.round_id, checkpoint, keep=config.checkpoint.keep)
