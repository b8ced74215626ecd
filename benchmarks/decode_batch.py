"""Milliseconds of a round of many prompts decoded together, with cuDNN's attention allowed and without.

    python benchmarks/decode_batch.py --output batch.json            SmolLM2-135M's shape with random weights, a GPU
    python benchmarks/decode_batch.py --tiny --output batch.json     the same code on any machine, in seconds

cuDNN plans every new shape on the host (see draftline/target/shape_plans.py), so what it costs shows as the difference
of the two; both take turns in one run, twice, and the second turn counts. `answers` is `draftline regenerate`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import LlamaConfig

from argtypes import json_file, one_of, whole
from decode_speed import random_target
from draftline.config.schema import DrafterConfig
from draftline.data import answering
from draftline.data.sampling import Prompt, Sampling
from draftline.decode.batch import BatchedTarget, RowSession, decode_together
from draftline.decode.budget import FixedBudget
from draftline.decode.chain import BoundDrafter, ChainSource
from draftline.decode.linear import linear_steps
from draftline.decode.plain import plain_steps
from draftline.decode.steps import Steps, Task
from draftline.decode.tree_generate import tree_steps
from draftline.drafter.model import Drafter
from draftline.drafter.spec import build_spec
from draftline.target.load import LoadedTarget
from measure import environment

SHAPE = {
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
TINY = SHAPE | {"vocab_size": 512, "num_hidden_layers": 2, "hidden_size": 144, "intermediate_size": 96, "head_dim": 16}
BLOCK_SIZE, BUDGET = 16, 64
METHODS = ("plain", "chain", "tree", "answers")


@dataclass(frozen=True, slots=True)
class Bench:
    """What is decoded.

    Attributes:
        prompts: of 40 to 120 tokens.
        new_tokens: written to each.
    """

    target: LoadedTarget
    bound: BoundDrafter
    prompts: list[list[int]]
    new_tokens: int

    def rounds(self, method: str, decode: Callable[..., Any]) -> int:
        """Decodes all prompts once: rounds of the longest."""

        def opener(ids: list[int]) -> Callable[[RowSession], Steps]:
            return lambda session: self._steps(method, session, Task(ids, self.new_tokens, stop_token_ids=()))

        columns = max(map(len, self.prompts)) + self.new_tokens + BUDGET + 1
        batch = BatchedTarget(self.target, self.bound.taps, len(self.prompts), columns)
        found = decode(batch, [opener(ids) for ids in self.prompts])
        return max(len(one.acceptance_lengths) for one in found)

    def _steps(self, method: str, session: RowSession, task: Task) -> Steps:
        if method == "plain":
            return plain_steps(session, task)
        own = self.bound.fork()
        if method == "chain":
            return linear_steps(session, ChainSource(own), task)
        return tree_steps(session, own, task, FixedBudget(BUDGET))

    def lengthened(self, turn: int) -> Bench:
        """Prompts so much longer that a turn meets no shape of those before it: plans of known shapes are kept."""
        more = turn * (self.new_tokens + BUDGET + 1)
        return replace(self, prompts=[[5] * more + ids for ids in self.prompts])

    def answers(self, generate: Callable[..., Any]) -> int:
        """Answers all prompts once: tokens of the longest."""
        named = [Prompt(str(i), ids) for i, ids in enumerate(self.prompts)]
        found = generate(self.target, named, self.new_tokens, Sampling(temperature=0.0, top_p=1.0, top_k=0, seed=0))
        return max(len(answer.token_ids) for answer in found)


def make_bench(device: torch.device, n_prompts: int, new_tokens: int, *, tiny: bool) -> Bench:
    """Random weights and prompts."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    target = random_target(LlamaConfig(**(TINY if tiny else SHAPE)), device, dtype)
    spec = build_spec(
        DrafterConfig(num_layers=2 if tiny else 5, block_size=BLOCK_SIZE, mask_token_id=3, taps=(0,) if tiny else None),
        target.facts,
    )
    with torch.device(device):
        drafter = Drafter(spec).to(device=device, dtype=dtype).eval()
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(40, 121, (n_prompts,), generator=generator).tolist()
    prompts = [torch.randint(4, 512, (size,), generator=generator).tolist() for size in sizes]
    return Bench(target, BoundDrafter(drafter, target), prompts, new_tokens)


def seconds_of(call: Callable[[], int], device: torch.device) -> tuple[float, int]:
    """Seconds a round, and the rounds."""
    begin = time.perf_counter()
    rounds = call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - begin) / rounds, rounds


def measure(bench: Bench, method: str) -> dict[str, float]:
    """Milliseconds a round without and with cuDNN's kernels; the functions are wrapped, what is below allows them."""
    device, decode, generate = bench.target.device, decode_together, answering._generate
    forms: dict[str, Any] = {
        "ours": (decode, generate),
        "cudnn_allowed": (torch.inference_mode()(unwrapped(decode)), torch.inference_mode()(unwrapped(generate))),
    }
    found: dict[str, float] = {}
    for turn in range(2):
        longer = bench.lengthened(turn)
        for name, (one, other) in forms.items():

            def call(one: Any = one, other: Any = other, bench: Bench = longer) -> int:
                return bench.answers(other) if method == "answers" else bench.rounds(method, one)

            seconds, found["rounds"] = seconds_of(call, device)
            found[f"{name}_ms"] = seconds * 1e3
    return found | {"ratio": found["cudnn_allowed_ms"] / found["ours_ms"]}


def unwrapped(function: Any) -> Any:
    """The function below its decorators."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=json_file, required=True, help="JSON file to write")
    parser.add_argument("--prompts", type=whole(1), default=64)
    parser.add_argument("--new-tokens", type=whole(1), default=48)
    parser.add_argument("--methods", type=one_of(METHODS), default=METHODS, help="comma-separated")
    parser.add_argument("--tiny", action="store_true", help="a small shape, for any machine")
    chosen = parser.parse_args()
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    prompts, new_tokens = (4, 6) if chosen.tiny else (chosen.prompts, chosen.new_tokens)
    bench = make_bench(device, prompts, new_tokens, tiny=chosen.tiny)
    report: dict[str, Any] = {"environment": environment(device), "prompts": prompts, "new_tokens": new_tokens}
    for method in chosen.methods:
        report[method] = measure(bench, method)
        print(method, json.dumps({k: round(v, 2) for k, v in report[method].items()}), flush=True)
        chosen.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
