"""What is worked out once, after the targets are loaded and before the loops start."""

from __future__ import annotations

from typing import Any

from draftline.cluster.crew import Crew, first_answer
from draftline.cluster.demand import SPARE_SLOTS
from draftline.cluster.messages import QueueSetup
from draftline.cluster.refs import Packed, RowContract, RowRef
from draftline.cluster.seat import Gift
from draftline.cluster.store import ObjectStore
from draftline.cluster.transport import pack, unpack
from draftline.cluster.validation import kept_rows
from draftline.pipeline.checkpoint import Checkpoint
from draftline.pipeline.core import LedgerState
from draftline.pipeline.runplan import RunPlan
from draftline.pipeline.workers import initial_weights


def queue_setup(plan: RunPlan, run_id: str, state: LedgerState | None) -> QueueSetup:
    """What the queue actor is made of."""
    pipeline = plan.config.pipeline
    contract = RowContract(run_id, plan.spec.taps, plan.spec.hidden_size, plan.config.objective.needs_teacher)
    return QueueSetup(
        plan=plan.rows,
        row_bytes=plan.row_bytes,
        settings=plan.settings,
        contract=contract,
        stall_timeout_s=pipeline.stall_timeout_s,
        state=state,
        spare_slots=SPARE_SLOTS,
        checkpoint_every=plan.config.checkpoint.every_rounds,
        allowed_failures=pipeline.max_restarts + 2 * pipeline.max_set_aside,
    )


def first_gifts(plan: RunPlan, crew: Crew, checkpoint: Checkpoint | None) -> list[Gift]:
    """What each drafter starts from, owned by this process: the same weights, and its own moments where they differ."""
    store, n = ObjectStore(), plan.num_drafters
    nothing = pack({}, store)
    if checkpoint is None:
        return [Gift(_first_weights(plan, crew, store), nothing, nothing)] * n
    weights, sync = pack(checkpoint.weights, store), pack(checkpoint.sync, store)
    moments = [pack(m, store) for m in checkpoint.moments] or [nothing]
    return [Gift(weights, moments[number % len(moments)], sync) for number in range(n)]


def _first_weights(plan: RunPlan, crew: Crew, store: ObjectStore) -> Packed:
    drafter = plan.config.drafter
    if drafter.init == "target_layers" and drafter.init_from is None:  # only a target has them
        first = crew.members[0]
        there: Packed = first_answer(first.actor.first_weights.remote(), first)
        return pack(unpack(there, store), store)
    unused: Any = None
    return pack(initial_weights(plan.config, plan.spec, unused), store)


def validation_of(crew: Crew) -> list[RowRef]:
    """The validation rows, captured by the first target and owned by this process."""
    first = crew.members[0]
    rows: list[RowRef] = first_answer(first.actor.validation.remote(), first)
    return kept_rows(rows, ObjectStore())
