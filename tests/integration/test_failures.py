"""What goes wrong in a real run, injected: one line that names who and what, or a counted recovery; never a hang."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import subprocess
import sys
import threading
import time

import pytest
import torch

from draftline.drafter.step import DrafterStep
from draftline.errors import RunFailedError, UserError
from draftline.monitor import events as events_module
from draftline.monitor.trackers import JsonlTracker
from draftline.pipeline import checkpoint as checkpoint_module
from draftline.pipeline import coordinator as coordinator_module
from draftline.pipeline.checkpoint import latest_checkpoint, list_checkpoints, read_checkpoint
from draftline.pipeline.coordinator import train
from draftline.pipeline.runplan import make_run_plan
from draftline.target.capture import TargetCapture

TWO_DRAFTERS = "pipeline.drafter_devices=[cpu,cpu]"
STICKY = "CUDA error: an illegal memory access was encountered"


def run(config, **options):
    return train(make_run_plan(config), **options)


def in_worker() -> bool:
    return threading.current_thread().name.startswith(("target-", "drafter-"))


def break_capture(monkeypatch, change, *, when=lambda planned: True):
    """`change(row)` replaces the captured row (or raises) in target threads, for the rows that `when` picks."""
    original = TargetCapture.capture

    def broken(self, planned, samples):
        row = original(self, planned, samples)
        return change(row) if in_worker() and when(planned) else row

    monkeypatch.setattr(TargetCapture, "capture", broken)


def break_step(monkeypatch, action, *, when=lambda row: True):
    """`action()` runs before a drafter thread trains a row that `when` picks."""
    original = DrafterStep.forward_backward

    def broken(self, row):
        if in_worker() and when(row):
            action()
        return original(self, row)

    monkeypatch.setattr(DrafterStep, "forward_backward", broken)


def raising(error):
    def act(*_):
        raise error

    return act


def once(action):
    """An action that happens the first time only."""
    first = threading.Lock()
    return lambda *arguments: action(*arguments) if first.acquire(blocking=False) else arguments[0]


def no_space(*_args, **_kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


# ---- memory and devices


def test_out_of_memory_in_a_target_is_survived_once_and_its_traceback_is_kept(make_run, monkeypatch):
    break_capture(monkeypatch, once(raising(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))))
    config = make_run()
    assert run(config).ledger.committed > 10
    kept = (config.output / "failures.log").read_text()
    assert "target-0" in kept and "Traceback" in kept and "OutOfMemoryError" in kept


def test_a_target_that_never_has_memory_fails_the_run_by_worker_and_row(make_run, monkeypatch):
    break_capture(monkeypatch, raising(torch.OutOfMemoryError("CUDA out of memory")), when=lambda p: p.row_id == 3)
    with pytest.raises(RunFailedError, match=r"target-0: row 3 .*out of memory"):
        run(make_run())


def test_out_of_memory_in_one_of_two_drafters_costs_nothing_but_work(make_run, monkeypatch):
    dying = threading.Lock()

    def die():
        if dying.acquire(blocking=False):
            raise torch.OutOfMemoryError("CUDA out of memory")

    break_step(monkeypatch, die, when=lambda row: row.row_id >= 3)
    config = make_run(TWO_DRAFTERS)
    result = run(config)
    assert result.ledger.committed == result.ledger.planned
    assert "OutOfMemoryError" in (config.output / "failures.log").read_text()


def test_out_of_memory_in_the_only_drafter_fails_the_run_by_name(make_run, monkeypatch):
    break_step(monkeypatch, raising(torch.OutOfMemoryError("CUDA out of memory")))
    with pytest.raises(RunFailedError, match=r"drafter-0: .*out of memory"):
        run(make_run())


def test_a_sticky_device_error_in_a_target_is_not_tried_again(make_run, monkeypatch):
    tries = []
    break_capture(monkeypatch, lambda row: tries.append(row) or raising(RuntimeError(STICKY))())
    with pytest.raises(RunFailedError, match=r"target-0: .*device is lost for this process; resume"):
        run(make_run("pipeline.max_restarts=50", "pipeline.max_set_aside=40"))
    assert len(tries) == 1


def test_a_sticky_device_error_in_one_of_two_drafters_fails_the_run(make_run, monkeypatch):
    break_step(monkeypatch, raising(RuntimeError(STICKY)), when=lambda row: row.row_id == 4)
    with pytest.raises(RunFailedError, match=r"drafter-\d: .*illegal memory access"):
        run(make_run(TWO_DRAFTERS))


# ---- the queue's door


def zero_layer(row):
    row.taps_TF[:, :64] = 0.0
    return row


def cut(**fields):
    return lambda row: dataclasses.replace(row, **{name: change(row) for name, change in fields.items()})


DOOR = {
    "b4: all-zero states": (zero_layer, "layer 0 are all zero"),
    "b6: states one token short": (cut(taps_TF=lambda r: r.taps_TF[:-1]), "tap features is"),
    "b6: token ids one short": (cut(input_ids_T=lambda r: r.input_ids_T[1:]), "token ids is"),
    "loss mask one short": (cut(loss_mask_T=lambda r: r.loss_mask_T[1:]), "loss mask is"),
    "b23: another row's states": (cut(row_id=lambda r: r.row_id + 1), "row id is"),
    "a sample too few": (cut(sample_ids=lambda r: r.sample_ids[1:]), "samples is"),
    "wrong lengths": (cut(lengths=lambda r: (*r.lengths, 1)), "tokens is"),
    "b1: a tap id too many": (cut(tap_layer_ids=lambda r: (0, 2, 3)), "do not split into 3 taps"),
    "infinite states": (cut(taps_TF=lambda r: r.taps_TF * float("inf")), "not finite"),
}


@pytest.mark.parametrize("what", DOOR)
def test_a_row_that_is_not_what_was_planned_is_stopped_at_the_door(make_run, monkeypatch, what):
    change, message = DOOR[what]
    break_capture(monkeypatch, change, when=lambda planned: planned.row_id == 1)
    with pytest.raises(RunFailedError, match=message) as failure:
        run(make_run("max_rows=4"))
    assert "row 1" in str(failure.value) and "sample-" in str(failure.value)


def test_b16_rows_with_bad_states_are_counted_and_limited(make_run, monkeypatch):
    bad = (2, 5)
    spoil = cut(taps_TF=lambda r: r.taps_TF * float("nan"))
    break_capture(monkeypatch, spoil, when=lambda planned: planned.row_id in bad)
    result = run(make_run("pipeline.max_set_aside=20", name="allowed"))
    assert (result.ledger.set_aside, result.ledger.remaining) == (2, 0)
    with pytest.raises(RunFailedError, match="not finite"):
        run(make_run("pipeline.max_set_aside=2", name="refused"))


# ---- disks


def test_a_full_disk_at_a_checkpoint_fails_by_one_line_and_the_run_resumes(make_run, monkeypatch):
    config, saves, save = make_run(), itertools.count(), checkpoint_module.save_file

    def fills_up(*args, **kwargs):
        return no_space() if next(saves) >= 5 else save(*args, **kwargs)

    monkeypatch.setattr(checkpoint_module, "save_file", fills_up)
    with pytest.raises(RunFailedError, match=r"could not be written .*free some space") as failure:
        run(config)
    assert "\n" not in str(failure.value)
    monkeypatch.undo()
    assert not list((config.output / "checkpoints").glob(".tmp-*"))
    committed = read_checkpoint(latest_checkpoint(config.output)[0]).state["ledger"]["n_committed"]
    assert committed > 0
    result = run(config, resume=True)
    assert result.ledger.committed == result.ledger.planned
    assert sum(result.rows_by_drafter) == result.ledger.planned - committed


def test_a_full_disk_under_events_and_metrics_never_stops_the_run(make_run, monkeypatch, caplog):
    class Full:
        write = staticmethod(no_space)
        close = staticmethod(lambda: None)

    init = events_module.EventLog.__init__

    def fills_up(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self._file.close()
        self._file = Full()

    monkeypatch.setattr(events_module.EventLog, "__init__", fills_up)
    monkeypatch.setattr(JsonlTracker, "log", no_space)
    result = run(make_run("monitor.status_every_s=0.05"))
    assert result.ledger.committed == result.ledger.planned
    assert "the event log ends here" in caplog.text and "metrics.jsonl failed" in caplog.text


@pytest.mark.parametrize("damage", ["cut", "flip"])
def test_a_damaged_checkpoint_is_passed_over_and_said_so(make_run, monkeypatch, capfd, damage):
    config = make_run()
    whole = run(config)
    newest, older = list_checkpoints(config.output)[-1], list_checkpoints(config.output)[-2]
    path = newest / "weights.safetensors"
    data = bytearray(path.read_bytes())
    if damage == "cut":
        del data[-1:]
    else:
        data[-1] ^= 0x01
    path.write_bytes(data)
    rows_left = whole.ledger.planned - read_checkpoint(older).state["ledger"]["n_committed"]
    result = run(config, resume=True)
    assert f"checkpoint passed over: {path}" in capfd.readouterr().err
    assert sum(result.rows_by_drafter) == rows_left > 0
    assert latest_checkpoint(config.output) == (newest, [])


def test_e18_a_start_that_was_killed_before_it_was_a_run_can_be_started_again(make_run):
    config = make_run("max_rows=2")
    config.output.mkdir()
    (config.output / "run.json").write_text("{")
    (config.output / "config.yaml.tmp").write_text("output:")
    (config.output / "run.lock").touch()
    with pytest.raises(UserError, match="holds no run to resume"):
        run(config, resume=True)
    assert run(config).ledger.remaining == 0


def test_two_processes_never_write_to_one_run(make_run):
    config = make_run("max_rows=2")
    run(config)
    holds = "import fcntl, sys; f = open(sys.argv[1], 'ab'); fcntl.flock(f, fcntl.LOCK_EX); print('held'); input()"
    other = subprocess.Popen(
        [sys.executable, "-c", holds, str(config.output / "run.lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdout is not None and other.stdout.readline() == "held\n"
    with pytest.raises(UserError, match="another process writes to this run"):
        run(config, resume=True)
    other.kill()
    other.communicate()
    assert run(config, resume=True).ledger.remaining == 0


# ---- time


@pytest.mark.parametrize(("role", "waiting"), [("drafter-0", "target-0"), ("target-0", "drafter-0")])
def test_c7_whoever_hangs_is_named_and_all_stacks_are_dumped(make_run, monkeypatch, role, waiting):
    released = threading.Event()

    def sleeps_for_ever(row=None):
        released.wait(60)
        return row

    monkeypatch.setattr(coordinator_module, "GRACE_S", 0.2)
    if role == "target-0":
        break_capture(monkeypatch, sleeps_for_ever, when=lambda planned: planned.row_id == 2)
    else:
        break_step(monkeypatch, sleeps_for_ever, when=lambda row: row.row_id == 2)
    config = make_run("pipeline.stall_timeout_s=2.5")
    with pytest.raises(RunFailedError, match=f"{role}: no progress for 2.5 s: no sign of {role}") as failure:
        run(config)
    released.set()
    assert f"{waiting} for a" in str(failure.value)
    stacks = (config.output / "stacks.txt").read_text()
    assert "sleeps_for_ever" in stacks
    for thread in (f"thread {role}:", f"thread {waiting}:", "thread MainThread:", "thread monitor:"):
        assert thread in stacks


def test_a_checkpoint_that_takes_longer_than_the_stall_timeout_is_no_stall(make_run, monkeypatch):
    save, slow = checkpoint_module.save_file, once(lambda _: time.sleep(4.0))

    def slow_disk(tensors, path):
        slow(path)
        return save(tensors, path)

    monkeypatch.setattr(checkpoint_module, "save_file", slow_disk)
    result = run(make_run("pipeline.stall_timeout_s=2.5", "max_rows=4"))
    assert result.ledger.committed == result.ledger.planned


def test_a_wall_clock_that_jumps_changes_nothing(make_run, monkeypatch):
    """Deadlines, waits and rates are of the monotonic clock; the wall clock only dates what is shown."""
    jumps = itertools.cycle([0.0, 4e9, -1e9, 1.7e9])
    monkeypatch.setattr(time, "time", lambda: next(jumps))
    result = run(make_run("max_rows=6"))
    assert result.ledger.committed == result.ledger.planned


def test_a_loop_that_dies_of_an_unexpected_error_keeps_its_traceback(make_run, monkeypatch):
    break_step(monkeypatch, raising(ZeroDivisionError("a fault of ours")))
    config = make_run()
    with pytest.raises(RunFailedError, match="drafter-0: ZeroDivisionError: a fault of ours"):
        run(config)
    kept = (config.output / "failures.log").read_text()
    assert "drafter-0\nTraceback" in kept and "a fault of ours" in kept and "forward_backward" in kept


def test_secrets_of_the_environment_reach_no_file_of_a_run(make_run, monkeypatch, capfd):
    """Neither its configuration nor its logs, its checkpoints or the tracebacks of what failed."""
    for name in ("HF_TOKEN", "WANDB_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.setenv(name, "s3cr3t-value")
    break_capture(monkeypatch, once(raising(RuntimeError("injected"))))
    config = make_run("max_rows=4")
    run(config)
    files = [path for path in config.output.rglob("*") if path.is_file()]
    assert {"config.yaml", "failures.log", "events.jsonl", "state.json"} <= {path.name for path in files}
    assert [path for path in files if b"s3cr3t" in path.read_bytes()] == []
    assert "s3cr3t" not in "".join(capfd.readouterr())
