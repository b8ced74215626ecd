"""Promises of `prepare` with several processes: the same data for any number, and nothing is half-written."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import data_kit as kit
import pytest

from draftline.config.schema import TargetConfig
from draftline.data import conversations, parallel
from draftline.data import prepare as module
from draftline.data.parallel import row_workers
from draftline.data.prepare import PrepareReport, prepare
from draftline.data.template import ChatTemplate
from draftline.data.work import Chunk, WorkSpec
from draftline.errors import RunFailedError, UserError

TARGET = TargetConfig(model="tiny")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    chat = ChatTemplate(kit.tokenizer_with(kit.STRICT_ROLES))
    monkeypatch.setattr(module, "load_template", lambda config: chat)
    monkeypatch.setattr(module, "CHUNK_ROWS", 7)


def rows() -> list[Any]:
    """Good rows, duplicates, rows without an id, one that the template refuses, one that is too long."""
    good: list[Any] = [{"messages": kit.talk(f"hello {i % 45}", f"yes {i % 45} one")} for i in range(60)]
    good += [{"id": "x", "messages": kit.talk(f"say {i}", "no")} for i in range(5)]
    refused = {"messages": [*kit.talk("a", "b"), {"role": "assistant", "content": "c"}]}
    return [*good, refused, {"messages": kit.talk("hello " * 400, "yes")}]


def run(tmp_path: Path, name: str, content: list[Any], workers: int, **options: Any) -> PrepareReport:
    source = kit.write_lines(tmp_path / "in.jsonl", content)
    settings = {"max_tokens": 100, "validation_fraction": 0.3, **options}
    return prepare([str(source)], tmp_path / name, target=TARGET, workers=workers, **settings)


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_data_is_the_same_for_any_number_of_workers(tmp_path: Path) -> None:
    reports = [run(tmp_path, f"w{n}", rows(), n) for n in (1, 2)]
    assert reports[0].rejected_by_reason == {"duplicate": 15, "template refused": 1, "prompt too long": 1}
    assert reports[0].out_rows == 50
    assert tree(tmp_path / "w1") == tree(tmp_path / "w2")
    with pytest.raises(UserError) as one:
        run(tmp_path, "bad", [*rows(), b"{", b"["], 1)
    with pytest.raises(UserError) as two:
        run(tmp_path, "bad", [*rows(), b"{", b"["], 2)
    assert str(one.value) == str(two.value) and "in.jsonl:68: not JSON" in str(one.value)
    assert not (tmp_path / "bad").exists()


def test_a_killed_worker_ends_the_run_by_name_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    receive = parallel._Crew._receive

    def kill_first(crew: Any, i: int) -> Any:
        os.kill(crew._processes[0].pid, signal.SIGKILL)
        crew._processes[0].join()
        return receive(crew, i)

    monkeypatch.setattr(parallel._Crew, "_receive", kill_first)
    with pytest.raises(RunFailedError, match=r"prepare-0: a process was killed by SIGKILL; nothing was written"):
        run(tmp_path, "out", rows(), 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl"]


def test_a_row_that_is_too_long_is_counted_alike_by_any_number_of_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversations, "MAX_LINE_BYTES", 1000)
    content = [*rows()[:20], {"messages": kit.talk("x" * 2000, "yes")}]
    for n in (1, 2):
        report = run(tmp_path, f"w{n}", content, n, skip_bad_rows=True)
        assert report.rejected_by_reason["line too long"] == 1 and report.in_rows == 21
        assert report.first_bad is not None and "in.jsonl:21: the line is longer than 1000 bytes" in report.first_bad
    assert tree(tmp_path / "w1") == tree(tmp_path / "w2")


class Unreadable:
    """Cannot be read back from a pipe."""

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return int, ("no number",)


def test_a_chunk_that_a_worker_cannot_read_ends_the_run_and_is_not_waited_for() -> None:
    spec = WorkSpec(ChatTemplate(kit.tokenizer_with(kit.CHATML)), 100, "all")
    with pytest.raises(RunFailedError, match="prepare-0: a process ended with"), row_workers(spec, 2) as work:
        list(work([Chunk(0, [(1, Unreadable())])]))


ENDLESS = """
import sys, time
sys.path.insert(0, "HERE")
import data_kit as kit
from draftline import cli
from draftline.data import prepare
from draftline.data.template import ChatTemplate

def rows(source):
    for i in range(20):
        yield i + 1, b'{"prompt": "a %d", "response": "yes one two"}' % i
    print("reading", flush=True)
    time.sleep(60)

if __name__ == "__main__":
    prepare.raw_rows, prepare.CHUNK_ROWS = rows, 5
    prepare.load_template = lambda config: ChatTemplate(kit.tokenizer_with(kit.CHATML))
    cli.main()
""".replace("HERE", str(Path(kit.__file__).parent))


@pytest.mark.parametrize(("number", "code", "workers"), [(signal.SIGINT, 130, "2"), (signal.SIGTERM, 143, "1")])
def test_a_stopped_run_leaves_nothing_and_no_process_and_a_second_one_is_refused_meanwhile(
    tmp_path: Path, number: signal.Signals, code: int, workers: str
) -> None:
    script, output = tmp_path / "run.py", tmp_path / "out"
    script.write_text(ENDLESS)
    command = [sys.executable, str(script), "prepare", "in", "-o", str(output), "--target", "tiny"]
    process = subprocess.Popen(
        [*command, "--workers", workers],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "reading\n"
    with pytest.raises(UserError, match="another process is writing to this folder"):
        run(tmp_path, "out", rows(), 1)
    os.kill(process.pid, number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code and errors.count("\n") == 1 and "Traceback" not in errors
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "run.py"]
    assert_group_ends(process.pid)


IDLE = """
import sys, time
sys.path.insert(0, sys.argv[1])
import data_kit as kit
from draftline.data.parallel import row_workers
from draftline.data.template import ChatTemplate
from draftline.data.work import WorkSpec

if __name__ == "__main__":
    with row_workers(WorkSpec(ChatTemplate(kit.tokenizer_with(kit.CHATML)), 100, "all"), 2):
        print("working", flush=True)
        time.sleep(60)
"""


def test_workers_end_when_the_main_process_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(IDLE)
    command = [sys.executable, str(script), str(Path(kit.__file__).parent)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
    assert process.stdout is not None and process.stdout.readline() == b"working\n"
    process.kill()
    process.communicate(timeout=60)
    assert_group_ends(process.pid)


def assert_group_ends(group: int) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    raise AssertionError("a worker process outlived the run")
