"""Promises of the loss masks: exactly the assistant's words and terminators, under any template, or a named rejection.

Numbers like A2 refer to known faults of drafter trainers: A1-A3 mask edges, A6-A7 truncation, A8 thinking, A9 training
unlike serving, A11 tools, A19 templates without marks, A21 several end tokens.
"""

from __future__ import annotations

from typing import Any

import data_kit as kit
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftline.data.chat import ChatEncoder, RejectedError, encode_conversation, ids_hash, render_prompt
from draftline.data.template import ChatTemplate, TemplateRefusedError, tokenizer_fingerprint
from draftline.errors import UserError

LONG = 100_000
TWO_TURNS = kit.talk("hello there", "one two", "and then?", "three, naïve 🤗")


def encode(tokenizer: Any, messages: list[dict[str, Any]], tools: Any = None, **options: Any) -> Any:
    return encode_conversation(tokenizer, messages, tools, **{"max_tokens": LONG, **options})


# name, template, end token, supervised text of TWO_TURNS
PLAIN_CASES = [
    ("chatml", kit.CHATML, "<|im_end|>", ["one two<|im_end|>", "three, naïve 🤗<|im_end|>"]),
    ("drops thinking", kit.DROPS_THINKING, "<|im_end|>", ["one two<|im_end|>", "three, naïve 🤗<|im_end|>"]),
    ("strict roles", kit.STRICT_ROLES, "<|im_end|>", ["one two<|im_end|>", "three, naïve 🤗<|im_end|>"]),
    ("tagged", kit.TAGGED, "<|im_end|>", ["one two<|im_end|>", "three, naïve 🤗<|im_end|>"]),
    ("channels", kit.CHANNELS, "<|return|>", ["one two<|end|>", "three, naïve 🤗<|return|>"]),
    ("other end", kit.OTHER_END, "<|im_end|>", ["one two<|im_end|>", "three, naïve 🤗<|endoftext|>"]),
    ("end not in tokenizer", kit.OTHER_END, "</s>", ["one two<|im_end|>", "three, naïve 🤗<|endoftext|>"]),
    ("empty thinking", kit.EMPTY_THINKING, "<|im_end|>", ["one two<|im_end|>", "three, naïve 🤗<|im_end|>"]),
    ("asks for thinking", kit.ASKS_FOR_THINKING, "<|im_end|>", ["one two<|im_end|>", "three, naïve 🤗<|im_end|>"]),
    ("tools late", kit.TOOLS_BEFORE_LAST_USER, "</s>", ["one two</s>", "three, naïve 🤗</s>"]),
    ("trimmed", kit.TRIMMED, "<end_of_turn>", ["one two<end_of_turn>", "three, naïve 🤗<end_of_turn>"]),
    ("no terminator", kit.NO_TERMINATOR, "<|user|>", ["one two<|user|>", "three, naïve 🤗"]),
    ("plain text", kit.PLAIN_TEXT, "</s>", ["one two\n[END]", "three, naïve 🤗\n[END]"]),
]


@pytest.mark.parametrize(("template", "eos", "expected"), [c[1:] for c in PLAIN_CASES], ids=[c[0] for c in PLAIN_CASES])
def test_a2_a19_a21_supervised_tokens_spell_the_answers_and_their_ends(
    template: str, eos: str, expected: list[str]
) -> None:
    tokenizer = kit.tokenizer_with(template, eos=eos)
    tools = [{"type": "function", "function": {"name": "f"}}] if template is kit.TOOLS_BEFORE_LAST_USER else None
    encoded = encode(tokenizer, TWO_TURNS, tools)
    assert kit.supervised(tokenizer, encoded) == expected
    assert encoded.turns_left_out == 0
    assert encoded.n_prompt_tokens == encoded.loss_mask.index(True) > 0
    assert encoded.loss_mask[-1]
    last = encode(tokenizer, TWO_TURNS, tools, turns="last")
    assert kit.supervised(tokenizer, last) == expected[-1:]
    assert last.input_ids == encoded.input_ids


TEXT = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\x00<|>[]#"), min_size=1, max_size=30)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([c[1:3] for c in PLAIN_CASES]), st.lists(TEXT.filter(str.strip), min_size=2, max_size=6))
def test_any_text_is_masked_exactly(case: tuple[str, str], turns: list[str]) -> None:
    """Whatever is said: the supervised text is the assistant's, turn by turn, up to white space at the edges."""
    tokenizer = kit.tokenizer_with(case[0], eos=case[1])
    try:
        encoded = encode(tokenizer, kit.talk(*turns))
    except RejectedError as error:
        assert error.reason == "no supervised token left"  # a one-token answer without a terminator
        return
    found = []
    for text in kit.supervised(tokenizer, encoded):
        for end in (*kit.SPECIALS, "[END]"):
            text = text.removesuffix(end)
        found.append(text.strip())
    assert encoded.turns_left_out == 0
    assert found == [text.strip() for text in turns[1::2]]


@pytest.mark.parametrize("word", ["Zdraftline0markerz", "Zdraftline0markerz and Zdraftline1markerz"])
@pytest.mark.parametrize("case", [c[1:3] for c in PLAIN_CASES], ids=[c[0] for c in PLAIN_CASES])
def test_a_conversation_about_the_words_that_mark_a_turn_is_masked_as_any_other(
    case: tuple[str, str], word: str
) -> None:
    tokenizer = kit.tokenizer_with(case[0], eos=case[1])
    for turns in (["one", "two", "three", word], [word, "two"], [word, word, word, word]):
        spelled = kit.supervised(tokenizer, encode(tokenizer, kit.talk(*turns)))
        assert len(spelled) == len(turns) // 2
        assert all(text.strip().startswith(turn) for text, turn in zip(spelled, turns[1::2], strict=True))


def test_a1_mask_of_every_position_by_hand() -> None:
    tokenizer = kit.tokenizer_with(kit.CHATML)
    encoded = encode(tokenizer, kit.talk("no", "yes"))
    tokens = tokenizer.convert_ids_to_tokens(encoded.input_ids)
    start = len(tokenizer("<|im_start|>user\nno<|im_end|>\n<|im_start|>assistant\n")["input_ids"])
    assert tokens[start - 1].endswith("Ċ") and tokens[-1] == "<|im_end|>"
    assert encoded.loss_mask == [False] * start + [True] * (len(tokens) - start)
    assert encoded.n_prompt_tokens == start


def test_a2_a_turn_whose_thinking_the_template_drops_is_not_supervised_and_counted() -> None:
    tokenizer = kit.tokenizer_with(kit.DROPS_THINKING)
    talk = kit.talk("hello", "<think>\nmaybe no\n</think>\n\none", "and?", "<think>\nyes\n</think>\n\ntwo")
    encoded = encode(tokenizer, talk)
    assert kit.supervised(tokenizer, encoded) == ["<think>\nyes\n</think>\n\ntwo<|im_end|>"]
    assert encoded.turns_left_out == 1
    assert "maybe" not in tokenizer.decode(encoded.input_ids)


def test_a3_an_answer_that_repeats_headers_or_the_question_is_found_at_its_own_place() -> None:
    tokenizer = kit.tokenizer_with(kit.CHATML)
    talk = kit.talk("one", "assistant\none", "one", "one", "user\none", "one one")
    assert kit.supervised(tokenizer, encode(tokenizer, talk)) == [
        "assistant\none<|im_end|>",
        "one<|im_end|>",
        "one one<|im_end|>",
    ]


def test_a3_white_space_at_the_edges_is_kept_where_the_template_keeps_it() -> None:
    tokenizer = kit.tokenizer_with(kit.CHATML)
    encoded = encode(tokenizer, kit.talk("hello", "\n\n  one  \n"))
    assert kit.supervised(tokenizer, encoded) == ["\n\n  one  \n<|im_end|>"]
    prompt = render_prompt(tokenizer, kit.talk("hello"))
    assert encoded.input_ids[: len(prompt)] == prompt


def test_a3_white_space_that_the_template_trims_is_not_missed() -> None:
    tokenizer = kit.tokenizer_with(kit.TRIMMED, eos="<end_of_turn>")
    assert kit.supervised(tokenizer, encode(tokenizer, kit.talk("hello", "  one \n"))) == ["one<end_of_turn>"]


def test_a3_word_pieces_with_leading_spaces_are_masked_whole() -> None:
    tokenizer = kit.tokenizer_with(kit.SPACED, eos="</s>", word_pieces=True)
    encoded = encode(tokenizer, kit.talk("hello there", "one two", "and", "three"))
    words = [token for token, flag in zip(encoded.input_ids, encoded.loss_mask, strict=True) if flag]
    text = tokenizer.decode(words, skip_special_tokens=False).replace(" ", "")
    assert text == "onetwo</s>three</s>"
    assert tokenizer.decode(encoded.input_ids[: encoded.n_prompt_tokens]).endswith("[/INST]")


def test_a8_thinking_in_a_field_of_its_own_is_supervised_where_it_is_rendered() -> None:
    tokenizer = kit.tokenizer_with(kit.CHANNELS, eos="<|return|>")
    talk = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "yes", "thinking": "maybe"}]
    assert kit.supervised(tokenizer, encode(tokenizer, talk)) == [
        "<|channel|>analysis<|message|>maybe<|end|><|start|>assistant<|channel|>final<|message|>yes<|return|>"
    ]
    longer = [*talk, *kit.talk("and?", "no")]
    encoded = encode(tokenizer, longer)
    assert kit.supervised(tokenizer, encoded) == ["no<|return|>"]
    assert encoded.turns_left_out == 1


def test_a8_a_thinking_part_laid_out_anew_is_supervised_as_rendered() -> None:
    template = kit.CHATML.replace("m.content", "(m.content | replace('</think>', '\\n</think>\\n\\n'))")
    tokenizer = kit.tokenizer_with(template)
    encoded = encode(tokenizer, kit.talk("hello", "<think>maybe</think>yes"))
    assert kit.supervised(tokenizer, encoded) == ["<think>maybe\n</think>\n\nyes<|im_end|>"]


def test_a9_template_arguments_reach_prompt_and_sample_alike() -> None:
    template = ChatTemplate(kit.tokenizer_with(kit.EMPTY_THINKING), template_kwargs={"enable_thinking": False})
    prompt = render_prompt(template.tokenizer, kit.talk("hello"), template_kwargs={"enable_thinking": False})
    encoded = ChatEncoder(template, max_tokens=LONG).encode(kit.talk("hello", "one"))
    assert encoded.n_prompt_tokens == len(prompt)
    assert encoded.input_ids[: len(prompt)] == prompt
    assert template.decode(prompt).endswith("<think>\n\n</think>\n\n")
    assert template.template_hash != ChatTemplate(template.tokenizer).template_hash


def test_a22_tool_calls_are_supervised_as_the_target_writes_them() -> None:
    tokenizer = kit.tokenizer_with(kit.TOOL_CALLS)
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    talk = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "two"},
    ]
    encoded = encode(tokenizer, talk, [{"type": "function", "function": {"name": "add"}}])
    assert kit.supervised(tokenizer, encoded) == [
        '\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>',
        "two<|im_end|>",
    ]


def test_a22_a_template_that_drops_tool_calls_rejects_the_row() -> None:
    tokenizer = kit.tokenizer_with(kit.CHATML)
    call = {"function": {"name": "add", "arguments": {}}}
    talk = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    with pytest.raises(RejectedError) as caught:
        encode(tokenizer, talk)
    assert caught.value.reason == "inexact mask"


@pytest.mark.parametrize(("template", "eos"), [c[1:3] for c in PLAIN_CASES], ids=[c[0] for c in PLAIN_CASES])
def test_a6_every_path_is_cut_to_the_limit(template: str, eos: str) -> None:
    tokenizer = kit.tokenizer_with(template, eos=eos)
    whole = encode(tokenizer, TWO_TURNS)
    assert not whole.truncated
    for limit in range(whole.n_prompt_tokens + 2, len(whole.input_ids) + 1):
        cut = encode(tokenizer, TWO_TURNS, max_tokens=limit)
        n = len(cut.input_ids)
        assert len(cut.loss_mask) == n <= limit
        assert (cut.input_ids, cut.loss_mask) == (whole.input_ids[:n], whole.loss_mask[:n])
        assert cut.truncated == (n < len(whole.input_ids))


def test_a7_nothing_left_to_learn_is_rejected_by_reason() -> None:
    tokenizer = kit.tokenizer_with(kit.CHATML)
    n_prompt = encode(tokenizer, TWO_TURNS).n_prompt_tokens
    for limit, reason in ((n_prompt, "prompt too long"), (n_prompt + 1, "no supervised token left")):
        with pytest.raises(RejectedError) as caught:
            encode(tokenizer, TWO_TURNS, max_tokens=limit)
        assert caught.value.reason == reason
    assert sum(encode(tokenizer, TWO_TURNS, max_tokens=n_prompt + 2).loss_mask) == 2


def test_a_role_order_that_the_template_refuses_is_rejected_with_its_words() -> None:
    tokenizer = kit.tokenizer_with(kit.STRICT_ROLES)
    with pytest.raises(RejectedError, match="roles must alternate") as caught:
        encode(tokenizer, [*kit.talk("a", "b"), {"role": "assistant", "content": "c"}])
    assert caught.value.reason == "template refused"
    with pytest.raises(TemplateRefusedError):
        render_prompt(tokenizer, [{"role": "assistant", "content": "c"}])


def test_a_conversation_that_begins_with_the_assistant_is_masked() -> None:
    tokenizer = kit.tokenizer_with(kit.CHATML)
    talk = [{"role": "assistant", "content": "hello"}, *kit.talk("one", "two")]
    assert kit.supervised(tokenizer, encode(tokenizer, talk)) == ["hello<|im_end|>", "two<|im_end|>"]


def test_what_follows_the_last_answer_is_left_away() -> None:
    tokenizer = kit.tokenizer_with(kit.CHATML)
    talk = kit.talk("one", "two")
    assert encode(tokenizer, [*talk, {"role": "user", "content": "three"}]) == encode(tokenizer, talk)


def test_an_answer_cut_by_the_length_limit_has_no_terminator() -> None:
    tokenizer = kit.tokenizer_with(kit.CHATML)
    encoder = ChatEncoder(ChatTemplate(tokenizer), max_tokens=LONG)
    encoded = encoder.encode(TWO_TURNS, answer_cut=True)
    assert kit.supervised(tokenizer, encoded) == ["one two<|im_end|>", "three, naïve 🤗"]


def test_a9_generated_ids_are_the_labels_even_where_text_would_tokenize_otherwise() -> None:
    tokenizer = kit.tokenizer_with(kit.CHATML)
    encoder = ChatEncoder(ChatTemplate(tokenizer), max_tokens=LONG)
    letters = [tokenizer.convert_tokens_to_ids(c) for c in "hello"]
    assert letters != tokenizer("hello")["input_ids"]
    answer = [*letters, tokenizer.eos_token_id]
    prompt = render_prompt(tokenizer, kit.talk("one"))
    encoded = encoder.encode_generated(kit.talk("one", "hello"), None, answer, prompt_hash=ids_hash(prompt))
    assert encoded.input_ids == prompt + answer
    assert encoded.loss_mask == [False] * len(prompt) + [True] * len(answer)


def test_a9_generated_ids_that_do_not_fit_are_rejected() -> None:
    tokenizer = kit.tokenizer_with(kit.CHATML)
    encoder = ChatEncoder(ChatTemplate(tokenizer), max_tokens=LONG)
    ids = [*tokenizer("hello")["input_ids"], tokenizer.eos_token_id]
    talk = kit.talk("one", "hello")
    wrong = [
        (kit.talk("one", "edited"), ids, None, "answer ids disagree"),
        (talk, [len(tokenizer)], None, "answer ids disagree"),
        (talk, ids, ids_hash([1, 2, 3]), "prompt ids disagree"),
    ]
    for messages, answer, prompt_hash, reason in wrong:
        with pytest.raises(RejectedError) as caught:
            encoder.encode_generated(messages, None, answer, prompt_hash=prompt_hash)
        assert caught.value.reason == reason


def test_a_tokenizer_without_a_chat_template_is_refused() -> None:
    tokenizer = kit.tokenizer_with(None)
    for use in (lambda: encode(tokenizer, TWO_TURNS), lambda: render_prompt(tokenizer, TWO_TURNS)):
        with pytest.raises(UserError, match="the tokenizer has no chat template; give an instruction-tuned target"):
            use()


def test_fingerprint_ignores_padding_and_template_but_not_the_vocabulary() -> None:
    one, other = kit.tokenizer_with(kit.CHATML), kit.tokenizer_with(kit.TAGGED)
    other(["a", "a b c"], padding=True) if other.pad_token else other.add_special_tokens({"pad_token": "<|end|>"})
    other(["a", "a b c"], padding=True, truncation=True, max_length=2)
    assert tokenizer_fingerprint(one) == tokenizer_fingerprint(other)
    assert tokenizer_fingerprint(one) != tokenizer_fingerprint(kit.tokenizer_with(kit.CHATML, word_pieces=True))


def test_unicode_that_a_tokenizer_composes_is_accepted() -> None:
    from tokenizers import normalizers

    tokenizer = kit.tokenizer_with(kit.CHATML)
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    assert kit.supervised(tokenizer, encode(tokenizer, kit.talk("a", "cafe\u0301"))) == ["caf\u00e9<|im_end|>"]


def test_text_that_a_tokenizer_cannot_spell_is_rejected() -> None:
    from tokenizers import normalizers

    tokenizer = kit.tokenizer_with(kit.CHATML)
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    with pytest.raises(RejectedError) as caught:
        encode(tokenizer, kit.talk("a", "Hello THERE"))
    assert caught.value.reason == "inexact mask"
