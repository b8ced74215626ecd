"""Targets whose code cannot verify a block, or cannot take one back, are refused in one line, never decoded wrongly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf

from decoding_kit import NoisyDrafter, greedy_text, random_prompt, wrap
from draftline.decode.batch import BatchedTarget
from draftline.decode.budget import FixedBudget
from draftline.decode.chain import chain_generate
from draftline.decode.cost import measure_cost_curve
from draftline.decode.linear import linear_steps
from draftline.decode.lookup import LookupSource, lookup_generate
from draftline.decode.plain import plain_generate
from draftline.decode.static_call import StaticCompiler
from draftline.decode.static_target import StaticTarget
from draftline.decode.steps import Task, run_steps
from draftline.decode.tree_generate import tree_generate
from draftline.decode.tree_replay import tree_replay
from draftline.errors import UserError
from draftline.target.load import LoadedTarget

SIZES: dict[str, Any] = {
    "vocab_size": 37,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
JAMBA: dict[str, Any] = {
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "mamba_d_state": 4,
    "mamba_dt_rank": 4,
}
OPTIONS: dict[str, Any] = {"max_new_tokens": 16, "stop_token_ids": ()}


def random_target(config: Any) -> LoadedTarget:
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(0.0, 0.4) if weight.ndim > 1 and "A_log" not in name else None
    return wrap(model)


def test_a_model_that_forgets_its_state_within_a_block_is_decoded_plainly_and_its_trees_are_replayed() -> None:
    """Jamba scans a block of several tokens from an empty state: verified so, drafts are not judged by the text."""
    target, prompt = random_target(hf.JambaConfig(**SIZES, **JAMBA)), random_prompt(0, 9, 37)
    text = greedy_text(target, prompt, 20)
    with torch.no_grad():
        straight = [int(target.model(torch.tensor([text[:end]])).logits[0, -1].argmax()) for end in range(9, 29)]
    assert text[9:] == straight
    drafter = NoisyDrafter(text, 37, 5, seed=0, strength=4.0)
    for generate in (
        lambda: chain_generate(target, drafter, prompt, **OPTIONS),
        lambda: lookup_generate(target, [1, 2, 1, 2, 1], **OPTIONS),
    ):
        with pytest.raises(UserError, match="jamba forgets its recurrent state"):
            generate()
    replayed = tree_replay(target, drafter, prompt, text[9:25], budget=FixedBudget(8), **OPTIONS)
    assert replayed.output_ids == text[9:25]


@pytest.mark.parametrize("carries", [True, False])
def test_a_block_is_tried_once_a_target_and_a_model_that_carries_its_state_passes(carries: bool) -> None:
    hybrid: dict[str, Any] = {"layer_types": ["conv", "full_attention"] * 2}
    config = hf.Lfm2Config(**SIZES, **hybrid) if carries else hf.JambaConfig(**SIZES, **JAMBA)
    target = random_target(config)
    assert target.carries_state_through_blocks is carries
    assert "carries_state_through_blocks" in vars(target)


@pytest.mark.parametrize(
    ("config", "own"),
    [
        (hf.RecurrentGemmaConfig, {"lru_width": 16, "attention_window_size": 8}),
        (hf.MiniMaxConfig, {"layer_types": ["linear_attention", "full_attention"] * 2, "num_local_experts": 2}),
    ],
)
def test_a_model_that_keeps_its_state_elsewhere_than_in_the_cache_is_refused(config: Any, own: dict[str, Any]) -> None:
    target = random_target(config(**SIZES, **own))
    with pytest.raises(UserError, match="keeps its state elsewhere than in the cache"):
        plain_generate(target, [1, 2, 3], **OPTIONS)


@pytest.mark.parametrize("kind", ["bloom", "falcon", "mpt"])
def test_models_that_tell_distance_by_column_verify_lines_but_no_trees_and_no_batches(kind: str) -> None:
    """ALiBi: siblings share a position, not a column of the cache, so a tree would be weighed wrongly."""
    ends: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "vocab_size": 37}
    config = {
        "bloom": lambda: hf.BloomConfig(**ends, hidden_size=16, n_layer=2, n_head=2),
        "falcon": lambda: hf.FalconConfig(
            **ends, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, alibi=True
        ),
        "mpt": lambda: hf.MptConfig(vocab_size=37, d_model=16, n_layers=2, n_heads=2, max_seq_len=128),
    }[kind]()
    target, prompt = random_target(config), random_prompt(0, 6, 37)
    text = greedy_text(target, prompt, 20)
    drafter = NoisyDrafter(text, 37, 5, seed=0, strength=4.0)
    assert chain_generate(target, drafter, prompt, **OPTIONS).output_ids == text[6:22]
    with pytest.raises(UserError, match=r"ALiBi.*ancestor mask"):
        tree_generate(target, drafter, prompt, budget=FixedBudget(8), **OPTIONS)
    with pytest.raises(UserError, match=r"ALiBi.*a mask by row"):
        BatchedTarget(target, (), 2, 50)


@pytest.mark.parametrize("prompt_tokens", [10, 63])
def test_a_table_of_learned_positions_is_not_read_past_its_end(prompt_tokens: int) -> None:
    """Neither by shapes prepared behind the longest text, nor where costs are measured behind a prompt at the limit."""
    config = hf.GPT2Config(vocab_size=37, n_embd=16, n_layer=2, n_head=2, n_positions=64, eos_token_id=None)
    target, prompt = random_target(config), random_prompt(0, prompt_tokens, 37)
    limit = 64 - prompt_tokens
    text = greedy_text(target, prompt, limit)
    with StaticTarget(target, 64 + 31, StaticCompiler("graph", target.device)) as static:
        static.warm((), (1, 8, 31))
        session, source = static.session((), (1, 8, 31)), LookupSource(8, 3)
        found = run_steps(session, linear_steps(session, source, Task(prompt, limit, ())))
    assert [*prompt, *found.output_ids] == text
    drafter = NoisyDrafter(text, 37, 6, seed=0)
    curve = measure_cost_curve(target, drafter, prompt, budgets=(0, 1, 40), repeats=1)
    assert curve.largest == 40
