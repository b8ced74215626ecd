"""A drafter's part in meetings, in its own process; the counterpart of pipeline/meeting.py.

hold        with every other member: the replicas are reduced over a group made for this attempt. Nothing is written
take_over   after the commit: this member's replica becomes the result. The leader then gives the weights to drafters
            that join, hands the checkpoint to the driver and waits until it is on the disk, and scores the validation
            rows, while the others train on; no later meeting can be held before it arrives there
after_stop  the last checkpoint, if its leader was lost before it was written: weights stand still by then

A member that fails while it takes over is lost with its replica.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from draftline.cluster.averaging import reduce_together
from draftline.cluster.group import QueueStore, ReductionGroup
from draftline.cluster.link import QueueLink
from draftline.cluster.messages import Scores
from draftline.cluster.refs import Packed
from draftline.cluster.remote import DrafterExchange
from draftline.cluster.transport import Store, pack
from draftline.cluster.turns import Turn
from draftline.drafter.schedule import LearningRate
from draftline.drafter.sync import Reduced, Synchronizer
from draftline.pipeline.core import Meeting, drafter_worker
from draftline.pipeline.validation import Validator
from draftline.pipeline.workers import DrafterWorker


@dataclass(frozen=True, slots=True)
class Gift:
    """Weights and state of a leader after a commit, for drafters that join at it."""

    weights: Packed
    moments: Packed
    sync: Packed


@dataclass(slots=True)
class ClusterSeat:
    """One drafter's place at meetings.

    Args:
        number: of the drafter.
        worker: its module, step and replica.
        synchronizer: this process's; its outer state is the same on every member.
        learning_rate: the run's schedule.
        exchange: this drafter's.
        group_link: a line to the queue of its own, for finding the other members.
        store: where packed tensors are put.
        timeout_s, address: see `ReductionGroup`.
        validator: makes the scorer of the validation rows at its first use; None without any.
    """

    number: int
    worker: DrafterWorker
    synchronizer: Synchronizer
    learning_rate: LearningRate
    exchange: DrafterExchange
    group_link: QueueLink
    store: Store
    timeout_s: float
    address: str
    validator: Callable[[], Validator | None]
    _reduced: Reduced = field(default_factory=Reduced)

    def hold(self, meeting: Meeting) -> None:
        """This member's part of one reduction.

        Raises:
            CollectiveBrokenError: to be repeated.
            RunFailedError: the result is not finite; the run has to fail.
        """
        turn = self.exchange.turn
        assert turn is not None
        attempt, replica = meeting.attempt, self.worker.replica
        store = QueueStore(
            partial(self._set_key, attempt), partial(self._get_key, attempt), partial(self._has_keys, attempt)
        )
        rank, device = meeting.members.index(self.number), replica.optimizer.device
        group = ReductionGroup(store, rank, len(meeting.members), device, self.timeout_s, self.address)
        try:
            rate = self.learning_rate.at(meeting.committed_rows - 1)
            self._reduced = reduce_together(group, replica, self.synchronizer, rate)
        finally:
            group.close()
        if turn.is_due and not self.synchronizer.leaves_moments_alike:
            self.exchange.kept = self._moments()

    def take_over(self, meeting: Meeting) -> tuple[Tensor, Tensor] | None:
        """See `Meetings.take_over`."""
        turn = self.exchange.turn
        assert turn is not None and turn.committed
        step = self.synchronizer.apply(self.worker.replica, self._reduced)
        self._reduced = Reduced()  # frees what was reduced
        if meeting.leader == self.number:
            self._finish(turn)
        return step

    def after_stop(self) -> None:
        """See the module's text."""
        turn: Turn | None = self.exchange.call("next_duty", self.number)
        if turn is not None:
            self._write(turn)

    def _finish(self, turn: Turn) -> None:
        if turn.joined:
            self.exchange.call("give_weights", turn.meeting.round_id, self._gift())
        if not turn.is_due:
            return
        self._write(turn)
        if not turn.meeting.is_last or self.exchange.call("is_complete"):  # who asked for a stop waits for no scores
            self._score(turn)

    def _write(self, turn: Turn) -> None:
        """Hands the checkpoint to the driver, and waits until it is written."""
        with self.exchange.busy(drafter_worker(self.number), "checkpointing"):
            moments = self._moments() if self.synchronizer.leaves_moments_alike else None
            round_id = turn.meeting.round_id
            self.exchange.call("order_checkpoint", round_id, self._weights(), moments, self._sync())
            self.exchange.call("await_checkpoint", self.number, round_id)

    def _score(self, turn: Turn) -> None:
        validator = self.validator()
        if validator is None:
            return
        with self.exchange.busy(drafter_worker(self.number), "validating"):
            scores = validator.score(self.worker.step)
        stats = scores.stats
        sums = tuple(stats.vector.tolist())
        committed = turn.meeting.committed_rows
        self.exchange.call("tell", Scores(committed, sums, stats.block_size, stats.tree_budgets, scores.walk))

    def _weights(self) -> Packed:
        optimizer = self.worker.replica.optimizer
        return pack(dict(zip(optimizer.names, optimizer.masters, strict=True)), self.store)

    def _moments(self) -> Packed:
        return pack(dict(self.worker.replica.optimizer.moments()), self.store)

    def _sync(self) -> Packed:
        return pack(self.synchronizer.state(), self.store)

    def _gift(self) -> Gift:
        return Gift(self._weights(), self._moments(), self._sync())

    def _set_key(self, attempt: int, key: str, value: bytes) -> None:
        self.group_link.call(("group_set", (attempt, key, value)))

    def _has_keys(self, attempt: int, keys: Sequence[str]) -> bool:
        return bool(self.group_link.call(("group_has", (attempt, keys))))

    def _get_key(self, attempt: int, key: str) -> bytes | None:
        found: bytes | None = self.group_link.call(("group_get", (self.number, attempt, key)))
        return found
