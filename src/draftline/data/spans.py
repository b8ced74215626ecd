"""Where the assistant's words lie in a rendered conversation, whatever the template does with them.

For a turn, the text that the target is served (the conversation before it, up to where the assistant begins to write)
is rendered. If the whole conversation begins with that text, the turn begins right behind it. Where it does not
(templates that rewrite or reject earlier turns), the turn's content is swapped for a marker and found that way. Either
way the place counts only if exactly the assistant's text stands there; a turn that the template rewrote, for example
by dropping its thinking part, is left out.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Any

from draftline.data.messages import REASONING_FIELDS, Message, Turns
from draftline.data.template import ChatTemplate, TemplateRefusedError

_THINK_BEGIN, _THINK_END, _NEAR = "<think>", "</think>", 32
_EMPTY_THINKING = re.compile(r"\s*(?:<think>\s*)?</think>\s*")

Tools = Sequence[Mapping[str, Any]] | None


@dataclass(frozen=True, slots=True)
class TurnSpan:
    """Character ranges of one assistant turn in the rendered text.

    Attributes:
        earliest: where the assistant begins to write; up to `start` there is only white space of the template.
        start, stop: the assistant's text.
        end_start, end_stop: the terminator behind it; empty range if there is none.
    """

    earliest: int
    start: int
    stop: int
    end_start: int
    end_stop: int


def locate_turns(
    template: ChatTemplate, messages: Sequence[Message], tools: Tools, text: str, turns: Turns
) -> list[TurnSpan | None]:
    """Spans of the assistant turns in `text`, the rendering of `messages`; None for a turn that cannot be had exactly.

    Args:
        messages: ends with an assistant turn.
        turns: `last` locates only that one.
    """
    wanted = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    regions = _tagged_regions(template, messages, tools, text, len(wanted))
    if turns == "last":
        wanted, regions = wanted[-1:], regions[-1:]
    places = []
    for i, region in zip(wanted, regions, strict=True):
        place = _fit(template, messages[i], text, *region) if region else None
        places.append(place or _locate(template, messages, tools, text, i))
    last = places[-1]
    tail = text[last[2] :].rstrip() if last else ""
    return [_with_terminator(template, text, place, tail) if place else None for place in places]


Place = tuple[int, int, int]  # earliest, start, stop


def _locate(template: ChatTemplate, messages: Sequence[Message], tools: Tools, text: str, index: int) -> Place | None:
    message, until_here = messages[index], messages[: index + 1]
    structured = _is_structured(message)
    served = _render_or_none(template, messages[:index], tools, ask=True)
    if served is not None and text.startswith(served):
        # Where a turn of several parts ends is only plain where it is the last one.
        is_inner = structured and index < len(messages) - 1
        whole = _render_or_none(template, until_here, tools, ask=False) if is_inner else text
        if whole is not None and whole.startswith(served):
            place = _fit(template, message, whole, len(served), len(whole))
            if place and (not is_inner or text.startswith(whole[: place[2]])):
                return place
        if is_inner:
            return _locate_by_stop(template, messages, tools, text, index, len(served))
    if structured:
        return _locate_parts_by_marker(template, messages, tools, text, index)
    return _locate_by_marker(template, messages, tools, text, index)


def _marker_for(text: str) -> str:
    """A word that stands nowhere in a rendered conversation, which may be about any word."""
    words = (f"Zdraftline{number}markerz" for number in count())
    return next(word for word in words if word not in text)


def _locate_parts_by_marker(
    template: ChatTemplate, messages: Sequence[Message], tools: Tools, text: str, index: int
) -> Place | None:
    """A turn of several parts, from where a plain content would begin."""
    marker = _marker_for(text)
    plain = {"role": "assistant", "content": marker}
    marked = _render_or_none(template, [*messages[:index], plain, *messages[index + 1 :]], tools, ask=False)
    before, found, _ = (marked or "").partition(marker)
    if not found or not text.startswith(before):
        return None
    if index < len(messages) - 1:
        return _locate_by_stop(template, messages, tools, text, index, len(before))
    return _fit(template, messages[index], text, len(before), len(text))


def _locate_by_stop(
    template: ChatTemplate, messages: Sequence[Message], tools: Tools, text: str, index: int, begin: int
) -> Place | None:
    """A turn of several parts that is rendered otherwise where it is the last one: up to the token that it stops at.

    That token must stand before the next message, whose content is swapped for a marker to see where it begins.
    """
    found = template.special_pattern.finditer(text, begin)
    end = next((match for match in found if template.special_ids[match.group()] in template.stop_ids), None)
    if end is None:
        return None
    marker = _marker_for(text)
    swapped = [*messages[: index + 1], {**messages[index + 1], "content": marker}, *messages[index + 2 :]]
    marked = _render_or_none(template, swapped, tools, ask=False)
    if marked is None or marker not in marked or not marked.startswith(text[: end.end()]):
        return None
    return _fit(template, messages[index], text, begin, end.end())


def _locate_by_marker(
    template: ChatTemplate, messages: Sequence[Message], tools: Tools, text: str, index: int
) -> Place | None:
    content, marker = str(messages[index]["content"]), _marker_for(text)
    swapped = [*messages[:index], {**messages[index], "content": marker}, *messages[index + 1 :]]
    marked = _render_or_none(template, swapped, tools, ask=False)
    if marked is None or marked.count(marker) != 1:
        return None
    before, _, after = marked.partition(marker)
    start, stop = len(before), len(text) - len(after)
    if stop <= start or not (text.startswith(before) and text.endswith(after)):
        return None
    return (start, start, stop) if text[start:stop].strip() == content.strip() else None


def _fit(template: ChatTemplate, message: Message, text: str, begin: int, limit: int) -> Place | None:
    """The assistant's text at the beginning of text[begin:limit], or None if something else stands there."""
    if _is_structured(message):
        begin += _added_thinking(message, text[begin:limit])
        body = _without_terminator(template, text[begin:limit])
        return (begin, begin, begin + len(body)) if body and _holds_parts(body, message) else None
    content = _behind_opened_thinking(str(message["content"]), text, begin)
    words = content.strip()
    start = begin
    while start < limit and text[start].isspace():
        start += 1
    stop = start + len(words)
    if not text.startswith(words, start) or stop > limit:
        return _fit_loosely(content, text, begin, limit) if _THINK_END in content else None
    trailing = content[len(content.rstrip()) :]
    if trailing and text.startswith(trailing, stop):
        stop += len(trailing)
    leading = content[: len(content) - len(content.lstrip())]
    if leading and text[begin:start].endswith(leading):
        start -= len(leading)
    return begin, start, stop


def _behind_opened_thinking(content: str, text: str, begin: int) -> str:
    """What the assistant writes itself of a content whose thinking part is opened by the prompt already."""
    opened = text[max(0, begin - _NEAR) : begin].rstrip().endswith(_THINK_BEGIN)
    return content.lstrip().removeprefix(_THINK_BEGIN) if opened else content


def _fit_loosely(content: str, text: str, begin: int, limit: int) -> Place | None:
    """As `_fit`, but white space may differ: templates lay out a thinking part anew."""
    place = begin
    for char in filter(lambda c: not c.isspace(), content):
        while place < limit and text[place].isspace():
            place += 1
        if place >= limit or text[place] != char:
            return None
        place += 1
    return begin, begin, place


def _is_structured(message: Message) -> bool:
    """Whether the target wrote more than the content: a thinking part or tool calls in fields of their own."""
    return bool(message.get("tool_calls")) or any(message.get(name) for name in REASONING_FIELDS)


def _added_thinking(message: Message, text: str) -> int:
    """Characters of an empty thinking part that the template puts in front of a turn without one."""
    if any(message.get(name) for name in REASONING_FIELDS) or _THINK_END in str(message["content"]):
        return 0
    found = _EMPTY_THINKING.match(text)
    return found.end() if found else 0


def _holds_parts(body: str, message: Message) -> bool:
    """Whether all that the assistant said stands there: each call by its name, and whatever text its arguments hold."""
    parts = [message["content"]] + [message[name] for name in REASONING_FIELDS if message.get(name)]
    functions = [call.get("function", call) for call in message.get("tool_calls", ())]
    names = Counter(str(function["name"]) for function in functions)
    return (
        all(str(part).strip() in body for part in parts)
        and all(body.count(name) >= count for name, count in names.items())
        and all(_spelled_in(body, text) for function in functions for text in _texts(function.get("arguments")))
    )


def _texts(value: Any) -> Iterator[str]:
    """Every text in a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from (str(key), *_texts(item))
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def _spelled_in(body: str, text: str) -> bool:
    """Whether a text stands there, as it is or as JSON spells it."""
    return text.strip() in body or any(json.dumps(text, ensure_ascii=a)[1:-1] in body for a in (False, True))


def _without_terminator(template: ChatTemplate, text: str) -> str:
    """Text without its end: special tokens and white space from the first stop token on (the last token if none)."""
    body, tokens = text.rstrip(), []
    while found := next((t for t in _specials_by_length(template) if body.endswith(t)), None):
        body = body[: -len(found)]
        tokens.append((template.special_ids[found] in template.stop_ids, len(body)))
        body = body.rstrip()
    stops = [place for is_stop, place in tokens if is_stop]
    cut = stops[-1] if stops else (tokens[0][1] if tokens else len(body))
    return text[:cut].rstrip()


def _specials_by_length(template: ChatTemplate) -> list[str]:
    return sorted(filter(None, template.special_ids), key=len, reverse=True)


def _with_terminator(template: ChatTemplate, text: str, place: Place, tail: str) -> TurnSpan:
    """Adds what ends it: a special token right behind, a stop token behind white space, or the template's tail."""
    stop = place[2]
    found = template.special_pattern.match(text, stop)
    if found:
        return TurnSpan(*place, found.start(), found.end())
    gap = len(text) - len(text[stop:].lstrip()) if text[stop:].strip() else stop
    found = template.special_pattern.match(text, gap)
    if found and template.special_ids[found.group()] in template.stop_ids:
        return TurnSpan(*place, found.start(), found.end())
    if tail and not template.special_pattern.search(tail) and text.startswith(tail, stop):
        return TurnSpan(*place, stop, stop + len(tail))
    return TurnSpan(*place, stop, stop)


def _tagged_regions(
    template: ChatTemplate, messages: Sequence[Message], tools: Tools, text: str, n_turns: int
) -> Sequence[tuple[int, int] | None]:
    """Characters that `{% generation %}` marks for each turn; None where there are no tags or they do not match up."""
    nothing = [None] * n_turns
    if not template.has_generation_tags(tools):
        return nothing
    mask = template.generation_mask(messages, tools)
    offsets = template.tokenize(text)[1]
    if len(mask) != len(offsets):
        return nothing
    regions = [(offsets[first][0], offsets[last][1]) for first, last in _runs(mask)]
    return regions if len(regions) == n_turns else nothing


def _runs(mask: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """First and last index of each run of True."""
    edges = [i for i, (a, b) in enumerate(pairwise([False, *mask, False])) if a != b]
    yield from ((first, after - 1) for first, after in zip(edges[::2], edges[1::2], strict=True))


def _render_or_none(template: ChatTemplate, messages: Sequence[Message], tools: Tools, *, ask: bool) -> str | None:
    try:
        return template.render(messages, tools, ask=ask)
    except TemplateRefusedError:
        return None
