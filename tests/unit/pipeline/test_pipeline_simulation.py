"""The simulation covers what it says, finds no fault in the core, and finds every seeded one."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from pipeline_mutations import MUTATIONS
from pipeline_situations import SITUATIONS, WatchedWorld

from draftline.pipeline.core.simulate import Explorer, main, run_one, run_random
from draftline.pipeline.core.simworld import BrokenPromiseError, Case, Fault

ALL_FAULTS = {fault.name.lower() for fault in Fault}


def test_distinct_schedules_break_no_promise_and_faults_meet_every_situation():
    met = Counter[str]()
    summary = run_random(20_000, 0, lambda case: WatchedWorld(case, met))
    assert summary.violation is None
    assert summary.distinct == 20_000
    assert set(summary.ends) == {"closed", "stopped", "failed"}
    assert set(summary.faults) == ALL_FAULTS
    assert min(summary.faults.values()) > 150
    assert {name: met[name] for name in SITUATIONS if met[name] < 10} == {}


@pytest.mark.parametrize(
    ("case", "n_faults", "at_least"),
    [
        (Case(2, 2, 2), 0, 900_000),
        (Case(1, 2, 3, rows_per_drafter=1, prefetch_rows=1, tight=True), 0, 600_000_000),
        (Case(1, 3, 2, ordered=True), 0, 10_000),
        (Case(2, 1, 2, byte_bound=True), 1, 2_000_000),
        (Case(1, 2, 2, tight=True), 1, 3_000_000),
        (Case(1, 1, 2, max_set_aside=2), 2, 3_000),
    ],
)
def test_every_schedule_of_a_small_case_breaks_no_promise(case: Case, n_faults: int, at_least: int):
    explored = Explorer().explore(case, n_faults)
    assert explored.schedules >= at_least
    assert "closed" in explored.ends
    assert ("stopped" in explored.ends and "failed" in explored.ends) == (n_faults > 0)


@pytest.mark.parametrize("name", MUTATIONS)
def test_simulation_catches_the_mutation(name: str):
    summary = run_random(10_000, 1, MUTATIONS[name])
    assert summary.violation is not None


def test_exhaustive_search_catches_a_commit_before_the_average():
    with pytest.raises(BrokenPromiseError, match="not what is committed"):
        Explorer(MUTATIONS["CommitBeforeAverage"]).explore(Case(1, 1, 1), 0)


def test_exhaustive_search_catches_a_count_without_its_lock():
    with pytest.raises(BrokenPromiseError, match="deadlock"):
        Explorer(MUTATIONS["CountWithoutItsLock"]).explore(Case(2, 1, 1), 0)


def test_a_schedule_can_be_run_again_from_its_seed_and_number():
    first, again, other = run_one(3, 14), run_one(3, 14), run_one(3, 15)
    assert (first.run(), first.trace, first.case) == (again.run(), again.trace, again.case)
    other.run()
    assert (other.case, other.trace) != (first.case, first.trace)


def test_a_violation_tells_how_to_see_it_again():
    summary = run_random(10_000, 1, MUTATIONS["ReturnedRowDropped"])
    assert summary.violation is not None
    seed, index = map(int, summary.violation["replay"].rsplit(" ", 1)[1].split(":"))
    run = run_one(seed, index, MUTATIONS["ReturnedRowDropped"])
    with pytest.raises(BrokenPromiseError, match="deadlock"):
        run.run()
    assert run.trace == summary.violation["trace"]


def test_command_prints_a_summary_and_exits_0(capsys: pytest.CaptureFixture[str]):
    assert main(["--schedules", "50", "--seed", "9"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["distinct"], summary["seed"], summary["violation"]) == (50, 9, None)


def test_command_replays_a_schedule(capsys: pytest.CaptureFixture[str]):
    assert main(["--replay", "0:7"]) == 0
    assert "Case(" in capsys.readouterr().out
