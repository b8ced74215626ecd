"""Promises of `prepare`: every row is accounted for, nothing twice, split by conversation, whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import data_kit as kit
import numpy as np
import pytest

from draftline.config.schema import TargetConfig
from draftline.data import prepare as module
from draftline.data.prepare import PrepareReport, load_template, prepare
from draftline.data.shards import TokenDataset
from draftline.data.template import ChatTemplate
from draftline.errors import UserError

TARGET = TargetConfig(model="tiny")


@pytest.fixture(autouse=True)
def template(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    if "target" not in request.fixturenames:
        chat = ChatTemplate(kit.tokenizer_with(kit.CHATML))
        monkeypatch.setattr(module, "load_template", lambda config: chat)
    yield


def row(i: int, answer: str = "yes one two") -> dict[str, Any]:
    return {"id": f"r{i}", "messages": kit.talk(f"hello {i}", answer)}


def run(tmp_path: Path, rows: list[Any], **options: Any) -> PrepareReport:
    source = kit.write_lines(tmp_path / "in.jsonl", rows)
    return prepare([str(source)], tmp_path / "out", target=TARGET, **{"max_tokens": 500, **options})


def balanced(report: PrepareReport) -> bool:
    return report.in_rows == report.out_rows + report.rejected


def test_rows_become_samples_and_the_report_balances(tmp_path: Path) -> None:
    report = run(tmp_path, [row(i) for i in range(20)])
    data = TokenDataset.open(tmp_path / "out")
    assert balanced(report) and len(data) == report.out_rows == 20
    tokenizer = kit.tokenizer_with(kit.CHATML)
    for i in range(20):
        sample = data.sample(i)
        assert sample.sample_id == f"r{i}" and not sample.answer_cut
        assert tokenizer.decode(sample.input_ids[sample.loss_mask].tolist()) == "yes one two<|im_end|>"
    assert data.manifest.vocab_size == len(tokenizer)
    assert data.manifest.sources[0].in_rows == 20 and data.manifest.sources[0].sha256 is not None
    assert report.summary_lines()[0] == "rows: 20 in == 20 out + 0 rejected"


def test_a7_rows_that_teach_nothing_are_dropped_and_counted(tmp_path: Path) -> None:
    long = row(2, "yes") | {"messages": kit.talk("hello there " * 100, "yes")}
    n_prompt = len(
        kit.tokenizer_with(kit.CHATML)("<|im_start|>user\nhello 3<|im_end|>\n<|im_start|>assistant\n").input_ids
    )
    report = run(tmp_path, [row(1, "yes"), long, row(1, "yes") | {"id": "again"}], max_tokens=n_prompt + 10)
    assert balanced(report)
    assert report.rejected_by_reason == {"prompt too long": 1, "duplicate": 1}
    data = TokenDataset.open(tmp_path / "out")
    assert data.manifest.rejected == report.rejected_by_reason
    assert data.supervised.min() >= 2 and data.lengths.max() <= n_prompt + 10


def test_answers_cut_by_the_limit_are_kept_and_marked(tmp_path: Path) -> None:
    report = run(tmp_path, [row(1), row(2, "yes one two three " * 20), row(3) | {"answer_cut": True}], max_tokens=60)
    data = TokenDataset.open(tmp_path / "out")
    assert [data.sample(i).answer_cut for i in range(3)] == [False, True, True]
    assert report.manifest.n_answer_cut == 2 and data.lengths[1] == 60
    end = kit.tokenizer_with(kit.CHATML).eos_token_id
    assert [int(data.sample(i).input_ids[-1]) == end for i in range(3)] == [True, False, False]


def test_a3_a_row_that_the_template_refuses_does_not_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = ChatTemplate(kit.tokenizer_with(kit.STRICT_ROLES))
    monkeypatch.setattr(module, "load_template", lambda config: chat)
    wrong = {"id": "w", "messages": [{"role": "assistant", "content": "one two"}]}
    report = run(tmp_path, [row(1), wrong, row(2)])
    assert balanced(report) and report.out_rows == 2
    assert report.rejected_by_reason == {"template refused": 1}


def test_a_row_without_an_assistant_turn_is_refused_or_counted(tmp_path: Path) -> None:
    rows = [row(1), {"id": "u", "messages": kit.talk("hello")}]
    with pytest.raises(UserError, match=r"in\.jsonl:2: there is no assistant turn to learn from; mend the row or pass"):
        run(tmp_path, rows)
    assert not (tmp_path / "out").exists()
    report = run(tmp_path, rows, skip_bad_rows=True)
    assert balanced(report) and report.rejected_by_reason == {"no assistant turn": 1}
    assert any("in.jsonl:2" in line for line in report.summary_lines())


def test_a_data_set_without_rows_is_refused_with_the_reasons(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no samples; 2 rows were read; rejected: prompt too long 2") as caught:
        run(tmp_path, [row(1), row(2)], max_tokens=2)
    assert "\n" not in str(caught.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.jsonl"]


def test_an_output_of_another_run_is_refused_before_any_work(tmp_path: Path) -> None:
    run(tmp_path, [row(1)])
    with pytest.raises(UserError, match="already holds another run"):
        run(tmp_path, [row(2)])
    assert TokenDataset.open(tmp_path / "out").sample(0).sample_id == "r1"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_tokens": 1}, "max_tokens is 1; set it to at least 2"),
        ({"turns": "first"}, "turns is 'first'; set it to all or last"),
        ({"validation_fraction": 1.0}, "validation_fraction is 1.0"),
    ],
)
def test_wrong_options_are_refused(tmp_path: Path, options: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        run(tmp_path, [row(1)], **options)


def test_the_split_is_by_conversation_seeded_and_complete(tmp_path: Path) -> None:
    openings = [f"hello {i % 50}" for i in range(200)]
    rows = [{"id": str(i), "messages": kit.talk(text, f"yes {i} one")} for i, text in enumerate(openings)]
    sides = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        (tmp_path / name).mkdir()
        report = run(tmp_path / name, rows, validation_fraction=0.3, seed=seed)
        assert balanced(report) and report.out_rows == 200 and report.validation is not None
        train = TokenDataset.open(tmp_path / name / "out")
        held = TokenDataset.open(tmp_path / name / "out" / "validation")
        ids = [{data.sample(i).sample_id for i in range(len(data))} for data in (train, held)]
        assert ids[0] | ids[1] == {str(i) for i in range(200)} and not ids[0] & ids[1]
        assert not {openings[int(i)] for i in ids[0]} & {openings[int(i)] for i in ids[1]}
        assert 20 < len(ids[1]) < 110
        assert (train.manifest.part, held.manifest.part) == ("train", "validation")
        sides.append(ids[1])
    assert sides[0] == sides[1] != sides[2]


def test_an_empty_validation_part_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the validation part would be empty; raise validation_fraction"):
        run(tmp_path, [row(1)], validation_fraction=1e-9)
    assert not (tmp_path / "out").exists()


def test_turns_last_supervises_one_turn_and_a_row_may_ask_for_it_alone(tmp_path: Path) -> None:
    talk = kit.talk("hello", "one two", "and", "three yes")
    report = run(tmp_path, [{"id": "a", "messages": talk}, {"id": "b", "messages": talk[:2] + talk, "turns": "last"}])
    data, tokenizer = TokenDataset.open(report.output), kit.tokenizer_with(kit.CHATML)
    texts = [tokenizer.decode(s.input_ids[s.loss_mask].tolist()) for s in map(data.sample, range(2))]
    assert texts == ["one two<|im_end|>three yes<|im_end|>", "three yes<|im_end|>"]


def test_several_sources_are_all_read(tmp_path: Path) -> None:
    sources = [str(kit.write_lines(tmp_path / f"{n}.jsonl", [row(i) for i in range(n, n + 5)])) for n in (0, 10)]
    report = prepare(sources, tmp_path / "out", target=TARGET, max_tokens=500)
    assert report.out_rows == 10
    assert [(s.name, s.in_rows) for s in report.manifest.sources] == [(name, 5) for name in sources]


def test_preparing_twice_gives_the_same_data(tmp_path: Path) -> None:
    prints = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        prints.append(run(tmp_path / name, [row(i) for i in range(50)]).manifest.fingerprint)
    assert prints[0] == prints[1]


def test_lengths_agree_with_the_manifest(tmp_path: Path) -> None:
    manifest = run(tmp_path, [row(i, "yes " * (i + 1)) for i in range(30)]).manifest
    data = TokenDataset.open(tmp_path / "out")
    assert (int(data.lengths.sum()), int(data.supervised.sum())) == (manifest.n_tokens, manifest.n_supervised)
    assert np.all(data.supervised < data.lengths)


def test_the_stop_tokens_of_a_model_folder_are_known(target: TargetConfig) -> None:
    chat = load_template(target)
    assert {chat.tokenizer.convert_tokens_to_ids("<|im_end|>"), 100, 139} <= chat.stop_ids


def test_manifest_is_plain_json(tmp_path: Path) -> None:
    run(tmp_path, [row(1)])
    content = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert content["format"] == "draftline-dataset" and content["schema_version"] == 1
