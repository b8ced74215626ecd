"""One row of a conversation file, checked and brought into one form.

Accepted shapes of a row: `messages` (OpenAI style), `conversations` (`from`/`value`), or `prompt` with an optional
`response`; `instruction`/`input`/`output` are read as those, with the rounds of `history` before them. A `system` or
`system_prompt` beside messages without a system prompt becomes one. `tools`, `id`, `category`, `language`, and what
`regenerate` writes (`answer_cut`, `answer_token_ids`, `prompt_hash`, `rendered_on`, `turns`) are kept. Other fields are
ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from typing import Any, Literal

Message = dict[str, Any]
Turns = Literal["all", "last"]

ROLES = ("system", "developer", "user", "assistant", "tool")
_ROLE_OF_FROM = {"human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant", "function": "tool"}
_PROMPT_FIELDS = ("prompt", "instruction")
_RESPONSE_FIELDS = ("response", "output", "completion")
_SYSTEM_FIELDS = ("system", "system_prompt")
_MEDIA_FIELDS = ("image", "images", "audio", "audios", "video", "videos")
MAX_MESSAGES = 100_000
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")


class BadRowError(ValueError):
    """A row that cannot be used. `reason` is a short fixed word that rows are counted by."""

    def __init__(self, reason: str, detail: str) -> None:
        self.reason, self.detail = reason, detail
        super().__init__(reason, detail)  # both, so that it can be handed to another process

    def __str__(self) -> str:
        return self.detail


@dataclass(frozen=True, slots=True)
class Row:
    """The usable content of one row; see Conversation for the fields."""

    id: str | None
    messages: list[Message]
    tools: list[Mapping[str, Any]] | None
    answer_cut: bool
    answer_token_ids: tuple[int, ...] | None
    prompt_hash: str | None
    turns: Turns
    category: str | None = None
    language: str | None = None
    rendered_on: date | None = None


def parse_row(row: Any) -> Row:
    """Check one decoded row.

    Raises:
        BadRowError: with the reason it is counted by.
    """
    if not isinstance(row, Mapping):
        raise BadRowError("not an object", f"the row is a {type(row).__name__}, not a JSON object")
    _refuse_media(row, "the row")
    name, tools = _row_id(row.get("id")), _tools(row.get("tools"))
    raw = _with_system(row, _raw_messages(row))
    if len(raw) > MAX_MESSAGES:
        raise BadRowError("too many messages", f"{len(raw)} messages, at most {MAX_MESSAGES} are read")
    messages = [_message(message, i) for i, message in enumerate(raw)]
    category, language = _label(row.get("category")), _label(row.get("language"))
    _require_plain_text([name, messages, tools, category, language])
    return Row(
        id=name,
        messages=messages,
        tools=tools,
        answer_cut=row.get("answer_cut") is True,
        answer_token_ids=_token_ids(row.get("answer_token_ids")),
        prompt_hash=prompt_hash if isinstance(prompt_hash := row.get("prompt_hash"), str) else None,
        turns="last" if row.get("turns") == "last" else "all",
        category=category,
        language=language,
        rendered_on=_day(row.get("rendered_on")),
    )


def require_answer(messages: list[Message]) -> None:
    """Refuse a row from which nothing can be learned: one without an assistant turn.

    Raises:
        BadRowError: no assistant turn.
    """
    if not any(message["role"] == "assistant" for message in messages):
        raise BadRowError("no assistant turn", "there is no assistant turn to learn from")


def prompt_part(messages: list[Message]) -> list[Message]:
    """The messages up to the last one that asks (user or tool): what the target answers.

    Raises:
        BadRowError: nobody asks anything.
    """
    asks = [i for i, message in enumerate(messages) if message["role"] in ("user", "tool")]
    if not asks:
        raise BadRowError("no user turn", "there is no user turn to answer")
    return messages[: asks[-1] + 1]


def canonical_json(messages: list[Message], tools: Any) -> bytes:
    """One spelling of a conversation's content, for hashes."""
    return json.dumps([messages, tools], sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode()


def _raw_messages(row: Mapping[str, Any]) -> list[Any]:
    for name in ("messages", "conversations"):
        if row.get(name) is not None:
            messages = row[name]
            if isinstance(messages, str):
                messages = _json_text(messages, "bad messages", name)
            if not isinstance(messages, list) or not messages:
                raise BadRowError("no messages", f"`{name}` must be a list with at least one message")
            return messages
    prompt = _first_field(row, _PROMPT_FIELDS)
    if prompt is None:
        raise BadRowError("no messages", "the row has neither `messages` nor `prompt`")
    if isinstance(prompt, list):  # a prompt given as messages
        messages = list(prompt)
    else:
        messages = [*_history(row.get("history")), {"role": "user", "content": _with_input(prompt, row.get("input"))}]
    response = _first_field(row, _RESPONSE_FIELDS)
    if response is not None:
        messages += response if isinstance(response, list) else [{"role": "assistant", "content": response}]
    return messages


def _with_input(prompt: Any, extra: Any) -> Any:
    return f"{prompt}\n\n{extra}" if isinstance(prompt, str) and isinstance(extra, str) and extra.strip() else prompt


def _with_system(row: Mapping[str, Any], messages: list[Any]) -> list[Any]:
    """The messages, with a system prompt that stands beside them in front of them if they have none."""
    system = next((row[name] for name in _SYSTEM_FIELDS if row.get(name)), None)
    if system is None or any(isinstance(m, Mapping) and _role(m) in ("system", "developer") for m in messages):
        return messages
    if not isinstance(system, str):
        raise BadRowError("bad message", f"the row's system prompt is a {type(system).__name__}, not text")
    return [{"role": "system", "content": system}, *messages] if system.strip() else messages


def _role(message: Mapping[str, Any]) -> Any:
    return message["role"] if message.get("role") is not None else message.get("from")


def _history(rounds: Any) -> list[Any]:
    """Earlier rounds of an instruction, pairs of question and answer, as messages."""
    if rounds is None:
        return []
    if not isinstance(rounds, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in rounds):
        raise BadRowError("bad history", "`history` must be a list of pairs, a question and its answer each")
    roles = ("user", "assistant")
    return [{"role": role, "content": text} for pair in rounds for role, text in zip(roles, pair, strict=True)]


def _first_field(row: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((row[name] for name in names if row.get(name) is not None), None)


def _message(raw: Any, index: int) -> Message:
    where = f"message {index + 1}"
    if not isinstance(raw, Mapping):
        raise BadRowError("bad message", f"{where} is a {type(raw).__name__}, not an object")
    _refuse_media(raw, where)
    message = {key: value for key, value in raw.items() if value is not None}
    role = message.pop("from", None) if "role" not in message else message.pop("role")
    role = _ROLE_OF_FROM.get(role, role) if isinstance(role, str) else role
    if role not in ROLES:
        raise BadRowError("unknown role", f"{where} has the unknown role {role!r}; known: {', '.join(ROLES)}")
    content = message.pop("content") if "content" in message else message.pop("value", "")
    message = {"role": role, "content": _text(content, where), **message}
    if message.get("tool_calls"):
        message["tool_calls"] = _tool_calls(message["tool_calls"], where)
    says = message["content"].strip() or role == "tool" or message.get("tool_calls")
    if not says and not any(message.get(name) for name in REASONING_FIELDS):
        raise BadRowError("empty content", f"{where} ({role}) has empty content")
    return message


def _refuse_media(fields: Mapping[str, Any], where: str) -> None:
    media = next((name for name in _MEDIA_FIELDS if fields.get(name)), None)
    if media:
        raise BadRowError("multimodal", f"{where} has `{media}`: images, audio and video are not supported, only text")


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
        return "".join(_part_text(part, where) for part in parts)
    raise BadRowError("bad message", f"{where}: content is a {type(content).__name__}, not text")


def _part_text(part: Any, where: str) -> str:
    if not isinstance(part, Mapping):
        raise BadRowError("bad message", f"{where}: a part of the content is a {type(part).__name__}, not an object")
    if part.get("type") != "text":
        raise BadRowError("multimodal", f"{where} has a part of type {part.get('type')!r}; only text is supported")
    if not isinstance(part.get("text"), str):
        raise BadRowError("bad message", f"{where}: the text of a part is a {type(part.get('text')).__name__}")
    return str(part["text"])


def _tool_calls(calls: Any, where: str) -> list[Any]:
    """Tool calls with their arguments as objects, which is what chat templates expect."""
    if not isinstance(calls, list):
        raise BadRowError("bad tool call", f"{where}: tool_calls is not a list")
    result = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise BadRowError("bad tool call", f"{where}: a tool call has no function name")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            arguments = _json_text(arguments, "bad tool call", f"{where}: arguments")
        filled = {**function, "arguments": arguments}
        result.append({**call, "function": filled} if "function" in call else filled)
    return result


def _tools(tools: Any) -> list[Mapping[str, Any]] | None:
    if isinstance(tools, str):
        tools = _json_text(tools, "bad tools", "tools") if tools.strip() else None
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise BadRowError("bad tools", "tools must be a list of JSON schemas")
    return tools


def _json_text(text: str, reason: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRowError(reason, f"{where} is a string that is not JSON ({error})") from None


def _row_id(value: Any) -> str | None:
    if value is None or value == "":
        return None
    if not isinstance(value, str | int) or isinstance(value, bool):
        raise BadRowError("bad id", f"id is a {type(value).__name__}, not text or a whole number")
    return str(value)


def _label(value: Any) -> str | None:
    """A label, short enough to be counted by; anything else in that field is not ours."""
    return value if isinstance(value, str) and 0 < len(value) <= 100 else None


def _token_ids(value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(type(i) is int and 0 <= i < 2**31 for i in value):
        raise BadRowError("bad answer_token_ids", "answer_token_ids must be a list of token ids")
    return tuple(value)


def _day(value: Any) -> date | None:
    if value is None:
        return None
    try:
        return date.fromisoformat(value)
    except (TypeError, ValueError):
        raise BadRowError("bad rendered_on", "rendered_on must be a date like 2026-01-31") from None


def _require_plain_text(content: Any) -> None:
    """JSON can spell halves of a character, which no tokenizer takes; Arrow can hold dates and bytes."""
    try:
        json.dumps(content, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise BadRowError("not UTF-8", "the row has half of a surrogate pair in it") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRowError("bad message", f"the row is not plain JSON ({error})") from None
