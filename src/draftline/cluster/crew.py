"""The actors of a run: made, watched, replaced. Used by the driver's one thread.

consumes     a placement, a work order
produces     members: each a worker of the core with its actor; references that become ready when something happened
waits for    nothing itself: the driver waits for all references at once (see driver.py)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import ray
from ray import exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from draftline.cluster.demand import Seat
from draftline.cluster.joining import NAMESPACE, Placement, hosts
from draftline.cluster.messages import Card, QueueSetup
from draftline.cluster.orders import WorkOrder
from draftline.cluster.probe import HostFacts, host_facts, require_alike
from draftline.cluster.queue import QueueActor
from draftline.cluster.workers import DrafterActor, TargetActor
from draftline.errors import UserError
from draftline.pipeline.core import Worker, drafter_worker, target_worker
from draftline.target.remote.lender import LentNames, is_lent_by_name

ANSWER_S = 300.0  # in which a process starts and imports what it needs, on a busy host
ASK_THREADS, SPARE_WAITERS = 8, 64
ACTOR_THREADS = 4
State = Literal["loading", "working", "over"]


class RefusedError(UserError):
    """A worker could not start; the line and the exit code are those that it found itself, or DIED."""

    DIED = 1

    def __init__(self, line: str, exit_code: int) -> None:
        super().__init__(line)
        self.exit_code = exit_code


@dataclass(slots=True, eq=False)
class Member:
    """One worker and its actor.

    Attributes:
        worker: as the core knows it; a replacement has a number of its own.
        seat: as people know it; a replacement sits where the lost one sat.
        bundle: of the placement group; None for one that was added later.
        replaces: the worker that was lost.
    """

    worker: Worker
    seat: Seat
    bundle: int | None
    actor: Any
    state: State = "loading"
    card: Card | None = None
    replaces: Worker | None = None


class Crew:
    """All members of a run.

    Args:
        order: told to every worker.
        placement: of the first members' seats.
        seats: in order of the placement's bundles.
    """

    def __init__(self, order: WorkOrder, placement: Placement, seats: Sequence[Seat]) -> None:
        self._order, self._placement = order, placement
        self.members: list[Member] = []
        self._head = host_facts("head", [])
        self._weights: dict[str, Card] = {}
        self._lent: LentNames | None = None
        self._next = {"target": 0, "drafter": 0}
        for bundle, seat in enumerate(seats):
            self.hire(seat, bundle)

    def hire(self, seat: Seat, bundle: int | None, replaces: Worker | None = None) -> Member:
        """Starts an actor for a seat; see `loaded` for when it is ready."""
        role = seat.name.partition("-")[0]
        number = self._next[role]
        self._next[role] += 1
        actor_class: Any = TargetActor if role == "target" else DrafterActor
        options: dict[str, Any] = {
            "num_cpus": seat.resources.get("CPU", 0),
            "num_gpus": seat.resources.get("GPU", 0),
            "resources": {k: v for k, v in seat.resources.items() if k not in ("CPU", "GPU")},
            "max_restarts": 0,
            "max_concurrency": ACTOR_THREADS,
        }
        if bundle is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                self._placement.group, placement_group_bundle_index=bundle
            )
        actor = ray.remote(actor_class).options(**options).remote(number, seat.place, seat.name)
        worker = target_worker(number) if role == "target" else drafter_worker(number)
        member = Member(worker, seat, bundle, actor, replaces=replaces)
        self.members.append(member)
        return member

    def of(self, role: str, state: State | None = None) -> list[Member]:
        """Members of one role, in the state if one is given."""
        return [m for m in self.members if m.worker.role == role and state in (None, m.state)]

    def look_over(self, paths: Sequence[str]) -> None:
        """Asks one worker on each host whether it runs the same code and sees the same files, before any is told more.

        Raises:
            UserError: names the host and what differs; RefusedError if the worker died.
        """
        addresses = {host.node: host.address for host in hosts()}
        first = dict(zip(reversed(self._placement.nodes), reversed(self.members), strict=True))
        asked = []
        for node, member in first.items():
            address = addresses.get(node, node)
            asked.append((member, address, member.actor.facts.remote(address, list(paths))))
        require_alike(self._head, [_told_facts(*each) for each in asked])

    def loaded(self, member: Member) -> Any:
        """Asks a member to load what it needs; the answer is its card. Drafters are told what targets told."""
        return member.actor.ready.remote(self._order, self._lent)

    def all_ready(self) -> None:
        """Waits until everybody hired so far has loaded what it needs. Where drafters read what they borrow by the
        names that a target tells, they begin once the first one has.

        Raises:
            RefusedError: one of them could not.
        """
        refs = {self.loaded(member): member for member in self.of("target")}
        waiting, by_name = self.of("drafter"), is_lent_by_name(self._order.run_config().target)
        while refs or waiting:
            if waiting and (not by_name or any(member.card for member in self.of("target"))):
                refs |= {self.loaded(member): member for member in waiting}
                waiting = []
            (ref,), _ = ray.wait(list(refs), num_returns=1)
            self.welcome(ref, refs.pop(ref))

    def welcome(self, ref: Any, member: Member) -> None:
        """A worker is ready, wherever it came to be: the same code as on the head node, the weights that others read.

        Raises:
            UserError: it could not start, or differs.
        """
        card = checked_card(ref, member)
        require_alike(self._head, [HostFacts(card.host, card.versions, ())])
        first = self._weights.setdefault(member.worker.role, card)
        if card.fingerprint != first.fingerprint:
            raise UserError(
                f"the target's weights are {card.fingerprint[:16]} there and {first.fingerprint[:16]} on {first.host}",
                where=f"host {card.host}",
                mend="put the same files on all hosts",
            )
        member.card = card
        self._lent = self._lent or card.lent

    def dismiss(self) -> None:
        """Ends all actors that are left."""
        for member in self.members:
            self.end(member)

    def end(self, member: Member) -> None:
        """Ends a member's actor, if it lives, so that its place is free for another one."""
        ray.kill(member.actor, no_restart=True)
        member.state = "over"


def _told_facts(member: Member, address: str, ref: Any) -> HostFacts:
    try:
        facts: HostFacts = ray.get(ref, timeout=ANSWER_S)
        return facts
    except (exceptions.RayError, ImportError, AttributeError) as error:
        if isinstance(error, exceptions.RayActorError) and not error.actor_init_failed:
            raise _not_started(member, error) from error
        raise UserError(
            f"draftline does not run there ({last_line(error)})",
            where=f"host {address}",
            mend="install the same draftline, with its extra `cluster`, on all hosts",
        ) from error


def checked_card(ref: Any, member: Member) -> Card:
    """A worker's card.

    Raises:
        RefusedError: bad input, or its process died while it loaded.
    """
    card: Card = first_answer(ref, member)
    if card.error:
        raise RefusedError(f"{member.seat.name} on {card.host}: {card.error}", card.exit_code)
    return card


def first_answer(ref: Any, member: Member) -> Any:
    """What a worker answers before its loop starts.

    Raises:
        RefusedError: it cannot, or its process died.
    """
    try:
        return ray.get(ref)
    except exceptions.RayError as error:
        raise _not_started(member, error) from error


def _not_started(member: Member, error: BaseException) -> RefusedError:
    return RefusedError(f"{member.seat.name} could not start: {last_line(error)}", RefusedError.DIED)


def last_line(error: BaseException) -> str:
    """What an error of Ray's says, without the tracebacks of other hosts above it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    told = lines[-1].partition(" Some common causes")[0].partition("Worker exit detail: ")
    return (told[2] or told[0])[:200]


def start_queue(setup: QueueSetup, n_workers: int) -> Any:
    """The queue actor, on the host of this process, with a thread for every worker that may wait."""
    node = ray.get_runtime_context().get_node_id()
    groups = {"ask": ASK_THREADS, "wait": 2 * n_workers + SPARE_WAITERS}
    remote: Any = ray.remote  # what it says of its options leaves this one out
    actor_class = remote(concurrency_groups=groups)(QueueActor)
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    return actor_class.options(
        name=queue_name(setup.contract.run_id),
        namespace=NAMESPACE,
        num_cpus=0,
        max_concurrency=ASK_THREADS,
        scheduling_strategy=strategy,
    ).remote(setup)


def queue_name(run_id: str) -> str:
    """Under which the cluster knows a run's queue."""
    return f"queue-{run_id}"


class Watch:
    """References and what to do when each becomes ready. Waits for all of them at once: no polling."""

    def __init__(self) -> None:
        self._todo: dict[Any, Callable[[Any], None]] = {}

    def add(self, ref: Any, act: Callable[[Any], None]) -> None:
        """Calls `act(ref)` once, in the thread of `wait`, when `ref` is ready or has failed."""
        self._todo[ref] = act

    def wait(self, timeout_s: float | None) -> bool:
        """Waits for the next one and acts; False if none came in time."""
        ready, _ = ray.wait(list(self._todo), num_returns=1, timeout=timeout_s)
        for ref in ready:
            self._todo.pop(ref)(ref)
        return bool(ready)
