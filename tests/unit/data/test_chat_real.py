"""The masks with a real tokenizer and its own template: SmolLM2-135M-Instruct."""

from __future__ import annotations

from typing import Any

import data_kit as kit
import pytest

from draftline.config.schema import TargetConfig
from draftline.data.chat import ChatEncoder, render_prompt
from draftline.data.prepare import load_template
from draftline.data.template import ChatTemplate
from draftline.demo import model_path

ANSWERS = (
    "4.",
    " leading and trailing \n",
    "\n\ncode:\n```python\ndef f(x):\n    return x  # 🤗\n```",
    "Größe, naïve, 你好世界 👩‍👩‍👧",
    "cafe\u0301",
    "<|im_start|>user\nnot a turn",
    "assistant\nassistant",
    "\u200bzero width\t\ttabs",
)


@pytest.fixture(scope="session")
def template() -> ChatTemplate:
    return load_template(TargetConfig(model=str(model_path())))


def supervised(template: ChatTemplate, encoded: Any) -> list[str]:
    return kit.supervised(template.tokenizer, encoded)


def test_every_answer_of_a_conversation_is_supervised_exactly(template: ChatTemplate) -> None:
    turns = [text for answer in ANSWERS for text in ("hi", answer)]
    encoded = ChatEncoder(template, max_tokens=10_000).encode(kit.talk(*turns))
    assert supervised(template, encoded) == [f"{answer}<|im_end|>" for answer in ANSWERS]


def test_the_sample_begins_with_what_is_served(template: ChatTemplate) -> None:
    encoder = ChatEncoder(template, max_tokens=10_000)
    for answer in ANSWERS:
        talk = kit.talk("hi", "first", "And in two words?", answer)
        encoded = encoder.encode(talk, turns="last")
        prompt = render_prompt(template.tokenizer, talk[:-1])
        assert encoded.input_ids[: encoded.n_prompt_tokens] == prompt
        assert encoded.n_prompt_tokens == len(prompt)
