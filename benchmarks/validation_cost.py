"""What trees and walks add to a validation on the CPU, and how the walk agrees with real decoding.

Run: `python benchmarks/validation_cost.py RUN --rows 8 --samples 4 data.path=HELD_OUT`. RUN is the folder of a run;
further arguments override its configuration. Processor time of one process: compare its figures with each other only.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from argtypes import whole
from draftline.config.load import load_config
from draftline.config.schema import RunConfig, ValidationConfig
from draftline.data.shards import TokenDataset
from draftline.decode.budget import FixedBudget
from draftline.decode.chain import BoundDrafter, chain_generate
from draftline.decode.tree_generate import tree_generate
from draftline.decode.walk import walk_answers
from draftline.drafter.model import Drafter
from draftline.drafter.step import DrafterStep
from draftline.pipeline.exporting import drafter_of_run
from draftline.pipeline.runplan import validation_rows
from draftline.pipeline.validation import Validator, choose_answers, tree_metric
from draftline.pipeline.workers import borrow
from draftline.records import HiddenStateRow
from draftline.target.capture import TargetCapture
from draftline.target.load import LoadedTarget, load_target

CPU = torch.device("cpu")
BUDGETS = ((), (16,), (16, 64), (16, 64, 256))


def make_step(config: RunConfig, drafter: Drafter, target: LoadedTarget, budgets: tuple[int, ...]) -> DrafterStep:
    embedding, head, teacher = borrow(drafter.spec, target, CPU, torch.float32)
    return DrafterStep(
        drafter,
        embedding,
        head,
        config.objective,
        teacher=teacher if config.objective.needs_teacher else None,
        row_tokens=config.data.row_tokens,
        seed=config.seed,
        trees=tree_metric(ValidationConfig(tree_budgets=budgets)),
    )


def captured_rows(config: RunConfig, drafter: Drafter, target: LoadedTarget, n_rows: int) -> list[HiddenStateRow]:
    dataset = TokenDataset.open(config.data.path)
    capture = TargetCapture(target, drafter.spec.taps, want_final=config.objective.needs_teacher)
    rows = validation_rows(dataset, config)[:n_rows]
    return [capture.capture(row, [dataset.sample(i) for i in row.samples]) for row in rows]


def median_s(call: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return statistics.median(times)


def print_costs(steps: Sequence[DrafterStep], rows: Sequence[HiddenStateRow], samples: int, rounds: int) -> None:
    """Validation without trees and walk is 1; steps differ in their trees."""

    def score_all(step: DrafterStep) -> None:
        for row in rows:
            step.evaluate(row)

    plain_s = median_s(lambda: score_all(steps[0]), rounds)
    blocks = sum(int(steps[0].evaluate(row).scalar("blocks")) for row in rows)
    print(f"{len(rows)} rows, {blocks} blocks: {plain_s:.3f} s of processor time without trees and walk (= 1.00)")
    for step in steps[1:]:
        assert step.trees is not None
        share = median_s(lambda step=step: score_all(step), rounds) / plain_s
        print(f"  with trees {'/'.join(map(str, step.trees.budgets))}: {share:.2f}")
    chosen = choose_answers(rows, samples, ())
    tokens = sum(a.stop - a.start for answers in chosen for a in answers)

    def walk_all(step: DrafterStep) -> None:
        for row, answers in zip(rows, chosen, strict=True):
            walk_answers(step, row, answers)

    for step in (steps[0], steps[-1]):
        walk_s = median_s(lambda step=step: walk_all(step), rounds)
        trees = "no trees" if step.trees is None else "all trees"
        each_ms = walk_s / tokens * 1e3
        print(
            f"  walk of {samples} samples, {tokens} tokens, {trees}: +{walk_s / plain_s:.2f} ({each_ms:.1f} ms a token)"
        )


def print_agreement(step: DrafterStep, target: LoadedTarget, rows: Sequence[HiddenStateRow], samples: int) -> None:
    """The walk and real decoding on the same prompts, with the answers' own lengths as limits."""
    assert step.trees is not None
    stops, bound = target.stop_token_ids, BoundDrafter(step._drafter, target)
    chosen = choose_answers(rows, samples, stops)
    validator = Validator(rows, ValidationConfig(tree_budgets=step.trees.budgets, walk_samples=samples), stops)
    scores = validator.score(step)
    at_anchors, walked = scores.acceptance_lengths(), scores.walked_lengths()
    for method in walked:
        rounds = tokens = same = 0
        for row, answers in zip(rows, chosen, strict=True):
            for answer in answers:
                ids = row.input_ids_T[answer.first : answer.stop].tolist()
                prompt, output = ids[: answer.start - answer.first], ids[answer.start - answer.first :]
                # Far from the limit, an answer that stops has whole blocks to its end.
                limit = len(output) if answer.limited else len(output) + step.block_size
                known = {"max_new_tokens": limit, "stop_token_ids": stops}
                if method == "chain":
                    found = chain_generate(target, bound, prompt, **known)
                else:
                    budget = FixedBudget(int(method.removeprefix("tree@")))
                    found = tree_generate(target, bound, prompt, budget=budget, **known)
                rounds, tokens = rounds + len(found.acceptance_lengths), tokens + sum(found.acceptance_lengths)
                same += found.output_ids == output
        lengths = f"anchors {at_anchors[method]:.4f}, walk {walked[method]:.4f}, decoded {tokens / rounds:.4f}"
        print(f"  {method}: {lengths} ({same}/{sum(map(len, chosen))} answers are the decoded text)")


def main() -> None:
    """Prints costs, then agreement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--rows", type=whole(1), default=8)
    parser.add_argument("--samples", type=whole(1), default=4)
    parser.add_argument("--rounds", type=whole(1), default=5)
    parser.add_argument(
        "--block-size", type=whole(1), help="cost of an untrained drafter with this block; no agreement"
    )
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_intermixed_args()
    config = load_config([options.run / "config.yaml"], options.overrides)
    target, drafter = load_target(config.target, "cpu"), drafter_of_run(options.run)
    if options.block_size is not None:
        drafter = Drafter(drafter.spec.model_copy(update={"block_size": options.block_size}))
    rows = captured_rows(config, drafter, target, options.rows)
    steps = [make_step(config, drafter, target, budgets) for budgets in BUDGETS]
    print_costs(steps, rows, options.samples, options.rounds)
    if options.block_size is None:
        print_agreement(steps[-1], target, rows, options.samples)


if __name__ == "__main__":
    main()
