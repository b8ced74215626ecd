"""Tokenizing each word once: a memo in front of tokenizers that never look across a space.

Many byte-level tokenizers first cut text by a regular expression none of whose alternatives matches a space behind
another character than white space, and then treat each piece by itself. So text may be cut before any single space
between two characters that are no white space, and the tokens of the pieces, joined, are the tokens of the text. Words
repeat, so most pieces are known. Which tokenizers are of this kind is read from their definition; all others, and
pieces that are not known, go to the tokenizer itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from draftline.data.token_bytes import TokenBytes

MAX_PIECES = 200_000
MAX_PIECE_CHARS = 64
PROOF_TEXTS = 32

_PIECE = re.compile(r"\s*\S+(?:(?:\s\s+|[^\S ])\S+)*(?:\s+\Z)?|\s+")
_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
# Alternatives of public tokenizers. None matches a space behind another character than white space, none looks back,
# and what they look ahead at is the character behind white space.
_BLIND = frozenset(
    [
        *("'s", "'t", "'re", "'ve", "'m", "'ll", "'d"),
        _CONTRACTION,
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
        *(
            rf"[^\r\n\p{{L}}\p{{N}}]?{shape}{ending}"
            for shape in (f"{_UPPER}*{_LOWER}+", f"{_UPPER}+{_LOWER}*")
            for ending in ("", f"{_CONTRACTION}?")
        ),
        r" ?\p{L}+",
        r" ?\p{N}+",
        r"\p{N}",
        r"\p{N}+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)

Tokenize = Callable[[Sequence[str]], list[list[int]]]


@dataclass(frozen=True, slots=True)
class Tokenized:
    """Ids of one text, int32 [T], and whether they are known to spell exactly its bytes."""

    ids: npt.NDArray[np.int32]
    is_spelled: bool = False


class WordMemo:
    """Tokens of texts, by the memo where that is exact.

    The first texts are tokenized whole as well and compared, so that a tokenizer that is not what its definition says
    is never trusted.

    Args:
        tokenizer: a fast tokenizer.
        tokenize: ids of whole texts, by the tokenizer itself.
        table: what its tokens spell; None if that is not known.
    """

    def __init__(self, tokenizer: Any, tokenize: Tokenize, table: TokenBytes | None = None) -> None:
        self._tokenize, self._table = tokenize, table
        self._known: dict[str, bytes] = {}  # ids of a piece as int32, to be joined without looking at them
        self._misspelled: set[str] = set()
        self._to_prove = PROOF_TEXTS
        self.is_used = is_blind_across_spaces(json.loads(tokenizer.backend_tokenizer.to_str()))

    def tokenize(self, texts: Sequence[str]) -> list[Tokenized]:
        """Ids of each text."""
        if self.is_used and self._to_prove <= 0:
            return self._by_pieces(texts)
        whole = [Tokenized(np.array(ids, np.int32)) for ids in self._tokenize(texts)]
        if self.is_used:
            self._to_prove -= len(texts)
            pairs = zip(self._by_pieces(texts), whole, strict=True)
            self.is_used = all(np.array_equal(one.ids, other.ids) for one, other in pairs)
        return whole

    def _by_pieces(self, texts: Sequence[str]) -> list[Tokenized]:
        cut = [pieces_of(text) for text in texts]
        unknown = sorted(set(chain.from_iterable(cut)).difference(self._known))
        if len(self._known) + len(unknown) > MAX_PIECES:
            self._known, self._misspelled = {}, set()
            unknown = sorted(set(chain.from_iterable(cut)))
        self._learn(unknown)
        look_up, misspelled = self._known.__getitem__, self._misspelled
        found = [
            Tokenized(
                np.frombuffer(b"".join(map(look_up, pieces)), np.int32),
                self._table is not None and (not misspelled or misspelled.isdisjoint(pieces)),
            )
            for pieces in cut
        ]
        for piece in unknown:
            if len(piece) > MAX_PIECE_CHARS:
                del self._known[piece]
                self._misspelled.discard(piece)
        return found

    def _learn(self, unknown: list[str]) -> None:
        for piece, ids in zip(unknown, self._tokenize(unknown), strict=True):
            self._known[piece] = np.array(ids, np.int32).tobytes()
            if self._table is not None and not self._table.spells(ids, piece.encode()):
                self._misspelled.add(piece)


def pieces_of(text: str) -> list[str]:
    """The text, cut before every single space between two characters that are no white space."""
    return _PIECE.findall(text)


def is_blind_across_spaces(definition: dict[str, Any]) -> bool:
    """Whether a tokenizer (as its JSON) gives the same tokens if text is cut as `pieces_of` does."""
    normalizer = definition.get("normalizer")
    if normalizer is not None and normalizer.get("type") not in ("NFC", None):
        return False
    model = definition.get("model", {})
    if model.get("type") != "BPE" or model.get("dropout"):
        return False
    for token in definition.get("added_tokens", []):
        if token.get("lstrip") or token.get("rstrip") or token.get("single_word") or re.search(r"\s", token["content"]):
            return False
    cutter = definition.get("pre_tokenizer") or {}
    steps = cutter.get("pretokenizers", []) if cutter.get("type") == "Sequence" else [cutter]
    return any(_cuts_at_spaces(step) for step in steps) and all(
        _cuts_at_spaces(step) or step.get("type") == "Digits" or _only_spells_bytes(step) for step in steps
    )


def _only_spells_bytes(step: dict[str, Any]) -> bool:
    return step.get("type") == "ByteLevel" and not step.get("add_prefix_space") and step.get("use_regex") is False


def _cuts_at_spaces(step: dict[str, Any]) -> bool:
    if step.get("type") == "ByteLevel":
        return not step.get("add_prefix_space") and step.get("use_regex") is not False
    pattern = step.get("pattern", {}).get("Regex") if step.get("type") == "Split" else None
    if pattern is None or step.get("behavior") != "Isolated" or step.get("invert"):
        return False
    alternatives = alternatives_of(pattern)
    return r"\s+" in alternatives and set(alternatives) <= _BLIND


def alternatives_of(pattern: str) -> list[str]:
    """The alternatives of a regular expression, cut at each `|` outside of brackets."""
    found, depth, in_class, escaped = [""], 0, False, False
    for char in pattern:
        if char == "|" and not (depth or in_class or escaped):
            found.append("")
            continue
        found[-1] += char
        if not escaped and not in_class:
            depth += (char == "(") - (char == ")")
        in_class = in_class if escaped else (char == "[") or (in_class and char != "]")
        escaped = char == "\\" and not escaped
    return found
