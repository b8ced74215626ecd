"""From what a server answered to the row that is written, proven as far as the server lets us.

Where it gives ids, they are the label: the prompt's must be the ones that our template renders, the answer's must
spell what it says it answered. Where it does not, the lengths it counted are compared with our own rendering. Either
way the row says whether our tokenizer gives the very same answer again (`retokenized`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from draftline.data.chat import ChatEncoder, RejectedError, answer_text, ids_hash
from draftline.data.conversations import Conversation
from draftline.data.messages import REASONING_FIELDS, Message
from draftline.data.regenerate_job import answer_row
from draftline.data.sampling import Prompt
from draftline.data.servers.protocol import Fault, ServedAnswer
from draftline.data.template import ChatTemplate

_UNBOUNDED = 2**31


class AnswerVerifier:
    """Turns answers into rows.

    Args:
        template: the target's, which the servers are held to.
        endpoint: `chat` or `completions`; see `ServerOptions`.
    """

    def __init__(self, template: ChatTemplate, endpoint: str) -> None:
        self._template, self._endpoint = template, endpoint
        self._encoder = ChatEncoder(template, max_tokens=_UNBOUNDED, turns="last")
        source = str(template.tokenizer.chat_template)
        self._reasoning_field = next((f for f in REASONING_FIELDS if re.search(rf"\b{f}\b", source)), None)
        self._thinks_inline = "</think>" in source

    @property
    def vocab_size(self) -> int:
        """Tokens of the tokenizer."""
        return len(self._template.tokenizer)

    def row(self, conversation: Conversation, prompt: Prompt, answer: ServedAnswer) -> dict[str, Any]:
        """The row to write.

        Raises:
            Fault: the server answered nothing, another prompt, or with ids that are not this answer's.
        """
        self._require_prompt(prompt, answer)
        if not (answer.content.strip() or answer.reasoning.strip() or answer.tool_calls):
            raise Fault("empty answer", "it has no text", "answer")
        if answer.token_ids is not None:
            return self._row_of_ids(conversation, prompt, answer, answer.token_ids)
        message = self._message(answer)
        ids = self._rendered_ids(conversation, message, cut=answer.cut)
        same = None if ids is None or answer.n_tokens is None else len(ids) == answer.n_tokens
        row = answer_row(conversation, message, cut=answer.cut)
        return row | {"answer_tokens": answer.n_tokens, "retokenized": None if same is None else _WORD[same]}

    def _row_of_ids(
        self, conversation: Conversation, prompt: Prompt, answer: ServedAnswer, served: list[int]
    ) -> dict[str, Any]:
        ids, stops = list(served), self._template.stop_ids
        cut = answer.cut and ids[-1] not in stops
        text = answer_text(self._template, ids)
        self._require_same_text(answer, text)
        message: Message = {"role": "assistant", "content": text}
        again = self._rendered_ids(conversation, message, cut=cut)
        if not cut and stops and ids[-1] not in stops:  # a server that keeps the end to itself
            ids.append(self._end_id(again))
        if not text.strip():
            raise Fault("empty answer", "its ids spell no text", "answer")
        return answer_row(conversation, message, cut=cut) | {
            "answer_token_ids": ids,
            "prompt_hash": ids_hash(prompt.input_ids),
            "answer_tokens": len(ids),
            "retokenized": None if again is None else "equal" if again == ids else "other ids",
        }

    def _require_prompt(self, prompt: Prompt, answer: ServedAnswer) -> None:
        mend = "has the server another chat template, other arguments for it, or another date?"
        if answer.prompt_token_ids is not None and answer.prompt_token_ids != prompt.input_ids:
            raise Fault("prompt ids disagree", f"the server rendered other ids than our template; {mend}", "answer")
        ours, theirs = len(prompt.input_ids), answer.n_prompt_tokens
        if theirs is not None and theirs != ours:
            detail = f"the server counted {theirs} tokens, our template renders {ours}; {mend}"
            raise Fault("prompt lengths disagree", detail, "answer")

    def _require_same_text(self, answer: ServedAnswer, text: str) -> None:
        """What the server said it answered must stand in what its ids spell, special tokens apart."""
        spelled = self._plain(text)
        parts = [answer.content, answer.reasoning, *(_call_name(call) for call in answer.tool_calls)]
        if not all(self._plain(part) in spelled for part in parts if part):
            raise Fault("answer ids disagree", "the answer's ids do not spell its text", "answer")

    def _plain(self, text: str) -> str:
        """Text without special tokens and white space, where servers differ in what they strip."""
        return re.sub(r"\s+", "", self._template.special_pattern.sub("", text)).replace("\ufffd", "")

    def _message(self, answer: ServedAnswer) -> Message:
        """The assistant's message as the target's template reads it.

        Raises:
            Fault: the template has no place for the reasoning, so the answer would be learned without it.
        """
        content = self._without_end(answer.content) if self._endpoint == "completions" else answer.content
        message: Message = {"role": "assistant", "content": content}
        if answer.reasoning.strip():
            if self._reasoning_field is not None:
                message[self._reasoning_field] = answer.reasoning
            elif self._thinks_inline:
                message["content"] = f"<think>\n{answer.reasoning.strip()}\n</think>\n\n{content.lstrip()}"
            else:
                detail = "the chat template reads no reasoning; start the server without a reasoning parser"
                raise Fault("reasoning without a place", detail, "refused")
        if answer.tool_calls:
            message["tool_calls"] = [_read_call(call) for call in answer.tool_calls]
        return message

    def _without_end(self, text: str) -> str:
        """Raw text without the special tokens that end it."""
        ends = [token for token in self._template.special_ids if token]
        while end := next((token for token in ends if text.endswith(token)), None):
            text = text.removesuffix(end)
        return text

    def _rendered_ids(self, conversation: Conversation, message: Message, *, cut: bool) -> list[int] | None:
        """The supervised ids of the answer as our template and tokenizer give them; None where they are not exact."""
        try:
            encoded = self._encoder.encode([*conversation.messages, message], conversation.tools, answer_cut=cut)
        except RejectedError:
            return None
        return [i for i, supervised in zip(encoded.input_ids, encoded.loss_mask, strict=True) if supervised]

    def _end_id(self, again: Sequence[int] | None) -> int:
        if again and again[-1] in self._template.stop_ids:
            return again[-1]
        end = self._template.tokenizer.eos_token_id
        return min(self._template.stop_ids) if end is None else int(end)


_WORD = {True: "same length", False: "another length"}


def _call_name(call: Any) -> str:
    function = call.get("function") if isinstance(call, Mapping) else None
    return str(function.get("name", "")) if isinstance(function, Mapping) else ""


def _read_call(call: Any) -> dict[str, Any]:
    """A tool call with its arguments as an object, which is what templates expect.

    Raises:
        Fault: it is none.
    """
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise Fault("malformed answer", "a tool call has no function name", "answer")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise Fault("malformed answer", "the arguments of a tool call are not JSON", "answer") from None
    try:
        json.dumps([function["name"], arguments], ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise Fault("not UTF-8", "a tool call has half of a surrogate pair in it", "answer") from None
    return {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
