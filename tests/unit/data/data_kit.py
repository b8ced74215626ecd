"""Small tokenizers and chat templates for the tests of the data room, made on the spot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|end|>",
    "<|return|>",
    "<s>",
    "</s>",
    "<|user|>",
    "<|assistant|>",
    "<start_of_turn>",
    "<end_of_turn>",
)
STOPS = range(100, 140)  # further stop tokens of the tiny target
CORPUS = (
    "the quick brown fox jumps over the lazy dog and says hello there to everyone",
    "user\nassistant\nsystem\n\n\n answer one two three think no yes maybe analysis final tool call name arguments",
    "Übergrößenträger, naïve café, 你好世界, emoji 🤗🎉, def f(x):\n    return x + 1\n\nprint(f(2))\n",
)

_TURN = "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
_ASK = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"

CHATML = "{% for m in messages %}" + _TURN + "{% endfor %}" + _ASK

# X2i: thinking parts of all turns but the last are dropped.
DROPS_THINKING = (
    "{% for m in messages %}{% set c = m.content %}"
    "{% if m.role == 'assistant' and not loop.last %}{% set c = c.split('</think>')[-1].lstrip() %}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\\n' + c + '<|im_end|>\\n' }}{% endfor %}" + _ASK
)

# X2ii: turns must alternate, beginning with the user.
STRICT_ROLES = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}" + _TURN + "{% endfor %}" + _ASK
)

# X2iii: the assistant's words are marked.
TAGGED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\\n' }}"
    "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}" + _TURN + "{% endif %}{% endfor %}" + _ASK
)

# X2iv: several channels, a header in front of the final answer, another end for the last turn.
CHANNELS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if m.thinking and loop.last %}"
    "{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
    "{% else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)

# X2v: the last turn ends with another end token than the ones before.
OTHER_END = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}"
    "{{ '<|endoftext|>' if loop.last else '<|im_end|>\\n' }}{% endfor %}" + _ASK
)

# An empty thinking part is written in front of a last answer that has none.
EMPTY_THINKING = (
    "{% for m in messages %}{% set c = m.content %}"
    "{% if m.role == 'assistant' and loop.last and '</think>' not in c %}"
    "{% set c = '<think>\\n\\n</think>\\n\\n' + c %}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\\n' + c + '<|im_end|>\\n' }}{% endfor %}" + _ASK + "{% if add_generation_prompt and"
    " enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
)

# The generation prompt begins a thinking part that the rendered history does not have.
ASKS_FOR_THINKING = CHATML + "{% if add_generation_prompt %}{{ '<think>\\n' }}{% endif %}"

# Tools stand before the last user turn only, so what was served is no prefix of the whole.
TOOLS_BEFORE_LAST_USER = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{{ '<s>' }}{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and loop.index0 == ns.last %}{{ '[TOOLS]' + (tools | tojson) }}{% endif %}"
    "{{ '[INST]' + m.content + '[/INST]' }}{% else %}{{ m.content + '</s>' }}{% endif %}{% endfor %}"
)

# A space before the answer and one before its end, as in some word-piece models.
SPACED = (
    "{{ '<s>' }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content | trim + ' </s>' }}{% endif %}{% endfor %}"
)

# Nothing ends an answer but the next header.
NO_TERMINATOR = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)

# Plain words as headers and ends, no special tokens at all.
PLAIN_TEXT = (
    "{% for m in messages %}{{ '### ' + m.role + ':\\n' + m.content + '\\n[END]\\n\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### assistant:\\n' }}{% endif %}"
)

# The assistant goes by another name and contents are trimmed.
TRIMMED = (
    "{{ '<s>' }}{% for m in messages %}{% set role = 'model' if m.role == 'assistant' else m.role %}"
    "{{ '<start_of_turn>' + role + '\\n' + m.content | trim + '<end_of_turn>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)

# Tool calls and tool results.
TOOL_CALLS = (
    "{% if tools %}{{ '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{{ '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}"
    '{% for call in m.tool_calls or [] %}{{ \'\\n<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \''
    " + (call.function.arguments | tojson) + '}\\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}"
    "{% endfor %}" + _ASK
)


@cache
def _byte_level() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=480,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    return str(tokenizer.to_str())


@cache
def _word_pieces() -> str:
    """Spaces become part of the following piece, and a decoder that strips the first one."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    specials = ["<unk>", *SPECIALS, "[INST]", "[/INST]"]
    trainer = trainers.BpeTrainer(vocab_size=440, special_tokens=specials, show_progress=False)
    tokenizer.train_from_iterator("\n".join(CORPUS * 4).split("\n"), trainer)  # line breaks are bytes, as in Llama 2
    definition = json.loads(tokenizer.to_str())
    vocabulary = definition["model"]["vocab"]
    for byte in range(256):  # what the corpus lacks is spelled in bytes
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    return json.dumps(definition)


def tokenizer_with(
    template: str | None, *, eos: str = "<|im_end|>", word_pieces: bool = False
) -> PreTrainedTokenizerFast:
    """A tokenizer of about 500 tokens with this chat template."""
    backend = Tokenizer.from_str(_word_pieces() if word_pieces else _byte_level())
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos)
    tokenizer.chat_template = template
    return tokenizer


def supervised(tokenizer: Any, encoded: Any) -> list[str]:
    """Text of each run of supervised tokens."""
    pairs = zip(encoded.input_ids, encoded.loss_mask, strict=True)
    return [
        tokenizer.decode([token for token, _ in run], skip_special_tokens=False)
        for flag, run in groupby(pairs, key=lambda pair: pair[1])
        if flag
    ]


def talk(*turns: str) -> list[dict[str, Any]]:
    """Messages of user and assistant in turn, beginning with the user."""
    return [{"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(turns)]


def write_lines(path: Path, rows: Sequence[Any]) -> Path:
    """JSON lines; a row given as bytes is written as it is."""
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path
