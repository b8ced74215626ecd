"""What is said to a server and what its answer must look like. Pure: bytes in, records out, no network.

Everything a server sends is doubted: an answer that is not JSON, not UTF-8, of another model, without choices, or
with ids that are no ids is a `Fault` with a short fixed reason that prompts are counted by.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from draftline.data.messages import Message
from draftline.data.sampling import Prompt, Sampling, prompt_seed_bytes

# server: it is at fault, and taken out if that goes on. out: it is taken out at once. busy: it asks for time.
# answer: this answer is bad. refused: it will never take this prompt. fatal: nothing will work as it was asked (unless
# it did work before).
Blame = Literal["server", "out", "busy", "answer", "refused", "fatal"]

_FINISHED = frozenset({"stop", "length", "tool_calls", "function_call", "eos", "eos_token", "stop_sequence"})
_ADDED_TO_NAME = re.compile(r"(@.*|[-:][\d-]+|:latest)?")
_OWNERS = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llama.cpp", "llama.cpp": "llama.cpp"}


class Fault(Exception):  # noqa: N818 - a fault is an answer, too
    """A question that gave no answer.

    Attributes:
        reason: short fixed phrase, counted by.
        detail: what exactly, for people.
        blame: what follows from it.
        counts: whether it is one of the prompt's tries.
        retry_after_s: the pause that the server asked for, or None.
    """

    def __init__(
        self, reason: str, detail: str, blame: Blame, *, counts: bool = True, retry_after_s: float | None = None
    ) -> None:
        self.reason, self.detail, self.blame, self.counts = reason, detail, blame, counts
        self.retry_after_s = retry_after_s
        super().__init__(f"{reason}: {detail}" if detail else reason)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a server says about the model it serves.

    Attributes:
        name: to be given in each request.
        kind: vllm, sglang, llama.cpp or openai (anything else).
        max_tokens: longest prompt and answer together, where it tells.
    """

    name: str
    kind: str
    max_tokens: int | None


@dataclass(frozen=True, slots=True)
class ServedAnswer:
    """One answer, checked for form.

    Attributes:
        content: the text, "" if there is none.
        reasoning: what the server parsed out as reasoning, "" if nothing.
        tool_calls: as OpenAI writes them, or [].
        cut: the length limit ended it.
        token_ids: generated ids where the server gave them.
        prompt_token_ids: ids of the prompt as the server rendered it, where it gave them.
        n_prompt_tokens, n_tokens: of prompt and answer as the server counts them, or None.
    """

    content: str
    reasoning: str
    tool_calls: list[Any]
    cut: bool
    token_ids: list[int] | None
    prompt_token_ids: list[int] | None
    n_prompt_tokens: int | None
    n_tokens: int | None


@dataclass(frozen=True, slots=True)
class Asking:
    """What is the same in every request of a run.

    Attributes:
        sampling: how the next token is chosen.
        max_new_tokens: length limit of an answer.
        endpoint: `chat` or `completions`.
        template_kwargs: for the chat template; sent at top level of the request.
        stop_ids: ids that end an answer.
        extra_body: the user's own fields.
    """

    sampling: Sampling
    max_new_tokens: int
    endpoint: str
    template_kwargs: Mapping[str, Any]
    stop_ids: Sequence[int]
    extra_body: Mapping[str, Any]

    def fields(self, kind: str) -> dict[str, Any]:
        """The sampling fields for one kind of server: the target's bare next-token choice, nothing added by it."""
        sampling = self.sampling
        fields: dict[str, Any] = {
            "max_tokens": self.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
        }
        if self.endpoint == "chat" and self.template_kwargs:
            fields["chat_template_kwargs"] = dict(self.template_kwargs)
        return fields | self._own_fields(kind) | dict(self.extra_body)

    def _own_fields(self, kind: str) -> dict[str, Any]:
        """Fields beyond OpenAI's; other servers refuse what they do not know, so each gets only its own."""
        plain = {"top_k": self.sampling.top_k or -1, "min_p": 0.0}
        if kind in ("vllm", "sglang"):
            raw = {"skip_special_tokens": False} if self.endpoint == "completions" else {}
            return plain | raw | {"repetition_penalty": 1.0, "return_token_ids": True}
        if kind == "llama.cpp":
            return plain | {"repeat_penalty": 1.0, "return_tokens": True, "verbose": True}
        if kind == "transformers":
            return {"generation_config": json.dumps(self._generation_config())}
        return {"top_k": self.sampling.top_k} if self.sampling.top_k else {}

    def _generation_config(self) -> dict[str, Any]:
        sampling = self.sampling
        sampled = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
        config: dict[str, Any] = {"max_new_tokens": self.max_new_tokens, "do_sample": sampling.temperature > 0}
        if self.stop_ids:
            config |= {"eos_token_id": sorted(self.stop_ids), "pad_token_id": min(self.stop_ids)}
        return config | (sampled if sampling.temperature > 0 else {})

    def body(
        self, model: ServedModel, prompt: Prompt, messages: Sequence[Message], tools: Any, variation: int
    ) -> dict[str, Any]:
        """One request. `variation` counts the unusable answers before it: a sampled answer is drawn anew."""
        name = f"{prompt.id} {variation}" if variation else prompt.id
        asked: dict[str, Any] = {"model": model.name, **self.fields(model.kind)}
        asked["seed"] = int.from_bytes(prompt_seed_bytes(self.sampling.seed, name)[:4], "little") >> 1
        if self.endpoint == "completions":
            return {**asked, "prompt": prompt.input_ids}
        if tools:
            asked["tools"] = list(tools)
            if model.kind == "vllm":
                asked["tool_choice"] = "none"  # it still renders them; else it asks for a parser of tool calls
        return {**asked, "messages": [_wire_message(message) for message in messages]}


def _wire_message(message: Message) -> Message:
    """Tool calls with their arguments as text, which is how the protocol carries them."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    return {**message, "tool_calls": [_wire_call(call, i) for i, call in enumerate(calls)]}


def _wire_call(call: Mapping[str, Any], index: int) -> dict[str, Any]:
    function = call.get("function", call)
    text = function.get("arguments", {})
    named = {"name": function.get("name"), "arguments": text if isinstance(text, str) else json.dumps(text)}
    return {"id": call.get("id", f"call_{index}"), "type": "function", "function": named}


def decode_json(data: bytes) -> dict[str, Any]:
    """The JSON object that a server sent.

    Raises:
        Fault: something else.
    """
    try:
        content = json.loads(data.decode())
    except UnicodeDecodeError:
        raise Fault("not UTF-8", f"{len(data)} bytes that are not UTF-8", "server") from None
    except (ValueError, RecursionError):
        raise Fault("malformed JSON", f"{len(data)} bytes that are not JSON", "server") from None
    if not isinstance(content, dict):
        raise Fault("malformed answer", f"a {type(content).__name__}, not an object", "server")
    return content


def printable(text: str) -> str:
    """`text` with a ? for each character that a terminal may obey, line breaks included."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def read_models(data: bytes, wanted: str, kind: str) -> ServedModel:
    """What a server's list of models says about the wanted one.

    Args:
        wanted: its name there. A list that is empty (some servers load what they are asked for) is taken as it is.
        kind: as the user says, or `auto`.

    Raises:
        Fault: fatal if the server serves only other models.
    """
    listed = decode_json(data).get("data")
    if not isinstance(listed, list):
        raise Fault("malformed answer", "its list of models is none", "out")
    models = [entry for entry in listed if isinstance(entry, dict) and isinstance(entry.get("id"), str)]
    found = next((m for m in models if wanted in (m["id"], m.get("root"))), None)
    if found is None and models:
        names = ", ".join(printable(m["id"]) for m in models[:5])
        raise Fault("another model", f"it serves {names[:300]}, not {wanted}", "fatal")
    entry = found or {}
    if kind == "auto":
        kind = _OWNERS.get(str(entry.get("owned_by", "")).lower(), "openai")
    longest = entry.get("max_model_len")
    return ServedModel(entry.get("id", wanted), kind, longest if type(longest) is int and longest > 0 else None)


def read_answer(data: bytes, model: ServedModel, *, vocab_size: int) -> ServedAnswer:
    """The answer in a reply of either endpoint.

    Raises:
        Fault: it is none.
    """
    content = decode_json(data)
    _require_model(content.get("model"), model.name)
    choices = content.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise Fault("no choices", "the reply holds no answer", "server")
    choice = choices[0]
    finish = choice.get("finish_reason")
    if not isinstance(finish, str) or finish not in _FINISHED:
        raise Fault("not finished", f"finish_reason is {str(finish)[:40]!r}", "answer")
    message = choice.get("message")
    if message is None and isinstance(choice.get("text"), str):
        message = {"content": choice["text"]}
    if not isinstance(message, dict):
        raise Fault("malformed answer", "the choice holds no message", "server")
    usage = content.get("usage")
    prompt_ids = content.get("prompt_token_ids") or choice.get("prompt_token_ids")
    calls = message.get("tool_calls")
    return ServedAnswer(
        content=_text(message, "content"),
        reasoning=_text(message, "reasoning_content") or _text(message, "reasoning"),
        tool_calls=calls if isinstance(calls, list) else [],
        cut=finish == "length",
        token_ids=_checked_ids(_answer_ids(content, choice), vocab_size),
        prompt_token_ids=_checked_ids(prompt_ids, None),
        n_prompt_tokens=_count(usage, "prompt_tokens"),
        n_tokens=_count(usage, "completion_tokens"),
    )


def _require_model(named: Any, wanted: str) -> None:
    """Servers may add a date or a revision to the name, or leave a path out; another name is another model."""
    if named is None or (isinstance(named, str) and wanted.endswith(f"/{named}")):
        return
    if isinstance(named, str) and named.startswith(wanted) and _ADDED_TO_NAME.fullmatch(named[len(wanted) :]):
        return
    raise Fault("another model", f"answered by {str(named)[:80]!r}, not {wanted!r}", "out")


def _text(message: Mapping[str, Any], name: str) -> str:
    value = message.get(name)
    if value is None:
        return ""
    if isinstance(value, list):  # parts
        value = "".join(str(part.get("text") or "") for part in value if isinstance(part, dict))
    if not isinstance(value, str):
        raise Fault("malformed answer", f"{name} is a {type(value).__name__}, not text", "server")
    if any("\ud800" <= letter <= "\udfff" for letter in value):
        raise Fault("not UTF-8", f"{name} has half of a surrogate pair in it", "server")
    return value


def _answer_ids(content: Mapping[str, Any], choice: Mapping[str, Any]) -> Any:
    """Generated ids, wherever servers put them: vLLM and SGLang in the choice, llama.cpp in its verbose part."""
    verbose = content.get("__verbose")
    places = (choice.get("token_ids"), choice.get("tokens"), content.get("tokens"))
    found = next((ids for ids in places if isinstance(ids, list) and ids), None)
    if found is None and isinstance(verbose, dict):
        found = verbose.get("tokens") or None
    logprobs = choice.get("logprobs")
    if found is None and isinstance(logprobs, dict) and isinstance(logprobs.get("content"), list):
        listed = [entry.get("id") if isinstance(entry, dict) else None for entry in logprobs["content"]]
        found = listed if listed and None not in listed else None
    return found


def _checked_ids(ids: Any, vocab_size: int | None) -> list[int] | None:
    if not ids:
        return None
    limit = 2**31 if vocab_size is None else vocab_size
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < limit for i in ids):
        raise Fault("wrong token ids", "they are not ids of the target's tokenizer", "answer")
    return ids


def _count(usage: Any, name: str) -> int | None:
    value = usage.get(name) if isinstance(usage, dict) else None
    return value if type(value) is int and value >= 0 else None
