"""Signals sent to a real `draftline train`: a usable checkpoint, the right exit code, and a run that goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from draftline import cli
from draftline.errors import RunStoppedError
from draftline.pipeline import coordinator as coordinator_module
from draftline.pipeline.checkpoint import latest_checkpoint, list_checkpoints, read_checkpoint
from draftline.pipeline.coordinator import train
from draftline.pipeline.runplan import make_run_plan
from draftline.pipeline.signals import StopSignals

pytestmark = pytest.mark.long

LONG = ("epochs=4", "sync.every_rows=1")  # enough rounds to be stopped between two checkpoints
WAITS_FOR_EVER = """
import threading
from draftline.pipeline.signals import StopSignals
with StopSignals() as signals, signals.stopping_by(lambda reason: print(reason, flush=True)):
    print("ready", flush=True)
    threading.Event().wait()
"""


def start(config_file: Path, output: Path, *options: str) -> subprocess.Popen[str]:
    command = [str(Path(sys.executable).with_name("draftline")), "train", "-c", str(config_file), *options]
    command += [*LONG, f"output={output}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def stop_after_a_checkpoint(process: subprocess.Popen[str], output: Path, number: int) -> tuple[int, str]:
    """Sends the signal once the process has written a checkpoint; returns exit code and standard error."""
    while process.poll() is None and not list_checkpoints(output):
        time.sleep(0.01)
    process.send_signal(number)
    _, errors = process.communicate(timeout=120)
    return process.returncode, errors


@contextmanager
def signalled_after_a_checkpoint(output: Path, number: int) -> Iterator[None]:
    """Sends the signal to this process once a checkpoint more has been written."""
    before, over = {path.name for path in list_checkpoints(output)}, threading.Event()

    def watch() -> None:
        while not over.wait(0.01):
            if not {path.name for path in list_checkpoints(output)} <= before:
                os.kill(os.getpid(), number)
                return

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def committed_rows(output: Path) -> int:
    found = latest_checkpoint(output)
    assert found is not None and found[1] == []
    return int(read_checkpoint(found[0]).state["ledger"]["n_committed"])


def test_sigterm_and_sigint_leave_a_usable_checkpoint_and_the_run_goes_on_to_its_end(make_run, tmp_path):
    config = make_run(*LONG)  # writes run.yaml, without them
    config_file, output = tmp_path / "run.yaml", config.output
    code, errors = stop_after_a_checkpoint(start(config_file, output), output, signal.SIGTERM)
    assert code == 143, errors
    assert "stop asked for by signal SIGTERM" in errors and "resume with --resume" in errors
    assert "Traceback" not in errors
    first = committed_rows(output)
    with signalled_after_a_checkpoint(output, signal.SIGINT), pytest.raises(RunStoppedError) as stopped:
        train(make_run_plan(config), resume=True)  # in this process: starting another takes longer than all the rest
    assert stopped.value.exit_code == 130
    assert 0 < first < committed_rows(output)
    result = train(make_run_plan(config), resume=True)
    assert "in flight 0 + remaining 0" in "\n".join(result.summary_lines())


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_ends_the_process_at_once(second: signal.Signals):
    process = subprocess.Popen([sys.executable, "-c", WAITS_FOR_EVER], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "signal SIGTERM\n"
    process.send_signal(second)
    assert process.wait(60) == -second  # a shell shows it as 143 or 130
    process.stdout.close()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_while_the_target_loads_ends_the_run_by_name_and_leaves_no_run(make_run, monkeypatch, number, code):
    config = make_run()

    def interrupted(plan):
        try:
            os.kill(os.getpid(), number)
            time.sleep(60)
        except Exception:  # noqa: BLE001  what a library may do: it must not swallow the signal
            return []
        return []

    monkeypatch.setattr(coordinator_module, "load_targets", interrupted)
    before = signal.getsignal(number)
    with pytest.raises(RunStoppedError, match=f"stopped by {number.name} while nothing was being trained") as stopped:
        train(make_run_plan(config))
    assert stopped.value.exit_code == code
    assert signal.getsignal(number) is before
    assert not config.output.exists()


def test_handlers_are_put_back_and_a_thread_other_than_the_main_one_sets_none():
    before, inside = signal.getsignal(signal.SIGTERM), []

    def look() -> None:
        with StopSignals() as signals, signals.stopping_by(lambda reason: None):
            inside.append(signal.getsignal(signal.SIGTERM))

    look()
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert inside[0] is not before and inside[1] is before
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_that_a_library_swallowed_stops_the_run_at_the_next_look():
    with pytest.raises(RunStoppedError) as stopped, StopSignals() as signals:
        with suppress(BaseException):  # as an extension module does that imports another one
            signal.raise_signal(signal.SIGINT)
        assert signals.received == signal.SIGINT
        signals.end_if_received()
    assert stopped.value.exit_code == 130


def test_a_signal_that_a_library_swallowed_stops_the_training_that_begins_after_it():
    reasons, told = [], threading.Event()

    def stop(reason: str) -> None:
        reasons.append(reason)
        told.set()

    with StopSignals() as signals:
        with suppress(BaseException):
            signal.raise_signal(signal.SIGTERM)
        with signals.stopping_by(stop):
            assert told.wait(30)
    assert reasons == ["signal SIGTERM"]


def test_ctrl_c_in_any_command_ends_with_130_and_a_word(monkeypatch, capsys) -> None:
    def interrupted(*_arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("draftline.config.load.load_config", interrupted)
    monkeypatch.setattr("sys.argv", ["draftline", "train", "-c", "run.yaml"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 130
    assert capsys.readouterr().err == "draftline: interrupted\n"
