"""What a chat template puts around the messages, learned once for each order of roles.

A conversation with a marker in place of each content is rendered, and its turns are located the careful way (see
`spans`). Another conversation with the same roles then needs one rendering: if its text is exactly the learned words
with its own contents between them, its turns stand where those of the marked one stood. Where the text differs in
anything, because the template looks into contents, trims them or rewrites them, nothing is assumed and the careful
way is gone again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from draftline.data.messages import Message
from draftline.data.spans import TurnSpan, locate_turns
from draftline.data.template import ChatTemplate, TemplateRefusedError

MAX_OUTLINES = 512
_PLAIN_FIELDS = {"role", "content"}


@dataclass(frozen=True, slots=True)
class _Turn:
    """An assistant turn: its message, and where things stand from the beginning (`lead`) and end of its content."""

    message: int
    lead: int
    end_start: int
    end_stop: int


@dataclass(frozen=True, slots=True)
class Outline:
    """The template's words between contents (one more than messages), and its assistant turns."""

    words: tuple[str, ...]
    turns: tuple[_Turn, ...]

    def spans(self, contents: Sequence[str], text: str) -> list[TurnSpan] | None:
        """The turns in `text`, or None if it is not exactly the words and the contents."""
        pieces = [piece for pair in zip(self.words, contents, strict=False) for piece in pair]
        if "".join([*pieces, self.words[-1]]) != text:
            return None
        starts, place = [], 0
        for word, content in zip(self.words, contents, strict=False):
            place += len(word)
            starts.append(place)
            place += len(content)
        spans = []
        for turn in self.turns:
            start = starts[turn.message]
            stop = start + len(contents[turn.message])
            spans.append(TurnSpan(start + turn.lead, start, stop, stop + turn.end_start, stop + turn.end_stop))
        return spans


class OutlineCache:
    """Outlines of one template, by the roles of a conversation."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._known: dict[tuple[str, ...], Outline | None] = {}

    def locate(self, messages: Sequence[Message], text: str) -> list[TurnSpan] | None:
        """Spans of all assistant turns of `messages`, which end with one, in their rendering `text`.

        None: not one of the plain cases; ask `locate_turns`.
        """
        if any(message.keys() != _PLAIN_FIELDS for message in messages):
            return None
        outline = self._outline(tuple(message["role"] for message in messages))
        if outline is None:
            return None
        contents = [message["content"] for message in messages]
        spans = outline.spans(contents, text)
        if spans is not None:
            return spans
        trimmed = [c if m["role"] == "assistant" else c.strip() for m, c in zip(messages, contents, strict=True)]
        return outline.spans(trimmed, text) if trimmed != contents else None

    def _outline(self, roles: tuple[str, ...]) -> Outline | None:
        if roles not in self._known:
            while len(self._known) >= MAX_OUTLINES:
                del self._known[next(iter(self._known))]
            self._known[roles] = learn_outline(self._template, roles)
        return self._known[roles]


def learn_outline(template: ChatTemplate, roles: Sequence[str]) -> Outline | None:
    """The outline of conversations with these roles, or None if the marked one is not rendered plainly."""
    markers = [f"Zdraftline{i}outlinez" for i in range(len(roles))]
    messages: list[Message] = [{"role": role, "content": m} for role, m in zip(roles, markers, strict=True)]
    try:
        text = template.render(messages, None)
    except TemplateRefusedError:
        return None
    words = _between(text, markers)
    if words is None:
        return None
    everything: Literal["all"] = "all"
    spans = iter(locate_turns(template, messages, None, text, everything))
    turns, place = [], 0
    for i, role in enumerate(roles):
        start = place + len(words[i])
        place = start + len(markers[i])
        if role != "assistant":
            continue
        span = next(spans)
        reach = place + len(words[i + 1])
        if span is None or (span.start, span.stop) != (start, place) or span.end_stop > reach:
            return None
        if span.earliest < start - len(words[i]):
            return None
        turns.append(_Turn(i, span.earliest - start, span.end_start - place, span.end_stop - place))
    return Outline(tuple(words), tuple(turns))


def _between(text: str, markers: Sequence[str]) -> list[str] | None:
    """What stands before, between and behind the markers, if each occurs once and in order."""
    words, rest = [], text
    for marker in markers:
        before, found, rest = rest.partition(marker)
        if not found:
            return None
        words.append(before)
    words.append(rest)
    whole = "".join(words)
    return None if any(marker in whole for marker in markers) else words
