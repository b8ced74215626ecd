"""A run on a cluster once its workers have their places: loaded, started, watched, and closed as on one host."""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import ray
from ray import exceptions

from draftline.cluster.control import ADDRESS_FILE
from draftline.cluster.crew import Crew, queue_name, start_queue
from draftline.cluster.demand import SPARE_SLOTS, seats_of
from draftline.cluster.driver import ClusterRun
from draftline.cluster.events import EventDesk
from draftline.cluster.joining import Placement, spilled_bytes
from draftline.cluster.orders import WorkOrder
from draftline.cluster.refs import slot_bytes
from draftline.cluster.start import first_gifts, queue_setup, validation_of
from draftline.export.zlab import export_zlab
from draftline.pipeline.coordinator import TrainResult
from draftline.pipeline.core import End, LedgerCounts, LedgerState
from draftline.pipeline.exporting import drafter_of_run
from draftline.pipeline.provenance import provenance
from draftline.pipeline.reporting import RunReporter
from draftline.pipeline.run_folder import RunFolder, claim_run_folder, undone_if_refused
from draftline.pipeline.runplan import RunPlan
from draftline.pipeline.signals import StopSignals
from draftline.pipeline.traces import FailureTraces

STATS_AGE_S = 0.5


def run_placed(
    plan: RunPlan, placement: Placement, where: str, signals: StopSignals, *, paths: Sequence[str], resume: bool
) -> TrainResult:
    """Loads the workers, claims the run folder, and runs to the end.

    Args:
        where: address of the cluster.
        paths: files that every host with a worker has to see.

    Raises:
        DraftlineError: see `train_on_cluster`.
    """
    order = _order(plan)
    crew = Crew(order, placement, seats_of(plan))
    try:
        crew.look_over(paths)
        crew.all_ready()
        first = crew.members[0]
        assert first.card is not None
        claimed = claim_run_folder(plan, target_fingerprint=first.card.fingerprint, resume=resume)
        with (
            closing(claimed) as folder,
            undone_if_refused(folder),
            RunReporter(_seen_from_here(plan), folder) as reporter,
            _reachable(folder.path, where, order.run_id),
        ):
            for line in (f"cluster {where}: {_hosts(crew)}", *first.card.lines, *folder.passed_over):
                reporter.say(line)
            return _train(plan, order.run_id, crew, folder, reporter, signals)
    finally:
        crew.dismiss()


def _order(plan: RunPlan) -> WorkOrder:
    """Paths are made absolute: workers have other working directories."""
    target, data = plan.config.target, plan.config.data
    if Path(target.model).expanduser().exists():
        target = target.model_copy(update={"model": str(Path(target.model).expanduser().absolute())})
    paths = {"path": data.path.expanduser().absolute()}
    if data.validation_path is not None:
        paths["validation_path"] = data.validation_path.expanduser().absolute()
    data = data.model_copy(update=paths)
    config = plan.config.model_copy(update={"target": target, "data": data})
    return WorkOrder(
        config=config.model_dump_json(),
        spec=plan.spec.model_dump_json(),
        facts=plan.facts,
        settings=plan.settings,
        first_row=plan.rows[0],
        total_rows=len(plan.rows),
        data_fingerprint=plan.dataset.manifest.fingerprint,
        run_id=uuid.uuid4().hex[:16],
        slots=plan.settings.max_rows + SPARE_SLOTS,
        slot_bytes=slot_bytes(max(plan.row_bytes)),
        cpus=plan.config.cluster.worker_cpus,
    )


def _seen_from_here(plan: RunPlan) -> RunPlan:
    """For the monitor: GPUs of workers are on other hosts, so none of this host's is shown for them."""
    pipeline = plan.config.pipeline
    update = {
        "target_devices": ("cpu",) * len(pipeline.target_devices),
        "drafter_devices": ("cpu",) * len(pipeline.drafter_devices),
    }
    config = plan.config.model_copy(update={"pipeline": pipeline.model_copy(update=update)})
    return replace(plan, config=config)


def _hosts(crew: Crew) -> str:
    places = [f"{m.seat.name} on {m.card.host}" for m in crew.members if m.card is not None]
    return ", ".join(places)


@contextmanager
def _reachable(run: Path, where: str, run_id: str) -> Iterator[None]:
    """While the run goes on, its folder says where `draftline scale` finds it."""
    file = run / ADDRESS_FILE
    file.write_text(json.dumps({"cluster": where, "queue": queue_name(run_id)}), encoding="utf-8")
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


def _train(
    plan: RunPlan, run_id: str, crew: Crew, folder: RunFolder, reporter: RunReporter, signals: StopSignals
) -> TrainResult:
    checkpoint = folder.checkpoint
    state = None if checkpoint is None else LedgerState.from_json(checkpoint.state["ledger"])
    queue = start_queue(queue_setup(plan, run_id, state), len(crew.members))
    try:
        return _train_through(queue, plan, crew, folder, reporter, signals)
    finally:
        ray.kill(queue)


def _train_through(
    queue: Any, plan: RunPlan, crew: Crew, folder: RunFolder, reporter: RunReporter, signals: StopSignals
) -> TrainResult:
    checkpoint, card = folder.checkpoint, crew.members[0].card
    assert card is not None
    fingerprints = {"data": plan.dataset.manifest.fingerprint, "target": card.fingerprint}
    desk = EventDesk(plan, queue, reporter, FailureTraces(folder.path), fingerprints)
    run = ClusterRun(plan, crew, queue, reporter, desk, validation_of(crew))
    run.stop_token_ids = card.stop_token_ids
    reporter.watch(cast(Any, RemoteStats(queue)))
    spilled = spilled_bytes()
    run.run(signals, first_gifts(plan, crew, checkpoint))
    if spilled_bytes() > spilled:
        reporter.say(f"the object store spilled {spilled_bytes() - spilled} bytes to disk: something else fills it")
    assert run.ledger is not None
    return _result(plan, run.ledger, reporter, run.training_s)


class RemoteStats:
    """The queue's counts for the monitor, asked for at most twice a second.

    Args:
        queue: the actor.
    """

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self._lock = threading.Lock()
        self._known: Any = None
        self._asked_s = 0.0

    def stats(self) -> Any:
        """See `RowExchange.stats`; the last known ones if the queue gives none any more."""
        with self._lock:
            if self._known is None or time.monotonic() - self._asked_s > STATS_AGE_S:
                self._asked_s = time.monotonic()
                try:
                    self._known = ray.get(self._queue.stats.remote(), timeout=10.0)
                except exceptions.RayError:
                    if self._known is None:
                        raise
            return self._known


def _result(plan: RunPlan, ledger: LedgerCounts, reporter: RunReporter, training_s: float) -> TrainResult:
    output = plan.config.output
    export = output / "export"
    if not export.exists():
        known = provenance(plan.config, plan.facts, plan.dataset.manifest)
        export_zlab(drafter_of_run(output), export, provenance={**known, "committed_rows": ledger.committed})
    return TrainResult(
        end=End.CLOSED,
        ledger=ledger,
        output=output,
        export=export,
        training_s=training_s,
        tokens=reporter.tokens,
        supervised_tokens=reporter.supervised_tokens,
        rows_by_drafter=reporter.rows_by_drafter,
    )
