"""The pipeline with a real tiny target on the CPU: ledger, repeatability, failures, resume."""

from __future__ import annotations

import json
import threading

import pytest
import torch
from safetensors.torch import load_file

from draftline.drafter import step as step_module
from draftline.errors import RunFailedError, RunStoppedError, UserError
from draftline.pipeline import coordinator as coordinator_module
from draftline.pipeline.checkpoint import latest_checkpoint, list_checkpoints, read_checkpoint
from draftline.pipeline.coordinator import train
from draftline.pipeline.meeting import best_acceptance
from draftline.pipeline.runplan import make_run_plan, plan_lines
from draftline.target.capture import TargetCapture


def run(config, **options):
    return train(make_run_plan(config), **options)


def final_weights(config):
    found = latest_checkpoint(config.output)
    assert found is not None
    return read_checkpoint(found[0]).weights


def assert_equal_weights(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


@pytest.fixture
def trained_samples(monkeypatch):
    """(sample id, epoch, anchors) of every row that goes through a training step."""
    seen: list[tuple[tuple[str, ...], int, tuple[int, ...]]] = []
    lock = threading.Lock()
    draw = step_module.draw_blocks

    def recording(row, *args, **kwargs):
        blocks = draw(row, *args, **kwargs)
        starts = torch.tensor([0, *row.lengths]).cumsum(0)
        with lock:
            for i, sample in enumerate(row.sample_ids):
                kept = blocks.anchors_A[blocks.keep_A]
                mine = kept[(kept >= starts[i]) & (kept < starts[i + 1])] - starts[i]
                seen.append((sample, row.epoch, tuple(mine.tolist())))
        return blocks

    monkeypatch.setattr(step_module, "draw_blocks", recording)
    return seen


def test_every_planned_row_is_committed_and_the_export_is_there(make_run):
    config = make_run("epochs=2")
    result = run(config)
    ledger = result.ledger
    assert ledger.planned == ledger.committed > 10
    assert ledger.set_aside == ledger.in_flight == ledger.remaining == 0
    assert sum(result.rows_by_drafter) == ledger.planned
    assert (result.export / "config.json").exists() and (result.export / "model.safetensors").exists()
    weights = final_weights(config)
    assert all(torch.isfinite(w).all() for w in weights.values())
    assert len(list_checkpoints(config.output)) == config.checkpoint.keep


def test_one_target_and_one_drafter_twice_give_bitwise_equal_weights(make_run):
    first, second = make_run(name="a"), make_run(name="b")
    run(first)
    run(second)
    assert_equal_weights(final_weights(first), final_weights(second))


def test_three_targets_train_the_same_samples_with_the_same_anchors(make_run, trained_samples):
    run(make_run("epochs=2", name="one"))
    one = sorted(trained_samples)
    trained_samples.clear()
    run(make_run("epochs=2", "pipeline.target_devices=[cpu,cpu,cpu]", name="three"))
    assert sorted(trained_samples) == one
    assert any(anchors for _, _, anchors in one)


def test_ordered_delivery_makes_many_targets_bitwise_repeatable(make_run):
    first = make_run(name="one")
    second = make_run("pipeline.target_devices=[cpu,cpu,cpu]", "pipeline.ordered=true", name="three")
    run(first)
    run(second)
    assert_equal_weights(final_weights(first), final_weights(second))


@pytest.mark.parametrize("kind", ["average", "copy", "gradient", "outer"])
def test_every_kind_of_sync_ends_with_a_whole_ledger(make_run, kind):
    config = make_run(
        f"sync.kind={kind}", "pipeline.target_devices=[cpu,cpu]", "pipeline.drafter_devices=[cpu,cpu,cpu]"
    )
    result = run(config)
    assert result.ledger.committed == result.ledger.planned


def test_gradient_sync_of_two_drafters_equals_one_with_the_joint_batch(make_run):
    """In exact arithmetic; in fp32 the sums are grouped differently."""
    one = make_run("sync.kind=gradient", "optimizer.accumulate_rows=2", "max_rows=8", name="one")
    two = make_run("sync.kind=gradient", "max_rows=8", "pipeline.drafter_devices=[cpu,cpu]", name="two")
    run(one)
    run(two)
    a, b = final_weights(one), final_weights(two)
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=2e-5, msg=name)


def test_a_run_folder_that_holds_a_run_is_refused(make_run):
    config = make_run("max_rows=2")
    run(config)
    with pytest.raises(UserError, match="holds another run"):
        run(config)


@pytest.mark.parametrize("drafters", ["[cpu]", "[cpu,cpu]"])
def test_a_stopped_run_resumes_and_commits_every_row_once(make_run, monkeypatch, drafters):
    config = make_run(f"pipeline.drafter_devices={drafters}", "epochs=2")
    _stop_after(monkeypatch, commits=2)
    with pytest.raises(RunStoppedError) as stopped:
        run(config)
    assert stopped.value.exit_code == 143
    monkeypatch.undo()
    ledger = read_checkpoint(latest_checkpoint(config.output)[0]).state["ledger"]
    assert 0 < ledger["n_committed"] < ledger["planned"] and ledger["in_flight"] >= 0
    result = run(config, resume=True)
    assert result.ledger.committed == result.ledger.planned
    assert sum(result.rows_by_drafter) == ledger["planned"] - ledger["n_committed"]


def test_a_resumed_run_ends_bitwise_like_the_unbroken_one(make_run, monkeypatch):
    whole, broken = make_run("epochs=2", name="whole"), make_run("epochs=2", name="broken")
    run(whole)
    _fail_after(monkeypatch, commits=3)
    with pytest.raises(RunFailedError, match="injected"):
        run(broken)
    monkeypatch.undo()
    run(broken, resume=True)
    assert_equal_weights(final_weights(whole), final_weights(broken))


def test_resume_refuses_a_changed_run_and_names_both_values(make_run, monkeypatch):
    config = make_run("epochs=2")
    _stop_after(monkeypatch, commits=1)
    with pytest.raises(RunStoppedError):
        run(config)
    monkeypatch.undo()
    with pytest.raises(UserError, match=r"optimizer\.learning_rate was 0\.001, is 0\.005"):
        run(make_run("epochs=2", "optimizer.learning_rate=5e-3"), resume=True)
    result = run(make_run("epochs=2", "pipeline.target_devices=[cpu,cpu]"), resume=True)
    assert result.ledger.committed == result.ledger.planned


def test_a_sample_that_fails_twice_is_set_aside_and_counted(make_run, monkeypatch):
    _poison(monkeypatch, "sample-7")
    config = make_run("pipeline.max_set_aside=40", "pipeline.target_devices=[cpu,cpu]")
    result = run(config)
    assert result.ledger.set_aside == 1
    assert result.ledger.committed == result.ledger.planned - 1


def test_past_max_set_aside_the_run_fails_by_name(make_run, monkeypatch):
    _poison(monkeypatch, "sample-7")
    with pytest.raises(RunFailedError, match="poisoned"):
        run(make_run())


def test_a_drafter_that_dies_costs_nothing_but_work(make_run, monkeypatch):
    """Its uncommitted rows are trained by the other one."""
    lock, deaths = threading.Lock(), []
    original = step_module.DrafterStep.forward_backward

    def dies_once(self, row):
        with lock:
            if row.row_id >= 4 and not deaths:
                deaths.append(threading.current_thread().name)
                raise RuntimeError("injected death")
        return original(self, row)

    monkeypatch.setattr(step_module.DrafterStep, "forward_backward", dies_once)
    result = run(make_run("pipeline.drafter_devices=[cpu,cpu]"))
    assert len(deaths) == 1
    assert result.ledger.committed == result.ledger.planned


@pytest.mark.parametrize("role", ["target", "drafter"])
def test_c1_a_worker_that_always_raises_fails_the_run_by_name(make_run, monkeypatch, role):
    place = (TargetCapture, "capture") if role == "target" else (step_module.DrafterStep, "forward_backward")
    original = getattr(*place)

    def raises(*args, **kwargs):
        if threading.current_thread() is threading.main_thread():  # the self-test before the start
            return original(*args, **kwargs)
        raise RuntimeError("injected fault")

    monkeypatch.setattr(*place, raises)
    with pytest.raises(RunFailedError, match="injected fault") as failure:
        run(make_run())
    assert failure.value.exit_code == 1
    assert role in str(failure.value)


def test_non_finite_states_never_reach_a_drafter(make_run, monkeypatch):
    original = TargetCapture.capture

    def spoiled(self, planned, samples):
        row = original(self, planned, samples)
        if planned.row_id == 2:
            row.taps_TF[3, 70] = float("nan")
        return row

    monkeypatch.setattr(TargetCapture, "capture", spoiled)
    with pytest.raises(RunFailedError, match="layer 2 are not finite"):
        run(make_run())


def test_non_finite_gradients_are_skipped_counted_and_limited(make_run, monkeypatch):
    original = step_module.DrafterStep.forward_backward

    def spoiled(self, row):
        stats = original(self, row)
        if row.row_id in (1, 3):
            next(self._drafter.parameters()).grad[0] = float("inf")
        return stats

    monkeypatch.setattr(step_module.DrafterStep, "forward_backward", spoiled)
    config = make_run("pipeline.max_skipped_steps=2", name="allowed")
    assert run(config).ledger.committed > 0
    assert all(torch.isfinite(w).all() for w in final_weights(config).values())
    with pytest.raises(RunFailedError, match="not finite"):
        run(make_run("pipeline.max_skipped_steps=1", name="refused"))


def assert_recall_rises_with_k(lines, kind):
    told = [line for line in lines if f"{kind}/recall_1/slot_1" in line]
    assert told
    for slot in (1, 2, 3):
        recalls = [told[-1][f"{kind}/recall_{k}/slot_{slot}"] for k in (1, 2, 4, 8, 16)]
        assert recalls[0] >= 0.0 and recalls[-1] <= 1.0 and recalls == sorted(recalls)


def test_validation_rows_are_scored_and_written(make_run, tiny_data):
    config = make_run(f"data.validation_path={tiny_data}", "max_rows=6")
    run(config)
    lines = [json.loads(line) for line in (config.output / "metrics.jsonl").read_text().splitlines()]
    scores = [line["validation/acceptance"] for line in lines if "validation/acceptance" in line]
    assert scores and all(1.0 <= score <= 4.0 for score in scores)
    assert_recall_rises_with_k(lines, "validation")
    assert_recall_rises_with_k(lines, "train")
    card = json.loads((config.output / "best" / "draftline.json").read_text())
    assert card["provenance"]["validation_acceptance"] == pytest.approx(max(scores))


def test_validation_scores_trees_and_walks_beside_the_chain_and_keeps_the_best_by_either(make_run, tiny_data):
    lengths = "validation={tree_budgets: [4, 32], walk_samples: 3, best_by: tree@32}"
    config = make_run(f"data.validation_path={tiny_data}", "max_rows=6", lengths)
    run(config)
    lines = [json.loads(line) for line in (config.output / "metrics.jsonl").read_text().splitlines()]
    scored = [line for line in lines if "validation/acceptance" in line]
    assert scored
    for line in scored:
        for kind in ("validation/acceptance", "validation/acceptance_walk"):
            assert 1.0 <= line[kind] <= line[f"{kind}_tree_32"] <= 4.0
            assert line[f"{kind}_tree_4"] <= line[f"{kind}_tree_32"]
    card = json.loads((config.output / "best" / "draftline.json").read_text())["provenance"]
    best = max(line["validation/acceptance_tree_32"] for line in scored)
    assert (card["best_by"], card["validation_acceptance"]) == ("tree@32", pytest.approx(best))
    assert best_acceptance(config.output / "best", "tree@32") == card["validation_acceptance"]
    assert best_acceptance(config.output / "best") == 0.0  # another measure: not to be compared


def test_dry_run_tells_rows_bounds_and_memory_without_weights(make_run, monkeypatch):
    monkeypatch.setattr(coordinator_module, "load_targets", None)
    lines = "\n".join(plan_lines(make_run_plan(make_run("objective.kl_weight=0.1"))))
    for word in ("targets: 1 on cpu", "bytes per row", "memory cpu", "queue: 5 rows admitted", "rounds: 3 rows"):
        assert word in lines, lines


def test_export_holds_the_checkpoints_weights_rounded_once(make_run):
    config = make_run("max_rows=4")
    result = run(config)
    exported, masters = load_file(result.export / "model.safetensors"), final_weights(config)
    assert exported.keys() == masters.keys()
    for name, weight in exported.items():
        assert torch.equal(weight, masters[name].to(torch.bfloat16)), name


def _poison(monkeypatch, sample):
    original = TargetCapture.capture

    def poisoned(self, planned, samples):
        if any(s.sample_id == sample for s in samples):
            raise RuntimeError(f"poisoned by {sample}")
        return original(self, planned, samples)

    monkeypatch.setattr(TargetCapture, "capture", poisoned)


def _stop_after(monkeypatch, *, commits):
    """Asks the run to stop, as a signal would, once so many rounds were committed."""
    hold = coordinator_module.MeetingRoom.hold

    def stopping(self, meeting, clock):
        hold(self, meeting, clock)
        if meeting.round_id + 1 == commits:
            threading.Thread(target=_running[0].request_stop).start()

    _running = _exchanges(monkeypatch)
    monkeypatch.setattr(coordinator_module.MeetingRoom, "hold", stopping)


def _fail_after(monkeypatch, *, commits):
    hold = coordinator_module.MeetingRoom.hold

    def failing(self, meeting, clock):
        if meeting.round_id == commits:
            raise RunFailedError("injected", origin="test")
        hold(self, meeting, clock)

    monkeypatch.setattr(coordinator_module.MeetingRoom, "hold", failing)


def _exchanges(monkeypatch):
    made = []
    original = coordinator_module.RowExchange

    def making(*args, **kwargs):
        made.append(original(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(coordinator_module, "RowExchange", making)
    return made
