"""The loss mask of a rendered conversation whose turns are located: which tokens spell exactly the assistant's words.

There are two ways to the same mask. By bytes: where a byte-level tokenizer's tokens join to the bytes of the text,
which proves the whole row at once. By offsets: any other tokenizer, and text in which a token reaches over the edge of
a turn; each turn's tokens are decoded and compared with its text.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from draftline.data.spans import TurnSpan
from draftline.data.template import ChatTemplate
from draftline.data.token_bytes import TokenBytes
from draftline.data.word_memo import Tokenized

Marked = tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_], int]  # ids, mask, turns that are exact


class RejectedError(ValueError):
    """A conversation that gives no sample. `reason` is a short fixed phrase that rows are counted by."""

    def __init__(self, reason: str, detail: str) -> None:
        self.reason = reason
        super().__init__(detail)


@dataclass(frozen=True, slots=True)
class Draft:
    """A rendered conversation whose turns are located, before it is tokenized.

    Attributes:
        text: the rendering.
        places: one an assistant turn that was asked for; None where it cannot be had exactly.
        end_is_cut: the last turn's terminator was never written.
    """

    text: str
    places: tuple[TurnSpan | None, ...]
    end_is_cut: bool = False

    @property
    def spans(self) -> list[tuple[TurnSpan, bool]]:
        """Located turns, and whether each has its terminator."""
        last = len(self.places) - 1
        return [(p, not (self.end_is_cut and i == last)) for i, p in enumerate(self.places) if p is not None]


def mark_by_bytes(table: TokenBytes, draft: Draft, tokens: Tokenized) -> Marked | None:
    """Ids, mask and number of exact turns, or None if the tokens do not spell the text or one reaches over an edge.

    Args:
        tokens: of `draft.text`.
    """
    ids, data = tokens.ids, draft.text.encode()
    if not (tokens.is_spelled or table.spells(ids.tolist(), data)):
        return None
    ends = table.ends(ids)
    is_ascii = len(data) == len(draft.text)
    mask, exact = np.zeros(len(ids), np.bool_), 0
    for span, with_end in draft.spans:
        if not is_ascii:
            span = _in_bytes(draft.text, span)
        first, stop = _after(ends, span.earliest), _after(ends, span.stop)
        if first is None or stop is None:
            return None
        while first < stop and ends[first] <= span.start:
            first += 1  # white space of the template
        if first == stop:
            continue
        mask[first:stop] = True
        exact += 1
        if with_end and span.end_start < span.end_stop:
            first, stop = _after(ends, span.end_start), _after(ends, span.end_stop)
            # An end that shares a token with what follows is not what the target wrote.
            if first is not None and stop is not None:
                mask[first:stop] = True
    return ids, mask, exact


def mark_by_offsets(template: ChatTemplate, draft: Draft) -> Marked:
    """Ids, mask and number of exact turns.

    Raises:
        RejectedError: a token reaches over the edge of a turn and cannot be cut there.
    """
    tokens = _cut_at_edges(template, draft.text, [span for span, _ in draft.spans])
    mask, exact = np.zeros(len(tokens.ids), np.bool_), 0
    for span, with_end in draft.spans:
        exact += _mark_turn(template, mask, tokens, draft.text, span, with_end=with_end)
    return np.array(tokens.ids, np.int32), mask, exact


def _after(ends: npt.NDArray[np.int64], place: int) -> int | None:
    """The token that begins at byte `place`, or None if a token reaches over it."""
    index = int(np.searchsorted(ends, place, side="right"))
    before = int(ends[index - 1]) if index else 0
    return index if before == place else None


def _in_bytes(text: str, span: TurnSpan) -> TurnSpan:
    """The same places, counted in UTF-8 bytes."""
    places, n_bytes, done = [], 0, 0
    for place in (span.earliest, span.start, span.stop, span.end_start, span.end_stop):
        n_bytes += len(text[done:place].encode())
        places.append(n_bytes)
        done = place
    return TurnSpan(*places)


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Ids with the characters each covers, in order."""

    ids: list[int]
    starts: list[int]
    stops: list[int]

    @classmethod
    def of(cls, ids: list[int], offsets: list[tuple[int, int]]) -> _Tokens:
        return cls(ids, [start for start, _ in offsets], [stop for _, stop in offsets])

    def range_of(self, start: int, stop: int) -> tuple[int, int]:
        """First and one-past-last token that begin in text[start:stop]."""
        return bisect_left(self.starts, start), bisect_left(self.starts, stop)

    def reach_over(self, edge: int) -> bool:
        """Whether a token covers characters on both sides of `edge`."""
        before = bisect_left(self.starts, edge) - 1
        return before >= 0 and self.stops[before] > edge


def _cut_at_edges(template: ChatTemplate, text: str, spans: Sequence[TurnSpan]) -> _Tokens:
    """Tokens of the text; where one would reach over the edge of a turn, the text is cut there first.

    The target too begins its answer on a fresh token, so the cut is what serving does.
    """
    tokens = _Tokens.of(*template.tokenize(text))
    cuts = sorted(edge for edge in {e for s in spans for e in (s.earliest, s.stop)} if tokens.reach_over(edge))
    if not cuts:
        return tokens
    ids: list[int] = []
    offsets: list[tuple[int, int]] = []
    for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True):
        piece_ids, piece_offsets = template.tokenize(text[start:stop])
        ids += piece_ids
        offsets += [(a + start, b + start) for a, b in piece_offsets]
    if template.decode(ids) != text:
        raise RejectedError("inexact mask", "a token reaches over the edge of an assistant turn")
    return _Tokens.of(ids, offsets)


def _mark_turn(
    template: ChatTemplate,
    mask: npt.NDArray[np.bool_],
    tokens: _Tokens,
    text: str,
    span: TurnSpan,
    *,
    with_end: bool,
) -> bool:
    """Set the mask of one turn if its tokens spell exactly its text; tells whether they do."""
    first, stop = tokens.range_of(span.earliest, span.stop)
    while first < stop and tokens.stops[first] <= span.start:
        first += 1  # white space of the template
    if first == stop or tokens.stops[stop - 1] != span.stop:
        return False
    spelled = text[min(tokens.starts[first], span.start) : span.stop]
    if not _decodes_to(template, tokens.ids, first, stop, spelled):
        return False
    mask[first:stop] = True
    first, stop = tokens.range_of(span.end_start, span.end_stop)
    # An end that shares a token with what follows is not what the target wrote.
    if with_end and first < stop and (tokens.starts[first], tokens.stops[stop - 1]) == (span.end_start, span.end_stop):
        mask[first:stop] = True
    return True


def _decodes_to(template: ChatTemplate, ids: Sequence[int], first: int, stop: int, text: str) -> bool:
    """Whether ids[first:stop] spell `text`; some decoders drop a leading space unless a token stands before it."""
    if template.decode(ids[first:stop]) == text:
        return True
    before = template.decode(ids[first - 1 : first]) if first else ""
    return bool(first) and template.decode(ids[first - 1 : stop]) == before + text
