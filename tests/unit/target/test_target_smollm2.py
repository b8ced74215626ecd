"""The real SmolLM2-135M-Instruct: its GGUF loads through transformers, template and all, and proves itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from draftline.config.schema import TargetConfig
from draftline.records import PlannedRow
from draftline.target.capture import TargetCapture
from draftline.target.facts import target_facts
from draftline.target.load import LoadedTarget
from draftline.target.selftest import ProbeSample, self_test

TAPS = (7, 14, 26)


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
