"""Promises of long contexts: samples up to the context of the target are trained, and their memory is told before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftline.data.manifest import DatasetFacts
from draftline.data.shards import ShardWriter
from draftline.errors import UserError
from draftline.pipeline.coordinator import train
from draftline.pipeline.runplan import estimate_memory, make_run_plan, plan_lines
from tiny_tokenizer import tiny_fingerprint

MakeRun = Callable[..., Any]
CONTEXT = 16384


@pytest.fixture(scope="module")
def long_target(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> Path:
    """One head, two layers and a context of 16384 tokens."""
    import torch
    import transformers as hf

    folder = tmp_path_factory.mktemp("long-target")
    sizes = {"vocab_size": 512, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 4, "head_dim": 16}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": CONTEXT}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        hf.Qwen3ForCausalLM(hf.Qwen3Config(**sizes, **heads, bos_token_id=1, eos_token_id=2)).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


def write_samples(path: Path, lengths: list[int]) -> Path:
    rng = np.random.default_rng(0)
    facts = DatasetFacts(
        tokenizer_fingerprint=tiny_fingerprint(), template_hash="t", vocab_size=400, max_tokens=max(lengths)
    )
    with ShardWriter(path) as writer:
        for i, n in enumerate(lengths):
            writer.add(f"s{i}", rng.integers(3, 400, n), np.arange(n) >= 6)
        writer.finish(facts)
    return path


def test_samples_and_rows_of_many_thousand_tokens_are_trained(
    tmp_path: Path, make_run: MakeRun, long_target: Path
) -> None:
    data = write_samples(tmp_path / "data", [12_000, 5_000, 3_000, 200])
    config = make_run("data.row_tokens=12288", "max_rows=2", data=data, model=long_target)
    plan = make_run_plan(config)
    assert sorted(row.n_tokens for row in plan.rows) == [8_000, 12_200]
    result = train(plan)
    assert (result.ledger.committed, result.tokens) == (2, 20_200)


def test_a_sample_beyond_the_context_is_refused_before_any_weight_is_loaded(
    tmp_path: Path, make_run: MakeRun, long_target: Path
) -> None:
    data = write_samples(tmp_path / "data", [CONTEXT + 1, 100])
    with pytest.raises(
        UserError, match=r"a sample has 16385 tokens, the target's context is 16384; prepare with --max"
    ):
        make_run_plan(make_run("data.row_tokens=20000", data=data, model=long_target))


def test_dry_run_tells_the_memory_of_long_rows(tmp_path: Path, make_run: MakeRun, long_target: Path) -> None:
    def memory(tokens: int, *more: str) -> dict[str, int]:
        data = write_samples(tmp_path / f"data-{tokens}-{len(more)}", [tokens] * 3)
        plan = make_run_plan(make_run(f"data.row_tokens={tokens}", *more, data=data, model=long_target))
        assert "target forward" in "\n".join(plan_lines(plan))
        return estimate_memory(plan)[0].parts

    short, long = memory(4096), memory(CONTEXT)
    assert long["target forward"] == 4 * short["target forward"]
    assert long["rows admitted"] == 4 * short["rows admitted"]
    per_token = 4 * (4 * 16 + 3 * 16 + 3 * 16)
    assert short["target forward"] == 4096 * per_token
    eager = memory(CONTEXT, "target.attention=eager")
    assert eager["target forward"] == CONTEXT * per_token + CONTEXT**2 * 8
