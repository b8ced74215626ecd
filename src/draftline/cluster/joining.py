"""Connecting to a Ray cluster and placing workers on it; everything that can be wrong with that is one line.

consumes     an address, the seats of a run
produces     a placement group with one bundle a seat, and the hosts they are on
waits for    hosts and GPUs that are missing, only if `cluster.wait_s` says so
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftline.cluster.demand import STORE_SHARE, Host, Seat, shortage, unplaced
from draftline.errors import UserError

CONNECT_S = 5.0
SETTLE_S = 10.0  # in which a run that has just ended gives its places back
AUTO, LOCAL = "auto", "local"
OPTION = "--cluster"
NAMESPACE = "draftline"
LEAST_STORE_BYTES = 80 << 20
SHARED_MEMORY = Path("/dev/shm")
_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "namespace": NAMESPACE}


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the seats of a run are.

    Attributes:
        group: Ray's placement group; bundle i is seat i.
        nodes: Ray's id of each seat's host.
    """

    group: Any
    nodes: tuple[str, ...]


def require_ray() -> None:
    """Raises UserError where Ray is not installed; else says what Ray reads when it is imported."""
    if importlib.util.find_spec("ray") is None:
        raise UserError("Ray is not installed", where=OPTION, mend="pip install 'draftline[cluster]'")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")


@contextmanager
def connected(address: str, *, store_bytes: int, cpus: int) -> Iterator[str]:
    """Connected to the cluster at `address`; yields its address.

    Args:
        address: HOST:PORT of a head node, or `auto`: the cluster that this host belongs to, or else one of this host
            alone, which ends with the run.
        store_bytes, cpus: of a cluster that is started here.

    Raises:
        UserError: Ray is missing, or there is no cluster.
    """
    require_ray()
    import ray

    if ray.is_initialized():
        yield str(ray.get_runtime_context().gcs_address)
        return
    with _signals_kept():
        _connect(address, store_bytes, cpus)
    try:
        yield str(ray.get_runtime_context().gcs_address)
    finally:
        ray.shutdown()


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Ray sets a handler of its own for SIGTERM when it connects; a run stops by ours."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)


def find_cluster(address: str) -> str:
    """HOST:PORT of the cluster that `address` means, where something answers; `local`: one is to be started here.

    Raises:
        UserError: it is no address, or nobody is there.
    """
    asked = os.environ.get("RAY_ADDRESS", "").strip() or AUTO if address == AUTO else address
    if asked == AUTO:
        return _cluster_of_this_host()
    if asked != LOCAL:
        _require_listener(asked)
    return asked


def _connect(address: str, store_bytes: int, cpus: int) -> None:
    import ray

    found = find_cluster(address)
    if found == LOCAL:
        _start_here(max(int(store_bytes / STORE_SHARE), LEAST_STORE_BYTES), cpus)
        return
    try:
        ray.init(address=found, **_QUIET)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise _no_cluster(found, str(error).splitlines()[0]) from error


def _cluster_of_this_host() -> str:
    """Address of the cluster that Ray runs for on this host, or noted as the last one; `local` if there is none.

    The note outlives a cluster that was killed, and Ray itself would wait for that one without end.

    Raises:
        UserError: Ray runs here for a cluster that does not answer.
    """
    from ray._private import services

    try:
        noted = str(services.canonicalize_bootstrap_address(AUTO))
    except (ConnectionError, ValueError):  # there is none, or the note is no address
        return LOCAL
    try:
        _require_listener(noted)
    except UserError:
        if services.find_gcs_addresses():
            raise
        return LOCAL
    return noted


def _start_here(store_bytes: int, cpus: int) -> None:
    """Ray on this host alone. With more than `/dev/shm` has, Ray would keep rows on a disk."""
    import ray

    room = shutil.disk_usage(SHARED_MEMORY).free
    mend = "lower pipeline.hs_queue_depth or data.row_tokens, or use more hosts"
    if store_bytes > room:
        needed = f"{store_bytes / 2**20:.0f} MiB are needed for all rows that may be alive at once"
        raise UserError(f"{needed}, {room / 2**20:.0f} MiB are free", where=str(SHARED_MEMORY), mend=mend)
    try:
        ray.init(address=LOCAL, num_cpus=cpus, object_store_memory=store_bytes, include_dashboard=False, **_QUIET)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        why = str(error).splitlines()[0]
        raise UserError(f"Ray does not start on this host ({why})", where=OPTION, mend=mend) from error


def _require_listener(address: str) -> None:
    """Ray's own client tries for a long time before it says that nobody is there."""
    if address.startswith("ray://"):
        mend = "give HOST:PORT of the head node, or run on the head node with --cluster auto"
        raise UserError(f"{address} is a Ray client address, through which no rows can go", where=OPTION, mend=mend)
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise UserError(f"{address!r} is no address", where=OPTION, mend="give HOST:PORT of the head node, or auto")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S):
            pass
    except (OSError, OverflowError) as error:
        raise _no_cluster(address, getattr(error, "strerror", None) or str(error)) from error
    _require_ray_at(address)


def _require_ray_at(address: str) -> None:
    """Something else may listen there."""
    import grpc
    from ray._private.grpc_utils import init_grpc_channel

    with init_grpc_channel(address) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=CONNECT_S)
        except grpc.FutureTimeoutError as error:
            raise _no_cluster(address, "what listens there is something else") from error


def _no_cluster(address: str, why: str) -> UserError:
    return UserError(
        f"no Ray cluster at {address} ({why})",
        where=OPTION,
        mend="start one with `ray start --head --port=6379` and give HOST:6379, or use --cluster auto on its head node",
    )


def hosts(*, whole: bool = False) -> list[Host]:
    """Hosts that are alive, with what is free; `whole`: with all that they have."""
    import ray
    from ray._private.state import available_resources_per_node

    free = available_resources_per_node()
    return [
        Host(
            node["NodeID"],
            node["NodeManagerAddress"],
            node["Resources"] if whole else free.get(node["NodeID"], {}),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def place(seats: Sequence[Seat], *, strategy: str, wait_s: float) -> Placement:
    """Reserves room for all seats.

    Raises:
        UserError: there is not enough, or not within `wait_s`; says what is missing and what is free where.
    """
    from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

    if not wait_s and unplaced(seats, hosts(whole=True)):
        _require_room(seats, "")
    patience_s = wait_s or SETTLE_S
    group = placement_group([dict(seat.resources) for seat in seats], strategy=strategy)
    if not group.wait(timeout_seconds=patience_s):
        remove_placement_group(group)
        _require_room(seats, f" after {patience_s:g} s")
        raise UserError(
            f"Ray did not place {len(seats)} workers within {patience_s:g} s",
            where=OPTION,
            mend="see `ray status` for what else asks for the same hosts",
        )
    nodes = placement_group_table(group)["bundles_to_node_id"]
    return Placement(group, tuple(nodes[i] for i in range(len(seats))))


def _require_room(seats: Sequence[Seat], when: str) -> None:
    line = shortage(seats, hosts())
    if line is not None:
        mend = "add hosts, name fewer devices, or set cluster.wait_s to wait for them"
        raise UserError(line + when, where=OPTION, mend=mend)


def require_store(placement: Placement, needed: int) -> None:
    """The object store of every host with a worker holds what may be alive at once, so that nothing is spilled.

    Raises:
        UserError: names the host, what it has and what it needs.
    """
    import ray

    for node in ray.nodes():
        if node["NodeID"] not in placement.nodes:
            continue
        there = int(node["Resources"].get("object_store_memory", 0))
        if there * STORE_SHARE < needed:
            raise UserError(
                f"its object store has {there / 2**20:.0f} MiB, {needed / STORE_SHARE / 2**20:.0f} MiB are needed for "
                "all rows that may be alive at once",
                where=f"host {node['NodeManagerAddress']}",
                mend=f"start it with `ray start --object-store-memory={int(needed / STORE_SHARE) + 1}`, or lower "
                "pipeline.hs_queue_depth or data.row_tokens",
            )


def spilled_bytes() -> int:
    """Bytes that hosts of the cluster have spilled to disk since they started; of those that can be reached, for one
    that just died counts as alive for some seconds more."""
    import grpc
    import ray
    from ray._private.internal_api import node_stats

    total = 0
    for node in ray.nodes():
        if node["Alive"]:
            with suppress(grpc.RpcError):
                stats = node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], False)
                total += stats.store_stats.spilled_bytes_total
    return total
