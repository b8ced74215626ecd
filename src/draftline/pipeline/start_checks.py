"""What can be seen to be wrong with a run before any weight is loaded, beyond what its configuration alone tells."""

from __future__ import annotations

import importlib.util

import torch

from draftline.config.drafter_spec import DrafterSpec
from draftline.config.schema import RunConfig
from draftline.drafter.head_fp8 import require_fp8
from draftline.errors import UserError
from draftline.export.formats import read_drafter_spec
from draftline.export.zlab_config import refuse_unservable
from draftline.monitor.trackers import not_installed
from draftline.pipeline.warm_spec import require_same_spec


def check_start(config: RunConfig, spec: DrafterSpec, num_target_layers: int) -> None:
    """Refuses a run that would load its target only to fail then, or train only to fail at its export.

    Args:
        config: with devices resolved.
        spec: of the drafter.

    Raises:
        UserError: see the checks below.
    """
    refuse_unservable(spec)  # every run ends with an export
    if config.drafter.init_from is not None:
        found = read_drafter_spec(config.drafter.init_from, num_target_layers=num_target_layers)
        require_same_spec(found, spec, config.drafter.init_from)
    elif config.drafter.init == "target_layers":
        chosen_init_layers(config, num_target_layers)
    if config.objective.needs_fp8:
        for device in config.pipeline.drafter_devices:
            require_fp8(torch.device(device))
    for name in config.monitor.trackers:
        if importlib.util.find_spec(name) is None:
            raise not_installed(name)


def chosen_init_layers(config: RunConfig, num_target_layers: int) -> tuple[int, ...]:
    """Target layers that `drafter.init: target_layers` copies, one a drafter layer; the target's last by default.

    Raises:
        UserError: layers that the target does not have.
    """
    chosen = config.drafter.init_layers
    if chosen is None:
        chosen = tuple(range(num_target_layers - config.drafter.num_layers, num_target_layers))
    bad = [layer for layer in chosen if not 0 <= layer < num_target_layers]
    if bad:
        raise UserError(
            f"target layers {bad} do not exist",
            where="drafter.init_layers",
            mend=f"choose from 0..{num_target_layers - 1}",
        )
    return chosen
