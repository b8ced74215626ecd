"""Builds the workers of a run: targets that proved themselves, and drafters that start from the same weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from draftline.config.drafter_spec import DrafterSpec
from draftline.config.schema import ObjectiveConfig, RunConfig
from draftline.data.manifest import read_manifest, require_tokenizer
from draftline.drafter.model import Drafter
from draftline.drafter.optimizer import MasterOptimizer
from draftline.drafter.step import DrafterStep
from draftline.drafter.sync import Replica
from draftline.drafter.warm_start import start_from_target
from draftline.export.formats import load_drafter_export
from draftline.pipeline.checkpoint import Checkpoint
from draftline.pipeline.remote import load_lenders, prove_backend, remote_captures
from draftline.pipeline.runplan import RunPlan
from draftline.pipeline.start_checks import chosen_init_layers
from draftline.pipeline.states import load_stored_targets, offline_captures
from draftline.pipeline.validation import tree_metric
from draftline.pipeline.warm_spec import require_same_spec
from draftline.records import FrozenEmbedding, FrozenHead
from draftline.target.cache import CachedCapture, StateCache
from draftline.target.capture import TargetCapture
from draftline.target.load import LoadedTarget, load_target, load_tokenizer
from draftline.target.loop import Capture
from draftline.target.remote.capture import RemoteCapture, RemoteReport
from draftline.target.selftest import SelfTestReport, self_test
from draftline.target.states.stored_target import StoredTarget

Target = LoadedTarget | StoredTarget
Proof = SelfTestReport | RemoteReport


@dataclass(frozen=True, slots=True)
class DrafterWorker:
    """A drafter on its device."""

    module: Drafter
    step: DrafterStep
    replica: Replica


def load_targets(plan: RunPlan) -> Sequence[Target]:
    """One target per configured device, in order; workers on one device share its weights.

    With states.mode `offline` only what drafters borrow is loaded, from beside the states.

    Raises:
        UserError: the data was prepared with another tokenizer; else as `load_target`.
    """
    if plan.config.states.mode == "offline":
        return load_stored_targets(plan)
    tokenizer, validation = load_tokenizer(plan.config.target), plan.config.data.validation_path
    plan.dataset.require_tokenizer(tokenizer)
    if validation is not None:
        require_tokenizer(read_manifest(validation), tokenizer, where=str(validation))
    if plan.config.target.backend.kind != "local":
        return load_lenders(plan, tokenizer)
    loaded: list[LoadedTarget] = []
    for device in plan.config.pipeline.target_devices:
        same = next((t for t in loaded if t.place == device), None)
        share = same or (loaded[0] if loaded else None)
        loaded.append(load_target(plan.config.target, device, share_with=share, tokenizer=tokenizer))
    return loaded


def prove_targets(plan: RunPlan, targets: Sequence[Target]) -> Mapping[int, Proof]:
    """The start-up self-test, once for each target that has weights of its own; reports by `id` of its model.

    Stored states were captured by a target that proved itself then.
    """
    if plan.config.states.mode != "offline" and plan.config.target.backend.kind != "local":
        return {0: prove_backend(plan, targets[0])}
    distinct = {id(target.model): target for target in targets if isinstance(target, LoadedTarget)}
    return {key: self_test(target, plan.spec.taps) for key, target in distinct.items()}


def make_captures(plan: RunPlan, targets: Sequence[Target], reports: Mapping[int, Proof]) -> list[Capture]:
    """A capture of its own for each worker, in the layout that the self-test settled on; the cache is shared."""
    if plan.config.states.mode == "offline":
        return offline_captures(plan)
    captures: list[TargetCapture | RemoteCapture] = []
    if plan.config.target.backend.kind != "local":
        captures += remote_captures(plan, targets)
    for target in targets:
        if isinstance(target, LoadedTarget):
            report = reports[id(target.model)]
            assert isinstance(report, SelfTestReport)
            want_final = plan.config.objective.needs_teacher
            captures.append(TargetCapture(target, plan.spec.taps, want_final=want_final, layout=report.layout))
    if not plan.config.pipeline.state_cache_bytes:
        return list(captures)
    cache = StateCache(plan.config.pipeline.state_cache_bytes)
    return [CachedCapture(capture, cache) for capture in captures]


def make_drafters(plan: RunPlan, target: Target, checkpoint: Checkpoint | None) -> list[DrafterWorker]:
    """All drafters with the same weights: new from the seed, from `init_from`, or from a checkpoint."""
    weights = initial_weights(plan.config, plan.spec, target) if checkpoint is None else checkpoint.weights
    workers = []
    for number, name in enumerate(plan.config.pipeline.drafter_devices):
        worker = _make_drafter(plan, target, number, torch.device(name), weights)
        if checkpoint is not None and checkpoint.moments:
            worker.replica.optimizer.load_moments(checkpoint.moments[number % len(checkpoint.moments)])
        workers.append(worker)
    return workers


def warm_drafters(workers: Sequence[DrafterWorker]) -> None:
    """Compiles everything that the loops will call, device after device, and frees what that took.

    Tracing is process-wide state, so it happens here, in one thread, before any loop starts; afterwards a call that
    would compile fails by name. On the CPU nothing is compiled.
    """
    for worker in workers:
        device = worker.replica.optimizer.device
        if device.type == "cuda":
            from draftline.drafter.compile_cache import process_cache  # loads torch's compiler

            process_cache().device(str(device)).warm(worker.step.warm_up)
            torch.cuda.synchronize(device)


def initial_weights(config: RunConfig, spec: DrafterSpec, target: Target) -> dict[str, torch.Tensor]:
    """fp32 weights that training starts from.

    Raises:
        UserError: `drafter.init_from` holds a drafter of another shape, or `init_layers` names a layer that the target
            does not have or that is shaped differently.
    """
    if config.drafter.init_from is not None:
        source = load_drafter_export(config.drafter.init_from, num_target_layers=spec.num_target_layers)
        require_same_spec(source.spec, spec, config.drafter.init_from)
        started = {name: value.float() for name, value in source.state_dict().items()}
        if spec.dflash2 is None or source.spec.dflash2 is not None:
            return started
        return {**_new_drafter(config, spec)[0].state_dict(), **started}  # what DFlash2 adds starts without effect
    drafter, generator = _new_drafter(config, spec)
    if config.drafter.init == "target_layers":
        assert isinstance(target, LoadedTarget)  # the configuration refuses stored ones
        start_from_target(drafter, target, chosen_init_layers(config, target.num_layers), generator)
    return dict(drafter.state_dict())


def _new_drafter(config: RunConfig, spec: DrafterSpec) -> tuple[Drafter, torch.Generator]:
    drafter, generator = Drafter(spec), torch.Generator().manual_seed(config.seed)
    drafter.init_weights(generator)
    return drafter, generator


def _make_drafter(
    plan: RunPlan, target: Target, number: int, device: torch.device, weights: dict[str, torch.Tensor]
) -> DrafterWorker:
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    module = Drafter(plan.spec)
    module.load_state_dict(weights)
    module.to(device=device, dtype=dtype)
    if device.type == "cuda" and plan.config.pipeline.compile:
        from draftline.drafter.compile_cache import compiled_kernels, process_cache  # loads torch's compiler

        module.kernels = compiled_kernels(process_cache().device(str(device)), layers=True)
    unreached = without_loss(module, plan.config.objective)
    optimizer = MasterOptimizer(module, plan.config.optimizer, without_loss=unreached)
    optimizer.load_masters(weights)  # a bf16 copy must not become the master
    embedding, head, teacher = borrow(plan.spec, target, device, dtype)
    step = DrafterStep(
        module,
        embedding,
        head,
        plan.config.objective,
        teacher=teacher if plan.config.objective.needs_teacher else None,
        row_tokens=plan.config.data.row_tokens,
        seed=plan.config.seed,
        cuda_graphs=device.type == "cuda" and plan.config.pipeline.cuda_graphs,
        trees=tree_metric(plan.config.validation) if plan.config.data.validation_path is not None else None,
    )
    return DrafterWorker(module, step, Replica(number, optimizer))


def without_loss(module: Drafter, objective: ObjectiveConfig) -> frozenset[str]:
    """Parameters that the objective leaves alone: those of a candidate selector whose loss has weight 0."""
    if objective.selector.weight > 0:
        return frozenset()
    return frozenset(name for name, _ in module.named_parameters() if name.startswith("candidate_selector."))


def borrow(
    spec: DrafterSpec, target: Target, device: torch.device, dtype: torch.dtype
) -> tuple[FrozenEmbedding, FrozenHead, FrozenHead]:
    """The target's embedding and head on a drafter's device: (embedding, draft head, teacher head).

    On the target's own device nothing is copied. Draft and teacher share the weight; they differ in multiplier and
    soft cap, which for the draft are what the export tells servers to use.
    """
    embedding = target.embedding.weight_VH.to(device=device, dtype=dtype)
    tied = target.head.weight_VH is target.embedding.weight_VH or (
        target.head.weight_VH.data_ptr() == target.embedding.weight_VH.data_ptr()
    )
    weight = embedding if tied else target.head.weight_VH.to(device=device, dtype=dtype)
    bias = None if target.head.bias_V is None else target.head.bias_V.to(device=device, dtype=dtype)
    teacher = FrozenHead(weight, bias, target.head.multiplier, target.head.softcap)
    head = FrozenHead(weight, bias, spec.output_multiplier, spec.final_logit_softcapping)
    return FrozenEmbedding(embedding, spec.input_embedding_scale), head, teacher
