"""`draftline plan` and `train --auto-split`: how many of N workers should be targets, and what to expect of them.

Rates of one target and one drafter are estimated from FLOPs, bytes and the device's peaks, or measured on one device;
everything else follows from the capacity model. No weight is loaded unless rates are measured.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable

from draftline.capacity import Expectation, Rates, Rounds, averaging_bytes, expect_sharing, ranked_splits
from draftline.config.schema import AverageSync, RunConfig
from draftline.data.made_up import MadeUpDataset
from draftline.data.shards import TokenDataset
from draftline.devices import resolve_devices
from draftline.errors import UserError
from draftline.pipeline.ceilings import (
    CPU_SHARE,
    DRAFTER_SHARE,
    LINK_SHARE,
    MEMORY_SHARE,
    TARGET_SHARE,
    Ceiling,
    ceiling_of,
    measure_cpu,
)
from draftline.pipeline.plan_report import PlanReport
from draftline.pipeline.runplan import DeviceMemory, RunPlan, count_drafter_parameters, estimate_memory, make_run_plan
from draftline.pipeline.work import RowWork, drafter_work, target_work
from draftline.target.facts import target_facts
from draftline.target.load import LoadedTarget
from draftline.target.size import TargetSize, target_size

MEASURED_ROWS = 8
MOST_GPUS = 10_000
_MADE_UP_SAMPLES = 64


def plan_split(config: RunConfig, workers: int, *, gpu: str | None = None, measure: bool = False) -> PlanReport:
    """The split of so many workers that is expected to train most tokens per second and fits into memory.

    Args:
        workers: GPUs, one worker each (one GPU is shared by both); without a GPU, workers that share the CPU.
        gpu: name of the GPU to plan for, if it is not this machine's.
        measure: run both stages on one device of this machine instead of estimating them.

    Raises:
        UserError: fewer than one worker, an unknown GPU, nothing fits, or anything wrong with the configuration.
    """
    if workers < 1:
        raise UserError(f"{workers} GPUs cannot train anything", where="--gpus", mend="give at least 1")
    if workers > MOST_GPUS:
        raise UserError(f"{workers} GPUs are more than can be planned for", where="--gpus", mend=f"at most {MOST_GPUS}")
    if measure and gpu is not None:
        raise UserError("a measurement is of this machine's GPU", where="--measure", mend="leave out --gpu")
    device, ceiling = device_and_ceiling(gpu)
    dataset, is_made_up = _dataset(config)
    size = target_size(config.target)

    def plan_of(targets: int, drafters: int) -> RunPlan:
        each = range(targets + drafters) if workers > 1 else (0, 0)
        names = ["cpu" if device == "cpu" else f"cuda:{i}" for i in each]
        own = _with_devices(config, names[:targets], names[targets:])
        return make_run_plan(own, dataset=dataset, check_devices=False)

    one = plan_of(1, 1)
    rates = _measured(config, dataset, device) if measure else _estimated(one, size, ceiling)
    rates = _sharing_cores(rates, workers, device)
    rounds = rounds_of(one, ceiling)
    if workers == 1:
        ranked = [expect_sharing(rates, rounds(1, 1))]
    else:
        ranked = ranked_splits(rates, workers, rounds)
    chosen, memory = _first_that_fits(ranked, ceiling, lambda t, d: estimate_memory(plan_of(t, d), size))
    return PlanReport(
        device=ceiling.name,
        workers=workers,
        how="measured" if measure else _how_estimated(device, ceiling),
        rates=rates,
        chosen=chosen,
        ranked=tuple(ranked),
        memory=tuple(memory),
        memory_bytes=ceiling.memory_bytes,
        row_bytes=max(one.row_bytes),
        bytes_per_token=sum(one.row_bytes) / sum(r.n_tokens for r in one.rows),
        averaging_bytes=_averaging_bytes(one, chosen.drafters),
        averaging_s=rounds(chosen.targets, chosen.drafters).averaging_s,
        data_tokens=None if is_made_up else sum(r.n_tokens for r in one.rows),
    )


def auto_split(config: RunConfig) -> tuple[RunConfig, PlanReport]:
    """The configuration with its devices shared out between targets and drafters as the estimate recommends.

    The devices are those that the configuration names for either side; one device is shared by both.

    Raises:
        UserError: see `plan_split`.
    """
    named = (*config.pipeline.target_devices, *config.pipeline.drafter_devices)
    devices = list(dict.fromkeys(resolve_devices(named)))
    report = plan_split(config, len(devices))
    if len(devices) == 1:
        return _with_devices(config, devices, devices), report
    targets = report.chosen.targets
    return _with_devices(config, devices[:targets], devices[targets:]), report


def device_and_ceiling(gpu: str | None) -> tuple[str, Ceiling]:
    """`cuda` or `cpu`, and its peaks."""
    if gpu is not None:
        return "cuda", ceiling_of(gpu)
    import torch

    if torch.cuda.is_available():
        return "cuda", ceiling_of(torch.cuda.get_device_name(0))
    return "cpu", measure_cpu()


def _dataset(config: RunConfig) -> tuple[TokenDataset, bool]:
    """The prepared data, or, where there is none yet, full rows of random tokens and True."""
    if config.data.path.expanduser().exists():
        return TokenDataset.open(config.data.path.expanduser()), False
    facts = target_facts(config.target)
    made_up = MadeUpDataset(
        n_samples=_MADE_UP_SAMPLES,
        sample_tokens=config.data.row_tokens,
        vocab_size=facts.vocab_size,
        unused=config.drafter.mask_token_id,
    )
    return made_up, True


def _with_devices(config: RunConfig, targets: list[str], drafters: list[str]) -> RunConfig:
    devices = {"target_devices": tuple(targets), "drafter_devices": tuple(drafters)}
    return config.model_copy(update={"pipeline": config.pipeline.model_copy(update=devices)})


def _estimated(plan: RunPlan, size: TargetSize, ceiling: Ceiling) -> Rates:
    """Rates from the plan's first row. Samples differ, so a row's time is taken to scatter with its tokens."""
    row = plan.rows[0]
    lengths = [int(plan.dataset.lengths[i]) for i in row.samples]
    on_cpu = plan.config.pipeline.target_devices[0] == "cpu"
    target = target_work(plan.config, plan.facts, size, plan.spec.taps, lengths)
    drafter = drafter_work(plan, lengths)
    return Rates(
        row.n_tokens / _seconds(target, ceiling, CPU_SHARE if on_cpu else TARGET_SHARE),
        row.n_tokens / _seconds(drafter, ceiling, CPU_SHARE if on_cpu else DRAFTER_SHARE),
    )


def _seconds(work: RowWork, ceiling: Ceiling, share: float) -> float:
    return work.flops / (ceiling.flops_per_s * share) + work.memory_bytes / (ceiling.memory_bytes_per_s * MEMORY_SHARE)


def _how_estimated(device: str, ceiling: Ceiling) -> str:
    if device == "cpu":
        return f"estimated at {CPU_SHARE:.0%} of the {ceiling.flops_per_s / 1e9:.0f} GFLOP/s of a matrix product"
    return (
        f"estimated at {TARGET_SHARE:.0%} (target) and {DRAFTER_SHARE:.0%} (drafter) "
        f"of {ceiling.flops_per_s / 1e12:.0f} TFLOP/s in bf16"
    )


def _measured(config: RunConfig, dataset: TokenDataset, device: str) -> Rates:
    """Runs both stages on the first device, one after the other; the target's layers are freed in between."""
    from draftline.pipeline.measure import measure_drafter, measure_target
    from draftline.pipeline.workers import load_targets, make_captures, make_drafters, prove_targets, warm_drafters

    name = resolve_devices([device])[0]
    start = {"init": "random", "init_layers": None, "init_from": None}
    config = config.model_copy(update={"drafter": config.drafter.model_copy(update=start)})
    pipeline = config.pipeline.model_copy(update={"state_cache_bytes": 0})
    config = _with_devices(config.model_copy(update={"pipeline": pipeline}), [name], [name])
    plan = make_run_plan(config, dataset=dataset)
    targets = load_targets(plan)
    captures = make_captures(plan, targets, prove_targets(plan, targets))
    target = measure_target(captures[0], dataset, plan.rows, device=name, rows=MEASURED_ROWS)
    lender = targets[0]
    if isinstance(lender, LoadedTarget):
        lender = dataclasses.replace(lender, model=None, decoder=None)
    del targets, captures
    _free_memory(name)
    workers = make_drafters(plan, lender, None)
    warm_drafters(workers)
    drafter = measure_drafter(plan, workers[0], rows=MEASURED_ROWS)
    return Rates(target.tokens_per_s, drafter.tokens_per_s, max(target.jitter, drafter.jitter))


def _free_memory(device: str) -> None:
    import torch

    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()


def _sharing_cores(rates: Rates, workers: int, device: str) -> Rates:
    """On the CPU all workers share the cores, one alone has them all."""
    if device != "cpu" or workers == 1:
        return rates
    return Rates(rates.target_tokens_per_s / workers, rates.drafter_tokens_per_s / workers, rates.jitter)


def rounds_of(plan: RunPlan, ceiling: Ceiling) -> Callable[[int, int], Rounds]:
    """Rounds of any split: averaging by the link between devices, and the rows that may wait."""
    row_tokens = sum(r.n_tokens for r in plan.rows) / len(plan.rows)
    pipeline = plan.config.pipeline

    def rounds(_targets: int, drafters: int) -> Rounds:
        return Rounds(
            row_tokens=row_tokens,
            rows_per_drafter=plan.settings.rows_per_drafter,
            averaging_s=_averaging_bytes(plan, drafters) / (ceiling.link_bytes_per_s * LINK_SHARE),
            queue_rows=drafters * (pipeline.hs_queue_depth + pipeline.prefetch_rows),
        )

    return rounds


def _averaging_bytes(plan: RunPlan, drafters: int) -> int:
    sync = plan.config.sync
    with_moments = isinstance(sync, AverageSync) and sync.moments == "average"
    return averaging_bytes(count_drafter_parameters(plan.spec), drafters, with_moments=with_moments)


def _first_that_fits(
    ranked: list[Expectation], ceiling: Ceiling, memory_of: Callable[[int, int], list[DeviceMemory]]
) -> tuple[Expectation, list[DeviceMemory]]:
    least: DeviceMemory | None = None
    for expectation in ranked:
        memory = memory_of(expectation.targets, expectation.drafters)
        largest = max(memory, key=lambda m: m.total_bytes)
        if largest.total_bytes <= ceiling.memory_bytes:
            return expectation, memory
        least = largest if least is None or largest.total_bytes < least.total_bytes else least
    assert least is not None
    parts = ", ".join(f"{name} {size / 2**30:.1f}" for name, size in least.parts.items())
    raise UserError(
        f"does not fit: {least.device} would need {least.total_bytes / 2**30:.1f} GiB ({parts}), "
        f"{ceiling.name} has {ceiling.memory_bytes / 2**30:.1f} GiB",
        where="plan",
        mend="plan for a larger GPU, or lower pipeline.hs_queue_depth, data.row_tokens or objective.anchors",
    )
