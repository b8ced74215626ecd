"""The parts of eight_gpus.py: each measures one thing with the product's own code and gives its figures as JSON."""

from __future__ import annotations

import dataclasses
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import torch

from draftline.capacity import Rates, averaging_bytes, expect, expect_sharing
from draftline.drafter.schedule import LearningRate
from draftline.errors import RunFailedError, RunStoppedError
from draftline.pipeline.coordinator import PipelineCoordinator
from draftline.pipeline.core import PipelineCore
from draftline.pipeline.measure import StageRate, measure_drafter, measure_target
from draftline.pipeline.planning import rounds_of
from draftline.pipeline.reporting import RunReporter
from draftline.pipeline.run_folder import claim_run_folder
from draftline.pipeline.runplan import RunPlan, count_drafter_parameters, estimate_memory
from draftline.pipeline.signals import StopSignals
from draftline.pipeline.workers import make_captures, make_drafters, prove_targets, warm_drafters
from eight_setup import Setup
from eight_watch import ENOUGH, Watcher, averaging_s
from gpu_watch import GpuWatch
from partitioned import PartitionedCore

WARM_ROWS = 3


def single(setup: Setup, rows: int) -> dict[str, Any]:
    """One target alone, then one drafter alone, on the first device: what the prediction rests on."""
    plan = setup.plan(1, 1, "single", rows=rows)
    begin = time.monotonic()
    targets = setup.targets(plan)
    built_s = time.monotonic() - begin
    reports = prove_targets(plan, targets)
    proved_s = time.monotonic() - begin - built_s
    captures = make_captures(plan, targets, reports)
    _reset_peaks(setup)
    device = plan.config.pipeline.target_devices[0]
    target = measure_target(captures[0], plan.dataset, plan.rows, device=device, rows=rows)
    target_memory = memory(setup)
    lender = dataclasses.replace(targets[0], model=None, decoder=None)
    layout = next(iter(reports.values())).layout
    del targets, captures
    setup.drop_targets()
    _reset_peaks(setup)
    drafter, made_s, warmed_s = _one_drafter(plan, lender, rows)
    return {
        "target": dataclasses.asdict(target),
        "drafter": dataclasses.asdict(drafter),
        "capture_layout": layout,
        "target_built_s": built_s,
        "self_test_s": proved_s,
        "drafter_made_s": made_s,
        "drafter_warmed_s": warmed_s,
        "drafter_parameters": count_drafter_parameters(plan.spec),
        "target_memory": target_memory,
        "drafter_memory": memory(setup),
        "memory_estimated": [dataclasses.asdict(m) for m in estimate_memory(plan)],
    }


def _one_drafter(plan: RunPlan, lender: Any, rows: int) -> tuple[StageRate, float, float]:
    begin = time.monotonic()
    workers = make_drafters(plan, lender, None)
    made_s = time.monotonic() - begin
    warm_drafters(workers)
    warmed_s = time.monotonic() - begin - made_s
    return measure_drafter(plan, workers[0], rows=rows), made_s, warmed_s


def together(setup: Setup, targets: int, drafters: int, alone: dict[str, Any], seconds: float) -> dict[str, Any]:
    """All workers at once, each on rows of its own and never waiting: what they lose to one another is the share of
    the GIL, the host's memory and the power supply. With one device alone it would be the device's own sharing."""
    plan = setup.plan(targets, drafters, "together", rows=4)
    loaded = setup.targets(plan)
    captures = make_captures(plan, loaded, prove_targets(plan, loaded))
    workers = make_drafters(plan, loaded[0], None)
    warm_drafters(workers)
    rates: dict[str, StageRate] = {}

    def count(side: str) -> int:
        return max(4, round(seconds / alone[side]["row_s"]))

    def run_target(i: int) -> None:
        device = plan.config.pipeline.target_devices[i]
        rates[f"target-{i}"] = measure_target(captures[i], plan.dataset, plan.rows, device=device, rows=count("target"))

    def run_drafter(i: int) -> None:
        rates[f"drafter-{i}"] = measure_drafter(plan, workers[i], rows=count("drafter"))

    _all_at_once([*(_bound(run_target, i) for i in range(targets)), *(_bound(run_drafter, i) for i in range(drafters))])
    ratios = {name: rate.tokens_per_s / alone[name.partition("-")[0]]["tokens_per_s"] for name, rate in rates.items()}
    return {"rate_to_alone": ratios, "mean": sum(ratios.values()) / len(ratios)}


def run(setup: Setup, targets: int, drafters: int, scheme: str, rounds: int) -> dict[str, Any]:
    """A real run of the pipeline, ended once enough of it was counted."""
    name = f"run-{targets}x{drafters}-{scheme}"
    rows = (rounds + 2) * setup.every_rows * drafters
    plan = setup.plan(targets, drafters, name, rows=rows)
    shutil.rmtree(plan.config.output, ignore_errors=True)
    _reset_peaks(setup)
    begin = time.monotonic()
    loaded = setup.targets(plan)
    built_s = time.monotonic() - begin
    core: type[PipelineCore] = PartitionedCore if scheme == "partitioned" else PipelineCore
    learning_rate = LearningRate(plan.config.optimizer, len(plan.rows))
    claimed = claim_run_folder(plan, target_fingerprint=loaded[0].fingerprint, resume=False)
    with StopSignals() as signals, closing(claimed) as folder, RunReporter(plan, folder) as reporter:
        coordinator = PipelineCoordinator(plan, folder, loaded, learning_rate, reporter, core_class=core)
        started_s = time.monotonic() - begin - built_s
        compiling_s = reporter.clock("coordinator").status(time.monotonic(), 1.0).seconds.get("compiling", 0.0)
        with GpuWatch() as gpus, Watcher(plan, coordinator, reporter, WARM_ROWS, rounds) as watcher:
            _run_until_ended(coordinator, signals)
        figures = watcher.figures()
    assert watcher.begin is not None and watcher.end is not None
    found = averaging_s(folder.path)
    parameters = count_drafter_parameters(plan.spec)
    return figures | {
        "targets": targets,
        "drafters": drafters,
        "scheme": scheme,
        "averaging_s": found,
        "averaging_bytes": averaging_bytes(parameters, drafters, with_moments=plan.config.sync.kind == "average"),
        "sync": plan.config.sync.kind,
        "rows_move_by": _way_between(plan),
        "memory": memory(setup),
        "gpus": gpus.means(watcher.begin.at_s, watcher.end.at_s),
        "targets_built_s": built_s,
        "coordinator_built_s": started_s,
        "compiling_s": compiling_s,
    }


def stop_and_resume(setup: Setup, targets: int, drafters: int) -> dict[str, Any]:
    """Stops a run in the coordinated way after one round, resumes it, and lets it end by itself."""
    rows = 4 * setup.every_rows * drafters
    plan = setup.plan(targets, drafters, "stop-and-resume", rows=rows)
    shutil.rmtree(plan.config.output, ignore_errors=True)
    loaded = setup.targets(plan)
    learning_rate = LearningRate(plan.config.optimizer, len(plan.rows))
    found: dict[str, Any] = {"rows_planned": len(plan.rows)}
    for resume in (False, True):
        begin = time.monotonic()
        claimed = claim_run_folder(plan, target_fingerprint=loaded[0].fingerprint, resume=resume)
        with StopSignals() as signals, closing(claimed) as folder, RunReporter(plan, folder) as reporter:
            coordinator = PipelineCoordinator(plan, folder, loaded, learning_rate, reporter)
            if resume:
                found |= _resumed(coordinator, reporter, signals, begin)
            else:
                found |= _stopped(plan, coordinator, reporter, signals)
        del coordinator
        setup.free_memory()
    return found


def _stopped(
    plan: RunPlan, coordinator: PipelineCoordinator, reporter: RunReporter, signals: StopSignals
) -> dict[str, Any]:
    with Watcher(plan, coordinator, reporter, 1, 1, stop="stop") as watcher:
        try:
            coordinator.run(signals)
        except RunStoppedError:
            ended_s = time.monotonic()
        else:
            raise RuntimeError("the run ended before it could be stopped: give it more rows")
    assert watcher.stop_asked_s is not None
    return {
        "stop_s": ended_s - watcher.stop_asked_s,
        "checkpoint_s": _checkpointing_s(plan, reporter),
        "ledger_at_stop": str(coordinator.exchange.stats().ledger),
    }


def _resumed(
    coordinator: PipelineCoordinator, reporter: RunReporter, signals: StopSignals, begin: float
) -> dict[str, Any]:
    built_s = time.monotonic() - begin
    result = coordinator.run(signals)
    ledger = result.ledger
    if ledger.committed != ledger.planned:
        raise RuntimeError(f"the resumed run left rows behind: {ledger}")
    del reporter
    return {"resume_s": built_s, "resumed_training_s": result.training_s, "ledger_at_end": str(ledger)}


def _checkpointing_s(plan: RunPlan, reporter: RunReporter) -> float:
    now = time.monotonic()
    clocks = (reporter.clock(f"drafter-{i}") for i in range(plan.num_drafters))
    return max(clock.status(now, 1.0).seconds.get("checkpointing", 0.0) for clock in clocks)


def predict(setup: Setup, targets: int, drafters: int, scheme: str, alone: dict[str, Any]) -> dict[str, Any]:
    """What the capacity model expects of a split from the rates of one target and one drafter alone."""
    target, drafter = alone["target"], alone["drafter"]
    share = targets + drafters if setup.on_cpu else 1  # on the CPU all workers share what one alone had
    rates = Rates(
        target["tokens_per_s"] / share, drafter["tokens_per_s"] / share, max(target["jitter"], drafter["jitter"])
    )
    plan = setup.plan(targets, drafters, "prediction", rows=2)
    rounds = rounds_of(plan, setup.ceiling)(targets, drafters)
    if len(setup.devices) == 1 and not setup.on_cpu:
        return dataclasses.asdict(expect_sharing(rates, rounds))
    return dataclasses.asdict(
        expect(rates, targets, drafters, rounds, "shared" if scheme == "shared" else "partitioned")
    )


def memory(setup: Setup) -> dict[str, dict[str, float]]:
    """GiB allocated and reserved at most on each GPU since the last reset."""
    if setup.on_cpu:
        return {}
    gib = 2**30
    return {
        device: {
            "allocated_gib": torch.cuda.max_memory_allocated(device) / gib,
            "reserved_gib": torch.cuda.max_memory_reserved(device) / gib,
        }
        for device in setup.devices
    }


def _reset_peaks(setup: Setup) -> None:
    if not setup.on_cpu:
        for device in setup.devices:
            torch.cuda.reset_peak_memory_stats(device)


def _run_until_ended(coordinator: PipelineCoordinator, signals: StopSignals) -> None:
    try:
        coordinator.run(signals)
    except RunFailedError as error:
        if ENOUGH not in str(error):
            raise


def _way_between(plan: RunPlan) -> str:
    source, target = plan.config.pipeline.target_devices[0], plan.config.pipeline.drafter_devices[0]
    if source == target:
        return "one device"
    if plan.config.pipeline.hold_on == "host":
        return "pinned host memory"
    pair = torch.cuda.can_device_access_peer(source, target)
    return "peer copies" if pair else "copies through the host (no peer access)"


def _bound(call: Callable[[int], None], argument: int) -> Callable[[], None]:
    return lambda: call(argument)


def _all_at_once(calls: list[Callable[[], None]]) -> None:
    """Runs the calls in threads; the first error, if any, is raised once all have ended."""
    errors: list[BaseException] = []

    def guarded(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001  raised below, in the caller's thread
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
