"""From a conversation to ids and a loss mask that covers exactly what the assistant wrote, terminators included.

Every mask is proven before it is used: the supervised tokens of a turn must decode to the assistant's text. A turn for
which that fails is left unsupervised, a conversation without any turn left is rejected.
"""

from __future__ import annotations

import hashlib
import unicodedata
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from draftline.data.messages import Message, Turns
from draftline.data.spans import TurnSpan, locate_turns
from draftline.data.template import ChatTemplate, TemplateRefusedError

Tools = Sequence[Mapping[str, Any]] | None


class RejectedError(ValueError):
    """A conversation that gives no sample. `reason` is a short fixed phrase that rows are counted by."""

    def __init__(self, reason: str, detail: str) -> None:
        self.reason = reason
        super().__init__(detail)


@dataclass(frozen=True, slots=True)
class EncodedConversation:
    """A sample. Ids end with the last supervised token, for nothing behind it is ever read.

    Attributes:
        input_ids: T token ids.
        loss_mask: T flags, True where the assistant wrote the token.
        n_prompt_tokens: tokens before the first supervised one.
        truncated: whether max_tokens cut it.
        turns_left_out: assistant turns that were asked for and are unsupervised, because the template rewrites them.
    """

    input_ids: list[int]
    loss_mask: list[bool]
    n_prompt_tokens: int
    truncated: bool = False
    turns_left_out: int = 0


def encode_conversation(
    tokenizer: Any, messages: Sequence[Message], tools: Tools = None, *, max_tokens: int, turns: Turns = "all"
) -> EncodedConversation:
    """Encode one conversation; see `ChatEncoder.encode`. Use a ChatEncoder for many."""
    return ChatEncoder(ChatTemplate(tokenizer), max_tokens=max_tokens, turns=turns).encode(messages, tools)


def render_prompt(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Tools = None,
    *,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Ids that the target is served for its next answer: the rendered conversation with the generation prompt.

    Raises:
        TemplateRefusedError: the template raised.
        UserError: no chat template.
    """
    return prompt_ids(ChatTemplate(tokenizer, template_kwargs=template_kwargs), messages, tools)


def prompt_ids(template: ChatTemplate, messages: Sequence[Message], tools: Tools = None) -> list[int]:
    """As `render_prompt`, for a template at hand."""
    return template.tokenize(template.render(messages, tools, ask=True))[0]


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


class ChatEncoder:
    """Encodes conversations under one length limit.

    Args:
        template: tokenizer and template.
        max_tokens: longest sample; longer ones are cut at the end.
        turns: supervise all assistant turns or only the last.
    """

    def __init__(self, template: ChatTemplate, *, max_tokens: int, turns: Turns = "all") -> None:
        self.template, self.max_tokens, self.turns = template, max_tokens, turns

    def encode(
        self,
        messages: Sequence[Message],
        tools: Tools = None,
        *,
        turns: Turns | None = None,
        answer_cut: bool = False,
    ) -> EncodedConversation:
        """Ids and mask of a conversation that holds an assistant turn.

        Args:
            turns: overrides the encoder's own.
            answer_cut: the last answer was cut when it was generated, so the terminator that the template puts
                behind it was never written and is dropped.

        Raises:
            RejectedError: with the reason it is counted by.
        """
        messages, text = self._rendered(_until_last_answer(messages), tools)
        places = locate_turns(self.template, messages, tools, text, turns or self.turns)
        if answer_cut and places[-1] is None:
            raise RejectedError("inexact mask", "the cut answer cannot be found in the rendered conversation")
        spans = [span for span in places if span is not None]
        tokens = self._tokenize(text, spans)
        mask, exact = [False] * len(tokens.ids), 0
        for span in spans:
            exact += self._mark(mask, tokens, text, span, with_end=not (answer_cut and span is places[-1]))
        if not exact:
            raise RejectedError("inexact mask", "no assistant turn is rendered exactly as it was written")
        return self._finish(tokens.ids, mask, turns_left_out=len(places) - exact)

    def encode_generated(
        self, messages: Sequence[Message], tools: Tools, answer_ids: Sequence[int], *, prompt_hash: str | None = None
    ) -> EncodedConversation:
        """Prompt and the very ids that the target generated: labels equal what it wrote, however text would tokenize.

        Args:
            messages: ends with the assistant turn whose ids are given.
            answer_ids: generated ids, with the stop token if one was generated.
            prompt_hash: `ids_hash` of the prompt that the target was served, to be compared with ours.

        Raises:
            RejectedError: the ids do not spell the answer's text, are not this tokenizer's, or the prompt differs.
        """
        messages = _until_last_answer(messages)
        if not answer_ids or max(answer_ids) >= len(self.template.tokenizer):
            raise RejectedError("answer ids disagree", "answer_token_ids are not ids of this tokenizer")
        if answer_text(self.template, answer_ids) != messages[-1]["content"]:
            raise RejectedError("answer ids disagree", "answer_token_ids do not decode to the answer's text")
        try:
            prompt = prompt_ids(self.template, messages[:-1], tools)
        except TemplateRefusedError as error:
            raise RejectedError("template refused", str(error)) from None
        if prompt_hash is not None and prompt_hash != ids_hash(prompt):
            raise RejectedError("prompt ids disagree", "the prompt renders to other ids than the target was served")
        return self._finish([*prompt, *answer_ids], [False] * len(prompt) + [True] * len(answer_ids), turns_left_out=0)

    def _render(self, messages: Sequence[Message], tools: Tools) -> str:
        try:
            return self.template.render(messages, tools)
        except TemplateRefusedError as error:
            raise RejectedError("template refused", str(error)) from None

    def _rendered(self, messages: list[Message], tools: Tools) -> tuple[list[Message], str]:
        """Messages and text, composed (NFC) where the tokenizer composes anyway: its offsets fit only then."""
        text = self._render(messages, tools)
        if unicodedata.is_normalized("NFC", text):
            return messages, text
        composed = _composed(messages)
        other = self._render(composed, tools)
        same = self.template.tokenize(other)[0] == self.template.tokenize(text)[0]
        return (composed, other) if same else (messages, text)

    def _tokenize(self, text: str, spans: Sequence[TurnSpan]) -> _Tokens:
        """Tokens of the text; where one would reach over the edge of a turn, the text is cut there first.

        The target too begins its answer on a fresh token, so the cut is what serving does.
        """
        tokens = _Tokens.of(*self.template.tokenize(text))
        cuts = sorted(edge for edge in {e for s in spans for e in (s.earliest, s.stop)} if tokens.reach_over(edge))
        if not cuts:
            return tokens
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True):
            piece_ids, piece_offsets = self.template.tokenize(text[start:stop])
            ids += piece_ids
            offsets += [(a + start, b + start) for a, b in piece_offsets]
        if self.template.decode(ids) != text:
            raise RejectedError("inexact mask", "a token reaches over the edge of an assistant turn")
        return _Tokens.of(ids, offsets)

    def _mark(self, mask: list[bool], tokens: _Tokens, text: str, span: TurnSpan, *, with_end: bool) -> bool:
        """Set the mask of one turn if its tokens spell exactly its text; tells whether they do."""
        first, stop = tokens.range_of(span.earliest, span.stop)
        while first < stop and tokens.stops[first] <= span.start:
            first += 1  # white space of the template
        if first == stop or tokens.stops[stop - 1] != span.stop:
            return False
        spelled = text[min(tokens.starts[first], span.start) : span.stop]
        if not self._decodes_to(tokens.ids, first, stop, spelled):
            return False
        mask[first:stop] = [True] * (stop - first)
        first, stop = tokens.range_of(span.end_start, span.end_stop)
        # An end that shares a token with what follows is not what the target wrote.
        if (
            with_end
            and first < stop
            and (tokens.starts[first], tokens.stops[stop - 1]) == (span.end_start, span.end_stop)
        ):
            mask[first:stop] = [True] * (stop - first)
        return True

    def _decodes_to(self, ids: Sequence[int], first: int, stop: int, text: str) -> bool:
        """Whether ids[first:stop] spell `text`; some decoders drop a leading space unless a token stands before it."""
        if self.template.decode(ids[first:stop]) == text:
            return True
        before = self.template.decode(ids[first - 1 : first]) if first else ""
        return bool(first) and self.template.decode(ids[first - 1 : stop]) == before + text

    def _finish(self, ids: list[int], mask: list[bool], *, turns_left_out: int) -> EncodedConversation:
        """Drop what nothing reads, apply the limit, and refuse what gives no label."""
        if mask.index(True) >= self.max_tokens:
            raise RejectedError("prompt too long", f"the prompt alone has more than {self.max_tokens} tokens")
        end = len(mask) - mask[::-1].index(True)
        truncated = end > self.max_tokens
        mask = mask[: min(end, self.max_tokens)]
        # A block is an anchor and at least one label behind it.
        if not any(one and other for one, other in pairwise(mask)):
            raise RejectedError("no supervised token left", "fewer than two supervised tokens in a row are left")
        return EncodedConversation(ids[: len(mask)], mask, mask.index(True), truncated, turns_left_out)


def answer_text(template: ChatTemplate, answer_ids: Sequence[int]) -> str:
    """Text of generated ids without the stop tokens at their end."""
    ids = list(answer_ids)
    while ids and (ids[-1] in template.stop_ids or ids[-1] in template.special_ids.values()):
        ids.pop()
    return template.decode(ids)


def ids_hash(ids: Sequence[int]) -> str:
    """Short hash of token ids, as hex."""
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()[:16]


def _until_last_answer(messages: Sequence[Message]) -> list[Message]:
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        raise RejectedError("no assistant turn", "there is no assistant turn to learn from")
    return list(messages[: answers[-1] + 1])


def _composed(value: Any) -> Any:
    """The same messages with every text in composed form (NFC)."""
    if isinstance(value, str):
        return unicodedata.normalize("NFC", value)
    if isinstance(value, Mapping):
        return {key: _composed(item) for key, item in value.items()}
    return [_composed(item) for item in value] if isinstance(value, list) else value
