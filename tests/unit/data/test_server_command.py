"""Promises of the command line: signals keep the answers, keys stay secret, mistakes are one line, exit codes hold."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from fake_server import MODEL, FakeServer, always
from server_kit import exactly_once, options, prompts, rows, run

from draftline.cli import main
from draftline.config.schema import TargetConfig
from draftline.data.servers.client import retry_after_s
from draftline.data.servers.options import ApiKey, Backoff, ServerOptions, base_url, key_from_environment
from draftline.errors import UserError

KEY = "sk-veryverysecret1234567890"


def arguments(source: Path, target: TargetConfig, *more: Any) -> list[str]:
    given = ["regenerate", source, "-o", source.parent / "a.jsonl", "--target", target.model, "--max-new-tokens", 24]
    return [str(item) for item in (*given, "--model", MODEL, *more)]


def ended(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> int:
    """Exit code of the command, run in this process."""
    monkeypatch.setattr(sys, "argv", ["draftline", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    return int(caught.value.code or 0)


def started(source: Path, target: TargetConfig, *more: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", "from draftline.cli import main; main()", *arguments(source, target, *more)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_at_once_with_the_answers_kept(
    tmp_path: Path,
    target: TargetConfig,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    number: signal.Signals,
) -> None:
    source, handlers = prompts(tmp_path, 60), [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    with FakeServer(lambda text, seen: "hang" if int(text[6:-1]) >= 40 else None) as server:
        helper = threading.Thread(target=send_later, args=(number, server, 10))
        helper.start()
        assert ended(monkeypatch, arguments(source, target, "--server", server.url, "--concurrency", 4)) == 128 + number
        helper.join()
        (line,) = capfd.readouterr().err.splitlines()
        kept = len(rows(source))
        assert f"stopped by {number.name}; {kept} answers are kept, start again to go on" in line
        assert server.answered.total() - 4 <= kept, "only what was under way may be lost"
        server.script = lambda text, seen: None
        report = run(source, target, options(server))
    assert exactly_once(source, report, 60) and report.resumed_rows == kept and report.rejected == 0
    assert sum(count > 1 for count in server.answered.values()) <= 4
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == handlers


def send_later(number: int, server: FakeServer, answered: int) -> None:
    while server.answered.total() < answered or server.in_flight == 0:
        time.sleep(0.005)
    os.kill(os.getpid(), number)


@pytest.mark.long
def test_a17_a_killed_client_goes_on_without_losing_or_doubling_a_prompt(tmp_path: Path, target: TargetConfig) -> None:
    source, output = prompts(tmp_path, 60), tmp_path / "a.jsonl"
    with FakeServer(delay_s=0.05) as server:
        child = started(source, target, "--server", server.url, "--concurrency", 2)
        try:
            while child.poll() is None and not (output.is_file() and output.read_bytes().count(b"\n") >= 4):
                time.sleep(0.01)
            child.kill()
            _, errors = child.communicate()
        finally:
            child.kill()
        assert child.returncode == -signal.SIGKILL, errors
        kept = output.read_bytes()
        assert 4 <= kept.count(b"\n") < 60
        report = run(source, target, options(server))
    assert output.read_bytes().startswith(kept)
    assert exactly_once(source, report, 60) and report.resumed_rows == kept.count(b"\n") and report.rejected == 0
    asked_twice = [text for text, count in server.answered.items() if count > 1]
    assert len(asked_twice) <= 10, "only what was under way or not yet on the disk may be asked again"


def test_keys_are_sent_and_never_shown(
    tmp_path: Path,
    target: TargetConfig,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The server repeats the key in its error texts, as real ones do."""
    monkeypatch.setenv("SOME_KEY", f" {KEY}\n")
    source = prompts(tmp_path, 3)
    for script, code in (
        (always("500", "429"), 0),
        (lambda *_: "401", 2),
        (lambda *_: "422", 2),
        (lambda *_: "307", 2),
    ):
        (tmp_path / "a.jsonl").unlink(missing_ok=True)
        with FakeServer(script) as server:
            told = arguments(source, target, "--server", server.url, "--api-key-env", "SOME_KEY", "--tries", 4)
            assert ended(monkeypatch, told) == code
        assert {headers["Authorization"] for headers in server.headers} == {f"Bearer {KEY}"}
        seen = capfd.readouterr()
        assert KEY not in seen.out + seen.err + caplog.text and "Traceback" not in seen.err
        assert code == 0 or len(seen.err.splitlines()) == 1
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or KEY.encode() not in path.read_bytes()
    shown = ServerOptions(("http://h",), api_key=ApiKey(KEY))
    assert KEY not in repr(shown) + str(shown) + str(shown.api_key)


def test_a_run_in_which_every_prompt_is_rejected_exits_2_with_one_line(
    tmp_path: Path, target: TargetConfig, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    source = prompts(tmp_path, 3)
    with FakeServer(always(*["other length"] * 9)) as server:
        assert ended(monkeypatch, arguments(source, target, "--server", server.url, "--tries", 2)) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "all 3 prompts were rejected, 3 of them for: prompt lengths disagree" in line
    assert "the server counted 3 tokens, our template renders" in line
    assert ended(monkeypatch, [*arguments(source, target)[:6], "--max-new-tokens", "400", "--device", "cpu"]) == 2
    errors = capfd.readouterr().err  # the bar of the loading of weights is in it
    assert errors.count("draftline: ") == 1
    assert "all 3 prompts were rejected, 3 of them for: prompt too long; lower --max-new-tokens" in errors
    assert json.loads((tmp_path / "a.manifest.json").read_text())["result"]["rejected"] == {"prompt too long": 3}


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--server", "ftp://h"], "not an http address"),
        (["--server", "http://user:pass@h"], "the address of h holds more than a place"),
        (["--server", "http://h?key=pass"], "the address of h holds more than a place"),
        (["--server", "http://h", "--server", "http://h/v1/"], "a server is named twice"),
        (["--server", "http://h", "--api-key-env", "UNSET_KEY"], "--api-key-env UNSET_KEY: the environment variable"),
        (["--server", "http://h", "--extra-body", "{"], "--extra-body: not JSON"),
        (["--server", "http://h", "--extra-body", '{"seed": 1}'], "`seed` is set by draftline itself"),
        (["--server", "http://h", "--server-kind", "x"], "unknown kind 'x'"),
        (["--server", "http://h", "--endpoint", "x"], "unknown endpoint 'x'"),
        (["--server", "http://h", "--timeout-s", "0"], "timeout_s is 0.0"),
        ([], "are for servers; name one with --server"),
    ],
)
def test_wrong_options_are_one_line_and_leave_nothing(
    tmp_path: Path,
    target: TargetConfig,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    more: list[str],
    says: str,
) -> None:
    source = prompts(tmp_path, 1)
    assert ended(monkeypatch, arguments(source, target, *more)) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert says in line and "pass" not in line.replace("--api-key-env", "").replace("passwords", "")
    assert [path.name for path in tmp_path.iterdir()] == [source.name]


def test_a_missing_client_is_named_with_its_extra(
    tmp_path: Path, target: TargetConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    with pytest.raises(UserError, match=r"asking servers needs `aiohttp`; pip install 'draftline\[servers\]'"):
        run(prompts(tmp_path, 1), target, ServerOptions(("http://h",)))


def test_going_on_with_another_model_or_another_way_is_refused(tmp_path: Path, target: TargetConfig) -> None:
    source = prompts(tmp_path, 3)
    with FakeServer() as server:
        run(source, target, options(server), limit=1)
        assert rows(source)
        with pytest.raises(UserError, match=f"begun with target served as {MODEL}, now it is served as other"):
            run(source, target, options(server, model="other"))
        with pytest.raises(UserError, match=f"begun with target served as {MODEL}, now it is [0-9a-f]+"):
            run(source, target, None)  # type: ignore[arg-type]
        with pytest.raises(UserError, match="begun with endpoint chat, now it is completions"):
            run(source, target, options(server, endpoint="completions"))


def test_addresses_pauses_and_keys_are_read_as_people_write_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert base_url("http://h:8000") == base_url("http://h:8000/v1/") == "http://h:8000/v1"
    assert base_url("https://h/api/openai/") == "https://h/api/openai"
    assert [retry_after_s(v) for v in ("2", "0.5", "-1", "x", None, "inf", "nan")] == [
        2,
        0.5,
        0,
        None,
        None,
        None,
        None,
    ]
    assert retry_after_s("Fri, 01 Jan 2100 00:00:00 GMT") > 1e9  # type: ignore[operator]
    assert retry_after_s("Fri, 01 Jan 1999 00:00:00 GMT") == 0
    assert [Backoff(0.5, 3).after(n) for n in (0, 1, 2, 3, 4, 9999)] == [0.5, 0.5, 1, 2, 3, 3]
    monkeypatch.setenv("BAD_KEY", "two words")
    with pytest.raises(UserError, match="--api-key-env BAD_KEY: holds characters that no key has"):
        key_from_environment("BAD_KEY")


def test_a_model_that_is_not_here_with_the_hub_out_of_reach_is_one_line_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nothing is tried again: one look at the hub, then only the cache is read."""
    from huggingface_hub import constants

    looks: list[str] = []
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.utils._http.http_backoff", lambda method, url, **_: looks.append(url))
    given = ["regenerate", str(prompts(tmp_path, 1)), "-o", str(tmp_path / "a.jsonl"), "--target", "nobody/no-model"]
    assert ended(monkeypatch, [*given, "--device", "cpu"]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "nobody/no-model: no such folder, not in the local cache, and the model hub cannot be reached" in line
    assert not looks
