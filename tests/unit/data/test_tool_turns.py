"""Promises of turns that hold more than a text: tool calls and thinking parts, as public formats render them."""

from __future__ import annotations

from typing import Any

import data_kit as kit
import pytest

from draftline.data.chat import ChatEncoder, EncodedConversation, RejectedError
from draftline.data.template import ChatTemplate

TOOLS = [{"type": "function", "function": {"name": "add"}}]
EMPTY = "{{ '<think>\\n\\n</think>\\n\\n' if m.role == 'assistant' and loop.last and not m.reasoning_content else '' }}"
HEAD = "{{ '<|im_start|>' + m.role + '\\n'"
# An empty thinking part stands in front of the last turn only (Qwen3).
EMPTY_BEFORE_LAST = kit.TOOL_CALLS.replace(HEAD + " + m.content }}", HEAD + " }}" + EMPTY + "{{ m.content }}")
# The prompt ends with an empty thinking part that the history does not show (DeepSeek-V3.1, Kimi).
CLOSED_IN_PROMPT = kit.TOOL_CALLS + "{{ '<think></think>' if add_generation_prompt else '' }}"
# Only the first call is rendered (gpt-oss).
ONE_CALL = kit.TOOL_CALLS.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")
# As that, and no end stands between the calls and what they gave.
NO_END = EMPTY_BEFORE_LAST.replace("{{ '<|im_end|>\\n' }}{%", "{{ '' if m.tool_calls else '<|im_end|>\\n' }}{%")
# The prompt opens the thinking part of the answer (Qwen3-Thinking, GLM-5).
OPENED_IN_PROMPT = kit.CHATML + "{{ '<think>\\n' if add_generation_prompt else '' }}"


def call(**arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "add", "arguments": arguments}}


def spelled(arguments: str) -> str:
    return f'\n<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call>'


def talk(*calls: dict[str, Any], content: str = "") -> list[dict[str, Any]]:
    asked: list[dict[str, Any]] = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": content, "tool_calls": list(calls)},
    ]
    return [*asked, {"role": "tool", "content": "two"}, {"role": "assistant", "content": "yes two"}]


def encode(template: str, messages: list[dict[str, Any]]) -> tuple[EncodedConversation, list[str]]:
    tokenizer = kit.tokenizer_with(template)
    encoded = ChatEncoder(ChatTemplate(tokenizer), max_tokens=10_000).encode(messages, TOOLS)
    return encoded, kit.supervised(tokenizer, encoded)


@pytest.mark.parametrize("template", [kit.TOOL_CALLS, EMPTY_BEFORE_LAST, CLOSED_IN_PROMPT])
def test_a22_calls_are_supervised_wherever_the_turn_stands_and_what_the_template_adds_is_not(template: str) -> None:
    messages = talk(call(a="one", b=[1]), call(a="two"), content="maybe")
    turn = "maybe" + spelled('{"a": "one", "b": [1]}') + spelled('{"a": "two"}') + "<|im_end|>"
    encoded, found = encode(template, messages)
    assert encoded.turns_left_out == 0 and found == [turn, "yes two<|im_end|>"]
    assert encode(template, messages[:2])[1] == [turn]  # the same turn as the last one


def test_a22_a_turn_of_which_the_template_shows_only_a_part_is_left_out() -> None:
    encoded, found = encode(ONE_CALL, talk(call(a="one"), call(a="two")))
    assert encoded.turns_left_out == 1 and found == ["yes two<|im_end|>"]
    with pytest.raises(RejectedError, match="no assistant turn is rendered exactly"):
        encode(kit.TOOL_CALLS.replace("call.function.arguments", "{}"), talk(call(a="one"))[:2])


def test_a22_results_of_a_call_are_never_taken_for_the_call() -> None:
    encoded, found = encode(NO_END, talk(call(a="one")))
    assert encoded.turns_left_out == 1 and found == ["yes two<|im_end|>"]


def test_a22_arguments_may_be_spelled_as_json_or_as_they_are() -> None:
    odd = 'say "yes"\n\\ naïve'
    _, found = encode(kit.TOOL_CALLS, talk(call(a=odd))[:2])
    assert '\\"yes\\"' in found[0]
    plain = kit.TOOL_CALLS.replace("(call.function.arguments | tojson)", "call.function.arguments.a + 'a'")
    assert odd in encode(plain, talk(call(a=odd))[:2])[1][0]


def test_a8_a_thinking_part_that_the_prompt_opens_is_supervised_from_there_on() -> None:
    messages = kit.talk("hello", "<think>\nmaybe\n</think>\n\nyes")
    encoded, found = encode(OPENED_IN_PROMPT, messages)
    assert found == ["maybe\n</think>\n\nyes<|im_end|>"]
    tokenizer = kit.tokenizer_with(None)
    assert str(tokenizer.decode(encoded.input_ids[: encoded.n_prompt_tokens])).endswith("<think>\n")
