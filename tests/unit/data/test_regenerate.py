"""Promises of `regenerate`: every prompt answered exactly once, also over a kill; labels are what the target wrote.

A17: a killed run goes on where it was. A9: ids equal or refused. A21: several end tokens all stop.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import data_kit as kit
import pytest
import torch

from draftline.config.schema import TargetConfig
from draftline.data import answering
from draftline.data.answer_log import AnswerLog
from draftline.data.answering import Prompt, Sampling, SeededSampler, answer_batch, batches_of
from draftline.data.chat import render_prompt
from draftline.data.prepare import prepare
from draftline.data.regenerate import RegenerateReport, regenerate
from draftline.data.shards import TokenDataset
from draftline.errors import UserError
from draftline.target.load import LoadedTarget, load_target

N = 24
WORDS = ("hello", "and then", "one two three", "the quick brown fox", "maybe no", "yes")


@pytest.fixture(scope="module")
def loaded(target: TargetConfig) -> LoadedTarget:
    return load_target(target, "cpu")


@pytest.fixture(autouse=True)
def one_load(monkeypatch: pytest.MonkeyPatch, loaded: LoadedTarget) -> None:
    monkeypatch.setattr("draftline.target.load.load_target", lambda config, device, tokenizer: loaded)


def prompts(tmp_path: Path, n: int = N) -> Path:
    rows = [{"id": f"p{i}", "prompt": f"{WORDS[i % len(WORDS)]} {i}"} for i in range(n)]
    return kit.write_lines(tmp_path / "prompts.jsonl", rows)


def run(source: Path, output: Path, target: TargetConfig, **options: Any) -> RegenerateReport:
    options = {"max_new_tokens": 12, "batch_size": 5, "temperature": 1.0, "device": "cpu"} | options
    return regenerate(str(source), output, target=target, **options)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def by_id(path: Path) -> dict[str, list[int]]:
    return {line["id"]: line["answer_token_ids"] for line in lines(path)}


def balanced(report: RegenerateReport) -> bool:
    return report.in_rows == report.out_rows + report.rejected


def test_a21_answers_end_at_any_stop_token_or_are_marked_as_cut(tmp_path: Path, target: TargetConfig) -> None:
    report = run(prompts(tmp_path), tmp_path / "a.jsonl", target)
    assert balanced(report) and report.in_rows == N
    stops = {kit.tokenizer_with(kit.CHATML).eos_token_id, *kit.STOPS}
    seen = set()
    for line in lines(report.output):
        ids = line["answer_token_ids"]
        assert line["messages"][-1]["role"] == "assistant" and line["messages"][-1]["content"].strip()
        assert not stops & set(ids[:-1]) and len(ids) <= 12
        assert line["answer_cut"] == (ids[-1] not in stops)
        assert len(ids) == 12 or not line["answer_cut"]
        seen.add(ids[-1])
    assert len(seen & stops) > 1 and report.n_answer_cut > 0


def test_greedy_answers_are_the_plain_argmax_whatever_the_model_settings_ask(
    tmp_path: Path, target: TargetConfig, loaded: LoadedTarget
) -> None:
    """The fixture's generation settings ask for sampling and a repetition penalty of 5; neither may be seen."""
    run(prompts(tmp_path, 6), tmp_path / "a.jsonl", target, temperature=0.0)
    answers = by_id(tmp_path / "a.jsonl")
    tokenizer = kit.tokenizer_with(kit.CHATML)
    for line in lines(tmp_path / "a.jsonl"):
        ids = render_prompt(tokenizer, line["messages"][:-1])
        n_prompt = len(ids)
        for _ in answers[line["id"]]:
            with torch.no_grad():
                logits = loaded.model(torch.tensor([ids])).logits[0, -1]
            ids.append(int(logits.argmax()))
        assert ids[n_prompt:] == answers[line["id"]]


def test_sampled_answers_depend_on_prompt_and_seed_and_not_on_the_batch(tmp_path: Path, target: TargetConfig) -> None:
    source = prompts(tmp_path)
    run(source, tmp_path / "a.jsonl", target, batch_size=1)
    run(source, tmp_path / "b.jsonl", target, batch_size=7)
    run(source, tmp_path / "c.jsonl", target, seed=1)
    a, b, c = (by_id(tmp_path / f"{name}.jsonl") for name in "abc")
    assert a == b
    assert sum(a[name] != c[name] for name in a.keys() & c.keys()) > N // 2


def test_the_same_words_under_two_ids_are_sampled_independently(tmp_path: Path, target: TargetConfig) -> None:
    source = kit.write_lines(tmp_path / "in.jsonl", [{"id": f"p{i}", "prompt": "hello"} for i in range(8)])
    run(source, tmp_path / "a.jsonl", target)
    assert len(set(map(tuple, by_id(tmp_path / "a.jsonl").values()))) > 4


def test_sampler_draws_from_the_distribution_after_temperature_top_k_and_top_p() -> None:
    logits = torch.tensor([3.0, 2.0, 1.0, 0.0, -1.0])
    draws = 4000
    numbers = (torch.arange(draws, dtype=torch.float64) + 0.5) / draws
    cases = [
        (Sampling(1.0), torch.softmax(logits, 0)),
        (Sampling(0.5), torch.softmax(logits / 0.5, 0)),
        (Sampling(1.0, top_k=2), torch.softmax(logits[:2], 0)),
        (Sampling(1.0, top_p=0.5), torch.tensor([1.0])),
    ]
    for sampling, expected in cases:
        scores = SeededSampler(sampling, 3, numbers[:, None])(torch.zeros(draws, 3), logits.repeat(draws, 1))
        share = torch.bincount(scores.argmax(-1), minlength=5) / draws
        assert torch.allclose(share[: len(expected)], expected, atol=1e-3)
        assert (scores > -torch.inf).sum(-1).eq(1).all()


def test_a9_prepare_takes_the_very_ids_that_were_generated(tmp_path: Path, target: TargetConfig) -> None:
    report = run(prompts(tmp_path), tmp_path / "a.jsonl", target)
    prepared = prepare([str(report.output)], tmp_path / "data", target=target, max_tokens=200)
    assert prepared.rejected_by_reason.keys() <= {"no supervised token left"}
    data, answers = TokenDataset.open(tmp_path / "data"), by_id(report.output)
    for i in range(len(data)):
        sample = data.sample(i)
        assert sample.input_ids[sample.loss_mask].tolist() == answers[sample.sample_id]
    assert prepared.manifest.n_answer_cut == report.n_answer_cut


KILLED = """
import sys, time
from pathlib import Path
from draftline.config.schema import TargetConfig
from draftline.data.answer_log import AnswerLog
from draftline.data.regenerate import regenerate
append = AnswerLog.append
def slow(self, *batch):
    append(self, *batch)
    time.sleep(0.3)
AnswerLog.append = slow
regenerate(sys.argv[1], Path(sys.argv[2]), target=TargetConfig(model=sys.argv[3]), device="cpu", max_new_tokens=12,
           batch_size=2, temperature=1.0, limit=20)
"""


@pytest.mark.long
def test_a17_a_killed_run_goes_on_without_losing_or_doubling_a_row(tmp_path: Path, target: TargetConfig) -> None:
    source, output = prompts(tmp_path), tmp_path / "killed.jsonl"
    child = subprocess.Popen([sys.executable, "-c", KILLED, str(source), str(output), target.model])
    try:
        while child.poll() is None and not (output.is_file() and output.read_bytes().count(b"\n") >= 5):
            time.sleep(0.02)
        assert child.poll() is None, "it ended before it could be killed"
        os.kill(child.pid, signal.SIGKILL)
    finally:
        child.kill()
        child.wait()
    before = output.read_bytes()
    assert 5 <= before.count(b"\n") < 20
    output.write_bytes(before + b'{"id": "p3", "messages": [{"ro')  # a line torn by the kill
    report = run(source, output, target, batch_size=3)  # another batch size and limit are allowed
    ids = [line["id"] for line in lines(output)]
    assert output.read_bytes().startswith(before)
    assert len(ids) == len(set(ids)) == report.out_rows and balanced(report) and report.in_rows == N
    assert report.resumed_rows == before.count(b"\n")
    assert all(line["messages"][-1]["role"] == "assistant" for line in lines(output))
    run(source, tmp_path / "whole.jsonl", target)
    assert by_id(output) == by_id(tmp_path / "whole.jsonl")


def test_a_finished_run_called_again_does_nothing(
    tmp_path: Path, target: TargetConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, output = prompts(tmp_path), tmp_path / "a.jsonl"
    first = run(source, output, target)
    before = output.read_bytes()

    def no_load(*_: Any, **__: Any) -> None:
        raise AssertionError("the target was loaded for nothing")

    monkeypatch.setattr("draftline.target.load.load_target", no_load)
    again = run(source, output, target)
    assert output.read_bytes() == before and balanced(again)
    assert (again.out_rows, again.rejected_by_reason) == (first.out_rows, first.rejected_by_reason)
    assert again.resumed_rows == first.out_rows and again.new_tokens == 0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"max_new_tokens": 8}, "begun with max_new_tokens 12, now it is 8"),
        ({"temperature": 0.5}, "begun with temperature 1.0, now it is 0.5"),
        ({"seed": 3}, "begun with seed 0, now it is 3"),
        ({"max_prompt_tokens": 50}, "begun with max_prompt_tokens context, now it is 50"),
    ],
)
def test_going_on_with_other_settings_is_refused_naming_both(
    tmp_path: Path, target: TargetConfig, change: dict[str, Any], says: str
) -> None:
    source, output = prompts(tmp_path, 3), tmp_path / "a.jsonl"
    run(source, output, target)
    with pytest.raises(UserError, match=says):
        run(source, output, target, **change)


def test_going_on_with_other_prompts_or_another_target_is_refused(
    tmp_path: Path, target: TargetConfig, monkeypatch: pytest.MonkeyPatch, loaded: LoadedTarget
) -> None:
    import dataclasses

    output = tmp_path / "a.jsonl"
    source = prompts(tmp_path, 3)
    run(source, output, target, limit=1)
    other = dataclasses.replace(loaded, fingerprint="f" * 32)
    monkeypatch.setattr("draftline.target.load.load_target", lambda config, device, tokenizer: other)
    with pytest.raises(UserError, match=f"begun with target {loaded.fingerprint}, now it is {'f' * 32}"):
        run(source, output, target)
    prompts(tmp_path, 4)
    with pytest.raises(UserError, match=r"begun with prompts [0-9a-f]+, now it is [0-9a-f]+"):
        run(source, output, target)


def test_prompts_that_cannot_be_served_are_counted(tmp_path: Path, target: TargetConfig) -> None:
    rows = [{"prompt": "hello"}, {"prompt": "hello there " * 200}, {"messages": [{"role": "system", "content": "a"}]}]
    source = kit.write_lines(tmp_path / "in.jsonl", [*rows, b"{broken"])
    with pytest.raises(UserError, match=r"in\.jsonl:3: there is no user turn to answer"):
        run(source, tmp_path / "a.jsonl", target)
    report = run(source, tmp_path / "a.jsonl", target, skip_bad_rows=True, temperature=0.0)
    assert balanced(report) and report.in_rows == 4
    assert report.rejected_by_reason == {"no user turn": 1, "not JSON": 1, "prompt too long": 1}


def test_an_empty_answer_is_rejected_once_and_not_asked_again(
    tmp_path: Path, target: TargetConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = kit.tokenizer_with(kit.CHATML).eos_token_id
    asked: list[str] = []

    def silent(target: Any, batch: list[Prompt], **_: Any) -> list[answering.Answer]:
        asked.extend(prompt.id for prompt in batch)
        return [answering.Answer([end] if prompt.id == "p1" else [300, end], False) for prompt in batch]

    monkeypatch.setattr(answering, "answer_batch", silent)
    source, output = prompts(tmp_path, 4), tmp_path / "a.jsonl"
    first, again = (run(source, output, target, limit=n) for n in (3, 4))
    assert first.rejected_by_reason == again.rejected_by_reason == {"empty answer": 1}
    assert balanced(first) and balanced(again) and (first.out_rows, again.out_rows) == (2, 3)
    assert sorted(asked) == ["p0", "p1", "p2", "p3"]


def test_a_given_answer_is_replaced_and_earlier_ones_stay_as_unlearned_context(
    tmp_path: Path, target: TargetConfig
) -> None:
    source = kit.write_lines(tmp_path / "in.jsonl", [{"id": "a", "messages": kit.talk("one", "FOREIGN", "two", "OLD")}])
    report = run(source, tmp_path / "a.jsonl", target, seed=4)
    (line,) = lines(report.output)
    assert [m["content"] for m in line["messages"][:3]] == ["one", "FOREIGN", "two"]
    assert line["messages"][3]["content"] != "OLD" and line["turns"] == "last"
    prepare([str(report.output)], tmp_path / "data", target=target, max_tokens=200)
    sample = TokenDataset.open(tmp_path / "data").sample(0)
    assert sample.input_ids[sample.loss_mask].tolist() == line["answer_token_ids"]


def test_foreign_and_damaged_outputs_are_refused(tmp_path: Path, target: TargetConfig) -> None:
    source = prompts(tmp_path, 3)
    foreign = kit.write_lines(tmp_path / "foreign.jsonl", [{"id": "x"}])
    with pytest.raises(UserError, match="was not written by `regenerate`"):
        run(source, foreign, target)
    with pytest.raises(UserError, match=r"the output must be a \.jsonl file"):
        run(source, tmp_path / "answers", target)
    output = tmp_path / "a.jsonl"
    run(source, output, target)
    first, *rest = output.read_bytes().splitlines(keepends=True)
    output.write_bytes(first[:-9] + b"\n" + b"".join(rest))
    with pytest.raises(UserError, match=r"a\.jsonl:1: damaged line"):
        run(source, output, target)


def test_a_file_that_is_removed_while_it_is_written_is_one_line(tmp_path: Path) -> None:
    removed = pytest.raises(UserError, match=r"answers\.jsonl: was removed while it was written; start again")
    with removed, AnswerLog(tmp_path / "answers.jsonl") as log:
        log.append([{"id": "a", "answer_cut": False}], [])
        (tmp_path / "answers.jsonl").unlink()
        log.append([{"id": "b", "answer_cut": False}], [])


def test_two_runs_into_one_file_the_second_is_refused(tmp_path: Path, target: TargetConfig) -> None:
    output = tmp_path / "a.jsonl"
    with AnswerLog(output), pytest.raises(UserError, match="another process is writing to it"):
        run(prompts(tmp_path, 3), output, target)


@pytest.mark.parametrize(
    "option",
    [
        {"temperature": -1.0},
        {"temperature": 1e-40},
        {"seed": -1},
        {"seed": 2**64},
        {"top_p": 0.0},
        {"max_new_tokens": 0},
        {"batch_size": 0},
        {"batch_size": 2**63},
    ],
)
def test_wrong_settings_are_refused(tmp_path: Path, target: TargetConfig, option: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"{next(iter(option))} is .*; set it to "):
        run(prompts(tmp_path, 1), tmp_path / "a.jsonl", target, **option)


def test_batches_are_of_similar_length_and_of_equal_length_for_recurrent_targets() -> None:
    mixed = [Prompt(f"p{i}", [0] * (1 + i % 3)) for i in range(10)]
    batches = batches_of(mixed, 4, same_length=False)
    assert [len(b) for b in batches] == [4, 4, 2]
    assert [len(p.input_ids) for b in batches for p in b] == sorted(len(p.input_ids) for p in mixed)
    for batch in batches_of(mixed, 4, same_length=True):
        assert len({len(p.input_ids) for p in batch}) == 1 and len(batch) <= 4


def test_a_batch_that_does_not_fit_is_halved_and_a_single_prompt_is_named(
    loaded: LoadedTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    def scarce(target: Any, batch: list[Prompt], *_: Any) -> list[answering.Answer]:
        sizes.append(len(batch))
        if len(batch) > 2 or batch[0].id == "huge":
            raise torch.OutOfMemoryError
        return [answering.Answer([int(prompt.id)], True) for prompt in batch]

    monkeypatch.setattr(answering, "_generate", scarce)
    many = [Prompt(str(i), [1]) for i in range(7)]
    answers = answer_batch(loaded, many, max_new_tokens=1, sampling=Sampling())
    assert [answer.token_ids for answer in answers] == [[i] for i in range(7)]
    with pytest.raises(UserError, match="huge: a prompt of 3 tokens does not fit into the memory of cpu"):
        answer_batch(loaded, [Prompt("huge", [1, 2, 3])], max_new_tokens=1, sampling=Sampling())
