"""Training for so many seconds: draftline's step and optimizer, behind the form that the peer has, too."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from draftline.config.drafter_spec import DrafterSpec
from draftline.config.schema import ScheduleConfig
from draftline.drafter.compile_cache import compiled_kernels, process_cache
from draftline.drafter.model import Drafter
from draftline.drafter.optimizer import MasterOptimizer
from draftline.drafter.schedule import schedule_factor
from draftline.drafter.spec import build_spec
from draftline.drafter.step import DrafterStep, StepStats
from draftline.drafter.warm_start import start_from_target
from draftline.pipeline.workers import borrow
from draftline.records import HiddenStateRow
from draftline.target.load import LoadedTarget
from settings import Settings
from states import rows_in_turn
from variants import Variant

SCHEDULE = ScheduleConfig(kind="cosine", warmup_fraction=0.04)
Weights = dict[str, Tensor]


class Trainer(Protocol):
    """One drafter in training."""

    spec: DrafterSpec

    def warm(self) -> None:
        """Compiles what a step needs; the weights stay as they are."""

    def step(self, rate: float) -> None:
        """One optimizer step."""

    def weights(self) -> Weights:
        """Copies of the fp32 masters, by the drafter's names."""


@dataclass(frozen=True)
class Snapshot:
    """Weights after so much training."""

    training_s: float
    steps: int
    weights: Weights


@dataclass(frozen=True)
class Course:
    """A finished training.

    Attributes:
        warm_s: compiling and first launches, before the clock.
        training_s: seconds of the steps, and nothing else.
    """

    warm_s: float
    training_s: float
    steps: int
    snapshots: list[Snapshot]

    def as_figures(self) -> dict[str, Any]:
        """JSON-able."""
        step_s = self.training_s / self.steps
        return {"warm_s": self.warm_s, "training_s": self.training_s, "steps": self.steps, "step_s": step_s}


def synchronize(device: torch.device) -> None:
    """Waits for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def warmed_s(trainer: Trainer, device: torch.device) -> float:
    """Seconds of the trainer's warm-up."""
    begin = time.perf_counter()
    trainer.warm()
    synchronize(device)
    return time.perf_counter() - begin


def train_for(
    trainer: Trainer, seconds: float, peak_rate: float, device: torch.device, marks: Sequence[float] = (1.0,)
) -> Course:
    """Steps until `seconds` of training are over.

    The learning rate follows the clock (cosine, warm-up 4 %), so both sides of a comparison see the same course
    whatever a step costs them. Copies of the weights at the marks are not on the clock.

    Args:
        marks: rising shares of `seconds`; the last one is 1.
    """
    warm_s = warmed_s(trainer, device)
    snapshots: list[Snapshot] = []
    spent_s, steps = 0.0, 0
    for mark in marks:
        begin = time.perf_counter()
        while True:
            now_s = spent_s + time.perf_counter() - begin
            if now_s >= mark * seconds and steps:
                break
            trainer.step(peak_rate * schedule_factor(SCHEDULE, min(1.0, max(now_s, 1e-3 * seconds) / seconds)))
            steps += 1
        synchronize(device)
        spent_s += time.perf_counter() - begin
        snapshots.append(Snapshot(spent_s, steps, trainer.weights()))
    return Course(warm_s, spent_s, steps, snapshots)


class OurTrainer:
    """A recipe on captured rows.

    Args:
        rows: on the target's device.
        peak_rate: tuned learning rate, before the recipe's own factor.
    """

    def __init__(
        self,
        target: LoadedTarget,
        rows: Sequence[HiddenStateRow],
        variant: Variant,
        settings: Settings,
        peak_rate: float,
    ) -> None:
        self.spec = build_spec(variant.drafter(settings), target.facts, stop_token_ids=target.stop_token_ids)
        self._rows, self._seed, self._done = rows, variant.seed, 0
        self._device = target.device
        weights = first_weights(self.spec, variant, target)
        self.module = make_module(self.spec, weights, target.device)
        config = variant.optimizer_config(peak_rate)
        self.peak_rate = config.learning_rate
        self.optimizer = MasterOptimizer(self.module, config)
        self.optimizer.load_masters(weights)  # a bf16 copy must not become the master
        embedding, head, teacher = borrow(self.spec, target, target.device, compute_dtype(target.device))
        objective = variant.objective(settings)
        self.drafter_step = DrafterStep(
            self.module,
            embedding,
            head,
            objective,
            teacher=teacher if objective.needs_teacher else None,
            row_tokens=settings.row_tokens,
            seed=variant.seed,
            cuda_graphs=target.device.type == "cuda",  # a drafter of this size is bound by launches otherwise
        )

    def warm(self) -> None:
        """Forward and backward of one row, twice; the gradients are thrown away."""

        def run() -> None:
            for _ in range(2):
                self.drafter_step.forward_backward(self._rows[0])
                self.module.zero_grad(set_to_none=True)

        if self._device.type == "cuda":
            process_cache().device(str(self._device)).warm(run)
        else:
            run()

    def step(self, rate: float) -> None:
        """The next row."""
        self.train_row(rows_in_turn(self._rows, self._seed, self._done), rate)
        self._done += 1

    def train_row(self, row: HiddenStateRow, rate: float) -> StepStats:
        """An optimizer step of this row alone."""
        stats = self.absorb_row(row)
        self.optimizer.step(rate)
        return stats

    def absorb_row(self, row: HiddenStateRow) -> StepStats:
        """Adds a row to the step in the making."""
        stats = self.drafter_step.forward_backward(row)
        self.optimizer.absorb(torch.where(stats.finite, stats.denominator, float("nan")))
        return stats

    def weights(self) -> Weights:
        """Copies of the fp32 masters."""
        pairs = zip(self.optimizer.names, self.optimizer.masters, strict=True)
        return {name: master.detach().clone() for name, master in pairs}


def compute_dtype(device: torch.device) -> torch.dtype:
    """As the pipeline chooses it."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def first_weights(spec: DrafterSpec, variant: Variant, target: LoadedTarget) -> Weights:
    """fp32 weights that a recipe starts from, on the CPU; the same for every recipe of one shape and seed."""
    drafter, generator = Drafter(spec), torch.Generator().manual_seed(variant.seed)
    drafter.init_weights(generator)
    if variant.init == "target_layers":
        start_from_target(drafter, target, range(target.num_layers - spec.num_layers, target.num_layers), generator)
    return dict(drafter.state_dict())


def make_module(spec: DrafterSpec, weights: Weights, device: torch.device) -> Drafter:
    """A drafter in its compute dtype, with compiled layers on a GPU; the weights are copied."""
    with torch.device("meta"):  # drawing weights that are not wanted takes longer than all the rest
        module = Drafter(spec)
    copied = {name: value.to(device, compute_dtype(device), copy=True) for name, value in weights.items()}
    module.load_state_dict(copied, assign=True)
    module.to(device=device)
    if device.type == "cuda":
        module.kernels = compiled_kernels(process_cache().device(str(device)), layers=True)
    return module
