"""What each token of a byte-level tokenizer spells, so that a row's tokens can be proven against its text at once.

Byte-level vocabularies write each byte as one printable character; read back through that table, the tokens of a text
must join to its UTF-8 bytes. Where they do, every token's place in the text is known without asking the tokenizer for
offsets, and decoding any run of them gives exactly the text they cover.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

# No UTF-8 text holds this byte: a row with such a token never passes the comparison.
_UNKNOWN = b"\xff"


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """Bytes of every token.

    Attributes:
        spelled: bytes by token id.
        lengths: int64 [vocabulary], their number.
    """

    spelled: tuple[bytes, ...]
    lengths: npt.NDArray[np.int64]

    @classmethod
    def of(cls, tokenizer: Any) -> TokenBytes | None:
        """The table of a fast tokenizer, or None if it is not a byte-level one."""
        backend = tokenizer.backend_tokenizer
        if not _is_byte_level(json.loads(backend.to_str()).get("decoder")):
            return None
        vocabulary = backend.get_vocab(with_added_tokens=True)
        added = {token.content for token in backend.get_added_tokens_decoder().values()}
        spelled = [_UNKNOWN] * (max(vocabulary.values(), default=-1) + 1)
        byte_of = _byte_of_char()
        for text, token in vocabulary.items():
            if text in added:
                spelled[token] = text.encode(errors="surrogatepass") or _UNKNOWN
            elif text and all(char in byte_of for char in text):
                spelled[token] = bytes(byte_of[char] for char in text)
        return cls(tuple(spelled), np.array([len(item) for item in spelled], np.int64))

    def spells(self, ids: Sequence[int], data: bytes) -> bool:
        """Whether the tokens join to `data`, the UTF-8 bytes of a text."""
        return b"".join(map(self.spelled.__getitem__, ids)) == data

    def ends(self, ids: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        """Where each token ends in the bytes that they spell, for ids int32 [T]."""
        return np.cumsum(self.lengths[ids])


def _is_byte_level(decoder: Any) -> bool:
    if not isinstance(decoder, dict):
        return False
    if decoder.get("type") == "Sequence":
        parts = decoder.get("decoders", [])
        return len(parts) == 1 and _is_byte_level(parts[0])
    return decoder.get("type") == "ByteLevel"


def _byte_of_char() -> dict[str, int]:
    """Printable Latin-1 bytes stand for themselves; the others, in order, for the characters from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in plain}
    others = [byte for byte in range(256) if byte not in set(plain)]
    return table | {chr(0x100 + i): byte for i, byte in enumerate(others)}
