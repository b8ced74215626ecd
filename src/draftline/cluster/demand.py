"""What a run asks of a cluster, and whether hosts can give it: plain numbers, no Ray.

For `draftline scale`, too, what imports torch is imported where it is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from draftline.cluster.refs import slot_bytes
from draftline.config.cluster import ClusterConfig

if TYPE_CHECKING:
    from draftline.pipeline.runplan import RunPlan

Resources = dict[str, float]
SPARE_SLOTS = 8
STORE_SHARE = 0.8  # of the object store that may be planned for: what Ray and fragmentation need is left


@dataclass(frozen=True, slots=True)
class Seat:
    """One worker's place: its name, its device as a cluster knows it, and what it takes."""

    name: str
    place: str
    resources: Resources


@dataclass(frozen=True, slots=True)
class Host:
    """A host with what is free of it now."""

    node: str
    address: str
    free: Mapping[str, float]


def seats_of(plan: RunPlan) -> list[Seat]:
    """Targets, then drafters."""
    pipeline, cluster = plan.config.pipeline, plan.config.cluster
    sides = (
        ("target", pipeline.target_devices, cluster.target_resources),
        ("drafter", pipeline.drafter_devices, cluster.drafter_resources),
    )
    return [
        Seat(f"{role}-{number}", place, seat_resources(cluster, place, extra))
        for role, places, extra in sides
        for number, place in enumerate(places)
    ]


def seat_resources(cluster: ClusterConfig, place: str, extra: Mapping[str, float]) -> Resources:
    """What one worker on such a device takes."""
    from draftline.cluster.orders import gpus_of

    gpus = gpus_of(place)
    return {"CPU": float(cluster.worker_cpus), **({"GPU": float(gpus)} if gpus else {}), **extra}


def unplaced(seats: Sequence[Seat], hosts: Sequence[Host]) -> list[Seat]:
    """Seats for which no host has room, by first fit with the largest first."""
    free = [dict(host.free) for host in hosts]
    left = []
    for seat in sorted(seats, key=lambda s: -sum(s.resources.values())):
        for room in free:
            if all(room.get(name, 0.0) >= amount for name, amount in seat.resources.items()):
                for name, amount in seat.resources.items():
                    room[name] -= amount
                break
        else:
            left.append(seat)
    return left


def shortage(seats: Sequence[Seat], hosts: Sequence[Host]) -> str | None:
    """One line that says what is missing, and what is free where; None if everything fits."""
    left = unplaced(seats, hosts)
    if not left:
        return None
    missing = ", ".join(f"{seat.name} ({_told(seat.resources)})" for seat in left)
    names = sorted({name for seat in seats for name in seat.resources})
    free = "; ".join(f"{h.address} has {_told({n: h.free.get(n, 0.0) for n in names})}" for h in hosts)
    return f"no host has room for {missing}; free: {free or 'no host at all'}"


def _told(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items())


def store_bytes(plan: RunPlan) -> int:
    """Bytes that one host's object store may have to hold at once: every admitted row, the validation rows, and the
    weights and moments of a checkpoint with what the drafters started from."""
    from draftline.pipeline.runplan import count_drafter_parameters

    largest = slot_bytes(max(plan.row_bytes))
    rows = min(plan.settings.max_rows * largest, _byte_bound(plan, largest))
    parameters = count_drafter_parameters(plan.spec)
    state = 12 * parameters * (2 + plan.num_drafters)
    return rows + state + validation_bytes(plan)


def _byte_bound(plan: RunPlan, largest: int) -> int:
    bound = plan.settings.queue_bytes
    return plan.settings.max_rows * largest if bound is None else bound + plan.settings.max_rows * 4096


def validation_bytes(plan: RunPlan) -> int:
    """Bytes of the validation rows, an eighth added for what goes into the buffers beside the states."""
    from draftline.data.shards import TokenDataset
    from draftline.pipeline.runplan import states_bytes

    path = plan.config.data.validation_path
    if path is None:
        return 0
    n_tokens = int(TokenDataset.open(path).lengths.sum())
    return states_bytes(plan.config, plan.spec, n_tokens, plan.config.pipeline.target_devices[0]) * 9 // 8
