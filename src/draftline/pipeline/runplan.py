"""What a run will do, worked out before any weight is loaded: devices, rows, bounds, bytes and memory.

`draftline train --dry-run` prints it; the coordinator starts from it. Bad combinations fail here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from draftline.config.drafter_spec import DrafterSpec
from draftline.config.schema import GradientSync, RunConfig, SyncConfig
from draftline.data.rows import plan_rows
from draftline.data.shards import TokenDataset
from draftline.devices import resolve_devices
from draftline.drafter.schedule import LearningRate
from draftline.drafter.spec import build_spec
from draftline.errors import UserError
from draftline.pipeline.anchors import anchor_lines
from draftline.pipeline.core.admission import CoreSettings, check_settings
from draftline.pipeline.long_rows import require_context, target_forward_bytes
from draftline.pipeline.start_checks import check_start
from draftline.pipeline.states import check_offline
from draftline.pipeline.warm_spec import spec_to_train_on
from draftline.records import PlannedRow
from draftline.target.facts import TargetFacts, target_facts
from draftline.target.size import TargetSize, target_size
from draftline.target.spread import device_parts, first_device

_GIB = 2**30
CARDS_GB = (24, 32, 48, 80, 96, 141, 192)


@dataclass(frozen=True, slots=True)
class RunPlan:
    """A run, resolved.

    Attributes:
        config: with devices resolved.
        facts: of the target.
        spec: of the drafter.
        dataset: opened, not read.
        rows: the whole plan, all epochs.
        settings: workers, rounds and admission bounds of the pipeline's core.
        row_bytes: bytes of each planned row's states, in plan order.
    """

    config: RunConfig
    facts: TargetFacts
    spec: DrafterSpec
    dataset: TokenDataset
    rows: list[PlannedRow]
    settings: CoreSettings
    row_bytes: list[int]

    @property
    def num_targets(self) -> int:
        """T."""
        return len(self.config.pipeline.target_devices)

    @property
    def num_drafters(self) -> int:
        """D."""
        return len(self.config.pipeline.drafter_devices)


def make_run_plan(config: RunConfig, *, dataset: TokenDataset | None = None, check_devices: bool = True) -> RunPlan:
    """Resolves devices, target facts, drafter spec, data and bounds. Loads no weights.

    Args:
        dataset: used instead of what `data.path` holds.
        check_devices: False takes device names as they are (plans for another machine).

    Raises:
        UserError: anything that does not fit together.
    """
    if check_devices:
        config = _with_devices(config)
    facts = target_facts(config.target)
    spec = spec_to_train_on(build_spec(config.drafter, facts), config.drafter.init_from)
    if check_devices:
        check_start(config, spec, facts.num_layers)
    dataset = dataset or _open_data(config.data.path, facts, spec)
    rows = plan_rows(
        dataset.lengths,
        dataset.supervised,
        row_tokens=config.data.row_tokens,
        seed=config.seed,
        epochs=config.epochs,
        max_rows=config.max_rows,
    )
    if not rows:
        raise UserError("the data set yields zero rows", where=str(config.data.path), mend="prepare more conversations")
    LearningRate(config.optimizer, len(rows))  # checks its whole course
    if config.data.validation_path is not None and check_devices:
        validation_rows(_open_data(config.data.validation_path, facts, spec), config)
    row_bytes = [states_bytes(config, spec, row.n_tokens, config.pipeline.target_devices[0]) for row in rows]
    settings = _core_settings(config)
    check_settings(settings, row_bytes)
    plan = RunPlan(config, facts, spec, dataset, rows, settings, row_bytes)
    if config.states.mode == "offline" and check_devices:
        check_offline(plan)
    return plan


def _with_devices(config: RunConfig) -> RunConfig:
    pipeline = config.pipeline.model_copy(
        update={
            "target_devices": tuple(resolve_devices(config.pipeline.target_devices)),
            "drafter_devices": tuple(resolve_devices(config.pipeline.drafter_devices)),
        }
    )
    return config.model_copy(update={"pipeline": pipeline})


def _core_settings(config: RunConfig) -> CoreSettings:
    pipeline = config.pipeline
    return CoreSettings(
        n_targets=len(pipeline.target_devices),
        n_drafters=len(pipeline.drafter_devices),
        rows_per_drafter=config.optimizer.accumulate_rows
        if isinstance(config.sync, GradientSync)
        else config.sync.every_rows,
        prefetch_rows=pipeline.prefetch_rows,
        queue_depth=pipeline.hs_queue_depth,
        queue_bytes=pipeline.queue_bytes,
        ordered=pipeline.ordered,
        max_set_aside=pipeline.max_set_aside,
    )


def validation_rows(dataset: TokenDataset, config: RunConfig) -> list[PlannedRow]:
    """The rows of the validation set, each once. Raises UserError if a sample does not fit into a row."""
    return plan_rows(dataset.lengths, dataset.supervised, row_tokens=config.data.row_tokens, seed=config.seed, epochs=1)


def _open_data(path: Path, facts: TargetFacts, spec: DrafterSpec) -> TokenDataset:
    """Opens a prepared folder and refuses one that cannot be trained on with this target and drafter."""
    dataset = TokenDataset.open(path)
    if dataset.manifest.vocab_size > facts.vocab_size:
        raise UserError(
            f"prepared with a tokenizer of {dataset.manifest.vocab_size} tokens, the target knows {facts.vocab_size}",
            where=str(path),
            mend="prepare the data with this target's tokenizer",
        )
    require_context(dataset, facts, path)
    used = dataset.count_token(spec.mask_token_id)
    if used:
        raise UserError(
            f"{spec.mask_token_id} is a token that text uses: it occurs {used} times in {path}",
            where="drafter.mask_token_id",
            mend="choose an embedding row that text never uses (a reserved or unused token)",
        )
    return dataset


def compute_dtype(setting: str, device: str) -> str:
    """`auto` is bfloat16 on a GPU and float32 on the CPU."""
    if setting != "auto":
        return setting
    return "float32" if device.startswith("cpu") else "bfloat16"


def dtype_bytes(name: str) -> int:
    """Bytes of one number of that dtype."""
    return 4 if name == "float32" else 2


def states_bytes(config: RunConfig, spec: DrafterSpec, n_tokens: int, device: str) -> int:
    """Bytes of a row of `n_tokens`: tap features, the final hidden state if a teacher is asked for, 21 bytes of ids."""
    width = len(spec.taps) * spec.hidden_size + (spec.hidden_size if config.objective.needs_teacher else 0)
    return n_tokens * (width * dtype_bytes(compute_dtype(config.target.dtype, device)) + 21)


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Estimated bytes on one device, part by part."""

    device: str
    parts: dict[str, int]

    @property
    def total_bytes(self) -> int:
        """All parts together."""
        return sum(self.parts.values())


def estimate_memory(plan: RunPlan, size: TargetSize | None = None) -> list[DeviceMemory]:
    """Memory per device; `size` saves counting the target again.

    Parameters and states are exact; activations are an estimate (saved tensors of the drafter's layers in the compute
    dtype, logits of one chunk in fp32 and the compute dtype).
    """
    pipeline = plan.config.pipeline
    size = size or target_size(plan.config.target)
    drafter_parameters = count_drafter_parameters(plan.spec)
    devices: dict[str, dict[str, int]] = {}
    for place in pipeline.target_devices:
        for device in device_parts(place):
            weights = size.parameters * dtype_bytes(compute_dtype(plan.config.target.dtype, device))
            devices.setdefault(device, {})["target weights"] = weights // len(device_parts(place))
    largest_row = max(plan.row_bytes)
    tokens, longest = max(row.n_tokens for row in plan.rows), int(plan.dataset.lengths.max())
    firsts = [first_device(place) for place in pipeline.target_devices]
    for device in set(firsts):
        share = firsts.count(device) / len(firsts)
        devices[device]["rows admitted"] = int(plan.settings.max_rows * share * largest_row)
        element = dtype_bytes(compute_dtype(plan.config.target.dtype, device))
        eager = plan.config.target.attention == "eager"
        forward = target_forward_bytes(plan.facts, tokens, longest, element, eager=eager)
        devices[device]["target forward"] = forward * firsts.count(device)
    for device in pipeline.drafter_devices:
        parts = devices.setdefault(device, {})
        on_gpu = device != "cpu"
        if "target weights" not in parts:
            parts["embedding and head"] = size.borrowed * (2 if on_gpu else 4)
        # masters, two moments and the gradient sum in fp32; on a GPU also a bf16 copy and its gradient
        per_parameter = 4 + 8 + 4 + 4
        parts["drafter state"] = parts.get("drafter state", 0) + drafter_parameters * per_parameter
        parts["activations"] = parts.get("activations", 0) + _activation_bytes(plan, 2 if on_gpu else 4)
        if plan.num_drafters > 1:  # the leader of a meeting reduces into new tensors, and any drafter may lead
            parts["averaging"] = drafter_parameters * 4 * _averaged_kinds(plan.config.sync)
    return [DeviceMemory(name, parts) for name, parts in devices.items()]


def _averaged_kinds(sync: SyncConfig) -> int:
    """fp32 values a parameter that a meeting makes anew: weights or gradients, and both moments where averaged."""
    if sync.kind == "copy":
        return 0
    return 3 if sync.kind == "average" and sync.moments == "average" else 1


def count_drafter_parameters(spec: DrafterSpec) -> int:
    """Parameters of a drafter, counted on the meta device."""
    import torch

    from draftline.drafter.model import Drafter

    with torch.device("meta"):
        return sum(p.numel() for p in Drafter(spec).parameters())


def _activation_bytes(plan: RunPlan, element: int) -> int:
    spec, objective = plan.spec, plan.config.objective
    from draftline.drafter.blocks import anchor_slot_sizes

    positions = anchor_slot_sizes(objective, plan.config.data.row_tokens)[-1] * spec.block_size
    tokens = plan.config.data.row_tokens
    kv = 2 * spec.num_kv_heads * spec.head_dim
    per_position = 6 * spec.hidden_size + 3 * spec.intermediate_size + 2 * spec.num_heads * spec.head_dim + kv
    if spec.dflash2 is not None:
        per_position += 8 * spec.hidden_size  # what goes into and comes out of the four convolutions of a layer
    layers = spec.num_layers * element * (positions * per_position + tokens * kv)
    chunk = min(objective.head_chunk_positions, positions)
    return layers + chunk * spec.vocab_size * (4 + element) + 3 * positions * spec.hidden_size * element


def plan_lines(plan: RunPlan) -> list[str]:
    """Plain lines for `--dry-run`: workers on devices, bytes per row, memory per device, queue bounds."""
    pipeline = plan.config.pipeline
    tokens = sum(r.n_tokens for r in plan.rows)
    supervised = sum(r.n_supervised for r in plan.rows)
    largest = max(plan.row_bytes)
    lines = [
        f"targets: {plan.num_targets} on {', '.join(pipeline.target_devices)}",
        f"drafters: {plan.num_drafters} on {', '.join(pipeline.drafter_devices)}",
        f"drafter: {plan.spec.num_layers} layers, block {plan.spec.block_size}, taps {list(plan.spec.taps)}, "
        f"{count_drafter_parameters(plan.spec) / 1e6:.1f} M parameters",
        f"plan: {len(plan.rows)} rows over {plan.config.epochs} epochs, {tokens} tokens, {supervised} supervised "
        f"({supervised / tokens:.0%}), {tokens / len(plan.rows) / plan.config.data.row_tokens:.0%} full",
        *anchor_lines(plan.dataset, plan.rows, plan.config.objective.anchors, plan.spec.block_size),
        f"bytes per row: {largest / 2**20:.1f} MiB at most, {largest / max(r.n_tokens for r in plan.rows):.0f} a token",
        f"queue: {plan.settings.max_rows} rows admitted at once, "
        f"{plan.settings.max_rows * largest / _GIB:.2f} GiB at most"
        + (f", bounded to {plan.settings.queue_bytes} bytes" if plan.settings.queue_bytes else ""),
        f"rounds: {plan.settings.rows_per_drafter * plan.num_drafters} rows, sync {plan.config.sync.kind}",
    ]
    for memory in estimate_memory(plan):
        parts = ", ".join(f"{name} {size / _GIB:.2f}" for name, size in memory.parts.items())
        fits = "" if memory.device == "cpu" else f"; {_cards(memory.total_bytes)}"
        lines.append(f"memory {memory.device}: {memory.total_bytes / _GIB:.2f} GiB estimated ({parts}){fits}")
    return lines


def _cards(total_bytes: int) -> str:
    """The smallest usual card that holds so much with a tenth to spare. Cards are sold in decimal gigabytes."""
    smallest = next((gb for gb in CARDS_GB if total_bytes * 1.1 <= gb * 1e9), None)
    return f"needs a card of {smallest} GB" if smallest else f"more than a card of {CARDS_GB[-1]} GB holds"
