"""Promises of tokenizing words once: the same ids as the tokenizer gives, or the tokenizer itself is asked."""

from __future__ import annotations

import json
from functools import cache
from itertools import pairwise
from typing import Any

import data_kit as kit
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from draftline.data.template import ChatTemplate
from draftline.data.word_memo import PROOF_TEXTS, WordMemo, alternatives_of, is_blind_across_spaces, pieces_of

_UP, _LOW = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SHORT = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
PATTERNS = {
    "gpt-2": None,
    "qwen": _SHORT + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "llama-3": _SHORT + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "gpt-4o": rf"[^\r\n\p{{L}}\p{{N}}]?{_UP}*{_LOW}+{_SHORT}?|[^\r\n\p{{L}}\p{{N}}]?{_UP}+{_LOW}*{_SHORT}?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}


@cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """A small BPE tokenizer that cuts text as this family does."""
    backend = Tokenizer(models.BPE())
    pattern = PATTERNS[name]
    if pattern is None:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        backend.normalizer = normalizers.NFC() if name == "qwen" else None
        cut = pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False)
        spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([cut, spell])
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<|im_start|>", "<|im_end|>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(kit.CORPUS * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.chat_template = kit.CHATML
    return tokenizer


def definition(tokenizer: Any) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str())
    return content


TEXT = st.text("aB. \n\t'st1,!🤗é\u0301\u00a0\u3000\x1c", max_size=24) | st.text(max_size=24)


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(sorted(PATTERNS)), st.lists(TEXT, min_size=1, max_size=4))
def test_pieces_have_the_ids_of_the_whole(name: str, parts: list[str]) -> None:
    template = ChatTemplate(tokenizer_of(name))
    text = "<|im_start|>".join(parts)
    memo = WordMemo(template.tokenizer, template.tokenize_many, template.token_bytes)
    assert memo.is_used
    memo.tokenize(["proof"] * PROOF_TEXTS)
    for found, whole in zip(memo.tokenize([text, text]), template.tokenize_many([text, text]), strict=True):
        assert found.ids.tolist() == whole
        assert not found.is_spelled or template.decode(whole) == text


@settings(max_examples=100, deadline=None)
@given(st.text("ab  \n\t.\u00a0", max_size=12))
def test_text_is_cut_before_single_spaces_inside_of_it_and_nowhere_else(text: str) -> None:
    cuts = [
        i
        for i, char in enumerate(text)
        if char == " " and 0 < i < len(text) - 1 and not (text[i - 1].isspace() or text[i + 1].isspace())
    ]
    edges = [0, *cuts, len(text)]
    assert pieces_of(text) == [text[a:b] for a, b in pairwise(edges) if b > a]


def without_memo(change: str) -> dict[str, Any]:
    content = definition(tokenizer_of("llama-3"))
    cut = content["pre_tokenizer"]["pretokenizers"][0]
    if change == "added token takes spaces":
        content["added_tokens"][0]["lstrip"] = True
    elif change == "added token has a space":
        content["added_tokens"][0]["content"] = "<| im_start|>"
    elif change == "lower case":
        content["normalizer"] = {"type": "Lowercase"}
    elif change == "unknown alternative":
        cut["pattern"]["Regex"] += r"|\p{L}+ \p{L}+"
    elif change == "white space is not matched":
        cut["pattern"]["Regex"] = r"[^\r\n\p{L}\p{N}]?\p{L}+"
    elif change == "pieces are removed":
        cut["behavior"] = "Removed"
    elif change == "random merges":
        content["model"]["dropout"] = 0.1
    return content


CHANGES = (
    "added token takes spaces",
    "added token has a space",
    "lower case",
    "unknown alternative",
    "white space is not matched",
    "pieces are removed",
    "random merges",
)


@pytest.mark.parametrize("change", CHANGES)
def test_tokenizers_that_may_look_across_spaces_are_asked_for_the_whole(change: str) -> None:
    assert not is_blind_across_spaces(without_memo(change))


def test_word_pieces_that_carry_their_space_are_asked_for_the_whole() -> None:
    assert not is_blind_across_spaces(definition(kit.tokenizer_with(None, word_pieces=True)))
    assert not is_blind_across_spaces(definition(kit.tokenizer_with(kit.CHATML)))  # cuts nowhere


def test_a_tokenizer_that_is_not_what_it_says_is_found_out() -> None:
    tokenizer = tokenizer_of("gpt-2")
    memo = WordMemo(tokenizer, lambda texts: [[len(text)] for text in texts])
    texts = ["one two three"] * (PROOF_TEXTS + 5)
    assert memo.is_used and [found.ids.tolist() for found in memo.tokenize(texts)] == [[13]] * len(texts)
    assert not memo.is_used and memo.tokenize(["a b"])[0].ids.tolist() == [3]


def test_text_that_is_composed_on_the_way_is_not_taken_for_spelled() -> None:
    template = ChatTemplate(tokenizer_of("qwen"))
    memo = WordMemo(template.tokenizer, template.tokenize_many, template.token_bytes)
    memo.tokenize(["proof"] * PROOF_TEXTS)
    found = memo.tokenize(["one cafe\u0301 two", "one caf\u00e9 two"])
    assert [tokens.is_spelled for tokens in found] == [False, True]
    assert found[0].ids.tolist() == found[1].ids.tolist()


def test_known_words_are_not_tokenized_again_and_long_pieces_are_not_kept() -> None:
    template = ChatTemplate(tokenizer_of("gpt-2"))
    asked: list[str] = []

    def tokenize(texts: Any) -> list[list[int]]:
        asked.extend(texts)
        return template.tokenize_many(texts)

    memo = WordMemo(template.tokenizer, tokenize)
    memo.tokenize(["proof"] * PROOF_TEXTS)
    for _ in range(2):
        asked.clear()
        memo.tokenize([f"one two {'x' * 100}"])
    assert asked == [f" {'x' * 100}"]


def test_alternatives_are_cut_outside_of_brackets_only() -> None:
    assert alternatives_of(r"(?:a|b)+|[|\]]|\||c") == [r"(?:a|b)+", r"[|\]]", r"\|", "c"]
