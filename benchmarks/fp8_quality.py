"""What fp8 costs in quality: loss curves on states of a real target, fp8 against three seeds of bf16.

    python benchmarks/fp8_quality.py --target TARGET --output fp8-quality.json      a GPU with fp8

The target answers the built-in prompts itself (greedy), its states are captured once, and a drafter is trained on them
for some hundred steps: in bf16 from three seeds (first weights, order of rows and anchors), and with fp8 products in
head and MLPs from the first of those seeds. The fp8 curve passes where its smoothed loss lies within the span of the
bf16 curves at every point from a tenth of the run on; the share of points that do is reported.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from argtypes import json_file, whole
from draftline.config.drafter_spec import DrafterSpec
from draftline.config.schema import DrafterConfig, ExponentialDecay, ObjectiveConfig, OptimizerConfig, TargetConfig
from draftline.data.answering import Prompt, Sampling, answer_batch, batches_of
from draftline.data.chat import prompt_ids
from draftline.data.prompts import builtin_prompts, split_prompts
from draftline.data.rows import plan_rows
from draftline.data.template import ChatTemplate
from draftline.drafter.compile_cache import compiled_kernels, process_cache
from draftline.drafter.model import Drafter
from draftline.drafter.optimizer import MasterOptimizer
from draftline.drafter.schedule import schedule_factor
from draftline.drafter.spec import build_spec
from draftline.drafter.step import DrafterStep
from draftline.records import HiddenStateRow
from draftline.target.capture import TargetCapture
from draftline.target.load import LoadedTarget, load_target, load_tokenizer
from measure import Stopwatch, environment

ROW_TOKENS, NEW_TOKENS = 1024, 192
SMOOTHED_STEPS = 25


@dataclass(frozen=True, slots=True)
class Sample:
    sample_id: str
    input_ids: np.ndarray
    loss_mask: np.ndarray


def answered_samples(target: LoadedTarget, tokenizer: Any, limit: int | None) -> list[Sample]:
    """The built-in prompts with the target's own greedy answers."""
    template = ChatTemplate(tokenizer)
    records, _ = split_prompts(builtin_prompts(), held_out=0)
    prompts = [Prompt(p["id"], prompt_ids(template, p["messages"])) for p in records][:limit]
    samples = []
    for batch in batches_of(prompts, 128, same_length=False):
        answers = answer_batch(target, batch, max_new_tokens=NEW_TOKENS, sampling=Sampling())
        for prompt, answer in zip(batch, answers, strict=True):
            mask = np.array([False] * len(prompt.input_ids) + [True] * len(answer.token_ids))
            samples.append(Sample(prompt.id, np.array(prompt.input_ids + answer.token_ids, dtype=np.int32), mask))
    return samples


def captured_rows(target: LoadedTarget, spec: DrafterSpec, samples: list[Sample], row_tokens: int) -> list:
    capture = TargetCapture(target, spec.taps, want_final=True)
    lengths, supervised = [len(s.input_ids) for s in samples], [int(s.loss_mask.sum()) for s in samples]
    plan = plan_rows(lengths, supervised, row_tokens=row_tokens, seed=0, epochs=1)
    return [capture.capture(row, [samples[i] for i in row.samples]) for row in plan]


def train(
    target: LoadedTarget,
    spec: DrafterSpec,
    rows: list[HiddenStateRow],
    objective: ObjectiveConfig,
    steps: int,
    seed: int,
) -> tuple[list[float], float]:
    """Loss per slot of each step, and the seconds of the run."""
    device = target.device
    drafter = Drafter(spec)
    drafter.init_weights(torch.Generator().manual_seed(seed))
    drafter.to(device=device, dtype=target.dtype)
    if device.type == "cuda":
        drafter.kernels = compiled_kernels(process_cache().device(str(device)), layers=True)
    optimizer = MasterOptimizer(drafter, OptimizerConfig())
    step = DrafterStep(
        drafter, target.embedding, target.head, objective, teacher=target.head, row_tokens=ROW_TOKENS, seed=seed
    )
    if device.type == "cuda":
        process_cache().device(str(device)).warm(step.warm_up)
    order = np.concatenate(
        [np.random.default_rng((seed, e)).permutation(len(rows)) for e in range(1 + steps // len(rows))]
    )
    losses = []

    def run() -> None:
        for i in range(steps):
            row = replace(rows[order[i]], epoch=i // len(rows))
            stats = step.forward_backward(row)
            losses.append(stats.numerator / stats.denominator)
            optimizer.absorb(stats.denominator)
            config = OptimizerConfig()
            optimizer.step(config.learning_rate * schedule_factor(config.schedule, i / steps))

    seconds = Stopwatch(device).time(run)
    return [float(x) for x in torch.stack(losses).cpu()], seconds


def smooth(losses: list[float]) -> np.ndarray:
    kernel = np.ones(SMOOTHED_STEPS) / SMOOTHED_STEPS
    return np.convolve(np.array(losses), kernel, mode="valid")


def judge(curves: dict[str, list[float]], tested: str) -> dict[str, Any]:
    """The tested curve against the span of the others, smoothed, from a tenth of the run on."""
    smoothed = {name: smooth(losses) for name, losses in curves.items()}
    start = len(smoothed[tested]) // 10
    others = np.stack([c[start:] for n, c in smoothed.items() if n.startswith("bf16")])
    low, high, own = others.min(0), others.max(0), smoothed[tested][start:]
    last = {name: float(np.mean(c[-max(1, len(c) // 10) :])) for name, c in smoothed.items()}
    spread = max(v for n, v in last.items() if n.startswith("bf16")) - min(
        v for n, v in last.items() if n.startswith("bf16")
    )
    return {
        "share_of_points_inside": float(np.mean((own >= low) & (own <= high))),
        "share_of_points_not_above": float(np.mean(own <= high)),
        "largest_excess": float(np.max(own - high)),
        "mean_span": float(np.mean(high - low)),
        "last_tenth_loss": last,
        "last_tenth_span_of_bf16": spread,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="folder of the target's model")
    parser.add_argument("--output", type=json_file, required=True, help="JSON file to write")
    parser.add_argument("--steps", type=whole(1), default=500)
    parser.add_argument("--prompts", type=whole(1), default=None, help="most prompts; all by default")
    parser.add_argument("--mask-token-id", type=whole(0), default=16)
    arguments = parser.parse_args()
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    config = TargetConfig(model=arguments.target)
    tokenizer = load_tokenizer(config)
    target = load_target(config, device, tokenizer=tokenizer)
    spec = build_spec(DrafterConfig(mask_token_id=arguments.mask_token_id), target.facts)
    rows = captured_rows(target, spec, answered_samples(target, tokenizer, arguments.prompts), ROW_TOKENS)
    plain = ObjectiveConfig(anchors=256, decay=ExponentialDecay(gamma=7.0))
    kinds: dict[str, tuple[ObjectiveConfig, int]] = {f"bf16_seed_{seed}": (plain, seed) for seed in range(3)}
    if device != "cpu":
        kinds["fp8_head_seed_0"] = (plain.model_copy(update={"head_dtype": "fp8"}), 0)
        kinds["fp8_seed_0"] = (plain.model_copy(update={"head_dtype": "fp8", "mlp_dtype": "fp8"}), 0)
    curves, seconds = {}, {}
    for name, (objective, seed) in kinds.items():
        curves[name], seconds[name] = train(target, spec, rows, objective, arguments.steps, seed)
    report = {
        "environment": environment(torch.device(device)),
        "rows": len(rows),
        "row_tokens": ROW_TOKENS,
        "steps": arguments.steps,
        "seconds": seconds,
        "verdicts": {name: judge(curves, name) for name in curves if name.startswith("fp8")},
        "curves": {name: [round(x, 4) for x in losses] for name, losses in curves.items()},
    }
    arguments.output.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report["verdicts"], indent=2))


if __name__ == "__main__":
    main()
