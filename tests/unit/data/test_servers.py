"""Promises of `regenerate` with servers, kept against a server that fails in every way it can.

Every prompt is answered or rejected exactly once, whatever the servers do; a server that is out comes back.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from fake_server import MODEL, FakeServer, always
from server_kit import exactly_once, manifest, options, prompts, rejects, rows, run, text

from draftline.config.schema import TargetConfig
from draftline.data import regenerate_job
from draftline.errors import DraftlineError, UserError

TRANSIENT = [
    "500",
    "503",
    "drop",
    "half",
    "429",
    "408",
    "garbage",
    "latin1",
    "list",
    "surrogate",
    "huge",
    "no choices",
    "no message",
    "number",
    "empty",
    "unfinished",
    "odd end",
    "half a character called",
    "ids too large",
    "ids of another",
    "ids as text",
    "other prompt",
    "other length",
    "other model",
]
REASON = {
    "500": "HTTP 500",
    "drop": "connection dropped",
    "half": "connection dropped",
    "garbage": "malformed JSON",
    "latin1": "not UTF-8",
    "list": "malformed answer",
    "surrogate": "not UTF-8",
    "huge": "reply too large",
    "no choices": "no choices",
    "number": "malformed answer",
    "empty": "empty answer",
    "unfinished": "not finished",
    "odd end": "not finished",
    "half a character called": "not UTF-8",
    "ids too large": "wrong token ids",
    "ids of another": "answer ids disagree",
    "other prompt": "prompt ids disagree",
    "other length": "prompt lengths disagree",
    "other model": "another model",
    "422": "refused by the server",
}


def test_every_prompt_is_answered_once_within_both_bounds_and_the_settings_are_recorded(
    tmp_path: Path, target: TargetConfig
) -> None:
    source = prompts(tmp_path, 60)
    with FakeServer(delay_s=0.005) as a, FakeServer(delay_s=0.005) as b:
        report = run(source, target, options(a, b, concurrency=6), temperature=0.7, top_k=5, seed=3)
        urls = [a.url, b.url]
    assert exactly_once(source, report, 60) and report.rejected == 0
    assert (a.answered + b.answered).total() == 60
    for server in (a, b):
        assert server.answered.total() > 10 and 1 < server.most_in_flight <= 3
    body = a.bodies[0]
    assert (body["temperature"], body["top_k"], body["top_p"], body["max_tokens"]) == (0.7, 5, 1.0, 24)
    assert body["repetition_penalty"] == 1.0 and body["min_p"] == 0.0 and body["return_token_ids"] is True
    assert len({body["seed"] for body in a.bodies + b.bodies}) == 60
    for row in rows(source):
        asked = row["messages"][0]["content"]
        assert row["messages"][1] == {"role": "assistant", "content": f"yes, {asked}"}
        assert row["retokenized"] == "equal" and not row["answer_cut"]
        assert row["answer_token_ids"][-1] == a.tokenizer.eos_token_id
    written = manifest(source)
    assert written["settings"]["target"] == f"served as {MODEL}" and written["settings"]["seed"] == 3
    assert [server["url"].removesuffix("/v1") for server in written["told"]["servers"]] == urls
    assert written["told"]["requests"]["vllm"]["top_k"] == 5
    assert written["result"]["retokenized"] == {"equal": 60}
    assert sum(server["answers"] for server in written["result"]["servers"]) == 60


@pytest.mark.parametrize("fault", TRANSIENT)
def test_a_fault_that_passes_costs_no_prompt(tmp_path: Path, target: TargetConfig, fault: str) -> None:
    source = prompts(tmp_path, 6)
    with FakeServer(always(fault, fault, on="hello 2")) as a, FakeServer(always(fault, on="hello 2")) as b:
        report = run(source, target, options(a, b))
    assert exactly_once(source, report, 6) and report.rejected == 0
    assert (a.answered + b.answered).total() == 6 and (a.asked + b.asked).total() in (7, 8, 9)


@pytest.mark.parametrize("fault", REASON)
def test_a_prompt_that_always_fails_is_rejected_with_the_reason_and_the_others_are_answered(
    tmp_path: Path, target: TargetConfig, fault: str
) -> None:
    source = prompts(tmp_path, 5)
    with FakeServer(always(*[fault] * 99, on="hello 2")) as server:
        report = run(source, target, options(server, tries=3))
        asked = server.asked[text(2)]
    assert exactly_once(source, report, 5)
    assert rejects(source) == {"p2": REASON[fault]} and report.rejected_by_reason == {REASON[fault]: 1}
    assert asked == (1 if fault == "422" else 3)


def test_a_server_that_hangs_is_given_up_after_the_timeout(tmp_path: Path, target: TargetConfig) -> None:
    source = prompts(tmp_path, 6)
    with FakeServer(lambda *_: "hang") as stuck, FakeServer() as good:
        report = run(source, target, options(stuck, good, timeout_s=3.0))
        assert stuck.asked and not stuck.answered
    assert exactly_once(source, report, 6) and report.rejected == 0
    again = run(source, target, options(good))  # nothing is asked again
    assert again.resumed_rows == 6 and good.answered.total() == 6


def test_a_server_that_lists_its_model_but_never_answers_costs_no_prompt_more_than_one_try(
    tmp_path: Path, target: TargetConfig
) -> None:
    source = prompts(tmp_path, 60)
    with FakeServer(lambda *_: "500") as broken, FakeServer(delay_s=0.01) as good:
        report = run(source, target, options(broken, good, tries=2))
    assert exactly_once(source, report, 60) and report.rejected == 0
    assert len(broken.asked) > 3 and set(broken.asked.values()) == {1}


def test_only_answers_that_were_written_are_told_as_a_servers_answers(tmp_path: Path, target: TargetConfig) -> None:
    source = prompts(tmp_path, 20)
    with FakeServer(lambda text, seen: "ids of another") as wrong, FakeServer() as good:
        report = run(source, target, options(wrong, good))
    assert exactly_once(source, report, 20) and report.rejected == 0 and wrong.asked.total() > 0
    assert [server["answers"] for server in manifest(source)["result"]["servers"]] == [0, 20]


def test_a_server_that_goes_away_is_taken_out_and_works_again_when_it_is_back(
    tmp_path: Path, target: TargetConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    """One outage drops many requests at once; it must count as one, and the server must get work again."""
    source = prompts(tmp_path, 260)
    with FakeServer(delay_s=0.01) as a, FakeServer(delay_s=0.01) as b:
        before: list[int] = []

        def bounce() -> None:
            while b.answered.total() < 20:
                time.sleep(0.005)
            b.stop()
            before.append(b.answered.total())
            reached = a.answered.total() + 30
            while a.answered.total() < reached:
                time.sleep(0.005)
            b.start()

        helper = threading.Thread(target=bounce)
        helper.start()
        report = run(source, target, options(a, b, concurrency=16))
        helper.join()
    assert exactly_once(source, report, 260) and report.rejected == 0
    assert b.answered.total() > before[0] + 20
    told = [line for line in capfd.readouterr().err.splitlines() if b.url in line]
    assert [line.split(" is ")[1][:4] for line in told] == ["out:", "back"]


def test_a_server_that_comes_back_with_another_model_stays_out(tmp_path: Path, target: TargetConfig) -> None:
    source = prompts(tmp_path, 40)
    with FakeServer(delay_s=0.01) as a, FakeServer(lambda *_: "500") as b:
        b.delay_s, b.model = 0.0, MODEL

        def swap() -> None:
            while not b.asked:
                time.sleep(0.002)
            b.model = "another"
            b.script = lambda *_: None

        helper = threading.Thread(target=swap)
        helper.start()
        report = run(source, target, options(a, b))
        helper.join()
    assert exactly_once(source, report, 40) and report.rejected == 0
    assert a.answered.total() == 40


def test_too_many_requests_is_no_fault_of_the_prompt_and_the_pause_asked_for_is_kept(
    tmp_path: Path, target: TargetConfig
) -> None:
    source = prompts(tmp_path, 3)
    with FakeServer(always(*["429"] * 12)) as server:
        report = run(source, target, options(server, tries=2, concurrency=1))
    assert exactly_once(source, report, 3) and report.rejected == 0
    (told,) = manifest(source)["result"]["servers"]
    assert told["outages"] == 0 and told["faults"] == 36


def test_a_run_without_servers_ends_and_keeps_the_answers(tmp_path: Path, target: TargetConfig) -> None:
    source = prompts(tmp_path, 200)
    with FakeServer(delay_s=0.01) as server:

        def leave() -> None:
            while server.answered.total() < 10:
                time.sleep(0.005)
            server.stop()

        helper = threading.Thread(target=leave)
        helper.start()
        with pytest.raises(DraftlineError, match=r"no server has answered for 0\.5 s \(last: .*unreachable") as caught:
            run(source, target, options(server, patience_s=0.5))
        helper.join()
        assert caught.value.exit_code == 1
        kept = len(rows(source))
        assert kept >= 10
        server.start()
        report = run(source, target, options(server))
    assert exactly_once(source, report, 200) and report.resumed_rows == kept and report.rejected == 0


def test_servers_that_only_fail_end_the_run_naming_the_reason(
    tmp_path: Path, target: TargetConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    source = prompts(tmp_path, 80)
    with FakeServer(lambda *_: "422") as server, pytest.raises(UserError, match="the first 64 prompts were all rej"):
        run(source, target, options(server))
    assert 64 <= server.asked.total() < 80
    with FakeServer(always(*["empty"] * 99)) as server, pytest.raises(UserError, match="all 5 prompts were rejected"):
        run(prompts(tmp_path, 5), target, options(server, tries=2))
    with FakeServer() as server:
        report = run(prompts(tmp_path, 5), target, options(server))
    assert exactly_once(source, report, 5) and report.rejected == 0


@pytest.mark.parametrize("fault", ["404", "401", "307"])
def test_a_refusal_of_everything_ends_the_run_unless_the_server_has_answered_before(
    tmp_path: Path, target: TargetConfig, fault: str
) -> None:
    source = prompts(tmp_path, 4)
    with FakeServer(lambda *_: fault) as server, pytest.raises(UserError, match=f"HTTP {fault}"):
        run(source, target, options(server))
    assert server.asked.total() <= 4
    with FakeServer(always(fault, on="hello 2")) as server:
        report = run(source, target, options(server, concurrency=1))
    assert exactly_once(source, report, 4) and report.rejected == 0 and server.probes == 2


def test_rejected_prompts_are_asked_again_only_when_told_to(tmp_path: Path, target: TargetConfig) -> None:
    source = prompts(tmp_path, 5)
    with FakeServer(always("422", on="hello 3")) as server:
        assert run(source, target, options(server)).rejected == 1
        assert run(source, target, options(server)).rejected == 1 and server.asked[text(3)] == 1
        report = run(source, target, options(server), retry_rejected=True)
    assert exactly_once(source, report, 5) and report.rejected == 0 and server.asked.total() == 6


def test_prompts_are_rendered_only_as_they_are_asked(
    tmp_path: Path, target: TargetConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered: list[int] = []
    plain = regenerate_job.prompt_ids

    def counted(*args: Any) -> list[int]:
        rendered.append(1)
        return plain(*args)

    monkeypatch.setattr(regenerate_job, "prompt_ids", counted)
    ahead: list[int] = []
    with FakeServer() as server:
        server.script = lambda *_: ahead.append(len(rendered) - server.answered.total())  # type: ignore[func-returns-value]
        run(prompts(tmp_path, 60), target, options(server, concurrency=5))
    assert len(ahead) == 60 and max(ahead) <= 6
