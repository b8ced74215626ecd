"""What every part of eight_gpus.py starts from: devices, configuration, data and random-weight targets."""

from __future__ import annotations

import functools
import gc
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from big_target import HEADS, TINY_HEADS, build_target, write_config
from draftline.config.drafter_spec import DrafterSpec, default_taps
from draftline.config.load import load_config
from draftline.config.schema import RunConfig
from draftline.data.made_up import MadeUpDataset
from draftline.pipeline import workers
from draftline.pipeline.ceilings import Ceiling
from draftline.pipeline.planning import device_and_ceiling
from draftline.pipeline.runplan import RunPlan, make_run_plan
from draftline.recipes import recipe_path
from draftline.target.load import LoadedTarget

RECIPE = "qwen3.6-27b-ddtree-8gpu"
NEVER = 1_000_000


@dataclass
class Setup:
    """One call of the benchmark.

    Attributes:
        devices: the first GPUs, or cpu.
        kind: hybrid or dense, see big_target.py.
        layers: of the target.
        samples_per_row: a row is so many samples of equal length.
        every_rows: rows of a drafter between two averagings.
        output: folder of the results; runs keep their files below it.
        overrides: further section.key=value of the configuration.
    """

    devices: list[str]
    kind: str
    layers: int
    tiny: bool
    samples_per_row: int
    every_rows: int
    output: Path
    overrides: Sequence[str] = ()
    _targets: dict[str, LoadedTarget] = field(default_factory=dict)

    @functools.cached_property
    def ceiling(self) -> Ceiling:
        """Peaks of the device."""
        return device_and_ceiling(None)[1]

    @property
    def on_cpu(self) -> bool:
        return self.devices == ["cpu"]

    def split_devices(self, targets: int, drafters: int) -> tuple[list[str], list[str]]:
        """A device each: the first for targets, the next for drafters; one device alone is shared by all."""
        if len(self.devices) == 1:
            return self.devices * targets, self.devices * drafters
        if targets + drafters > len(self.devices):
            raise SystemExit(
                f"split {targets}:{drafters} needs {targets + drafters} GPUs, {len(self.devices)} are used"
            )
        return self.devices[:targets], self.devices[targets : targets + drafters]

    def config(self, targets: int, drafters: int, name: str, extra: Sequence[str] = ()) -> RunConfig:
        """The recipe of the big run, on this call's devices and target."""
        on, train_on = self.split_devices(targets, drafters)
        items = [
            f"output={self.output / 'runs' / name}",
            f"target.model={self.target_folder()}",
            f"pipeline.target_devices=[{','.join(on)}]",
            f"pipeline.drafter_devices=[{','.join(train_on)}]",
            f"sync.every_rows={self.every_rows}",
            f"checkpoint.every_rounds={NEVER}",
            "checkpoint.keep=1",
            "epochs=1",
            *(self._tiny_items() if self.tiny else self._big_items()),
            *self.overrides,
            *extra,
        ]
        return load_config([recipe_path(RECIPE)], items)

    def plan(self, targets: int, drafters: int, name: str, *, rows: int, extra: Sequence[str] = ()) -> RunPlan:
        """A plan of so many full rows of made-up tokens."""
        config = self.config(targets, drafters, name, extra)
        dataset = MadeUpDataset(
            n_samples=rows * self.samples_per_row,
            sample_tokens=config.data.row_tokens // self.samples_per_row,
            vocab_size=512 if self.tiny else 248_320,
            unused=config.drafter.mask_token_id,
        )
        return make_run_plan(config, dataset=dataset)

    def targets(self, plan: RunPlan) -> list[LoadedTarget]:
        """Targets for a plan, kept from part to part; those on other devices are dropped first."""
        wanted = list(plan.config.pipeline.target_devices)
        for device in self._targets.keys() - set(wanted):
            del self._targets[device]
        self.free_memory()
        for device in wanted:
            if device not in self._targets:
                self._targets[device] = build_target(plan.config.target, device)
        return [self._targets[device] for device in wanted]

    def keep_first_weights(self) -> None:
        """Every part starts its drafters from the same weights; drawing 1.8 G of them takes the CPU 15 s each time."""
        draw, kept = workers.initial_weights, list[dict[str, torch.Tensor]]()

        def initial_weights(config: RunConfig, spec: DrafterSpec, target: LoadedTarget) -> dict[str, torch.Tensor]:
            if not kept:
                kept.append(draw(config, spec, target))
            return kept[0]

        workers.initial_weights = initial_weights

    def drop_targets(self) -> None:
        self._targets.clear()
        self.free_memory()

    def free_memory(self) -> None:
        gc.collect()
        if not self.on_cpu:
            torch.cuda.empty_cache()

    def target_folder(self) -> Path:
        folder = self.output / f"target-{self.kind}-{self.layers}"
        if not (folder / "config.json").exists():
            write_config(folder, self.kind, self.layers, tiny=self.tiny)
        return folder

    def _big_items(self) -> list[str]:
        """A dense stand-in must not change the drafter, so its head sizes are those of the hybrid."""
        items = [f"drafter.num_heads={HEADS}", "drafter.num_kv_heads=4", "drafter.head_dim=256"]
        if self.layers != 64:
            items.append(f"drafter.taps={list(default_taps(self.layers, 5))}".replace(" ", ""))
        return items

    def _tiny_items(self) -> list[str]:
        return [
            "data.row_tokens=64",
            "drafter.num_layers=2",
            "drafter.block_size=4",
            f"drafter.taps={list(default_taps(self.layers, 2))}".replace(" ", ""),
            "drafter.mask_token_id=500",
            f"drafter.num_heads={TINY_HEADS}",
            "drafter.num_kv_heads=1",
            "drafter.head_dim=32",
            "drafter.sliding.window_tokens=32",
            "drafter.sliding.layers=[0]",
            "objective.anchors=16",
            "pipeline.compile=false",
        ]
