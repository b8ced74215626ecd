"""The section for runs over several hosts."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from draftline.config.sections import Section


class ClusterConfig(Section):
    """Workers on the hosts of a Ray cluster (`draftline train --cluster`); elsewhere this section says nothing.

    Workers are those of `pipeline.target_devices` and `pipeline.drafter_devices`. A device is `cpu` or `cuda` here:
    which GPU of which host it is, Ray decides.
    """

    transport: Literal["auto", "slab", "objects", "direct"] = Field(
        default="auto",
        description="How rows travel. slab: shared memory of one host; objects: Ray's object store; direct: NIXL; "
        "auto: slab where all workers share a host, else objects.",
    )
    wait_s: float = Field(default=0.0, ge=0, description="Seconds to wait for missing hosts or GPUs; 0: refuse.")
    worker_cpus: int = Field(default=1, ge=1, description="CPU cores that a worker takes.")
    target_resources: dict[str, float] = Field(
        default_factory=dict, description="Ray resources of a target's host beyond CPU and GPU, to keep targets there."
    )
    drafter_resources: dict[str, float] = Field(default_factory=dict, description="The same for drafters.")
    strategy: Literal["PACK", "SPREAD"] = Field(default="PACK", description="On few hosts, or on many.")
    averaging_timeout_s: float = Field(
        default=60.0, gt=0, description="How long drafters that average wait for one that fell silent."
    )
