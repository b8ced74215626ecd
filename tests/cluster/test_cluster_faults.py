"""Faults at awkward moments on several raylets: what dies, what lives on though it should not, and who comes after."""

from __future__ import annotations

import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from cluster_kit import Meanwhile, kill_one, processes, wait_until_whole
from held import HeldTarget, Hold

from draftline.cluster import crew
from draftline.cluster.control import scale
from draftline.cluster.crew import Crew, Member, RefusedError
from draftline.cluster.demand import Seat
from draftline.cluster.driver import ClusterRun
from draftline.cluster.messages import Card
from draftline.cluster.train import cluster_plan, train_on_cluster
from draftline.errors import RunFailedError, UserError
from draftline.pipeline.checkpoint import latest_checkpoint, read_checkpoint
from draftline.pipeline.core import drafter_worker, target_worker
from draftline.pipeline.runplan import make_run_plan

pytestmark = pytest.mark.timeout(600)
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not see the tests


def run(config, cluster, **options):
    return train_on_cluster(cluster_plan(config), cluster.address, **options)


class FirstTargetFails(HeldTarget):
    """The first target's loop ends by an error that nobody foresaw; its process lives on."""

    def start(self, queue, transport):
        def fail():
            raise ZeroDivisionError("made up")

        if self._number == 0:
            self._start(fail)
        else:
            super().start(queue, transport)


@pytest.mark.long
def test_the_place_of_a_lost_or_dismissed_target_is_free_for_the_next(cluster, make_run, monkeypatch):
    """Only one node takes targets, and all of it is taken; one drafter goes on meanwhile."""
    monkeypatch.setattr(crew, "TargetActor", FirstTargetFails)
    ours = ("pipeline.target_devices=[cpu,cpu]", "cluster.target_resources={first: 4}")
    config = make_run(*ours, "epochs=24", "sync.every_rows=10", name="ours")
    folder, hold = config.output, Hold(config.output)
    hold.on()
    meanwhile = Meanwhile(
        folder,
        (3, lambda: wait_until_whole(folder, hold, alive, (2, 1))),
        (3, lambda: scale(folder, -1)),
        (3, lambda: wait_for_targets(1)),
        (3, lambda: scale(folder, 1)),
        (3, lambda: wait_for_targets(2)),
        (3, hold.let_go),
    )
    meanwhile.start()
    result = run(config, cluster)
    meanwhile.check()
    assert result.ledger.committed == len(make_run_plan(config).rows)
    assert "ZeroDivisionError" in (folder / "failures.log").read_text()


def alive():
    return len(processes("FirstTargetFails")), len(processes("DrafterActor"))


def wait_for_targets(n):
    """Until there are so many target processes."""
    deadline = time.monotonic() + 240
    while len(processes("FirstTargetFails")) != n:
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.mark.long
def test_a_run_whose_queue_dies_says_so_and_is_resumed_by_the_same_process(cluster, make_run):
    config = make_run("epochs=6")  # one target, one drafter
    meanwhile = Meanwhile(config.output, (20, lambda: kill_one("QueueActor")))
    meanwhile.start()
    with pytest.raises(RunFailedError, match=r"^queue: the queue is gone .*; resume the run$") as caught:
        run(config, cluster)
    meanwhile.check()
    assert "\n" not in str(caught.value) and not (config.output / "cluster.json").exists()
    before = read_checkpoint(latest_checkpoint(config.output)[0]).state["ledger"]["n_committed"]
    result = run(config, cluster, resume=True)
    planned = len(make_run_plan(config).rows)
    assert result.ledger.committed == planned and sum(result.rows_by_drafter) == planned - before


@pytest.mark.long
def test_a_worker_that_dies_before_the_first_row_leaves_nothing(cluster, make_run):
    config = make_run("max_rows=4")
    killer = threading.Thread(target=_kill_when_there, args=("DrafterActor",), daemon=True)
    killer.start()
    with pytest.raises(RefusedError, match=r"drafter-0 could not start: ") as caught:
        run(config, cluster)
    killer.join(30)
    assert caught.value.exit_code == 1 and "\n" not in str(caught.value)
    assert not config.output.exists()


def _kill_when_there(name):
    while not processes(name):
        time.sleep(0.02)
    kill_one(name)


def member(name, number=0):
    role = name.partition("-")[0]
    worker = target_worker(number) if role == "target" else drafter_worker(number)
    return Member(worker, Seat(name, "cpu", {}), 0, None, card=Card("node", "10.0.0.1"))


def test_a_worker_that_comes_later_runs_the_same_code_on_the_same_weights(head):
    asked = Crew(None, None, [])
    versions = asked._head.versions
    asked.welcome(ray.put(Card("a", "10.0.0.1", "weights", versions=versions)), member("target-0"))
    asked.welcome(ray.put(Card("a", "10.0.0.1", "borrowed", versions=versions)), member("drafter-0"))
    other = Card("b", "10.0.0.2", "weights", versions={**versions, "torch": "0.1"})
    with pytest.raises(UserError, match=r"host 10.0.0.2: torch is 0.1 there and "):
        asked.welcome(ray.put(other), member("target-1"))
    with pytest.raises(
        UserError, match=r"host 10.0.0.2: the target's weights are others there and weights on 10.0.0.1"
    ):
        asked.welcome(ray.put(Card("b", "10.0.0.2", "others", versions=versions)), member("target-1"))


class CrewOfOne:
    """A crew whose next worker cannot start."""

    def __init__(self, error):
        self.error, self.hired = error, []

    def of(self, role, state=None):
        return [member("drafter-0")] if role == "drafter" else []

    def welcome(self, ref, newcomer):
        raise self.error

    def end(self, newcomer):
        newcomer.state = "over"

    def hire(self, seat, bundle, replaces=None):
        self.hired.append(seat.name)
        return seat.name

    def loaded(self, newcomer):
        return f"{newcomer} is ready"


@pytest.mark.parametrize(
    ("error", "hired"),
    [(UserError("torch is 0.1 there"), []), (RefusedError("it died", RefusedError.DIED), ["target-0"])],
)
def test_a_host_that_is_wrong_is_not_tried_again_and_a_worker_that_died_by_chance_is(make_run, error, hired):
    crew_of_one, said = CrewOfOne(error), []
    reporter = SimpleNamespace(ended=lambda name, why: None, say=said.append)
    goes_on: Any = ClusterRun(make_run_plan(make_run()), crew_of_one, None, reporter, None, [])
    goes_on._on_ready(member("target-0", 3), None)
    assert crew_of_one.hired == hired
    assert said[0].endswith("another is started" if hired else "no more")
