"""Tiny random targets and drafters with known behaviour, for the tests of decoding, evaluation and export."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from draftline.config.drafter_spec import DrafterSpec
from draftline.config.schema import TargetConfig
from draftline.decode.linear import RoundContext
from draftline.decode.plain import plain_generate
from draftline.target.facts import facts_from_hf
from draftline.target.load import LoadedTarget, wrap_model
from spec_kit import small_spec


def wrap(model: Any) -> LoadedTarget:
    model.eval().requires_grad_(False)
    return wrap_model(model, config=TargetConfig(model="tiny"), facts=facts_from_hf(model.config, ()))


def tiny_target(seed: int = 0, *, sharpness: float = 6.0, **changes: Any) -> LoadedTarget:
    """A random Qwen3 in fp32. `sharpness` scales the head, so that the best logits are rarely close to a tie."""
    sizes: dict[str, Any] = {
        "vocab_size": 13,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "initializer_range": 0.3,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        **changes,
    }
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(**sizes))
    with torch.no_grad():
        model.lm_head.weight.mul_(sharpness)
    return wrap(model)


def tiny_spec(**changes: Any) -> DrafterSpec:
    """Spec of a two-layer drafter for `tiny_target()`."""
    own: dict[str, Any] = {
        "vocab_size": 13,
        "mask_token_id": 12,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "num_target_layers": 4,
        "initializer_range": 0.3,
    }
    return small_spec(**(own | changes))


def random_prompt(seed: int, length: int, vocab_size: int = 13) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (length,), generator=generator).tolist()


@dataclass
class OracleDrafter:
    """Knows the target's greedy text and drafts it, except where `is_right(round, slot)` says no.

    Attributes:
        text: prompt and continuation, longer than what is decoded.
        calls: the contexts it was asked with: (start, slots, new tap rows).
    """

    text: Sequence[int]
    vocab_size: int
    block_size: int
    is_right: Any
    taps: tuple[int, ...] = (1,)
    calls: list[tuple[int, int, int]] = field(default_factory=list)

    def start(self) -> None:
        self.calls.clear()

    def block_logits(self, context: RoundContext) -> torch.Tensor:
        assert context.new_taps_SF is not None
        self.calls.append((context.start, context.slots, context.new_taps_SF.shape[0]))
        logits_KV = torch.zeros(context.slots - 1, self.vocab_size)
        for slot in range(1, context.slots):
            token = self.text[context.start + slot]
            if not self.is_right(len(self.calls) - 1, slot):
                token = (token + 1) % self.vocab_size
            logits_KV[slot - 1, token] = 9.0
        return logits_KV


@dataclass
class NoisyDrafter:
    """Logits that mix the target's greedy text with noise: accepts some drafts, rejects others, at any slot."""

    text: Sequence[int]
    vocab_size: int
    block_size: int
    seed: int
    strength: float = 2.0
    taps: tuple[int, ...] = (0,)

    def start(self) -> None:
        self._generator = torch.Generator().manual_seed(self.seed)

    def block_logits(self, context: RoundContext) -> torch.Tensor:
        # The noise of a block depends on its place alone, so that chain and tree meet the same marginals there.
        self._generator.manual_seed(self.seed * 100_003 + context.start)
        logits_KV = torch.randn(self.block_size - 1, self.vocab_size, generator=self._generator)[: context.slots - 1]
        for slot in range(1, context.slots):
            if context.start + slot < len(self.text):
                logits_KV[slot - 1, self.text[context.start + slot]] += self.strength
        return logits_KV


def greedy_text(target: LoadedTarget, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
    """Prompt and greedy continuation, no stop token."""
    return [*prompt, *plain_generate(target, prompt, max_new_tokens=max_new_tokens, stop_token_ids=()).output_ids]
