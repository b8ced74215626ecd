"""`draftline train --cluster`: from a configuration to a finished run over several hosts.

Everything that can be wrong is found in this order, each with one line and nothing left behind: Ray, whether a cluster
answers, configuration, room for the workers, object stores, versions and files on their hosts, targets, run folder.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from draftline.cluster.demand import seats_of, store_bytes
from draftline.cluster.joining import Placement, connected, place, require_ray, require_store
from draftline.cluster.orders import cluster_place
from draftline.config.schema import RunConfig
from draftline.data.shards import TokenDataset
from draftline.errors import UserError
from draftline.pipeline.coordinator import TrainResult
from draftline.pipeline.run_folder import check_run_folder
from draftline.pipeline.runplan import RunPlan, make_run_plan, validation_rows
from draftline.pipeline.signals import StopSignals
from draftline.pipeline.start_checks import check_start


def cluster_plan(config: RunConfig) -> RunPlan:
    """The plan of a run on a cluster, whose devices this host need not have. Loads no weights.

    Raises:
        UserError: anything that does not fit together, or that only one host can do.
    """
    if config.states.mode != "online":
        raise UserError(
            f"states.mode {config.states.mode} keeps states on one host's disk",
            where="--cluster",
            mend="set states.mode: online, or train on one host",
        )
    if config.cluster.transport == "direct" and importlib.util.find_spec("nixl") is None:
        mend = "pip install nixl on all hosts, or set cluster.transport: auto"
        raise UserError("direct transport needs the package nixl", where="cluster.transport", mend=mend)
    pipeline = config.pipeline.model_copy(
        update={
            "target_devices": tuple(map(cluster_place, config.pipeline.target_devices)),
            "drafter_devices": tuple(map(cluster_place, config.pipeline.drafter_devices)),
        }
    )
    config = config.model_copy(update={"pipeline": pipeline})
    plan = make_run_plan(config, check_devices=False)
    check_start(_without_fp8(config), plan.spec, plan.facts.num_layers)  # fp8 is looked for where the drafters are
    if config.data.validation_path is not None:
        validation_rows(TokenDataset.open(config.data.validation_path), config)
    return plan


def _without_fp8(config: RunConfig) -> RunConfig:
    objective = config.objective.model_copy(update={"head_dtype": "compute", "mlp_dtype": "compute"})
    return config.model_copy(update={"objective": objective})


def train_on_cluster(plan: RunPlan, address: str, *, resume: bool = False) -> TrainResult:
    """Runs a plan to its end on a Ray cluster.

    Args:
        plan: of `cluster_plan`.
        address: see `joining.connected`.
        resume: go on from the last whole checkpoint in the run's folder.

    Raises:
        UserError, RunFailedError, RunStoppedError: as `coordinator.train`.
    """
    require_ray()
    seats = seats_of(plan)
    needed, cluster = store_bytes(plan), plan.config.cluster
    with StopSignals() as signals:
        check_run_folder(plan, resume=resume)
        with connected(address, store_bytes=needed, cpus=cluster.worker_cpus * len(seats)) as where:
            placement = place(seats, strategy=cluster.strategy, wait_s=cluster.wait_s)
            with _given_back(placement):
                require_store(placement, needed)
                from draftline.cluster.session import run_placed  # needs Ray to be imported

                return run_placed(plan, placement, where, signals, paths=_paths(plan.config), resume=resume)


@contextmanager
def _given_back(placement: Placement) -> Iterator[None]:
    from ray.util.placement_group import remove_placement_group

    try:
        yield
    finally:
        remove_placement_group(placement.group)


def _paths(config: RunConfig) -> list[str]:
    """Files that every host with a worker has to see."""
    found = [str(config.data.path)]
    if Path(config.target.model).expanduser().exists():
        found.append(config.target.model)
    if config.data.validation_path is not None:
        found.append(str(config.data.validation_path))
    return [str(Path(path).expanduser().absolute()) for path in found]
