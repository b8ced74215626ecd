"""Promises of the masks over the formats of public models: the supervised tokens spell exactly the answers."""

from __future__ import annotations

import unicodedata
from typing import Any

import data_kit as kit
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from real_templates import FAMILIES, tokenizer_of

from draftline.data.chat import ChatEncoder, RejectedError
from draftline.data.template import ChatTemplate
from draftline.data.word_memo import PROOF_TEXTS, WordMemo

CONVERSATIONS = {
    "one turn": ["hello there", "one two"],
    "three turns": ["hello", "one two three", "and then?", "yes: naïve café 🤗", "why", "你好世界, no"],
    "says headers": ["user", "assistant: user\nassistant", "### user", "USER: one ASSISTANT: two"],
    "repeats the question": ["one two", "one two", "one two", "one two one two"],
    "lines and code": ["write code", "def f(x):\n    return x\n\n\n- one\n- two", "go on", "```python\nf(1)\n```"],
    "white space at the edges": ["  hello \n", "\n  one two  \n", "\tand\t", " three "],
    "zero width and composed": ["cafe\u0301", "\u200bcafe\u0301 two", "a", "na\u0308ive 👩‍👩‍👧"],
}


def conversation(name: str, system: bool) -> list[dict[str, Any]]:
    return [{"role": "system", "content": "Be brief."}] * system + kit.talk(*CONVERSATIONS[name])


def spoken(text: str, word_pieces: bool) -> str:
    """Text up to what stands at the edges; where pieces carry the spaces, up to white space and composed accents."""
    return "".join(unicodedata.normalize("NFC", text).split()) if word_pieces else text.strip()


@pytest.mark.parametrize("talk", CONVERSATIONS)
@pytest.mark.parametrize("name", FAMILIES)
def test_supervised_tokens_spell_exactly_the_answers_of_every_format(name: str, talk: str) -> None:
    family, tokenizer = FAMILIES[name], tokenizer_of(name)
    for system in (False, True)[: 1 + family.system]:
        messages = conversation(talk, system)
        encoded = ChatEncoder(ChatTemplate(tokenizer), max_tokens=10_000).encode(messages)
        assert encoded.turns_left_out == 0
        answers = [m["content"] for m in messages if m["role"] == "assistant"]
        ends = [family.end] * (len(answers) - 1) + [family.eos]
        found = kit.supervised(tokenizer, encoded)
        if family.word_pieces:  # some formats have a space of their own in front of the end
            whole = "".join(text.strip() + end for text, end in zip(answers, ends, strict=True))
            assert spoken("".join(found), True) == spoken(whole, True)
        else:
            assert [text.strip() for text in found] == [
                spelled.strip() for spelled in map(joined, map(str.strip, answers), ends, found)
            ]


def joined(answer: str, end: str, found: str) -> str:
    """An answer and its end, with the white space between them that the format kept."""
    body = found.removesuffix(end)
    return answer + body[len(body.rstrip()) :] + end


TEXT = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\x00<|>[]\uff5c"), min_size=1, max_size=24)
PLAIN = st.text("ab one,.\n", min_size=1, max_size=24)


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(sorted(FAMILIES)), st.lists((TEXT | PLAIN).filter(str.strip), min_size=2, max_size=6))
def test_the_quick_way_gives_what_the_careful_way_gives(name: str, turns: list[str]) -> None:
    template = ChatTemplate(tokenizer_of(name))
    encoder = ChatEncoder(template, max_tokens=10_000)
    messages = kit.talk(*turns[: len(turns) // 2 * 2])

    def result(quick: bool) -> Any:
        try:
            if not quick:
                return encoder.encode(messages)
            draft = encoder.draft(messages)
            words = WordMemo(template.tokenizer, template.tokenize_many, template.token_bytes)
            words.tokenize(["proof"] * PROOF_TEXTS)
            return encoder.settle(draft, words.tokenize([draft.text])[0]).to_lists()
        except RejectedError as error:
            return error.reason

    assert result(True) == result(False)


@pytest.mark.parametrize("name", [n for n in FAMILIES if not FAMILIES[n].word_pieces])
def test_plain_conversations_go_the_quick_way(name: str) -> None:
    template = ChatTemplate(tokenizer_of(name))
    encoder = ChatEncoder(template, max_tokens=10_000)
    text = template.render(kit.talk("hello", "one two", "and", "three"), None)
    places = encoder._outlines.locate(kit.talk("hello", "one two", "and", "three"), text)
    assert places is not None and [text[p.start : p.stop] for p in places] == ["one two", "three"]


def test_a2_thinking_of_earlier_turns_is_left_out_and_the_last_is_kept() -> None:
    talk = kit.talk("hi", "<think>\nmaybe\n</think>\n\none", "and?", "<think>\nyes\n</think>\n\ntwo")
    qwen = ChatEncoder(ChatTemplate(tokenizer_of("qwen3")), max_tokens=10_000).encode(talk)
    assert kit.supervised(tokenizer_of("qwen3"), qwen) == ["<think>\nyes\n</think>\n\ntwo<|im_end|>"]
    assert qwen.turns_left_out == 1
    with pytest.raises(RejectedError, match="no assistant turn is rendered exactly"):  # R1 never shows any of it
        ChatEncoder(ChatTemplate(tokenizer_of("deepseek-r1")), max_tokens=10_000).encode(talk)


def test_a8_thinking_in_a_field_is_supervised_where_the_format_shows_it() -> None:
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "two", "reasoning_content": "maybe"}]
    encoded = ChatEncoder(ChatTemplate(tokenizer_of("qwen3")), max_tokens=10_000).encode(talk)
    assert kit.supervised(tokenizer_of("qwen3"), encoded) == ["<think>\nmaybe\n</think>\n\ntwo<|im_end|>"]
    with pytest.raises(RejectedError):  # a format that drops the field cannot be trained on as if it had it
        ChatEncoder(ChatTemplate(tokenizer_of("chatml")), max_tokens=10_000).encode(talk)


def test_a3_a_format_without_system_prompts_refuses_the_row_in_its_own_words() -> None:
    with pytest.raises(RejectedError, match="System role not supported"):
        ChatEncoder(ChatTemplate(tokenizer_of("gemma")), max_tokens=10_000).encode(conversation("one turn", True))


def test_at_least_twelve_formats_are_covered() -> None:
    assert len(FAMILIES) >= 12
