"""ClusterRun: owns a run over several hosts, from the process that started it.

consumes     a RunPlan, a placement, and a checkpoint when resumed
produces     a trained drafter as on one host: checkpoints, an export, the ledger's closing line, all in the run folder
starts       the queue actor, one actor per target and drafter; replacements of lost ones; the monitor
waits for    any of: a worker's end, an event of the queue, a replacement that is ready, the end of the run
on failure   a lost worker costs its rows a second capture; RunFailedError by name if nobody can take over. If this
             process is killed, its actors end with it, and the run can be resumed from its last checkpoint
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, cast

import ray
from ray import exceptions

from draftline.cluster.crew import Crew, Member, RefusedError, Watch, checked_card, last_line
from draftline.cluster.demand import Seat, seat_resources
from draftline.cluster.events import EventDesk
from draftline.cluster.messages import Outcome, Scale
from draftline.cluster.refs import RowRef
from draftline.cluster.seat import Gift
from draftline.cluster.transport import Kind, choose_kind
from draftline.errors import RunFailedError, UserError
from draftline.pipeline.core import End, Failure, LedgerCounts, Worker
from draftline.pipeline.ending import STOPPING, raise_unless_closed
from draftline.pipeline.reporting import RunReporter
from draftline.pipeline.runplan import RunPlan
from draftline.pipeline.signals import StopSignals

GRACE_S = 15.0  # for workers to end by themselves once the run has failed
REATTACH_S = 1.0
QUEUE = "queue"


class ClusterRun:
    """The part of a run after its folder is claimed: workers start, are watched, end.

    Args:
        plan: with devices as a cluster knows them.
        crew: loaded and ready.
        queue: the actor.
        reporter: where everything is counted and shown.
        desk: takes the queue's events.
        validation: rows that a replacement needs, too.

    Attributes:
        stop_token_ids: of the target.
        training_s: from the start of the loops to their end.
        ledger: of the run that has ended.
    """

    def __init__(
        self,
        plan: RunPlan,
        crew: Crew,
        queue: Any,
        reporter: RunReporter,
        desk: EventDesk,
        validation: Sequence[RowRef],
    ) -> None:
        self._plan, self._crew, self._queue, self._reporter, self._desk = plan, crew, queue, reporter, desk
        self._validation = list(validation)
        self._watch = Watch()
        self._restarts_left = plan.config.pipeline.max_restarts
        self._ended: tuple[End, Failure | None] | None = None
        self._nodes = [self._node_of(member) for member in crew.of("drafter")]
        self._targets_asked_for = 0
        self._free_bundles: list[int] = []  # of targets that were let go
        self._events: Any = None
        self.stop_token_ids: tuple[int, ...] = ()
        self.training_s = 0.0
        self.ledger: LedgerCounts | None = None

    # ---- the whole

    def run(self, signals: StopSignals, gifts: Sequence[Gift]) -> None:
        """Runs to the end.

        Raises:
            RunFailedError, RunStoppedError: see `coordinator.train`.
        """
        self._make_drafters(gifts)
        started = time.monotonic()
        for member in self._crew.members:
            self._start(member, joins=False)
        self._watch.add(self._queue.wait_end.options(concurrency_group="wait").remote(), self._on_end)
        self._listen()
        with signals.stopping_by(self._stop), ThreadPoolExecutor(1, thread_name_prefix="checkpoints") as writer:
            self._desk.writer = writer
            self._attend()
        self.training_s = time.monotonic() - started
        self._close(signals)

    def _make_drafters(self, gifts: Sequence[Gift]) -> None:
        made = []
        for member, gift in zip(self._crew.of("drafter"), gifts, strict=True):
            made.append((member.actor.make.remote(gift, self._validation, self.stop_token_ids), member))
        for ref, member in made:
            checked_card(ref, member)

    def _attend(self) -> None:
        """Until the run has ended and all workers have; after a failure only for a moment."""
        deadline: float | None = None
        while self._ended is None or any(m.state == "working" for m in self._crew.members):
            if self._ended is not None and self._ended[0] is End.FAILED and deadline is None:
                deadline = time.monotonic() + GRACE_S
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._watch.wait(left) and deadline is not None:
                return

    def _close(self, signals: StopSignals) -> None:
        assert self._ended is not None
        end, failure = self._ended
        if failure is not None and failure.origin == QUEUE:
            raise RunFailedError(failure.reason, origin=QUEUE)
        try:
            ray.get(self._queue.tell.remote(Scale(0)))  # so that whoever still listens hears what is there
            self._desk.take([*ray.get(self._events), *ray.get(self._queue.take_events.remote())])
            self.ledger = ray.get(self._queue.stats.remote()).ledger
            owes_checkpoint = ray.get(self._queue.owes_checkpoint.remote())
        except exceptions.RayActorError as error:
            raise RunFailedError(_gone(error), origin=QUEUE) from error
        self._reporter.say(f"ledger: {self.ledger}")
        if failure is None and owes_checkpoint:
            what = "all drafters are lost before the last checkpoint was written; resume the run"
            raise RunFailedError(what, origin="pipeline")
        raise_unless_closed(end, failure, self._desk.last_checkpoint, signals.received or signal.SIGTERM)

    def _stop(self, reason: str) -> None:
        self._reporter.say(f"stop asked for by {reason}: {STOPPING}")
        self._tell("request_stop")

    def _tell(self, method: str, *arguments: Any) -> Any:
        """A call to the queue that is done at once; None, and the run has failed, if the queue is gone."""
        try:
            return ray.get(getattr(self._queue, method).remote(*arguments))
        except exceptions.RayActorError as error:
            self._queue_lost(error)
            return None

    # ---- workers

    def _start(self, member: Member, *, joins: bool) -> None:
        transport = self._transport(member)
        if member.worker.role == "target":
            started = member.actor.start.remote(self._queue, transport)
        else:
            started = member.actor.start.remote(self._queue, transport == "slab", joins)
        member.state = "working"
        self._reporter.clock(member.seat.name)  # shown as running again if it was lost
        self._watch.add(started, partial(self._on_started, member))

    def _transport(self, member: Member) -> Kind:
        return choose_kind(self._plan.config.cluster.transport, self._node_of(member), self._nodes)

    def _node_of(self, member: Member) -> str:
        assert member.card is not None
        return member.card.node

    def _on_started(self, member: Member, ref: Any) -> None:
        try:
            ray.get(ref)
        except exceptions.RayError as error:
            self._lost(member, last_line(error))
            return
        self._watch_outcome(member)

    def _watch_outcome(self, member: Member) -> None:
        self._watch.add(member.actor.outcome.remote(), partial(self._on_outcome, member))

    def _on_outcome(self, member: Member, ref: Any) -> None:
        try:
            outcome: Outcome = ray.get(ref)
        except exceptions.ActorUnavailableError:  # the link broke, not the worker
            time.sleep(REATTACH_S)
            self._watch_outcome(member)
            return
        except exceptions.RayError as error:
            self._lost(member, last_line(error))
            return
        if outcome.kind == "ended":
            member.state = "over"
            self._reporter.ended(member.seat.name, None)
            if member.worker.role == "target":
                idle = self._queue.await_idle.options(concurrency_group="wait").remote(member.worker.index)
                self._watch.add(idle, partial(self._on_idle, member))
            return
        if outcome.kind != "gone":
            self._desk.keep_trace(member.seat.name, outcome.trace)
        if outcome.kind in ("gone", "crashed") or outcome.sticky:
            self._lost(member, outcome.reason)
            return
        member.state = "over"
        self._reporter.ended(member.seat.name, RunFailedError(outcome.reason, origin=outcome.origin))
        self._fail(outcome.origin, outcome.reason)

    def _on_idle(self, member: Member, ref: Any) -> None:
        """A target that was asked to leave: its place is free for others once nobody needs its buffers."""
        try:
            is_idle = ray.get(ref)
        except exceptions.RayActorError as error:
            self._queue_lost(error)
            return
        if is_idle and self._ended is None:
            self._crew.end(member)
            if member.bundle is not None:
                self._free_bundles.append(member.bundle)

    def _lost(self, member: Member, why: str, *, again: bool = True) -> None:
        """A worker is gone: its rows go back, and another is started in its place while there is work to do.

        Args:
            again: whether another one there may fare better.
        """
        if member.state == "over":
            return
        was_working = member.state == "working"
        self._crew.end(member)  # its process may live on, in the place that the next one needs
        self._reporter.ended(member.seat.name, RunFailedError(why, origin=member.seat.name))
        replaced = again and self._ended is None and self._restarts_left > 0 and not self._is_last_drafter(member)
        if was_working:
            returns = replaced and member.worker.role == "target"
            self._tell("lost", member.worker, returns)
        if self._ended is not None:
            return
        self._reporter.say(f"{member.seat.name} is lost ({why}); {'another is started' if replaced else 'no more'}")
        if replaced:
            self._restarts_left -= 1
            self._hire(member.seat, member.bundle, member.worker if was_working else member.replaces)
        else:
            self._forget_absent(member)

    def _is_last_drafter(self, member: Member) -> bool:
        return member.worker.role == "drafter" and not self._crew.of("drafter", "working")

    def _hire(self, seat: Seat, bundle: int | None, replaces: Worker | None = None) -> None:
        member = self._crew.hire(seat, bundle, replaces)
        self._watch.add(self._crew.loaded(member), partial(self._on_ready, member))

    def _on_ready(self, member: Member, ref: Any) -> None:
        try:
            self._crew.welcome(ref, member)
        except UserError as error:  # what is wrong with a host stays so; a process may have died by chance
            self._lost(member, str(error), again=error.exit_code == RefusedError.DIED)
            return
        if self._ended is not None:
            return
        if member.worker.role == "drafter":
            self._watch.add(
                member.actor.make.remote(None, self._validation, self.stop_token_ids), partial(self._on_made, member)
            )
        else:
            self._join(member)

    def _on_made(self, member: Member, ref: Any) -> None:
        try:
            checked_card(ref, member)
        except RefusedError as error:
            self._lost(member, str(error))
            return
        self._join(member)

    def _join(self, member: Member) -> None:
        if not self._tell("joined", member.worker):
            self._crew.end(member)
            return
        self._forget_absent(member)
        self._reporter.say(f"{member.seat.name} takes part from now on, on {member.card.host if member.card else '?'}")
        self._start(member, joins=member.worker.role == "drafter")

    def _forget_absent(self, member: Member) -> None:
        """The target that this one stands for is not waited for any more."""
        if member.replaces is not None and member.replaces.role == "target":
            self._tell("lost", member.replaces, False)
            member.replaces = None

    # ---- events

    def _listen(self) -> None:
        self._events = self._queue.next_events.options(concurrency_group="wait").remote()
        self._watch.add(self._events, self._on_events)

    def _on_events(self, ref: Any) -> None:
        try:
            events = ray.get(ref)
        except exceptions.RayError as error:
            self._queue_lost(error)
            return
        try:
            for event in self._desk.take(events):
                self._scale(cast(Scale, event).targets)
        except RunFailedError as error:
            self._fail(error.origin, error.reason)
        self._listen()

    def _scale(self, targets: int) -> None:
        """More targets, wherever the cluster has room; or fewer: the last ones go when they hold no row."""
        for _ in range(targets):
            number = self._plan.num_targets + self._targets_asked_for
            self._targets_asked_for += 1
            place = self._plan.config.pipeline.target_devices[0]
            cluster = self._plan.config.cluster
            seat = Seat(f"target-{number}", place, seat_resources(cluster, place, cluster.target_resources))
            self._hire(seat, self._free_bundles.pop() if self._free_bundles else None)
        working = self._crew.of("target", "working")
        leaving = working[max(1, len(working) + targets) :] if targets < 0 else []
        for member in leaving:
            self._tell("leave", member.worker.index)

    def _on_end(self, ref: Any) -> None:
        try:
            self._ended = ray.get(ref)
        except exceptions.RayError as error:
            self._queue_lost(error)

    def _queue_lost(self, error: BaseException) -> None:
        if self._ended is None:
            self._ended = End.FAILED, Failure(QUEUE, _gone(error))

    def _fail(self, origin: str, reason: str) -> None:
        self._tell("fail", origin, reason.removeprefix(f"{origin}: "))


def _gone(error: BaseException) -> str:
    return f"the queue is gone ({last_line(error)}); resume the run"
