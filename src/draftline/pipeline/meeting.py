"""What happens when drafters meet: reduce, commit, take over; then validation and a checkpoint.

hold        in the leader's thread, while the others wait and before the commit: consumes a Meeting (who is here, which
            rows the round trained); produces what the replicas shall become, beside them. Nothing is written.
take_over   in each member's own thread, after the commit: its replica becomes that. The leader then writes the
            checkpoint and scores the validation rows while the others train on; no later meeting can begin before it
            is done, because it has to arrive there. Its own weights and the committed rows stand still meanwhile.

A member that fails while it takes over is lost with its replica. A leader that fails after the commit fails the run:
the checkpoint of the commit is its duty.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from draftline.drafter.schedule import LearningRate
from draftline.drafter.sync import Reduced, Synchronizer
from draftline.errors import DraftlineError, RunFailedError
from draftline.export.zlab import CARD, export_zlab
from draftline.pipeline.checkpoint import Checkpoint, write_checkpoint
from draftline.pipeline.runplan import RunPlan
from draftline.pipeline.threads import Meeting
from draftline.pipeline.validation import ValidationScores, Validator
from draftline.pipeline.workers import DrafterWorker

BEST = "best"


def best_acceptance(folder: Path, best_by: str = "chain") -> float:
    """Validation acceptance length of the drafter kept in `folder`; 0.0 if none was chosen by this measure."""
    card = folder / CARD
    if not card.is_file():
        return 0.0
    provenance = json.loads(card.read_text(encoding="utf-8"))["provenance"]
    return float(provenance["validation_acceptance"]) if provenance.get("best_by", "chain") == best_by else 0.0


class MeetingClock(Protocol):
    """Spans of the worker in whose thread a meeting is held."""

    def span(self, activity: Any, what: str, **facts: Any) -> AbstractContextManager[Any]:
        """Times what stands inside it."""


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
        """Times what stands inside it, and tells the watchdog that it may take long."""
        with self._busy(str(activity)), self._clock.span(activity, what, **facts) as span:
            yield span


@dataclass(slots=True)
class _Outcome:
    """What one meeting agreed on, until everybody has taken it over.

    Attributes:
        is_due: a checkpoint is to be written after the commit.
        kept_moments: AdamW state of every member, on the host, where members keep different ones and a checkpoint is
            due; the others train on while it is written.
        waiting: members that have not taken over yet.
    """

    round_id: int
    attempt: int
    reduced: Reduced
    is_due: bool
    kept_moments: list[dict[str, Tensor]] | None
    waiting: set[int]


class MeetingRoom:
    """Holds the meetings of a run.

    Args:
        plan: the run.
        drafters: all workers, by number.
        synchronizer: what is done with their weights.
        learning_rate: the run's schedule.
        ledger: gives the ledger; in the leader's hands it counts exactly what the last meeting committed.
        fingerprints: of data and target, kept in each checkpoint.
        validator: scores a drafter on the validation rows; None without any.
        on_validation: receives the scores, and how many rows are committed.
    """

    def __init__(
        self,
        plan: RunPlan,
        drafters: Sequence[DrafterWorker],
        synchronizer: Synchronizer,
        learning_rate: LearningRate,
        *,
        ledger: Callable[[], dict[str, Any]],
        fingerprints: dict[str, str],
        validator: Validator | None = None,
        on_validation: Callable[[ValidationScores, int], None] | None = None,
    ) -> None:
        self._plan, self._drafters, self._synchronizer = plan, drafters, synchronizer
        self._learning_rate, self._ledger, self._fingerprints = learning_rate, ledger, fingerprints
        self._validator, self._on_validation = validator, on_validation
        self.last_checkpoint: Path | None = None
        self._outcome: _Outcome | None = None
        self._lock = threading.Lock()

    def hold(self, meeting: Meeting, clock: MeetingClock) -> None:
        """One meeting, before it is committed. Replicas are left as they are; repeated if a member is lost meanwhile.

        Raises:
            RunFailedError, UserError: the round stays uncommitted, and the run has to fail.
        """
        with _failing_by_name(meeting, "could not be averaged"):
            present = [self._drafters[d].replica for d in meeting.members]
            reduced = self._synchronizer.reduce(present, self._learning_rate.at(meeting.committed_rows - 1))
            is_due = meeting.is_last or (meeting.round_id + 1) % self._plan.config.checkpoint.every_rounds == 0
            kept = None
            if is_due and not self._synchronizer.leaves_moments_alike:
                with clock.span("checkpointing", f"moments of round {meeting.round_id}"):
                    kept = [_on_host(replica.optimizer.moments()) for replica in present]
            with self._lock:
                self._outcome = _Outcome(
                    meeting.round_id, meeting.attempt, reduced, is_due, kept, waiting=set(meeting.members)
                )

    def take_over(self, drafter: int, meeting: Meeting, clock: MeetingClock) -> tuple[Tensor, Tensor] | None:
        """A member's part after the commit, in its own thread.

        Returns:
            (gradient norm, skipped) if the meeting was an optimizer step; see `Synchronizer.apply`.

        Raises:
            RunFailedError, UserError: the leader could not finish; the run has to fail.
        """
        with self._lock:
            outcome = self._outcome
            assert outcome is not None and (outcome.round_id, outcome.attempt) == (meeting.round_id, meeting.attempt)
        if drafter != meeting.leader:
            return self._apply(drafter, outcome)
        with _failing_by_name(meeting, "was committed, but could not be finished"):
            step = self._apply(drafter, outcome)
            if outcome.is_due:
                self._finish(meeting, outcome.kept_moments, clock)
        return step

    def _apply(self, drafter: int, outcome: _Outcome) -> tuple[Tensor, Tensor] | None:
        step = self._synchronizer.apply(self._drafters[drafter].replica, outcome.reduced)
        with self._lock:
            outcome.waiting.discard(drafter)
            if not outcome.waiting and self._outcome is outcome:
                self._outcome = None  # frees what was reduced
        return step

    def _finish(self, meeting: Meeting, kept_moments: list[dict[str, Tensor]] | None, clock: MeetingClock) -> None:
        """The checkpoint first; who asked the run to stop does not wait for scores."""
        ledger = self._ledger()
        with clock.span("checkpointing", f"round {meeting.round_id}"):
            self.last_checkpoint = self._write(meeting, ledger, kept_moments)
        was_stopped = meeting.is_last and ledger["n_committed"] + ledger["n_set_aside"] < ledger["planned"]
        if self._validator is not None and not was_stopped:
            with clock.span("validating", f"{len(self._validator)} rows"):
                self._score(meeting, self._validator)

    def _score(self, meeting: Meeting, validator: Validator) -> None:
        """Scores the validation rows; the best drafter by acceptance length, never by loss, is kept in `best/`."""
        drafter, best_by = self._drafters[meeting.leader], self._plan.config.validation.best_by
        scores = validator.score(drafter.step)
        if self._on_validation is not None:
            self._on_validation(scores, meeting.committed_rows)
        acceptance, folder = scores.acceptance_lengths().get(best_by), self._plan.config.output / BEST
        if acceptance is None or acceptance <= best_acceptance(folder, best_by):
            return
        facts = {
            "validation_acceptance": acceptance,
            "best_by": best_by,
            "committed_rows": meeting.committed_rows,
        }
        export_zlab(drafter.module, folder, provenance=facts)

    def _write(self, meeting: Meeting, ledger: dict[str, Any], kept_moments: list[dict[str, Tensor]] | None) -> Path:
        config = self._plan.config
        leader = self._drafters[meeting.leader].replica.optimizer
        state = {
            "round_id": meeting.round_id,
            "ledger": ledger,
            "spec": self._plan.spec.model_dump(mode="json"),
            "config": config.model_dump(mode="json"),
            "fingerprints": self._fingerprints,
        }
        checkpoint = Checkpoint(
            state=state,
            weights=dict(zip(leader.names, leader.masters, strict=True)),
            moments=[dict(leader.moments())] if kept_moments is None else kept_moments,
            sync=self._synchronizer.state(),
        )
        return write_checkpoint(config.output, meeting.round_id, checkpoint, keep=config.checkpoint.keep)


@dataclass(frozen=True, slots=True)
class Seat:
    """One drafter's place in the meeting room."""

    room: MeetingRoom
    drafter: int
    clock: MeetingClock

    def hold(self, meeting: Meeting) -> None:
        """See `MeetingRoom.hold`."""
        self.room.hold(meeting, self.clock)

    def take_over(self, meeting: Meeting) -> tuple[Tensor, Tensor] | None:
        """See `MeetingRoom.take_over`."""
        return self.room.take_over(self.drafter, meeting, self.clock)


@contextmanager
def _failing_by_name(meeting: Meeting, what: str) -> Iterator[None]:
    """Any error fails the run, by round and leader."""
    try:
        yield
    except DraftlineError:
        raise
    except Exception as error:
        raise RunFailedError(
            f"round {meeting.round_id} {what}: {type(error).__name__}: {error}", origin=f"drafter-{meeting.leader}"
        ) from error


def _on_host(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors}
