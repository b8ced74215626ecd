"""What a worker actor is told at its start, and how it makes a plan of one worker from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from draftline.config.drafter_spec import DrafterSpec
from draftline.config.schema import RunConfig
from draftline.data.shards import TokenDataset
from draftline.devices import resolve_devices
from draftline.pipeline.core import CoreSettings
from draftline.pipeline.runplan import RunPlan
from draftline.records import PlannedRow
from draftline.target.facts import TargetFacts
from draftline.target.spread import SEPARATOR, device_parts


@dataclass(frozen=True, slots=True)
class WorkOrder:
    """A run, as its workers need to know it.

    Attributes:
        config, spec: as JSON.
        facts: of the target.
        settings: of the core.
        first_row: what a target proves itself with.
        total_rows: rows of the whole plan, for the learning rate.
        data_fingerprint: of the data set, which every target reads for itself.
        run_id: of this process of the run.
        slots, slot_bytes: of a host's slab.
        cpus: threads that a worker may compute with.
    """

    config: str
    spec: str
    facts: TargetFacts
    settings: CoreSettings
    first_row: PlannedRow
    total_rows: int
    data_fingerprint: str
    run_id: str
    slots: int
    slot_bytes: int
    cpus: int

    def run_config(self) -> RunConfig:
        """The run's configuration."""
        return RunConfig.model_validate_json(self.config)

    def plan_of_one(self, place: str, dataset: TokenDataset | None) -> RunPlan:
        """A plan with one worker on a device of this process, `place` with its own numbers: `cuda` is `cuda:0` here.

        Args:
            dataset: of a target.
        """
        config = self.run_config()
        local = local_place(place)
        resolve_devices([local])
        pipeline = config.pipeline.model_copy(update={"target_devices": (local,), "drafter_devices": (local,)})
        return RunPlan(
            config=config.model_copy(update={"pipeline": pipeline}),
            facts=self.facts,
            spec=DrafterSpec.model_validate_json(self.spec),
            dataset=cast(TokenDataset, dataset),  # a drafter reads none
            rows=[self.first_row],
            settings=self.settings,
            row_bytes=[],
        )


def cluster_place(place: str) -> str:
    """A device as a cluster knows it: `cpu`, `cuda`, `cuda+cuda`. Which GPU it is, Ray decides."""
    kinds = ["cpu" if part.strip().lower().startswith("cpu") else "cuda" for part in device_parts(place)]
    return SEPARATOR.join(kinds)


def gpus_of(place: str) -> int:
    """GPUs that a worker takes."""
    return sum(part.startswith("cuda") for part in device_parts(place))


def local_place(place: str) -> str:
    """The same inside the worker, which sees only its own GPUs."""
    if not gpus_of(place):
        return "cpu"
    return SEPARATOR.join(f"cuda:{number}" for number in range(gpus_of(place)))
