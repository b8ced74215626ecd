"""What the core keeps of a run, and that a run cut anywhere goes on from it without losing or doubling a row."""

from __future__ import annotations

import json
import random

import pytest
from core_kit import capture, commit_round, make_core, train_one
from hypothesis import given, settings
from hypothesis import strategies as st

from draftline.errors import UserError
from draftline.pipeline.core import Lease, LedgerState, PipelineCore, RowItem, RowState, SyncItem, target_worker


def test_a_resumed_run_skips_what_is_committed_or_set_aside():
    state = LedgerState(planned=6, committed=((0, 2), (3, 4)), set_aside=((2, 3),), failures=((4, 1),), rounds=7)
    core = make_core(n_rows=6, state=state, max_set_aside=2)
    assert core.round_id == 7
    assert core.lease(0).row_id == 4
    core.give_back(target_worker(0), 4, blame=True)  # its second failure, the first one before the restart
    assert core.ledger.states[4] is RowState.SET_ASIDE


def test_a_ledger_survives_json():
    state = LedgerState(planned=6, committed=((0, 2), (3, 4)), set_aside=((2, 3),), failures=((4, 1),), rounds=7)
    assert LedgerState.from_json(json.loads(json.dumps(state.to_json()))) == state


@pytest.mark.parametrize(
    "change",
    [
        {"committed": [[0, 9]]},
        {"committed": [[2, 1]]},
        {"committed": [[0, 2], [1, 4]], "n_committed": 5},
        {"set_aside": [[1, 2]], "n_set_aside": 1},
        {"n_committed": 3},
        {"rounds": "many"},
        {"failures": [[1]]},
        {"planned": None},
    ],
)
def test_a_ledger_that_contradicts_itself_is_refused(change: dict):
    data = LedgerState(planned=6, committed=((0, 2),), rounds=1).to_json() | change
    with pytest.raises(UserError):
        LedgerState.from_json(data)


def test_a_ledger_of_another_plan_is_refused_with_both_numbers():
    with pytest.raises(UserError, match=r"6 rows.*has 4"):
        make_core(n_rows=4, state=LedgerState(planned=6))


def test_identity_holds_for_each_epoch():
    core = make_core(n_rows=6, rows_per_drafter=2)
    capture(core, 2)
    train_one(core)
    train_one(core)
    commit_round(core, 0)
    core.lease(0)
    epochs = core.ledger.epochs()
    assert [(e.planned, e.committed, e.in_flight, e.remaining) for e in epochs] == [(4, 2, 1, 1), (2, 0, 0, 2)]


def step_anything(core: PipelineCore, rng: random.Random, trained: list[int]) -> None:
    """One step of target-0 or drafter-0, whichever can."""
    lease = core.lease(0)
    if isinstance(lease, Lease):
        core.put(0, lease.row_id)
    if rng.random() < 0.5:
        return
    item = core.get(0)
    if isinstance(item, RowItem):
        core.trained(0, item.row_id)
    elif isinstance(item, SyncItem):
        core.arrive(0, item.round_id)
        meeting = core.begin_average(0, item.round_id)
        trained += [row.row_id for row in core.commit(0, item.round_id, meeting.attempt).rows[0]]


@settings(max_examples=60, deadline=None)
@given(
    n_rows=st.integers(1, 12),
    rows_per_drafter=st.integers(1, 5),
    ordered=st.booleans(),
    seed=st.integers(0, 10_000),
    cuts=st.lists(st.integers(0, 25), max_size=4),
)
def test_a_run_cut_anywhere_and_resumed_commits_each_row_once(n_rows, rows_per_drafter, ordered, seed, cuts):
    rng, committed, state = random.Random(seed), [], None
    for n_steps in [*cuts, 10_000]:
        core = make_core(n_rows, rows_per_drafter=rows_per_drafter, ordered=ordered, state=state)
        for _ in range(n_steps):
            if core.ledger.is_complete:
                break
            step_anything(core, rng, committed)
        state = LedgerState.from_json(json.loads(json.dumps(core.snapshot().to_json())))
    assert sorted(committed) == list(range(n_rows))
    assert state.n_committed == n_rows
    if ordered:
        assert committed == sorted(committed)
