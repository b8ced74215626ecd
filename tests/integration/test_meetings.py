"""Meetings of a real run: a failure at any part of them, steps that are not finite, what a checkpoint then holds."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from draftline.drafter.model import Drafter
from draftline.drafter.optimizer import MasterOptimizer
from draftline.drafter.step import DrafterStep
from draftline.drafter.sync import Synchronizer
from draftline.errors import RunFailedError, RunStoppedError
from draftline.pipeline import coordinator as coordinator_module
from draftline.pipeline import meeting as meeting_module
from draftline.pipeline.checkpoint import latest_checkpoint, list_checkpoints, read_checkpoint
from draftline.pipeline.coordinator import train
from draftline.pipeline.meeting import MeetingRoom
from draftline.pipeline.runplan import make_run_plan

TWO_DRAFTERS, THREE_DRAFTERS = "pipeline.drafter_devices=[cpu,cpu]", "pipeline.drafter_devices=[cpu,cpu,cpu]"


def run(config: Any, **options: Any) -> Any:
    return train(make_run_plan(config), **options)


def content_of(optimizer: MasterOptimizer) -> list[torch.Tensor]:
    return [value.detach().clone() for value in (*optimizer.masters, *(value for _, value in optimizer.moments()))]


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture
def exchanges(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every exchange that a run makes."""
    made: list[Any] = []
    original = coordinator_module.RowExchange

    def making(*args: Any, **kwargs: Any) -> Any:
        made.append(original(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(coordinator_module, "RowExchange", making)
    return made


# ---- a failure before, at and after the commit


@pytest.mark.parametrize("kind", ["average", "gradient"])
def test_a_member_lost_before_the_commit_leaves_the_others_as_they_were(make_run, monkeypatch, exchanges, kind):
    """The meeting is held twice: by three, which does not count, and by the two that are left."""
    hold, held = MeetingRoom.hold, []

    def losing(self, meeting, clock):
        optimizers = [self._drafters[d].replica.optimizer for d in meeting.members]
        before = [content_of(optimizer) for optimizer in optimizers]
        hold(self, meeting, clock)
        held.append(meeting.members)
        assert all(same(content_of(o), b) for o, b in zip(optimizers, before, strict=True))
        if len(held) == 1:
            exchanges[0].drafter_lost(next(d for d in meeting.members if d != meeting.leader))

    monkeypatch.setattr(MeetingRoom, "hold", losing)
    config = make_run(THREE_DRAFTERS, f"sync.kind={kind}")
    result = run(config)
    assert [len(members) for members in held[:2]] == [3, 2]
    assert result.ledger.committed == result.ledger.planned
    ledger = read_checkpoint(latest_checkpoint(config.output)[0]).state["ledger"]
    assert ledger["n_committed"] == ledger["planned"]


def test_a_member_that_fails_while_it_takes_over_is_lost_alone(make_run, monkeypatch):
    apply, failed = Synchronizer.apply, threading.Lock()

    def failing(self, replica, reduced):
        is_member = threading.current_thread().name != leaders.get("first")
        if is_member and failed.acquire(blocking=False):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return apply(self, replica, reduced)

    hold, leaders = MeetingRoom.hold, {}

    def noting(self, meeting, clock):
        leaders.setdefault("first", threading.current_thread().name)
        hold(self, meeting, clock)

    monkeypatch.setattr(MeetingRoom, "hold", noting)
    monkeypatch.setattr(Synchronizer, "apply", failing)
    config = make_run(THREE_DRAFTERS)
    result = run(config)
    assert failed.locked()
    assert result.ledger.committed == result.ledger.planned
    assert "OutOfMemoryError" in (config.output / "failures.log").read_text()


def test_a_leader_that_fails_after_the_commit_fails_the_run_and_a_resume_does_the_rest(make_run, monkeypatch):
    def broken(self, meeting, moments, clock):
        if meeting.round_id == 1:
            raise MemoryError("no memory")
        return finish(self, meeting, moments, clock)

    finish = MeetingRoom._finish
    monkeypatch.setattr(MeetingRoom, "_finish", broken)
    config = make_run(TWO_DRAFTERS)
    with pytest.raises(
        RunFailedError, match=r"drafter-\d: round 1 was committed, but could not be finished: MemoryError"
    ):
        run(config)
    monkeypatch.undo()
    before = read_checkpoint(latest_checkpoint(config.output)[0]).state["ledger"]
    assert before["rounds"] == 1
    result = run(config, resume=True)
    assert result.ledger.committed == result.ledger.planned
    assert sum(result.rows_by_drafter) == before["planned"] - before["n_committed"]


@pytest.mark.parametrize("moments", ["keep", "average"])
def test_a_checkpoint_holds_the_commit_although_the_others_train_on(make_run, monkeypatch, moments):
    hold, at_commit = MeetingRoom.hold, {}

    def noting(self, meeting, clock):
        hold(self, meeting, clock)
        reduced = self._outcome.reduced
        own = [dict(self._drafters[d].replica.optimizer.moments()) for d in meeting.members]
        agreed = own if reduced.moments is None else [reduced.moments]
        names = self._drafters[meeting.leader].replica.optimizer.names
        at_commit[meeting.round_id] = (
            {name: weight.clone() for name, weight in zip(names, reduced.weights, strict=True)},
            [{name: value.clone() for name, value in each.items()} for each in agreed],
            {row.row_id for rows in meeting.rows.values() for row in rows},
        )

    write = meeting_module.write_checkpoint

    def slow_disk(*args, **kwargs):
        time.sleep(0.2)  # several rows
        return write(*args, **kwargs)

    monkeypatch.setattr(MeetingRoom, "hold", noting)
    monkeypatch.setattr(meeting_module, "write_checkpoint", slow_disk)
    config = make_run(THREE_DRAFTERS, "sync.every_rows=1", f"sync.moments={moments}", "max_rows=9")
    run(config)
    committed: set[int] = set()
    stored = {int(folder.name[-8:]): read_checkpoint(folder) for folder in list_checkpoints(config.output)}
    for round_id, (weights, all_moments, rows) in sorted(at_commit.items()):
        committed |= rows
        if (checkpoint := stored.get(round_id)) is None:  # not kept
            continue
        assert_equal(checkpoint.weights, weights)
        assert len(checkpoint.moments) == len(all_moments) == (3 if moments == "keep" else 1)
        for found, wanted in zip(checkpoint.moments, all_moments, strict=True):
            assert_equal(found, wanted)
        assert {row for a, b in checkpoint.state["ledger"]["committed"] for row in range(a, b)} == committed


def test_who_asks_for_a_stop_waits_for_the_checkpoint_and_not_for_scores(make_run, tiny_data, monkeypatch, exchanges):
    hold, scored = MeetingRoom.hold, []

    def stopping(self, meeting, clock):
        hold(self, meeting, clock)
        if meeting.round_id == 1:
            exchanges[0].request_stop()

    monkeypatch.setattr(MeetingRoom, "hold", stopping)
    monkeypatch.setattr(MeetingRoom, "_score", lambda self, meeting, validator: scored.append(meeting.round_id))
    config = make_run(f"data.validation_path={tiny_data}", "epochs=2")
    with pytest.raises(RunStoppedError):
        run(config)
    assert scored == [0]
    ledger = read_checkpoint(latest_checkpoint(config.output)[0]).state["ledger"]
    assert 0 < ledger["n_committed"] < ledger["planned"]


# ---- steps that are not finite


def spoil_gradient(monkeypatch: pytest.MonkeyPatch, rows: set[int]) -> None:
    original = DrafterStep.forward_backward

    def spoiled(self, row):
        stats = original(self, row)
        if row.row_id in rows:
            next(self._drafter.parameters()).grad[0] = float("nan")
        return stats

    monkeypatch.setattr(DrafterStep, "forward_backward", spoiled)


def spoil_loss(monkeypatch: pytest.MonkeyPatch, rows: set[int]) -> None:
    step, forward, now = DrafterStep.forward_backward, Drafter.forward, threading.local()

    def noting(self, row):
        now.is_bad = row.row_id in rows
        stats = step(self, row)
        assert bool(stats.finite) != now.is_bad
        return stats

    def spoiled(self, *args, **kwargs):
        hidden = forward(self, *args, **kwargs)
        return hidden * float("nan") if getattr(now, "is_bad", False) else hidden

    monkeypatch.setattr(DrafterStep, "forward_backward", noting)
    monkeypatch.setattr(Drafter, "forward", spoiled)


def spoil_loss_alone(monkeypatch: pytest.MonkeyPatch, rows: set[int]) -> None:
    """A loss may overflow although its gradient does not."""
    original = DrafterStep._pass_head

    def spoiled(self, prepared, *args, **kwargs):
        output = original(self, prepared, *args, **kwargs)
        if prepared.row.row_id in rows:
            output.values.ce[:] = float("inf")
        return output

    monkeypatch.setattr(DrafterStep, "_pass_head", spoiled)


KINDS = {
    "a step each row": ["sync.every_rows=3"],
    "a step that was still accumulating at the meeting": ["optimizer.accumulate_rows=2", "sync.every_rows=3"],
    "a joint step": ["sync.kind=gradient", TWO_DRAFTERS],
}


@pytest.mark.parametrize(
    ("kind", "spoil"),
    [
        *((kind, spoil_gradient) for kind in KINDS),
        ("a step each row", spoil_loss),
        ("a joint step", spoil_loss_alone),
    ],
)
def test_a_step_that_is_not_finite_is_skipped_counted_and_limited(make_run, monkeypatch, kind, spoil):
    """Row 2 is the last of the first round where three rows make a round."""
    spoil(monkeypatch, {2})
    config = make_run("max_rows=8", "pipeline.max_skipped_steps=1", *KINDS[kind], name="allowed")
    assert run(config).ledger.committed == 8
    weights = read_checkpoint(latest_checkpoint(config.output)[0]).weights
    assert all(torch.isfinite(weight).all() for weight in weights.values())
    with pytest.raises(
        RunFailedError, match=r"drafter-\d: .*the gradient is not finite \(1 steps skipped, 0 allowed\)"
    ):
        run(make_run("max_rows=8", "pipeline.max_skipped_steps=0", *KINDS[kind], name="refused"))
