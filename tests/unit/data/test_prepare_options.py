# ruff: noqa: RUF001  (other scripts are what is tested)
"""Promises of what `prepare` can be asked for: mixes, evaluation prompts kept out, limits, labels kept, statistics."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import data_kit as kit
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from draftline.config.schema import TargetConfig
from draftline.data import prepare as module
from draftline.data.decontaminate import Decontaminator, words_of
from draftline.data.manifest import read_manifest
from draftline.data.mixing import mixed_counts
from draftline.data.options import weighted_sources
from draftline.data.prepare import PrepareReport, prepare
from draftline.data.shards import TokenDataset
from draftline.data.template import ChatTemplate
from draftline.errors import UserError

TARGET = TargetConfig(model="tiny")


@pytest.fixture(autouse=True)
def template(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    chat = ChatTemplate(kit.tokenizer_with(kit.CHATML))
    monkeypatch.setattr(module, "load_template", lambda config: chat)
    yield


def source(folder: Path, name: str, n: int, **more: Any) -> str:
    rows = [{"id": f"{name}{i}", "messages": kit.talk(f"{name} asks {i}", "yes one two"), **more} for i in range(n)]
    return str(kit.write_lines(folder / f"{name}.jsonl", rows))


def run(sources: list[str], output: Path, **options: Any) -> PrepareReport:
    return prepare(sources, output, target=TARGET, **{"max_tokens": 500, **options})


def ids(folder: Path) -> list[str]:
    data = TokenDataset.open(folder)
    return [data.sample(i).sample_id for i in range(len(data))]


@given(st.lists(st.tuples(st.integers(1, 500), st.integers(1, 100)), min_size=1, max_size=5), st.sampled_from([1, 100]))
@example([(70, 70), (30, 30)], 100)  # 0.7 and 0.3 are no binary numbers
def test_a_mix_has_the_asked_shares_and_could_not_be_larger(sources: list[tuple[int, int]], unit: int) -> None:
    available, weights = [n for n, _ in sources], [w for _, w in sources]
    counts, whole = mixed_counts(available, [w / unit for w in weights]), sum(weights)
    assert all(count <= n for count, n in zip(counts, available, strict=True))
    total = sum(counts)
    assert all(abs(count * whole - total * w) <= whole for count, w in zip(counts, weights, strict=True))
    assert any((total + 1) * w > n * whole for n, w in zip(available, weights, strict=True))


def test_a14_sources_are_mixed_by_weight_seeded_with_exact_counts(tmp_path: Path) -> None:
    sources = [source(tmp_path, "a", 30), source(tmp_path, "b", 100)]
    report = run(sources, tmp_path / "one", weights=[0.7, 0.3])
    assert [(s.n_samples, s.weight, s.in_rows) for s in report.manifest.sources] == [(29, 0.7, 30), (13, 0.3, 100)]
    assert Counter(name[0] for name in ids(tmp_path / "one")) == {"a": 29, "b": 13}
    assert report.rejected_by_reason == {"left out by the mix": 88}
    assert report.in_rows == report.out_rows + report.rejected == 130
    assert "mixed: " in "\n".join(report.summary_lines())
    assert ids(tmp_path / "one") == ids(run(sources, tmp_path / "two", weights=[7, 3]).output)
    assert ids(tmp_path / "one") != ids(run(sources, tmp_path / "three", weights=[7, 3], seed=1).output)
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == ["manifest.json", "shard-00000.arrow"]


def test_both_parts_of_a_split_are_mixed(tmp_path: Path) -> None:
    sources = [source(tmp_path, "a", 200, category="maths"), source(tmp_path, "b", 200)]
    report = run(sources, tmp_path / "out", weights=[3, 1], validation_fraction=0.3)
    assert report.validation is not None
    for manifest, folder in ((report.manifest, "out"), (report.validation, "out/validation")):
        a, b = (record.n_samples for record in manifest.sources)
        assert a is not None and b is not None and abs(a - 3 * b) <= 3 and a + b == manifest.n_samples > 20
        assert Counter(name[0] for name in ids(tmp_path / folder)) == {"a": a, "b": b}
        assert manifest.statistics is not None and manifest.statistics.categories == {"maths": a}
    assert not set(ids(tmp_path / "out")) & set(ids(tmp_path / "out" / "validation"))


def test_a_source_that_gives_nothing_cannot_be_mixed(tmp_path: Path) -> None:
    nothing = kit.write_lines(tmp_path / "b.jsonl", [{"messages": kit.talk("hello there " * 30, "yes one")}])
    with pytest.raises(UserError, match=r"b\.jsonl: it gave no sample"):
        run([source(tmp_path, "a", 3), str(nothing)], tmp_path / "out", weights=[1, 1], max_prompt_tokens=30)
    assert not (tmp_path / "out").exists()


def test_weights_are_read_from_the_names_of_sources(tmp_path: Path) -> None:
    (tmp_path / "odd=1").write_text("x")
    assert weighted_sources(["a.jsonl=0.7", "hf:x/y:train=3e-1"]) == (["a.jsonl", "hf:x/y:train"], (0.7, 0.3))
    assert weighted_sources([str(tmp_path / "odd=1"), "b"]) == ([str(tmp_path / "odd=1"), "b"], None)
    for names in (["a=1", "b"], ["a=1.2.3"]):
        with pytest.raises(UserError, match="write SOURCE=WEIGHT"):
            weighted_sources(names)
    with pytest.raises(UserError, match="a mix needs one weight above 0 for each source"):
        run([source(tmp_path, "a", 3)], tmp_path / "out", weights=[0])


PROMPT = "Natalia sold clips to 48 of her friends in April, and then she sold half as many in May."


def test_conversations_that_hold_an_evaluation_prompt_are_left_out_and_counted(tmp_path: Path) -> None:
    prompts = kit.write_lines(tmp_path / "eval.jsonl", [{"prompt": PROMPT}, {"prompt": "Name the capital!"}])
    rows = [
        {"id": "quoted", "messages": kit.talk(f"Please solve: {PROMPT.upper()}  Thanks", "yes one two")},
        {"id": "answered", "messages": kit.talk("say it", f"yes: {PROMPT}")},
        {"id": "short", "messages": kit.talk("name the capital", "yes one two")},
        {"id": "part", "messages": kit.talk("Natalia sold clips to 48 of her friends", "yes one two")},
        {"id": "other", "messages": kit.talk("please name the capital of it", "yes one two")},
    ]
    report = run([str(kit.write_lines(tmp_path / "in.jsonl", rows))], tmp_path / "out", decontaminate=[str(prompts)])
    assert ids(tmp_path / "out") == ["part", "other"]
    assert report.rejected_by_reason == {"in evaluation prompts": 3}
    record = report.manifest.decontamination
    assert record is not None and record.n_words == 13 and record.files[0].sha256 is not None
    fewer = run([str(tmp_path / "in.jsonl")], tmp_path / "four", decontaminate=[str(prompts)], decontaminate_words=4)
    assert ids(fewer.output) == ["other"]


def test_words_are_compared_without_case_and_punctuation_in_any_script() -> None:
    assert words_of("Don't STOP_it -- ＡＢＣ 12.5") == ["don", "t", "stop", "it", "abc", "12", "5"]
    found = Decontaminator.of(["法国的首都是哪里，请回答"], 5).find(
        [{"role": "user", "content": "问：法国的首都是哪里？"}]
    )
    assert found == "法 国 的 首 都"
    assert Decontaminator.of(["a b c"], 3).find(kit.talk("a b", "b c")) is None


def test_reasoning_and_tool_calls_are_looked_at_too() -> None:
    evaluation = Decontaminator.of(["a b c", "the capital"], 3)
    call = {"function": {"name": "search", "arguments": {"queries": ["The capital!"]}}}
    for message in ({"content": "", "reasoning_content": "so a b c it is"}, {"content": "", "tool_calls": [call]}):
        assert evaluation.find([{"role": "assistant", **message}]) in ("a b c", "the capital")


def test_limits_on_prompts_and_labels_drop_and_count(tmp_path: Path) -> None:
    rows = [
        {"id": "good", "messages": kit.talk("hi", "yes one two three yes one two")},
        {"id": "long", "messages": kit.talk("hello there " * 40, "yes one two three yes one two")},
        {"id": "brief", "messages": kit.talk("hi", "no")},
    ]
    file = str(kit.write_lines(tmp_path / "in.jsonl", rows))
    report = run([file], tmp_path / "out", max_prompt_tokens=60, min_supervised_tokens=5)
    assert ids(tmp_path / "out") == ["good"]
    assert report.rejected_by_reason == {"prompt too long": 1, "answer too short": 1}
    assert (report.manifest.max_prompt_tokens, report.manifest.min_supervised_tokens) == (60, 5)


def test_categories_are_kept_and_counted_on_both_sides_of_a_split(tmp_path: Path) -> None:
    sources = [source(tmp_path, "a", 60, category="maths"), source(tmp_path, "b", 60, category=7)]
    report = run(sources, tmp_path / "out", validation_fraction=0.4)
    assert report.validation is not None
    for manifest, folder in ((report.manifest, "out"), (report.validation, "out/validation")):
        data = TokenDataset.open(tmp_path / folder)
        labels = Counter(data.sample(i).category for i in range(len(data)))
        assert manifest.statistics is not None and manifest.statistics.categories == {"maths": labels["maths"]}
        assert labels["maths"] > 5 and labels[""] > 5
        assert all((data.sample(i).category == "maths") == (data.sample_id(i)[0] == "a") for i in range(len(data)))


def test_statistics_tell_how_the_samples_are_spread(tmp_path: Path) -> None:
    rows = [{"messages": kit.talk(*["hi", "yes"] * turns, f"{turns}", "no one")} for turns in range(1, 12)]
    report = run([str(kit.write_lines(tmp_path / "in.jsonl", rows))], tmp_path / "out")
    data, statistics = TokenDataset.open(tmp_path / "out"), report.manifest.statistics
    assert statistics is not None
    lengths = sorted(data.lengths.tolist())
    spread = statistics.tokens
    assert [spread.min, spread.median, spread.p90, spread.max] == [lengths[0], lengths[5], lengths[9], lengths[10]]
    assert statistics.n_turns == sum(turns + 1 for turns in range(1, 12))
    assert statistics.prompt_tokens.min == int(data.sample(0).loss_mask.argmax())
    stored = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert stored["statistics"]["tokens"]["max"] == lengths[-1]


def test_data_without_category_column_or_statistics_still_opens(tmp_path: Path) -> None:
    """What earlier releases wrote."""
    import hashlib

    import pyarrow as pa

    run([source(tmp_path, "a", 3)], tmp_path / "out")
    shard, manifest = tmp_path / "out" / "shard-00000.arrow", tmp_path / "out" / "manifest.json"
    table = pa.ipc.open_file(pa.BufferReader(shard.read_bytes())).read_all().drop_columns(["category"])
    with pa.ipc.new_file(str(shard), table.schema) as writer:
        writer.write_table(table)
    content = json.loads(manifest.read_text())
    digest = hashlib.sha256(shard.read_bytes()).hexdigest()
    content["shards"][0] |= {"n_bytes": shard.stat().st_size, "sha256": digest}
    for name in ("statistics", "decontamination", "label_check", "seed", "validation_fraction"):
        del content[name]
    manifest.write_text(json.dumps(content))
    assert TokenDataset.open(tmp_path / "out").sample(0).category == ""
    assert read_manifest(tmp_path / "out").statistics is None
