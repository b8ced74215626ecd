"""The real SmolLM2-135M-Instruct: its GGUF loads through transformers, template and all, and proves itself.

And on it, with a drafter made of its own layers: a tree that holds the chain accepts no less. Both are in one file so
that the model is read once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftline.config.schema import DrafterConfig, TargetConfig
from draftline.decode.budget import FixedBudget
from draftline.decode.chain import BoundDrafter, chain_generate
from draftline.decode.generation import Generation
from draftline.decode.plain import plain_generate
from draftline.decode.steps import RoundContext
from draftline.decode.tree_generate import tree_generate
from draftline.drafter.model import Drafter
from draftline.drafter.spec import build_spec
from draftline.drafter.warm_start import start_from_target
from draftline.evaluate.rounds import tree_rounds
from draftline.records import PlannedRow
from draftline.target.capture import TargetCapture
from draftline.target.facts import target_facts
from draftline.target.load import LoadedTarget
from draftline.target.selftest import ProbeSample, self_test

pytestmark = pytest.mark.long

TAPS = (7, 14, 26)
PROMPT = "<|im_start|>user\nWhat is the capital of Portugal?<|im_end|>\n<|im_start|>assistant\n"
LIMIT, BUDGETS = 13, (4, 16, 64)


def test_the_gguf_gives_facts_template_and_stop_tokens(
    smollm2_gguf: Path, smollm2_tokenizer: Any, smollm2_target: LoadedTarget
) -> None:
    target, tokenizer = smollm2_target, smollm2_tokenizer
    facts = target_facts(TargetConfig(model=str(smollm2_gguf)))
    assert facts == target.facts
    assert (facts.model_type, facts.num_layers, facts.hidden_size, facts.vocab_size) == ("llama", 30, 576, 49152)
    assert facts.rope_parameters == {"rope_type": "default", "rope_theta": 100000.0}
    assert facts.architectures == ("LlamaForCausalLM",)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert end in target.stop_token_ids and end in facts.eos_token_ids
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_real_model_proves_itself_and_its_taps_are_its_hidden_states(
    smollm2_target: LoadedTarget, smollm2_tokenizer: Any
) -> None:
    target, tokenizer = smollm2_target, smollm2_tokenizer
    report = self_test(target, TAPS)
    assert report.head_error <= 1e-5 and report.head_top1 == 1.0 and max(report.tap_errors.values()) <= 1e-5
    assert report.isolation_error <= 1e-5 and report.layout_error <= 1e-3
    ids = np.array(tokenizer("The capital of France is")["input_ids"], dtype=np.int32)
    sample = ProbeSample("paris", ids, np.ones(len(ids), dtype=np.bool_))
    planned = PlannedRow(0, 0, (0,), len(ids), len(ids))
    row = TargetCapture(target, TAPS, want_final=True, layout="packed").capture(planned, [sample])
    with torch.no_grad():
        output = target.model(input_ids=row.input_ids_T[None], output_hidden_states=True, use_cache=False)
    want = torch.cat([output.hidden_states[t + 1][0] for t in TAPS], dim=-1)
    torch.testing.assert_close(row.taps_TF, want, rtol=1e-4, atol=1e-4)
    assert tokenizer.decode(output.logits[0, -1].argmax()).strip() == "Paris"


@dataclass
class Helped:
    """The drafter, led towards what the target will write, at places drawn by position.

    Untrained layers are right too rarely to try acceptance; what they answer stays the base of every distribution.
    """

    bound: BoundDrafter
    text: Sequence[int]

    @property
    def block_size(self) -> int:
        return self.bound.block_size

    @property
    def taps(self) -> tuple[int, ...]:
        return self.bound.taps

    def start(self) -> None:
        self.bound.start()

    def block_logits(self, context: RoundContext) -> torch.Tensor:
        logits_KV = self.bound.block_logits(context).clone()
        generator = torch.Generator().manual_seed(context.start)
        # A little above or below the drafter's own first choice.
        lead_K = 8.0 * torch.rand(context.slots - 1, generator=generator) - 3.0
        for slot in range(1, context.slots):
            if context.start + slot < len(self.text):
                best = logits_KV[slot - 1].max()
                logits_KV[slot - 1, self.text[context.start + slot]] = best + lead_K[slot - 1]
        return logits_KV


@pytest.fixture(scope="module")
def drafter(smollm2_target: LoadedTarget) -> BoundDrafter:
    config = DrafterConfig(num_layers=2, block_size=4, taps=(9, 23), mask_token_id=16)
    drafter = Drafter(build_spec(config, smollm2_target.facts)).eval()
    start_from_target(drafter, smollm2_target, (28, 29), torch.Generator().manual_seed(0))
    return BoundDrafter(drafter, smollm2_target)


@pytest.fixture(scope="module")
def plain(smollm2_target: LoadedTarget, prompt_ids: list[int]) -> Generation:
    return plain_generate(smollm2_target, prompt_ids, max_new_tokens=LIMIT + 4, stop_token_ids=())


@pytest.fixture(scope="module")
def prompt_ids(smollm2_tokenizer) -> list[int]:  # type: ignore[no-untyped-def]
    return smollm2_tokenizer(PROMPT)["input_ids"]


@pytest.mark.parametrize("helped", [False, True])
def test_on_the_same_rounds_no_tree_that_holds_the_chain_accepts_less(
    smollm2_target: LoadedTarget, drafter: BoundDrafter, prompt_ids: list[int], plain: Generation, helped: bool
) -> None:
    used = Helped(drafter, [*prompt_ids, *plain.output_ids]) if helped else drafter
    chain = chain_generate(smollm2_target, used, prompt_ids, max_new_tokens=LIMIT, stop_token_ids=())
    assert chain.output_ids == plain.output_ids[:LIMIT]
    trees = {f"tree@{n}": FixedBudget(n) for n in BUDGETS}
    found = tree_rounds(smollm2_target, "d", used, [(prompt_ids, chain)], trees, LIMIT)
    assert [(r.rounds, r.chain_tokens) for r in found] == [(chain.target_forwards, LIMIT - 1)] * len(BUDGETS)
    assert [r.rounds_below_chain for r in found] == [0] * len(BUDGETS)
    assert [r.tree_tokens for r in found] == sorted(r.tree_tokens for r in found)
    if helped:
        assert chain.acceptance_length > 1.2
        assert found[-1].rounds_with_chain > 0
        assert found[-1].tree_tokens > found[-1].chain_tokens


def test_a_real_tree_decodes_the_targets_own_text(
    smollm2_target: LoadedTarget, drafter: BoundDrafter, prompt_ids: list[int], plain: Generation
) -> None:
    helped = Helped(drafter, [*prompt_ids, *plain.output_ids])
    tree = tree_generate(
        smollm2_target, helped, prompt_ids, budget=FixedBudget(16), max_new_tokens=LIMIT, stop_token_ids=()
    )
    assert tree.output_ids == plain.output_ids[:LIMIT]
    assert tree.acceptance_length > 1.2
