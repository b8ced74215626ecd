"""Promises about templates that write the date: an answer is learned behind the date that it was given on."""

from __future__ import annotations

import json
import pickle
import shutil
from datetime import date, datetime
from pathlib import Path
from typing import Any

import data_kit as kit
import pytest

from draftline.config.schema import TargetConfig
from draftline.data import regenerate_job
from draftline.data import template as template_module
from draftline.data.chat import ChatEncoder
from draftline.data.prepare import prepare
from draftline.data.regenerate import regenerate
from draftline.data.shards import TokenDataset
from draftline.data.template import ChatTemplate

DATED = "{{ '<|im_start|>system\\nToday: ' + strftime_now('%d %b %Y') + '<|im_end|>\\n' }}"
NEW_YEAR, LATER = date(2026, 1, 1), date(2026, 11, 30)


def set_clock(monkeypatch: pytest.MonkeyPatch, day: date) -> None:
    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Clock:
            return cls(day.year, day.month, day.day, 13, 14)

    for module in (template_module, regenerate_job):
        monkeypatch.setattr(module, "datetime", Clock)


@pytest.fixture
def dated(tmp_path: Path, target: TargetConfig) -> TargetConfig:
    folder = tmp_path / "dated"
    shutil.copytree(target.model, folder)
    (folder / "chat_template.jinja").write_text(DATED + kit.CHATML)
    return TargetConfig(model=str(folder))


@pytest.mark.parametrize("rest", [kit.CHATML, kit.TAGGED])
def test_a_template_is_told_one_day_wherever_it_is_rendered(rest: str) -> None:
    plain, template = ChatTemplate(kit.tokenizer_with(rest)), ChatTemplate(kit.tokenizer_with(DATED + rest))
    assert template.reads_date and not plain.reads_date
    for day, text in ((NEW_YEAR, "01 Jan 2026"), (LATER, "30 Nov 2026")):
        other = pickle.loads(pickle.dumps(template.on(day)))  # as another process gets it
        encoded = ChatEncoder(other, max_tokens=1000).encode(kit.talk("hello", "yes", "and", "no"))
        assert kit.supervised(other.tokenizer, encoded) == ["yes<|im_end|>", "no<|im_end|>"]
        assert other.decode(encoded.input_ids).startswith(f"<|im_start|>system\nToday: {text}<|im_end|>")


def test_a9_answers_of_one_day_are_prepared_on_another_behind_the_prompt_that_was_served(
    tmp_path: Path, dated: TargetConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = kit.write_lines(tmp_path / "in.jsonl", [{"id": f"p{i}", "prompt": f"hello {i}"} for i in range(3)])
    answers = tmp_path / "answers.jsonl"
    set_clock(monkeypatch, NEW_YEAR)
    regenerate(str(prompts), answers, target=dated, device="cpu", max_new_tokens=6, limit=2)
    set_clock(monkeypatch, LATER)
    regenerate(str(prompts), answers, target=dated, device="cpu", max_new_tokens=6)
    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    assert [row["rendered_on"] for row in rows] == ["2026-01-01", "2026-01-01", "2026-11-30"]
    report = prepare([str(answers)], tmp_path / "out", target=dated, max_tokens=200)
    assert report.rejected_by_reason == {} and report.out_rows == 3
    rows = [{"id": "text", "prompt": "a", "response": "yes one", "rendered_on": "2026-01-01"}]
    rows += [{"id": "none", "prompt": "b", "response": "yes one"}]
    prepare([str(kit.write_lines(answers, rows))], tmp_path / "texts", target=dated, max_tokens=200)
    tokenizer = kit.tokenizer_with(None)
    for folder, days in (("out", ["01 Jan 2026", "01 Jan 2026", "30 Nov 2026"]), ("texts", ["01 Jan", "30 Nov"])):
        data = TokenDataset.open(tmp_path / folder)
        texts = [tokenizer.decode(data.sample(i).input_ids) for i in range(len(data))]
        assert all(f"Today: {day}" in text for day, text in zip(days, texts, strict=True))
