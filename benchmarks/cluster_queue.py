"""How many rows a second the real queue actor hands through, with rows that are metadata only.

    python benchmarks/cluster_queue.py --output FILE     needs the extra `cluster`

Client processes with many threads each act as targets (lease, put) and drafters (get, trained, meetings without any
averaging), one call a row on either side, as the real workers do. Workers are added until rows/s no longer rise: twice
in a row by less than a twentieth. It is an error if they still do with the most workers named. The same state machine
is also driven without any network, in one thread: what the actor costs beyond it is Ray.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from typing import Any

import ray
import torch

from argtypes import json_file, whole, wholes
from draftline.cluster.crew import start_queue
from draftline.cluster.link import QueueLink
from draftline.cluster.messages import QueueSetup, Step
from draftline.cluster.refs import DOCUMENTS, IDS, MASK, POSITIONS, TAPS, Layout, RowContract, RowRef, SlabPlace
from draftline.cluster.turns import SlotLease
from draftline.pipeline.core import CoreSettings, Lease, PipelineCore, RowItem, SyncItem
from draftline.records import PlannedRow
from measure import environment

TOKENS, WIDTH, TAP_IDS = 4096, 4096, (1, 9, 17, 25, 33)
ROUND = 50
LEAST_GAIN = 0.05
CONTRACT = RowContract("load", TAP_IDS, WIDTH, False)


def layout() -> Layout:
    n = (TOKENS,)
    taps = (TAPS, "bfloat16", (TOKENS, len(TAP_IDS) * WIDTH))
    return Layout.of([taps, (IDS, "int64", n), (MASK, "bool", n), (DOCUMENTS, "int32", n), (POSITIONS, "int64", n)])


def plan_of(rows: int) -> list[PlannedRow]:
    return [PlannedRow(i, 0, (i,), TOKENS, TOKENS // 2) for i in range(rows)]


class Client:
    """Workers as threads of one process."""

    def __init__(self, queue: Any, targets: list[int], drafters: list[int]) -> None:
        self._queue, self._layout = queue, layout()
        self._threads = [threading.Thread(target=self._target, args=(t,)) for t in targets]
        self._threads += [threading.Thread(target=self._drafter, args=(d,)) for d in drafters]

    def run(self) -> float:
        """Seconds until all its workers have ended."""
        start = time.perf_counter()
        for thread in self._threads:
            thread.start()
        for thread in self._threads:
            thread.join()
        return time.perf_counter() - start

    def _target(self, number: int) -> None:
        link = QueueLink(self._queue, f"target-{number}", 60.0)
        pending: list[Step] = []
        while isinstance(answer := link.call(*pending, ("lease_slot", (number,))), SlotLease):
            pending = [("put", (number, answer.lease.row_id, self._ref(answer)))]
        link.call(("producer_done", (number,)))

    def _ref(self, answer: SlotLease) -> RowRef:
        row_id = answer.lease.row_id
        place = SlabPlace("node", answer.slot)
        return RowRef(1, "load", row_id, 0, (f"s{row_id}",), (TOKENS,), "post", TAP_IDS, self._layout, place)

    def _drafter(self, number: int) -> None:
        link = QueueLink(self._queue, f"drafter-{number}", 60.0)
        pending: list[Step] = []
        while True:
            item = link.call(*pending, ("get", (number,)))
            pending = []
            if isinstance(item, RowItem):
                pending = [("trained", (number, item.row_id))]
            elif isinstance(item, SyncItem):
                self._meet(link, number, item.round_id)
            else:
                return

    def _meet(self, link: QueueLink, number: int, round_id: int) -> None:
        link.call(("arrive", (number, round_id)))
        attempt = 0
        while not (turn := link.call(("await_turn", (number, round_id, attempt)))).committed:
            attempt = turn.meeting.attempt
            link.call(("reduced", (number, round_id, attempt)))


def through_the_actor(workers: int, rows: int, clients: int) -> float:
    """Rows/s with so many targets and as many drafters."""
    settings = CoreSettings(workers, workers, ROUND)
    row_bytes = layout().n_bytes
    setup = QueueSetup(
        plan_of(rows),
        [row_bytes] * rows,
        settings,
        CONTRACT,
        120.0,
        None,
        8,
        checkpoint_every=10**9,
        allowed_failures=0,
    )
    queue = start_queue(setup, 2 * workers)
    ray.get(queue.stats.remote())
    shares = [list(range(workers))[i::clients] for i in range(clients)]
    actors = [ray.remote(Client).options(num_cpus=0).remote(queue, share, share) for share in shares if share]
    ray.get([actor.__ray_ready__.remote() for actor in actors])
    seconds = max(ray.get([actor.run.remote() for actor in actors]))
    assert ray.get(queue.stats.remote()).ledger.committed == rows
    for actor in [*actors, queue]:
        ray.kill(actor)
    return rows / seconds


def empty_call_s(calls: int = 500) -> float:
    """Seconds of one call that does next to nothing, to a queue that nobody else calls."""
    rows = 4
    setup = QueueSetup(
        plan_of(rows), [1 << 30] * rows, CoreSettings(1, 1, ROUND), CONTRACT, 120.0, None, 8, 1, allowed_failures=0
    )
    queue = start_queue(setup, 2)
    link, seconds = QueueLink(queue, "target-0", 60.0), []
    for _ in range(calls):
        start = time.perf_counter()
        link.call(("is_complete", ()))
        seconds.append(time.perf_counter() - start)
    ray.kill(queue)
    return statistics.median(seconds)


def without_ray(workers: int, rows: int) -> float:
    """Rows/s of the bare state machine in one thread."""
    core = PipelineCore(plan_of(rows), [1] * rows, CoreSettings(workers, workers, ROUND))
    start = time.perf_counter()
    while core.ledger.counts[5] < rows:
        for target in range(workers):
            lease = core.lease(target)
            if isinstance(lease, Lease):
                core.put(target, lease.row_id)
        meeting = None
        for drafter in range(workers):
            item = core.get(drafter) if drafter not in core.rounds.called else None
            if isinstance(item, RowItem):
                core.trained(drafter, item.row_id)
            elif isinstance(item, SyncItem):
                core.arrive(drafter, item.round_id)
        if core.leader is not None:
            meeting = core.begin_average(core.leader, core.round_id)
            core.commit(meeting.leader, meeting.round_id, meeting.attempt)
    return rows / (time.perf_counter() - start)


def is_saturated(rates: list[float]) -> bool:
    """Twice in a row, more workers brought less than a twentieth more."""
    return len(rates) > 2 and max(rates[-2:]) < (1 + LEAST_GAIN) * max(rates[:-2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--workers", type=wholes, default=(1, 2, 4, 8, 16, 32, 64), help="Targets, and as many drafters."
    )
    parser.add_argument("--rows", type=whole(1), default=3000)
    parser.add_argument("--clients", type=whole(1), default=4, help="Processes that share the workers.")
    parser.add_argument("--output", type=json_file)
    arguments = parser.parse_args()
    ray.init(address="local", num_cpus=8, object_store_memory=100 << 20, include_dashboard=False, log_to_driver=False)
    call_s = empty_call_s()
    print(f"one call, nobody else calling: {1e6 * call_s:.0f} us")
    found: dict[str, dict[str, float]] = {"actor_rows_per_s": {}, "core_rows_per_s": {}}
    for workers in arguments.workers:
        through = through_the_actor(workers, arguments.rows, arguments.clients)
        bare = without_ray(workers, arguments.rows)
        found["actor_rows_per_s"][str(workers)], found["core_rows_per_s"][str(workers)] = through, bare
        print(f"{workers:4} targets and drafters: {through:8.0f} rows/s through the actor, {bare:9.0f} without Ray")
        if is_saturated(list(found["actor_rows_per_s"].values())):
            break
    ray.shutdown()
    saturated = max(found["actor_rows_per_s"].values())
    if not is_saturated(list(found["actor_rows_per_s"].values())):
        raise SystemExit(f"not saturated at {saturated:.0f} rows/s: name more --workers")
    print(f"saturated at {saturated:.0f} rows/s")
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        report = {
            "environment": environment(torch.device("cpu")),
            "call_s": call_s,
            "saturated_rows_per_s": saturated,
            **found,
        }
        arguments.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
