"""Keeping evaluation prompts out of training data.

The rule: a conversation is left out if any text of its messages (reasoning and tool calls are text too) shares a run
of `n_words` words with an evaluation prompt, or is, word for word, a whole prompt shorter than that. Words are runs of
letters and digits, compared without regard to case or punctuation; each character of a script written without spaces
is a word.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from draftline.data.conversations import Tally, read_conversations
from draftline.data.messages import Message
from draftline.errors import UserError

DEFAULT_WORDS = 13
REASON = "in evaluation prompts"
_UNSPACED = "\u0e00-\u0e7f\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W_{_UNSPACED}]+")


@dataclass(frozen=True, slots=True)
class Decontaminator:
    """The evaluation prompts, as runs of words.

    Attributes:
        n_words: length of a run.
        runs: all runs of the prompts.
        openings: first words of the runs, to look up few of a message's own.
        short: whole prompts that are shorter than a run.
    """

    n_words: int
    runs: frozenset[str]
    openings: frozenset[str]
    short: frozenset[str]

    @classmethod
    def of(cls, prompts: Iterable[str], n_words: int) -> Decontaminator:
        """For these prompts."""
        runs: set[str] = set()
        short: set[str] = set()
        for prompt in prompts:
            words = words_of(prompt)
            if len(words) >= n_words:
                runs.update(_runs(words, n_words))
            elif words:
                short.add(" ".join(words))
        return cls(n_words, frozenset(runs), frozenset(run.split(" ", 1)[0] for run in runs), frozenset(short))

    def find(self, messages: Sequence[Message]) -> str | None:
        """The first words that a conversation shares with a prompt, or None."""
        for text in (text for message in messages for text in _texts(message)):
            words = words_of(text)
            if len(words) < self.n_words:
                whole = " ".join(words)
                if whole in self.short:
                    return whole
                continue
            for i in range(len(words) - self.n_words + 1):
                if words[i] in self.openings and (run := " ".join(words[i : i + self.n_words])) in self.runs:
                    return run
        return None


def read_decontaminator(files: Sequence[str], n_words: int) -> Decontaminator:
    """The user turns of these files (read as any conversations) as a Decontaminator.

    Raises:
        UserError: a file that cannot be read, or n_words below 1.
    """
    if n_words < 1:
        raise UserError(f"decontaminate_words is {n_words}", mend="set it to at least 1")
    rows = read_conversations(files, Tally(skip_bad_rows=False))
    return Decontaminator.of(
        (str(message["content"]) for row in rows for message in row.messages if message["role"] == "user"), n_words
    )


def words_of(text: str) -> list[str]:
    """The words of a text as they are compared."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def _texts(value: object) -> Iterator[str]:
    """All that a message says: its content, its reasoning, and the arguments of its tool calls."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            if name != "role":
                yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def _runs(words: Sequence[str], n_words: int) -> Iterator[str]:
    for i in range(len(words) - n_words + 1):
        yield " ".join(words[i : i + n_words])
