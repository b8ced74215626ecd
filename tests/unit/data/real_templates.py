# ruff: noqa: RUF001  (the wide bars are part of a format)
"""Chat templates in the formats of public models, shortened to what decides where the assistant's words stand."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import data_kit as kit
from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class Family:
    """A format: its template, its special tokens, and what ends an answer inside and at the end of a conversation."""

    template: str
    specials: tuple[str, ...]
    end: str
    last_end: str | None = None
    word_pieces: bool = False
    system: bool = True

    @property
    def eos(self) -> str:
        return self.last_end or self.end


_IM_ASK = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

FAMILIES = {
    "chatml": Family(
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
        + _IM_ASK,
        ("<|im_start|>", "<|im_end|>"),
        "<|im_end|>",
    ),
    # The system prompt goes into the first question; contents are trimmed; spaces around the answer.
    "llama-2": Family(
        "{% if messages[0].role == 'system' %}{% set loop_messages = messages[1:] %}"
        "{% set system_message = messages[0].content %}"
        "{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}"
        "{% for m in loop_messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
        "{% if loop.index0 == 0 and system_message %}"
        "{% set content = '<<SYS>>\n' + system_message + '\n<</SYS>>\n\n' + m.content %}"
        "{% else %}{% set content = m.content %}{% endif %}"
        "{% if m.role == 'user' %}{{ '<s>' + '[INST] ' + content.strip() + ' [/INST]' }}"
        "{% elif m.role == 'assistant' %}{{ ' ' + content.strip() + ' ' + '</s>' }}{% endif %}{% endfor %}",
        ("<s>", "</s>"),
        "</s>",
        word_pieces=True,
    ),
    "llama-3": Family(
        "{{- '<|begin_of_text|>' }}{%- if messages[0].role == 'system' %}"
        "{%- set system_message = messages[0].content | trim %}{%- set messages = messages[1:] %}{%- else %}"
        "{%- set system_message = '' %}{%- endif %}"
        "{{- '<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n\n' }}"
        "{{- system_message + '<|eot_id|>' }}{%- for m in messages %}"
        "{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}",
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|eot_id|>",
    ),
    # No generation prompt at all: the answer follows the question's own end.
    "mistral": Family(
        "{{ '<s>' }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}"
        "{% elif m.role == 'system' %}{{ '[SYSTEM_PROMPT]' + m.content + '[/SYSTEM_PROMPT]' }}"
        "{% else %}{{ m.content + '</s>' }}{% endif %}{% endfor %}",
        ("<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
        "</s>",
    ),
    "gemma": Family(
        "{{ '<bos>' }}{% if messages[0].role == 'system' %}"
        "{{ raise_exception('System role not supported') }}{% endif %}"
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
        "{% if m.role == 'assistant' %}{% set role = 'model' %}{% else %}{% set role = m.role %}{% endif %}"
        "{{ '<start_of_turn>' + role + '\n' + m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        "<end_of_turn>",
        system=False,
    ),
    "phi-3": Family(
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ '<|endoftext|>' }}{% endif %}",
        ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"),
        "<|end|>",
    ),
    "phi-4": Family(
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '<|im_sep|>' + m.content + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}",
        ("<|im_start|>", "<|im_sep|>", "<|im_end|>"),
        "<|im_end|>",
    ),
    # Thinking parts of turns before the last question are dropped; the last answer gets one even if it is empty.
    "qwen3": Family(
        "{%- set ns = namespace(last=messages|length - 1) %}{%- for m in messages %}"
        "{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
        "{%- for m in messages %}{%- if m.role == 'assistant' %}{%- set content = m.content %}"
        "{%- set reasoning = m.reasoning_content or '' %}{%- if '</think>' in content %}"
        "{%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
        "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
        "{%- if loop.index0 > ns.last %}"
        "{{- '<|im_start|>assistant\n<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}"
        "{%- else %}{{- '<|im_start|>assistant\n' + content }}{%- endif %}{{- '<|im_end|>\n' }}"
        "{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
        "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}"
        "{%- endif %}",
        ("<|im_start|>", "<|im_end|>", "<think>", "</think>"),
        "<|im_end|>",
    ),
    # The generation prompt opens a thinking part that the history never shows.
    "deepseek-r1": Family(
        "{{ '<｜begin▁of▁sentence｜>' }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}"
        "{% elif m.role == 'user' %}{{ '<｜User｜>' + m.content }}{% else %}{% set content = m.content %}"
        "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
        "{{ '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}",
        ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"),
        "<｜end▁of▁sentence｜>",
    ),
    "zephyr": Family(
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '</s>' + '\n' }}"
        "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>' + '\n' }}{% endif %}{% endfor %}",
        ("<s>", "</s>"),
        "</s>",
        word_pieces=True,
    ),
    "command-r": Family(
        "{{ '<BOS_TOKEN>' }}{% for m in messages %}{{ '<|START_OF_TURN_TOKEN|>' }}"
        "{% if m.role == 'system' %}{{ '<|SYSTEM_TOKEN|>' + m.content }}"
        "{% elif m.role == 'user' %}{{ '<|USER_TOKEN|>' + m.content.strip() }}"
        "{% else %}{{ '<|CHATBOT_TOKEN|>' + m.content.strip() }}{% endif %}{{ '<|END_OF_TURN_TOKEN|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}",
        (
            "<BOS_TOKEN>",
            "<|START_OF_TURN_TOKEN|>",
            "<|END_OF_TURN_TOKEN|>",
            "<|SYSTEM_TOKEN|>",
            "<|USER_TOKEN|>",
            "<|CHATBOT_TOKEN|>",
        ),
        "<|END_OF_TURN_TOKEN|>",
    ),
    # Several channels; only the last answer shows its analysis, and ends with another token.
    "harmony": Family(
        "{{ '<|start|>system<|message|>You are a helpful model.<|end|>' }}{% for m in messages %}"
        "{% if m.role == 'assistant' %}{% if m.thinking and loop.last and not add_generation_prompt %}"
        "{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}"
        "{{ '<|start|>assistant<|channel|>final<|message|>' + m.content }}"
        "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
        "{% elif m.role == 'system' %}{{ '<|start|>developer<|message|># Instructions\n\n' + m.content + '<|end|>' }}"
        "{% else %}{{ '<|start|>user<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}",
        ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"),
        "<|end|>",
        "<|return|>",
    ),
    "granite": Family(
        "{%- if messages[0].role != 'system' %}{{- '<|start_of_role|>system<|end_of_role|>Today is a day. "
        "You are a helpful assistant.<|end_of_text|>\n' }}{%- endif %}{%- for m in messages %}"
        "{{- '<|start_of_role|>' + m.role + '<|end_of_role|>' + m.content + '<|end_of_text|>\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|start_of_role|>assistant<|end_of_role|>' }}{%- endif %}",
        ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"),
        "<|end_of_text|>",
    ),
    # Headers are plain text; only the last answer's end has no line break behind it.
    "olmo-2": Family(
        "{{ '<|endoftext|>' }}{% for m in messages %}{% if m.role == 'assistant' %}"
        "{{ '<|assistant|>\n' + m.content + '<|endoftext|>' + ('' if loop.last else '\n') }}"
        "{% else %}{{ '<|' + m.role + '|>\n' + m.content + '\n' }}{% endif %}"
        "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}",
        ("<|endoftext|>",),
        "<|endoftext|>",
    ),
    # No special token but the end of everything; turns are parted by empty lines.
    "falcon": Family(
        "{% for m in messages %}{% if not loop.first %}{{ '\n' }}{% endif %}{{ m.role.capitalize() + ': ' }}"
        "{{ m.content.strip() }}{{ '<|endoftext|>' if m.role == 'assistant' else '' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '\nAssistant:' }}{% endif %}",
        ("<|endoftext|>",),
        "<|endoftext|>",
    ),
    # `{% generation %}` marks what the assistant writes; the mode is told in the system prompt.
    "smollm3": Family(
        "{{- '<|im_start|>system\n## Metadata\n\nReasoning Mode: /no_think\n\n' }}"
        "{%- if messages[0].role == 'system' %}{{- messages[0].content }}{%- set messages = messages[1:] %}{%- endif %}"
        "{{- '<|im_end|>\n' }}{%- for m in messages %}{%- if m.role == 'assistant' %}{{- '<|im_start|>assistant\n' }}"
        "{% generation %}{{- '<think>\n\n</think>\n' + m.content.lstrip('\n') + '<|im_end|>' }}{% endgeneration %}"
        "{{- '\n' }}{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif %}"
        "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n\n</think>\n' }}{%- endif %}",
        ("<|im_start|>", "<|im_end|>"),
        "<|im_end|>",
    ),
    "vicuna": Family(
        "{% if messages[0].role == 'system' %}{{ messages[0].content + ' ' }}"
        "{% set messages = messages[1:] %}{% endif %}"
        "{% for m in messages %}{% if m.role == 'user' %}{{ 'USER: ' + m.content.strip() + ' ' }}"
        "{% else %}{{ 'ASSISTANT: ' + m.content.strip() + '</s>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}",
        ("<s>", "</s>"),
        "</s>",
        word_pieces=True,
    ),
}


@cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """A small tokenizer with the family's special tokens and template."""
    family = FAMILIES[name]
    tokenizer = kit.tokenizer_with(family.template, eos=family.eos, word_pieces=family.word_pieces)
    tokenizer.add_special_tokens({"additional_special_tokens": list(family.specials)})
    return tokenizer
