"""What 8, 64 and 512 GPUs are expected to do: the capacity model beside a simulation of the real state machine.

    python benchmarks/cluster_scale.py --output FILE     needs neither GPU nor Ray

From measured figures (benchmarks/results: one H200, Qwen3-8B shape; the queue actor's rate on the machine that
measured it) it works out, for hosts of eight GPUs on 25, 100 and 400 Gb/s, one queue or one a host: tokens/s by the
capacity model with what the links and the queue allow, tokens/s of a simulation, traffic of the links, and what
averaging costs.

The simulation runs in virtual time. Targets, drafters and the queue call the real `PipelineCore`; a call occupies the
queue for its measured time, a row that goes to another host occupies both hosts' links, a meeting takes a ring
all-reduce in which one drafter of each host sends to the next host. Losses, retries and other traffic are not in it.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import random
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from argtypes import json_file, positive, whole
from draftline.capacity import Rates, Rounds, best_split, expect
from draftline.pipeline.core import CoreSettings, Lease, PipelineCore, RowItem, StopItem, SyncItem
from draftline.records import PlannedRow
from measure import environment

RESULTS = Path(__file__).parent / "results"
GPUS_A_HOST, ROW_TOKENS, ROUND = 8, 4096, 50
BYTES_A_TOKEN = 5 * 4096 * 2 + 21
PARAMETERS = 1_050_000_000  # 5 layers of the 8B shape and the fusion of 5 taps
INSIDE_BYTES_PER_S = 300e9  # NVLink of one GPU, one way
JITTER = 0.05
GBIT = 1e9 / 8


@dataclass(frozen=True)
class Setting:
    """One point: hosts, their link, how often drafters meet and what they average."""

    gpus: int
    link_gbit: int
    sharded: bool
    kinds: int  # fp32 values a parameter that are averaged: 1 weights, 3 with both moments
    row_s: tuple[float, float]
    call_s: float

    @property
    def hosts(self) -> int:
        return max(1, self.gpus // GPUS_A_HOST)

    @property
    def split(self) -> tuple[int, int]:
        """(targets, drafters), the same on every host."""
        rates = [ROW_TOKENS / s for s in self.row_s]
        targets, drafters = best_split(rates[0], rates[1], GPUS_A_HOST)
        return targets * self.hosts, drafters * self.hosts

    @property
    def averaging_s(self) -> float:
        """A ring all-reduce over all drafters; between hosts it is the link that counts."""
        drafters = self.split[1]
        n_bytes = 2 * (drafters - 1) / drafters * self.kinds * 4 * PARAMETERS
        return n_bytes / (INSIDE_BYTES_PER_S if self.hosts == 1 else min(self.link_gbit * GBIT, INSIDE_BYTES_PER_S))


def by_model(s: Setting) -> dict[str, float]:
    """The capacity model, and the ceilings of links and queue that it does not know."""
    targets, drafters = s.split
    queue_rows = 3 * drafters
    rates = Rates(ROW_TOKENS / s.row_s[0], ROW_TOKENS / s.row_s[1], JITTER)
    expected = expect(rates, targets, drafters, Rounds(ROW_TOKENS, ROUND, s.averaging_s, queue_rows)).tokens_per_s
    crossing = 0.0 if s.sharded or s.hosts == 1 else 1.0 - 1.0 / s.hosts
    link = s.hosts * s.link_gbit * GBIT / (BYTES_A_TOKEN * crossing) if crossing else float("inf")
    queue = ROW_TOKENS / (2 * s.call_s) * (s.hosts if s.sharded else 1)
    tokens = min(expected, link, queue)
    return {
        "tokens_per_s": tokens,
        "limit": ["stages", "links", "queue"][[expected, link, queue].index(tokens)],  # type: ignore[dict-item]
        "averaging_s": s.averaging_s,
        "averaging_share": s.averaging_s / (ROUND * s.row_s[1] + s.averaging_s),
        "row_traffic_bytes_per_s_a_host": tokens * BYTES_A_TOKEN * crossing / s.hosts,
        "queue_calls_per_s": 2 * tokens / ROW_TOKENS / (s.hosts if s.sharded else 1),
        "object_store_bytes_a_host": (targets + drafters * 4) * ROW_TOKENS * BYTES_A_TOKEN / s.hosts,
    }


class Simulation:
    """One queue with its workers in virtual time.

    Args:
        s: the setting; with sharded queues, one host of it.
        rows: how many are trained.
    """

    def __init__(self, s: Setting, rows: int) -> None:
        targets, drafters = s.split
        hosts = s.hosts
        if s.sharded:
            targets, drafters, hosts = targets // hosts, drafters // hosts, 1
        self.s, self.targets, self.drafters, self.hosts = s, targets, drafters, hosts
        plan = [PlannedRow(i, 0, (i,), ROW_TOKENS, ROW_TOKENS) for i in range(rows)]
        self.core = PipelineCore(plan, [1] * rows, CoreSettings(targets, drafters, ROUND))
        self.now = self.queue_free = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.order = itertools.count()
        self.random = random.Random(0)
        self.out_free, self.in_free = [0.0] * hosts, [0.0] * hosts
        self.where: dict[int, int] = {}
        self.idle_targets: deque[int] = deque()
        self.idle_drafters: deque[int] = deque()
        self.ready: list[deque[int]] = [deque() for _ in range(drafters)]
        self.training = [False] * drafters
        self.asked = [0] * drafters  # rows asked for or in hand
        self.called: dict[int, int] = {}
        self.trained = 0
        self.waits_s = 0.0

    def run(self) -> float:
        """Tokens/s."""
        for target in range(self.targets):
            self.call(lambda t=target: self.lease(t))
        for drafter in range(self.drafters):
            self.ask(drafter)
        while self.events and self.core.end is None:
            self.now, _, act = heapq.heappop(self.events)
            act()
        return self.trained * ROW_TOKENS / self.now * (self.s.hosts if self.s.sharded else 1)

    def at(self, when: float, act: Callable[[], None]) -> None:
        heapq.heappush(self.events, (when, next(self.order), act))

    def call(self, act: Callable[[], None]) -> None:
        """A call to the queue, behind those that are there."""
        self.queue_free = max(self.now, self.queue_free) + self.s.call_s
        self.waits_s += self.queue_free - self.now
        self.at(self.queue_free, act)

    def stage_s(self, which: int) -> float:
        return self.s.row_s[which] * max(0.2, self.random.gauss(1.0, JITTER))

    # ---- targets

    def lease(self, target: int) -> None:
        answer = self.core.lease(target)
        if isinstance(answer, Lease):
            row = answer.row_id
            self.where[row] = target * self.hosts // self.targets
            self.at(self.now + self.stage_s(0), lambda: self.call(lambda: self.put(target, row)))
        else:
            self.idle_targets.append(target)

    def put(self, target: int, row: int) -> None:
        self.core.put(target, row)
        self.lease(target)
        self.wake()

    def wake(self) -> None:
        """Whoever waits asks again, first come first served, until one has to wait on."""
        for waiting, act in ((self.idle_targets, self.lease), (self.idle_drafters, self.get)):
            for _ in range(len(waiting)):
                n = len(waiting)
                act(waiting.popleft())
                if len(waiting) == n:  # it waits again, behind the others: back to the front
                    waiting.rotate(1)
                    break

    # ---- drafters

    def ask(self, drafter: int) -> None:
        self.asked[drafter] += 1
        self.call(lambda: self.get(drafter))

    def get(self, drafter: int) -> None:
        item = self.core.get(drafter)
        if isinstance(item, RowItem):
            self.at(self.arrival(item.row_id, drafter), lambda: self.arrived(drafter, item.row_id))
        elif isinstance(item, SyncItem):
            self.asked[drafter] -= 1
            self.called[drafter] = item.round_id
            self.meet_if_done(drafter)
        elif not isinstance(item, StopItem):
            self.idle_drafters.append(drafter)

    def arrival(self, row: int, drafter: int) -> float:
        source, sink = self.where.pop(row), drafter * self.hosts // self.drafters
        if source == sink:
            return self.now
        start = max(self.now, self.out_free[source], self.in_free[sink])
        end = start + ROW_TOKENS * BYTES_A_TOKEN / (self.s.link_gbit * GBIT)
        self.out_free[source] = self.in_free[sink] = end
        return end

    def arrived(self, drafter: int, row: int) -> None:
        self.ready[drafter].append(row)
        self.begin(drafter)

    def begin(self, drafter: int) -> None:
        if self.training[drafter] or not self.ready[drafter]:
            return
        self.training[drafter] = True
        row = self.ready[drafter].popleft()
        self.at(self.now + self.stage_s(1), lambda: self.finished(drafter, row))
        if self.asked[drafter] < 2 and drafter not in self.called:
            self.ask(drafter)

    def finished(self, drafter: int, row: int) -> None:
        self.training[drafter] = False
        self.asked[drafter] -= 1
        self.trained += 1
        self.core.trained(drafter, row)  # told with the next call; its time is counted there
        self.begin(drafter)
        if drafter in self.called:
            self.meet_if_done(drafter)
        elif not self.asked[drafter]:
            self.ask(drafter)
        self.wake()

    def meet_if_done(self, drafter: int) -> None:
        if self.training[drafter] or self.ready[drafter] or self.asked[drafter]:
            return
        self.core.arrive(drafter, self.called[drafter])
        if self.core.leader is not None:
            meeting = self.core.begin_average(self.core.leader, self.core.round_id)
            self.at(self.now + self.s.averaging_s, lambda: self.commit(meeting.leader, meeting.attempt))

    def commit(self, leader: int, attempt: int) -> None:
        self.core.commit(leader, self.core.round_id, attempt)
        self.called.clear()
        for drafter in range(self.drafters):
            self.ask(drafter)
        self.wake()


def settings(row_s: tuple[float, float], call_s: float) -> list[Setting]:
    found = []
    for gpus, link, kinds in itertools.product((8, 64, 512), (25, 100, 400), (1, 3)):
        for sharded in (False, True) if gpus > GPUS_A_HOST else (False,):
            found.append(Setting(gpus, link, sharded, kinds, row_s, call_s))
    return [s for s in found if s.gpus > GPUS_A_HOST or s.link_gbit == 100]


def measured(queue_rows_per_s: float | None) -> tuple[tuple[float, float], float]:
    """Seconds of a row at both stages, and of one call to the queue."""
    capture = json.loads((RESULTS / "capture-h200.json").read_text())["results"]["draftline"]["tokens_per_s"]
    step = json.loads((RESULTS / "step-h200.json").read_text())["q8"]["step"]["draftline"]["median_s"]
    if queue_rows_per_s is None:
        queue_rows_per_s = json.loads((RESULTS / "cluster-queue.json").read_text())["saturated_rows_per_s"]
    return (ROW_TOKENS / capture, step), 1.0 / (2 * queue_rows_per_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=whole(1), default=3, help="Rounds simulated.")
    parser.add_argument("--queue-rows-per-s", type=positive, help="Of the queue actor; default: as measured.")
    parser.add_argument("--output", type=json_file)
    arguments = parser.parse_args()
    row_s, call_s = measured(arguments.queue_rows_per_s)
    print(f"a row: {row_s[0]:.3f} s to capture, {row_s[1]:.3f} s to train; a call to the queue: {1e6 * call_s:.0f} us")
    points: list[dict[str, Any]] = []
    for s in settings(row_s, call_s):
        model = by_model(s)
        shards = s.hosts if s.sharded else 1
        simulated = Simulation(s, arguments.rounds * ROUND * s.split[1] // shards).run()
        points.append({**asdict(s), "split": s.split, "model": model, "simulated_tokens_per_s": simulated})
        print(
            f"{s.gpus:4} GPUs {s.link_gbit:4} Gb/s {'queue a host' if s.sharded else 'one queue   '} "
            f"{'weights + moments' if s.kinds == 3 else 'weights only     '} "
            f"model {model['tokens_per_s'] / 1e3:7.0f} ktok/s ({model['limit']}), simulated {simulated / 1e3:7.0f}; "
            f"averaging {model['averaging_s']:6.2f} s ({model['averaging_share']:4.0%}), "
            f"rows {model['row_traffic_bytes_per_s_a_host'] / 1e9:5.2f} GB/s a host, "
            f"{model['queue_calls_per_s']:5.0f} calls/s a queue"
        )
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        report = {"environment": environment(torch.device("cpu")), "row_s": row_s, "call_s": call_s, "points": points}
        arguments.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
