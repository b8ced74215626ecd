"""What a resumed run must be, what it may change, and that it ends as if nothing had happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftline.data.manifest import DatasetFacts
from draftline.data.shards import ShardWriter
from draftline.errors import RunFailedError, UserError
from draftline.pipeline.checkpoint import latest_checkpoint, read_checkpoint
from draftline.pipeline.coordinator import train
from draftline.pipeline.meeting import MeetingRoom
from draftline.pipeline.runplan import make_run_plan
from tiny_tokenizer import tiny_fingerprint


def run(config: Any, **options: Any) -> Any:
    return train(make_run_plan(config), **options)


def break_off(monkeypatch: pytest.MonkeyPatch, config: Any, *, at_round: int) -> None:
    """Runs until the meeting of a round, which fails."""
    hold = MeetingRoom.hold

    def failing(self, meeting, clock):
        if meeting.round_id == at_round:
            raise RunFailedError("injected", origin="test")
        hold(self, meeting, clock)

    with monkeypatch.context() as patch:
        patch.setattr(MeetingRoom, "hold", failing)
        with pytest.raises(RunFailedError, match="injected"):
            run(config)


def final_weights(config: Any) -> dict[str, torch.Tensor]:
    found = latest_checkpoint(config.output)
    assert found is not None
    return read_checkpoint(found[0]).weights


def other_data(folder: Path) -> Path:
    rng = np.random.default_rng(7)
    with ShardWriter(folder) as writer:
        for i in range(40):
            writer.add(f"other-{i}", rng.integers(3, 400, 20).tolist(), [False] * 6 + [True] * 14)
        writer.finish(
            DatasetFacts(tokenizer_fingerprint=tiny_fingerprint(), template_hash="tiny", vocab_size=400, max_tokens=64)
        )
    return folder


def test_with_ordered_delivery_three_targets_and_a_break_change_no_bit(make_run, monkeypatch):
    ordered = ("pipeline.target_devices=[cpu,cpu,cpu]", "pipeline.ordered=true")
    whole, broken = make_run(*ordered, name="whole"), make_run(*ordered, name="broken")
    run(whole)
    break_off(monkeypatch, broken, at_round=2)
    run(broken, resume=True)
    a, b = final_weights(whole), final_weights(broken)
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_another_data_set_or_target_is_refused_with_both_values(make_run, make_tiny_target, monkeypatch, tmp_path):
    config = make_run()
    break_off(monkeypatch, config, at_round=1)
    elsewhere = other_data(tmp_path / "other")
    with pytest.raises(UserError, match=r"data\.path was '.*tiny', is '.*other'.*data fingerprint was \w+, is \w+"):
        run(make_run(data=elsewhere), resume=True)
    retrained = make_tiny_target("qwen3", seed=5)
    with pytest.raises(UserError, match=r"target\.model was '.*', is '.*'"):
        run(make_run(model=retrained), resume=True)


def test_a_target_or_data_that_changed_in_place_is_refused_with_both_fingerprints(
    make_run, make_tiny_target, monkeypatch, tmp_path
):
    """The configuration is the same; what stands at its paths is not."""
    target, data = tmp_path / "target", tmp_path / "shards"
    target.symlink_to(make_tiny_target("qwen3"))
    first, second = other_data(tmp_path / "first"), make_run().data.path
    data.symlink_to(first)
    config = make_run(model=target, data=data)
    break_off(monkeypatch, config, at_round=1)
    target.unlink()
    target.symlink_to(make_tiny_target("qwen3", seed=5))
    with pytest.raises(UserError, match=r"the same run: target fingerprint was \w{8,}, is \w{8,}; give the old values"):
        run(config, resume=True)
    data.unlink()
    data.symlink_to(second)
    with pytest.raises(UserError, match=r"the same run: data fingerprint was \w{8,}, is \w{8,}; give the old values"):
        run(config, resume=True)


def test_workers_queue_checkpoints_and_logging_may_change(make_run, monkeypatch):
    config = make_run("epochs=2")
    break_off(monkeypatch, config, at_round=2)
    changed = make_run(
        "epochs=2",
        "pipeline.target_devices=[cpu,cpu]",
        "pipeline.drafter_devices=[cpu,cpu]",
        "pipeline.hs_queue_depth=4",
        "checkpoint.keep=1",
        "checkpoint.every_rounds=2",
        "monitor.status_every_s=1",
    )
    result = run(changed, resume=True)
    assert result.ledger.committed == result.ledger.planned
    assert len(result.rows_by_drafter) == 2 and all(result.rows_by_drafter)
