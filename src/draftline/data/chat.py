"""From a conversation to ids and a loss mask that covers exactly what the assistant wrote, terminators included.

Every mask is proven before it is used: the supervised tokens of a turn must decode to the assistant's text. A turn for
which that fails is left unsupervised, a conversation without any turn left is rejected.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from draftline.data.marking import Draft, RejectedError, mark_by_bytes, mark_by_offsets
from draftline.data.messages import Message, Turns
from draftline.data.outline import OutlineCache
from draftline.data.spans import locate_turns
from draftline.data.template import ChatTemplate, TemplateRefusedError
from draftline.data.word_memo import Tokenized

Tools = Sequence[Mapping[str, Any]] | None


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
class EncodedArrays:
    """As EncodedConversation, in arrays.

    Attributes:
        ids: int32 [T].
        mask: bool [T].
        n_turns: assistant turns that are supervised.
    """

    ids: npt.NDArray[np.int32]
    mask: npt.NDArray[np.bool_]
    n_prompt_tokens: int
    truncated: bool
    n_turns: int
    turns_left_out: int

    def to_lists(self) -> EncodedConversation:
        """The same with ids and mask as lists."""
        lists: tuple[list[int], list[bool]] = (self.ids.tolist(), self.mask.tolist())
        return EncodedConversation(*lists, self.n_prompt_tokens, self.truncated, self.turns_left_out)


class ChatEncoder:
    """Encodes conversations under one length limit.

    Args:
        template: tokenizer and template.
        max_tokens: longest sample; longer ones are cut at the end.
        turns: supervise all assistant turns or only the last.
    """

    def __init__(self, template: ChatTemplate, *, max_tokens: int, turns: Turns = "all") -> None:
        self.template, self.max_tokens, self.turns = template, max_tokens, turns
        self._outlines = OutlineCache(template)

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
        return self.settle(self.draft_carefully(messages, tools, turns=turns, answer_cut=answer_cut)).to_lists()

    def draft(
        self, messages: Sequence[Message], tools: Tools = None, *, turns: Turns | None = None, answer_cut: bool = False
    ) -> Draft:
        """Render and locate, by the template's outline where that is proven for this conversation.

        Raises:
            RejectedError: with the reason it is counted by.
        """
        if not tools:
            asked = _until_last_answer(messages)
            text = self._render(asked, None)
            # Text that a tokenizer may compose is looked at more closely, unless tokens are proven byte by byte.
            if self.template.token_bytes is not None or unicodedata.is_normalized("NFC", text):
                places = self._outlines.locate(asked, text)
                if places is not None:
                    chosen = places if (turns or self.turns) == "all" else places[-1:]
                    return Draft(text, tuple(chosen), answer_cut)
        return self.draft_carefully(messages, tools, turns=turns, answer_cut=answer_cut)

    def draft_carefully(
        self, messages: Sequence[Message], tools: Tools = None, *, turns: Turns | None = None, answer_cut: bool = False
    ) -> Draft:
        """See `draft`: the same, with what is served rendered anew for each turn."""
        asked, text = self._rendered(_until_last_answer(messages), tools)
        places = locate_turns(self.template, asked, tools, text, turns or self.turns)
        if answer_cut and places[-1] is None:
            raise RejectedError("inexact mask", "the cut answer cannot be found in the rendered conversation")
        return Draft(text, tuple(places), answer_cut)

    def settle(self, draft: Draft, tokens: Tokenized | None = None) -> EncodedArrays:
        """Ids and mask of a draft.

        Args:
            tokens: of `draft.text` if it is tokenized already; they are used if they are proven byte by byte.

        Raises:
            RejectedError: with the reason it is counted by.
        """
        table = self.template.token_bytes
        marked = mark_by_bytes(table, draft, tokens) if table is not None and tokens is not None else None
        ids, mask, exact = marked or mark_by_offsets(self.template, draft)
        if not exact:
            raise RejectedError("inexact mask", "no assistant turn is rendered exactly as it was written")
        return self._finish(ids, mask, exact, len(draft.places) - exact)

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
        text = self.draft_generated(messages, tools, answer_ids)
        return self.settle_generated(self.template.tokenize(text)[0], answer_ids, prompt_hash).to_lists()

    def draft_generated(self, messages: Sequence[Message], tools: Tools, answer_ids: Sequence[int]) -> str:
        """The text that the target was served, once the ids are found to spell the answer. See `encode_generated`."""
        messages = _until_last_answer(messages)
        if not answer_ids or max(answer_ids) >= len(self.template.tokenizer):
            raise RejectedError("answer ids disagree", "answer_token_ids are not ids of this tokenizer")
        if answer_text(self.template, answer_ids) != messages[-1]["content"]:
            raise RejectedError("answer ids disagree", "answer_token_ids do not decode to the answer's text")
        try:
            return self.template.render(messages[:-1], tools, ask=True)
        except TemplateRefusedError as error:
            raise RejectedError("template refused", str(error)) from None

    def settle_generated(
        self, prompt: Sequence[int], answer_ids: Sequence[int], prompt_hash: str | None
    ) -> EncodedArrays:
        """The sample of a tokenized prompt and its answer. See `encode_generated`."""
        if prompt_hash is not None and prompt_hash != ids_hash(prompt):
            raise RejectedError("prompt ids disagree", "the prompt renders to other ids than the target was served")
        ids = np.array([*prompt, *answer_ids], np.int32)
        return self._finish(ids, np.arange(len(ids)) >= len(prompt), 1, 0)

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

    def _finish(
        self, ids: npt.NDArray[np.int32], mask: npt.NDArray[np.bool_], n_turns: int, left_out: int
    ) -> EncodedArrays:
        """Drop what nothing reads, apply the limit, and refuse what gives no label."""
        n_prompt = int(mask.argmax())
        if n_prompt >= self.max_tokens:
            raise RejectedError("prompt too long", f"the prompt alone has more than {self.max_tokens} tokens")
        end = len(mask) - int(mask[::-1].argmax())
        size = min(end, self.max_tokens)
        ids, mask = ids[:size], mask[:size]
        # A block is an anchor and at least one label behind it.
        if not (mask[:-1] & mask[1:]).any():
            raise RejectedError("no supervised token left", "fewer than two supervised tokens in a row are left")
        return EncodedArrays(ids, mask, n_prompt, end > self.max_tokens, n_turns, left_out)


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
