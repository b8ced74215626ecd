"""Targets and drafters as actors: each builds its worker, then runs the loop that threads run on one host.

consumes     a WorkOrder; leases or rows, by calls to the queue actor
produces     rows in shared memory or in the object store; trained weights, checkpoints by way of the driver
starts       one thread for the loop. The driver waits for `outcome`, and asks again if a link broke meanwhile
"""

from __future__ import annotations

import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import ray
import torch

from draftline.cluster.link import GoneError, QueueLink
from draftline.cluster.messages import Card, Outcome
from draftline.cluster.orders import WorkOrder
from draftline.cluster.probe import HostFacts, host_facts
from draftline.cluster.refs import Packed, RowRef
from draftline.cluster.remote import DrafterExchange, TargetExchange
from draftline.cluster.reports import WorkerReports
from draftline.cluster.seat import ClusterSeat, Gift
from draftline.cluster.slab import Slab
from draftline.cluster.store import DirectStore, ObjectStore
from draftline.cluster.transport import (
    DirectSender,
    Kind,
    ObjectSender,
    RowReceiver,
    RowSender,
    SlabSender,
    pack,
    unpack,
)
from draftline.cluster.validation import fetched_rows, stored_rows
from draftline.data.shards import TokenDataset
from draftline.drafter.loop import DrafterTrainLoop
from draftline.drafter.schedule import LearningRate
from draftline.drafter.sync import Synchronizer
from draftline.errors import DraftlineError, RunFailedError, UserError
from draftline.pipeline.budget import is_sticky
from draftline.pipeline.checkpoint import Checkpoint
from draftline.pipeline.validation import Validator
from draftline.pipeline.workers import (
    initial_weights,
    load_targets,
    make_captures,
    make_drafters,
    prove_targets,
    warm_drafters,
)
from draftline.target.load import LoadedTarget, load_target
from draftline.target.loop import TargetForwardLoop
from draftline.target.remote.lender import LentNames, lent_names, load_lender, read_lent
from draftline.target.spread import first_device
from draftline.target.states.stored_target import StoredTarget

PATIENCE_S = 120.0


class LoopActor(ABC):
    """What both kinds share: one loop in one thread, and its outcome.

    Args:
        number, place: of this worker; `place` is its device as a cluster knows it.
        seat: the name under which people see it; a restarted worker has the name of the one it replaces.
    """

    role = ""

    _order: WorkOrder
    _lent: LentNames | None

    def __init__(self, number: int, place: str, seat: str) -> None:
        self._number, self._place, self._seat = number, place, seat
        self._ended = threading.Event()
        self._outcome = Outcome("ended")

    def card(self, fingerprint: str = "", **facts: Any) -> Card:
        """Where this worker is."""
        return Card(node_id(), ray.util.get_node_ip_address(), fingerprint, **facts)

    def facts(self, host: str, paths: Sequence[str]) -> HostFacts:
        """Of this host, under the address by which it is known. Asked first, and by plain values: whatever version of
        draftline runs here can tell.
        """
        return host_facts(host, paths)

    def ready(self, order: WorkOrder, lent: LentNames | None) -> Card:
        """`load`, and what runs on this host. `lent`: what a target told, for drafters."""
        self._order, self._lent = order, lent
        torch.set_num_threads(order.cpus)
        card = self._told(self.load)
        return replace(card, versions=host_facts(card.host, []).versions)

    def _told(self, act: Callable[[], Card]) -> Card:
        """Bad input is told in the card, so that it crosses hosts as one line."""
        try:
            return act()
        except DraftlineError as error:
            return self.card(error=str(error), exit_code=error.exit_code)

    @abstractmethod
    def load(self) -> Card:
        """Loads what the worker needs."""

    def outcome(self) -> Outcome:
        """Waits until the loop has ended, and tells how."""
        self._ended.wait()
        return self._outcome

    def _start(self, run: Callable[[], None]) -> None:
        threading.Thread(target=self._guarded, args=(run,), name=f"{self.role}-{self._number}", daemon=True).start()

    def _guarded(self, run: Callable[[], None]) -> None:
        """A loop that ends by an exception is never silent: the driver decides what becomes of the run."""
        try:
            run()
        except GoneError as error:
            self._outcome = Outcome("gone", reason=str(error))
        except BaseException as error:  # noqa: BLE001  told to the driver, by name
            self._outcome = _outcome_of(error, f"{self.role}-{self._number}")
        finally:
            self._ended.set()

    def _link(self, queue: Any, purpose: str = "") -> QueueLink:
        return QueueLink(queue, f"{self.role}-{self._number}{purpose}", PATIENCE_S)

    def _slab(self) -> Slab:
        name = f"{self._order.run_id}-{node_id()[:12]}"
        return Slab(name, self._order.slots, self._order.slot_bytes)


class TargetActor(LoopActor):
    """A target on its device; see `LoopActor`."""

    role = "target"

    def load(self) -> Card:
        """Loads the target and lets it prove itself.

        Raises:
            UserError: bad input; one line.
        """
        config = self._order.run_config()
        self._dataset = TokenDataset.open(config.data.path)
        if self._dataset.manifest.fingerprint != self._order.data_fingerprint:
            mend = "put the same files on all hosts"
            raise UserError("is another data set here than on the head node", where=str(config.data.path), mend=mend)
        plan = self._plan = self._order.plan_of_one(self._place, self._dataset)
        (self._target,) = load_targets(plan)
        reports = prove_targets(plan, [self._target])
        (self._capture,) = make_captures(plan, [self._target], reports)
        lines = [line for report in reports.values() for line in (report.line(), *report.notes)]
        stops = tuple(sorted(self._target.stop_token_ids))
        lent = lent_names(self._target) if isinstance(self._target, LoadedTarget) else None
        return self.card(self._target.fingerprint, stop_token_ids=stops, lent=lent, lines=tuple(lines))

    def first_weights(self) -> Packed:
        """Weights that training starts from, where they come from the target's own layers."""
        return pack(initial_weights(self._plan.config, self._plan.spec, self._target), ObjectStore())

    def validation(self) -> list[RowRef]:
        """The validation rows, captured once."""
        return stored_rows(self._plan, self._capture, ObjectStore())

    def start(self, queue: Any, transport: Kind) -> None:
        """Runs the loop in a thread; see `outcome`."""
        link = self._link(queue)
        reports = WorkerReports(self._seat, link)
        sender = self._sender(transport)
        loop = TargetForwardLoop(
            self._number,
            cast(Any, TargetExchange(link, sender)),
            self._dataset,
            self._capture,
            cast(Any, reports),
            cast(Any, reports),
            device=first_device(self._plan.config.pipeline.target_devices[0]),
        )

        def run() -> None:
            try:
                loop.run()
            finally:
                sender.close()
            reports.send(wait=True)

        self._start(run)

    def _sender(self, transport: Kind) -> RowSender:
        if transport == "slab":
            return SlabSender(self._slab(), node_id(), self._order.run_id)
        if transport == "direct":
            return DirectSender(DirectStore(), self._order.run_id)
        return ObjectSender(ObjectStore(), self._order.run_id)


class DrafterActor(LoopActor):
    """A drafter on its device; see `LoopActor`."""

    role = "drafter"

    def load(self) -> Card:
        """Reads what a drafter borrows of the target.

        Raises:
            UserError: bad input; one line.
        """
        self._plan = self._order.plan_of_one(self._place, None)
        self._device = torch.device(first_device(self._plan.config.pipeline.drafter_devices[0]))
        self._lender = self._borrowed()
        return self.card(self._lender.fingerprint)

    def _borrowed(self) -> StoredTarget:
        config = self._plan.config.target
        if self._lent is not None:
            return read_lent(config, self._order.facts, self._lent, self._device)
        if config.backend.kind != "local":
            return load_lender(config, self._device)
        return borrowed_target(config, self._device)

    def make(self, gift: Gift | None, validation: list[RowRef], stop_token_ids: tuple[int, ...]) -> Card:
        """Builds the drafter. `gift`: what it starts from; None: it is given that when it joins."""
        self._validation, self._stops = validation, stop_token_ids

        def build() -> Card:
            if gift is not None:
                self._build(gift)
            return self.card()

        return self._told(build)

    def _build(self, gift: Gift) -> None:
        store = ObjectStore()
        moments = unpack(gift.moments, store)
        start = Checkpoint({}, unpack(gift.weights, store), [moments] if moments else [], unpack(gift.sync, store))
        (self._worker,) = make_drafters(self._plan, self._lender, start)
        warm_drafters([self._worker])
        self._synchronizer = Synchronizer(self._plan.config.sync)
        self._synchronizer.begin([self._worker.replica])
        if start.sync:
            self._synchronizer.load_state(start.sync)

    def start(self, queue: Any, has_slab: bool, joins: bool) -> None:
        """Runs the loop in a thread; see `outcome`.

        Args:
            has_slab: rows may come through this host's slab.
            joins: wait for a commit and its weights first.
        """
        link = self._link(queue)

        def run() -> None:
            if joins:
                gift = link.call(("await_weights", (self._number,)))
                if gift is None:
                    return
                self._build(gift)
            self._train(queue, link, has_slab)

        self._start(run)

    def _train(self, queue: Any, link: QueueLink, has_slab: bool) -> None:
        config = self._plan.config
        receiver = RowReceiver(self._device, ObjectStore(), self._slab() if has_slab else None, node_id())
        exchange = DrafterExchange(link, receiver, lambda: seat.after_stop())
        rate = LearningRate(config.optimizer, self._order.total_rows)
        seat = ClusterSeat(
            self._number,
            self._worker,
            self._synchronizer,
            rate,
            exchange,
            self._link(queue, "/group"),
            ObjectStore(),
            config.cluster.averaging_timeout_s,
            ray.util.get_node_ip_address(),
            self._validator,
        )
        reports = WorkerReports(self._seat, link)
        loop = DrafterTrainLoop(
            self._number,
            cast(Any, exchange),
            self._worker.step,
            self._worker.replica,
            rate,
            meetings=seat,
            log=reports,
            clock=cast(Any, reports),
            accumulate_rows=0 if config.sync.kind == "gradient" else config.optimizer.accumulate_rows,
            prefetch_rows=config.pipeline.prefetch_rows,
        )
        try:
            loop.run()
        finally:
            receiver.close()
        reports.send(wait=True)

    def _validator(self) -> Validator | None:
        if not self._validation:
            return None
        rows = fetched_rows(self._validation, ObjectStore())
        return Validator(rows, self._plan.config.validation, frozenset(self._stops))

    def weights(self) -> Packed:
        """The masters as they are now: for tests."""
        optimizer = self._worker.replica.optimizer
        return pack(dict(zip(optimizer.names, optimizer.masters, strict=True)), ObjectStore())


def borrowed_target(config: Any, device: torch.device) -> StoredTarget:
    """Embedding and head of a target whose files must be read whole (.gguf, quantised, other names in the files than
    in the model); the rest is let go.
    """
    target: LoadedTarget = load_target(config, str(device))
    return StoredTarget(
        embedding=target.embedding,
        head=target.head,
        device=device,
        dtype=target.embedding.weight_VH.dtype,
        stop_token_ids=frozenset(target.stop_token_ids),
        fingerprint=target.fingerprint,
    )


def node_id() -> str:
    """Of the host, as Ray knows it."""
    return str(ray.get_runtime_context().get_node_id())


def _outcome_of(error: BaseException, worker: str) -> Outcome:
    trace = "".join(traceback.format_exception(error))
    if isinstance(error, RunFailedError):
        return Outcome("failed", error.origin, error.reason, trace, is_sticky(error))
    reason = str(error) if isinstance(error, DraftlineError) else f"{type(error).__name__}: {error}"
    kind = "failed" if isinstance(error, DraftlineError) else "crashed"
    return Outcome(cast(Any, kind), worker, reason, trace, is_sticky(error))
