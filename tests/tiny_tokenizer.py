"""The small ChatML tokenizer of the tiny targets, made without any network."""

from __future__ import annotations

import functools
from typing import Any

from draftline.data.template import tokenizer_fingerprint

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TOKENIZER_SIZE = 400
CORPUS = (
    "The quick brown fox jumps over the lazy dog. How are you today? I am fine, thank you very much.",
    "user assistant system What is the capital of France? The capital of France is Paris.",
    "Write a short list of numbers: one, two, three, four, five, six, seven, eight, nine, ten.",
)


def build_tokenizer(*, lower: bool = False) -> Any:
    """Byte-level BPE with ChatML's special tokens (ids 0, 1, 2) and template; never needs an unknown token."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENIZER_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    if lower:  # of texts, once the tokens are settled
        tokenizer.normalizer = normalizers.Lowercase()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", bos_token="<|im_start|>"
    )
    fast.chat_template = CHATML
    return fast


@functools.cache
def tiny_fingerprint() -> str:
    """What data for the tiny targets is prepared with."""
    return tokenizer_fingerprint(build_tokenizer())
