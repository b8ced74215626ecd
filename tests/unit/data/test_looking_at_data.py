"""Promises of looking at prepared data: the mask as one reads it, and whether the labels are the target's own."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import data_kit as kit
import pytest
from rich.console import Console

from draftline.config.schema import TargetConfig
from draftline.data.label_check import check_labels, label_lines
from draftline.data.manifest import LabelCheck, read_manifest
from draftline.data.prepare import load_template, prepare
from draftline.data.preview import preview
from draftline.data.shards import TokenDataset
from draftline.data.template import ChatTemplate
from draftline.errors import UserError


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, target: TargetConfig) -> Path:
    folder = tmp_path_factory.mktemp("looking")
    rows = [{"id": f"r{i}", "messages": kit.talk(f"hello [b]{i}", "yes one"), "category": "maths"} for i in range(6)]
    source = kit.write_lines(folder / "in.jsonl", rows)
    return prepare([str(source)], folder / "out", target=target, max_tokens=100).output


def shown(prepared: Path, target: TargetConfig, **console: object) -> str:
    screen = io.StringIO()
    tokenizer = load_template(target).tokenizer
    preview(prepared, tokenizer, n_samples=2, console=Console(file=screen, width=200, highlight=False, **console))
    return screen.getvalue()


def test_without_colours_the_preview_brackets_what_is_supervised(prepared: Path, target: TargetConfig) -> None:
    text = shown(prepared, target)
    assert text.count("<|im_start|>assistant\n⟦yes one<|im_end|>⟧") == 2
    assert text.count("⟦") == 3 and "\x1b" not in text  # one more in the legend
    assert "hello [b]" in text  # never read as markup
    assert "supervised, maths" in text
    assert "⟦" in shown(prepared, target, force_terminal=True, no_color=True)


def test_a_stream_that_cannot_show_the_brackets_gets_plain_ones(prepared: Path, target: TargetConfig) -> None:
    screen = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="replace")
    console = Console(file=screen, width=200, highlight=False)
    preview(prepared, load_template(target).tokenizer, n_samples=2, console=console)
    screen.flush()
    text = screen.buffer.getvalue().decode()  # type: ignore[attr-defined]
    assert text.count("assistant\n[[yes one<|im_end|>]]") == 2 and "?" not in text


def test_with_colours_the_preview_colours_it(prepared: Path, target: TargetConfig) -> None:
    text = shown(prepared, target, force_terminal=True, color_system="standard", legacy_windows=False)
    assert text.count("\x1b[1;32myes one<|im_end|>\x1b[0m") == 2 and "⟦" not in text


def test_what_a_terminal_would_obey_is_shown_as_signs(tmp_path: Path, target: TargetConfig) -> None:
    talk = kit.talk("red \x1b[31m\a\x00 \r\u202e gone", "yes\x9b one")
    source = kit.write_lines(tmp_path / "in.jsonl", [{"id": "a\x1b[2Jb\n", "messages": talk, "category": "\b"}])
    folder = prepare([str(source)], tmp_path / "out", target=target, max_tokens=200).output
    for console in ({}, {"force_terminal": True, "color_system": "standard"}):
        text = shown(folder, target, **console)
        assert "red ␛[31m␇␀ ␍<U+202E> gone" in text and "yes<U+009B> one" in text and "a␛[2Jb␊: " in text
        own = re.sub(r"\x1b\[[0-9;]*m", "", text)
        assert all(letter == "\n" or letter.isprintable() for letter in own)


@pytest.mark.parametrize("width", [1, 10, 40])
def test_a_narrow_terminal_loses_nothing(prepared: Path, target: TargetConfig, width: int) -> None:
    screen = io.StringIO()
    console = Console(file=screen, width=width, soft_wrap=True, highlight=False)
    preview(prepared, load_template(target).tokenizer, n_samples=2, console=console)
    text = "".join(screen.getvalue().split())
    assert text.count("⟦yesone<|im_end|>⟧") == 2 and text.count("supervised,maths") == 2


def test_the_choice_of_samples_is_seeded(prepared: Path, target: TargetConfig) -> None:
    assert shown(prepared, target) == shown(prepared, target)


def test_a_preview_with_another_tokenizer_is_refused(prepared: Path) -> None:
    with pytest.raises(UserError, match="the data was prepared with tokenizer"):
        preview(prepared, kit.tokenizer_with(kit.CHATML, word_pieces=True), n_samples=1)


def test_a27_the_share_of_labels_that_are_the_targets_own_is_counted_and_stored(
    tmp_path: Path, target: TargetConfig
) -> None:
    import torch

    from draftline.data.answering import Prompt, Sampling, answer_batch
    from draftline.data.chat import ids_hash, prompt_ids
    from draftline.target.load import load_target

    loaded, template = load_target(target, "cpu"), load_template(target)
    rows = []
    for i in range(4):
        prompt = Prompt(str(i), prompt_ids(template, kit.talk(f"hello {i}")))
        (answer,) = answer_batch(loaded, [prompt], max_new_tokens=12, sampling=Sampling())
        text = template.decode([t for t in answer.token_ids if t not in loaded.stop_token_ids])
        rows.append(
            {
                "messages": kit.talk(f"hello {i}", text),
                "answer_token_ids": answer.token_ids,
                "prompt_hash": ids_hash(prompt.input_ids),
            }
        )
    own = prepare([str(kit.write_lines(tmp_path / "own.jsonl", rows))], tmp_path / "own", target=target, max_tokens=200)
    before = own.manifest.fingerprint
    check = check_labels(own.output, loaded, n_samples=100)
    assert check.n_labels == own.manifest.n_supervised and check.n_samples == len(TokenDataset.open(own.output))
    assert check.share == 1.0 and len(label_lines(check)) == 1
    stored = read_manifest(own.output)
    assert stored.label_check == check and stored.fingerprint == before

    foreign = kit.write_lines(
        tmp_path / "in.jsonl", [{"messages": kit.talk("hello", "the quick brown fox jumps over")}]
    )
    other = prepare([str(foreign)], tmp_path / "other", target=target, max_tokens=100)
    low = check_labels(other.output, loaded, n_samples=1)
    sample = TokenDataset.open(other.output).sample(0)
    ids = torch.from_numpy(sample.input_ids.astype("int64"))
    best = loaded.model(ids[None]).logits[0].argmax(-1)
    by_hand = sum(int(best[t - 1] == ids[t]) for t in range(1, len(ids)) if sample.loss_mask[t])
    assert (low.n_own, low.n_labels) == (by_hand, int(sample.loss_mask.sum()))
    assert "warning: below 75%" in label_lines(low)[1]


def test_a_label_check_is_told_by_doctor(prepared: Path) -> None:
    from draftline.doctor import DoctorContext, check_data

    def findings() -> list[tuple[str, str]]:
        return [(f.level, f.what) for f in check_data(DoctorContext(data=prepared)) if "own first choice" in f.what]

    assert findings() == []
    file, levels = prepared / "manifest.json", []
    for own in (90, 10):
        content = json.loads(file.read_text())
        content["label_check"] = LabelCheck(target="t", n_samples=1, n_labels=100, n_own=own, seed=0).model_dump()
        file.write_text(json.dumps(content))
        levels += [level for level, _ in findings()]
    assert levels == ["ok", "warn"]


@pytest.mark.parametrize(
    ("template", "line"), [("{% for m in messages %}{{ m.content }}", 1), ("a\n{{ messages | nosuch }}\n", 2)]
)
def test_a_broken_chat_template_is_one_line_that_says_where_and_how_to_mend(
    tmp_path: Path, target: TargetConfig, template: str, line: int
) -> None:
    tokenizer = kit.tokenizer_with(template)
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    with pytest.raises(UserError) as caught:
        load_template(TargetConfig(model=str(tmp_path / "model")))
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'model'}: the chat template is broken (line {line}: ")
    assert message.endswith("mend chat_template.jinja, or `chat_template` in tokenizer_config.json, there")
    assert "\n" not in message


def test_a_template_that_fails_on_every_row_is_told_with_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from draftline.data import prepare as module

    chat = ChatTemplate(kit.tokenizer_with("{{ messages[0].nothing.at_all }}"))
    monkeypatch.setattr(module, "load_template", lambda config: chat)
    source = kit.write_lines(tmp_path / "in.jsonl", [{"messages": kit.talk("a", "b")}])
    with pytest.raises(UserError, match=r"template refused 1; the first: .*in\.jsonl:1: the chat template refuses"):
        prepare([str(source)], tmp_path / "out", target=TargetConfig(model="tiny"), max_tokens=50)
