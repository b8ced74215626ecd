"""How close the shared queue comes to its capacity: real threads, real loops, real exchange; stages that only sleep.

    python benchmarks/scaling.py --output benchmarks/results/scaling-threads.json

TargetForwardLoop, DrafterTrainLoop and RowExchange run as in a run; only the two stages are replaced by sleeps whose
length scatters (normal, `--jitter` of its mean) and the averaging by one of `--averaging-s`. t and d are rows per
second of working time of one worker, taken from each run itself, so that a busy machine slows both sides of a ratio
alike; counted are the rows between the first and the last twentieth.

Cases: five targets and three drafters at d/t = 1, 1.25, 1.67 and 2; the partitioned scheme at 1.67; targets with a
tenth to spare; one and two drafters at d/t = 1. `--target-s` and `--drafter-s` take measured stage times instead.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import threading
import time
from dataclasses import asdict, dataclass, field, replace
from typing import Any, cast

import torch

from argtypes import json_file, not_negative, positive
from draftline.capacity import Rates, Rounds, expect
from draftline.config.schema import OptimizerConfig
from draftline.drafter.loop import DrafterTrainLoop, TrainedRow
from draftline.drafter.metrics import StepStats
from draftline.drafter.schedule import LearningRate
from draftline.monitor.clock import WorkerClock
from draftline.monitor.status import WorkerStatus
from draftline.pipeline.budget import FailureBudget
from draftline.pipeline.core import CoreSettings, End, PipelineCore
from draftline.pipeline.threads import Meeting, RowExchange
from draftline.records import HiddenStateRow, PlannedRow
from draftline.target.loop import TargetForwardLoop
from measure import environment
from partitioned import PartitionedCore

NEEDED = 0.97
NEEDED_OVER_PARTITIONED = 1.12
MOST_WAITING = 0.03
ROUND = 50
EDGE = 0.05


@dataclass(frozen=True)
class Case:
    """One run. Times in seconds; `rows` in all."""

    name: str
    targets: int
    drafters: int
    target_s: float
    drafter_s: float
    rows: int
    jitter: float
    averaging_s: float
    partitioned: bool = False


class Stage:
    """Sleeps for a row's time, with scatter of its own seed."""

    def __init__(self, seconds: float, jitter: float, seed: int) -> None:
        self._seconds, self._jitter, self._random = seconds, jitter, random.Random(seed)

    def work(self) -> None:
        time.sleep(self._seconds * max(0.2, self._random.gauss(1.0, self._jitter)))


class FakeCapture(Stage):
    """Hands out the same tiny states for every row."""

    def capture(self, planned: PlannedRow, samples: object) -> HiddenStateRow:
        del samples
        self.work()
        return replace(TINY_ROW, row_id=planned.row_id)


class FakeStep(Stage):
    def forward_backward(self, row: HiddenStateRow) -> StepStats:
        del row
        self.work()
        return StepStats.of_empty_row(4, "cpu")


class FakeOptimizer:
    device = torch.device("cpu")

    def absorb(self, denominator: object) -> None:
        """Nothing to add up."""

    def step(self, rate: float) -> tuple[torch.Tensor, torch.Tensor]:
        del rate
        return torch.zeros(()), torch.zeros(())


@dataclass
class FakeReplica:
    optimizer: FakeOptimizer = field(default_factory=FakeOptimizer)
    supervised_tokens: int = 0


@dataclass(frozen=True)
class FakeMeetings:
    averaging_s: float

    def hold(self, meeting: Meeting) -> None:
        del meeting
        time.sleep(self.averaging_s)

    def take_over(self, meeting: Meeting) -> None:
        """All replicas are alike already."""


class FakeSamples:
    def sample(self, index: int) -> None:
        """The fake capture reads none."""


TINY_ROW = HiddenStateRow(
    row_id=0,
    epoch=0,
    sample_ids=("sample",),
    lengths=(1,),
    input_ids_T=torch.zeros(1, dtype=torch.int64),
    loss_mask_T=torch.ones(1, dtype=torch.bool),
    document_ids_T=torch.zeros(1, dtype=torch.int32),
    position_ids_T=torch.zeros(1, dtype=torch.int64),
    taps_TF=torch.ones(1, 1),
    final_hidden_TH=None,
    final_hidden_norm="post",
    tap_layer_ids=(0,),
)


class Book:
    """Counts trained rows and looks at all clocks when the counted stretch begins and ends."""

    def __init__(self, case: Case, clocks: dict[str, WorkerClock]) -> None:
        self._clocks = clocks
        self._lock = threading.Lock()
        self._done = 0
        self._edges = {round(case.rows * EDGE): 0, round(case.rows * (1 - EDGE)): 1}
        self.marks: dict[int, tuple[float, int, dict[str, WorkerStatus]]] = {}

    def row_trained(self, report: TrainedRow) -> None:
        del report
        with self._lock:
            self._done += 1
            edge = self._edges.get(self._done)
            if edge is not None:
                now = time.monotonic()
                self.marks[edge] = (now, self._done, {n: c.status(now, 1.0) for n, c in self._clocks.items()})

    def step_skipped(self, drafter: int, what: str) -> None:
        raise AssertionError(f"drafter {drafter} skipped {what}")


def run_case(case: Case) -> dict[str, Any]:
    names = [f"target-{i}" for i in range(case.targets)] + [f"drafter-{i}" for i in range(case.drafters)]
    clocks = {n: WorkerClock(n, "target" if n[0] == "t" else "drafter", time.monotonic) for n in names}
    book = Book(case, clocks)
    plan = [PlannedRow(i, 0, (i,), 1, 1) for i in range(case.rows)]
    settings = CoreSettings(case.targets, case.drafters, ROUND)
    core = PartitionedCore if case.partitioned else PipelineCore
    exchange: RowExchange[HiddenStateRow] = RowExchange(
        plan, [1] * case.rows, settings, stall_timeout_s=60, core_class=core
    )
    loops = [*_targets(case, exchange, clocks), *_drafters(case, exchange, clocks, book)]
    threads = [threading.Thread(target=loop.run, name=loop.name) for loop in loops]
    for thread in threads:
        thread.start()
    if exchange.wait_end() is not End.CLOSED:
        raise RuntimeError(f"{case.name}: {exchange.failure}")
    for thread in threads:
        thread.join()
    return _figures(case, settings, book)


def _targets(
    case: Case, exchange: RowExchange[HiddenStateRow], clocks: dict[str, WorkerClock]
) -> list[TargetForwardLoop]:
    samples = cast(Any, FakeSamples())
    return [
        TargetForwardLoop(
            i,
            exchange,
            samples,
            FakeCapture(case.target_s, case.jitter, seed=i),
            clocks[f"target-{i}"],
            FailureBudget(0),
        )
        for i in range(case.targets)
    ]


def _drafters(
    case: Case, exchange: RowExchange[HiddenStateRow], clocks: dict[str, WorkerClock], book: Book
) -> list[DrafterTrainLoop]:
    return [
        DrafterTrainLoop(
            i,
            exchange,
            cast(Any, FakeStep(case.drafter_s, case.jitter, seed=100 + i)),
            cast(Any, FakeReplica()),
            LearningRate(OptimizerConfig(), case.rows),
            meetings=FakeMeetings(case.averaging_s),
            log=book,
            clock=clocks[f"drafter-{i}"],
            accumulate_rows=1,
            prefetch_rows=1,
        )
        for i in range(case.drafters)
    ]


def _figures(case: Case, settings: CoreSettings, book: Book) -> dict[str, Any]:
    """Rows per second, capacity and waiting shares of the counted stretch."""
    (begin_s, first, before), (end_s, last, after) = book.marks[0], book.marks[1]
    seconds = end_s - begin_s
    rate = (last - first) / seconds
    spent = {n: _spent(before[n], after[n]) for n in before}
    t, d = (_rate([s for n, s in spent.items() if n.startswith(side)]) for side in ("target", "drafter"))
    drafters = [s for n, s in spent.items() if n.startswith("drafter")]
    targets = [s for n, s in spent.items() if n.startswith("target")]
    rounds = Rounds(1, ROUND, case.averaging_s, settings.max_rows - case.targets - case.drafters)
    scheme = "partitioned" if case.partitioned else "shared"
    expected = expect(Rates(t, d, case.jitter), case.targets, case.drafters, rounds, cast(Any, scheme))
    capacity = min(case.targets * t, case.drafters * d)
    return asdict(case) | {
        "rows_per_s": rate,
        "target_rows_per_s": t,
        "drafter_rows_per_s": d,
        "capacity_rows_per_s": capacity,
        "share_of_capacity": rate / capacity,
        "expected_rows_per_s": expected.tokens_per_s,
        "measured_to_expected": rate / expected.tokens_per_s,
        "drafter_waiting": statistics.fmean(s["waiting"] for s in drafters) / seconds,
        "target_waiting": statistics.fmean(s["waiting"] for s in targets) / seconds,
        "averaging": statistics.fmean(s["averaging"] for s in drafters) / seconds,
    }


def _spent(before: WorkerStatus, after: WorkerStatus) -> dict[str, float]:
    names = ("working", "waiting", "averaging")
    spent = {name: after.seconds.get(name, 0.0) - before.seconds.get(name, 0.0) for name in names}
    return spent | {"rows": after.rows - before.rows}


def _rate(workers: list[dict[str, float]]) -> float:
    """Rows per second of working time of one worker of a side."""
    return sum(w["rows"] for w in workers) / sum(w["working"] for w in workers)


def make_cases(arguments: argparse.Namespace) -> list[Case]:
    drafter_s, rows = arguments.drafter_s, round(3 * arguments.seconds / arguments.drafter_s)

    def case(name: str, ratio: float, drafters: int = 3, **changes: Any) -> Case:
        """`ratio` is d/t."""
        count = round(rows * min(drafters / 3, 5 / (3 * ratio)))
        target_s = ratio * drafter_s
        return Case(name, 5, drafters, target_s, drafter_s, count, arguments.jitter, arguments.averaging_s, **changes)

    if arguments.target_s:
        return [
            case("shared, given times", arguments.target_s / drafter_s),
            case("partitioned, given times", arguments.target_s / drafter_s, partitioned=True),
        ]
    cases = [case(f"shared, d/t {ratio:.3g}", ratio) for ratio in (1.0, 1.25, 5 / 3, 2.0)]
    cases += [case("partitioned, d/t 1.67", 5 / 3, partitioned=True)]
    cases += [case("shared, targets 10 % to spare", 5 / 3 / 1.1)]
    return cases + [case(f"shared, {n} drafters, d/t 1", 1.0, drafters=n) for n in (1, 2)]


def judge(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What was promised beside what was measured."""
    shared = [f for f in found.values() if not f["partitioned"] and f["drafters"] == 3]
    balanced, partitioned = found.get("shared, d/t 1.67"), found.get("partitioned, d/t 1.67")
    spare, one = found.get("shared, targets 10 % to spare"), found.get("shared, 1 drafters, d/t 1")
    judged: dict[str, Any] = {"least_share_of_capacity": min(f["share_of_capacity"] for f in shared)}
    judged["share_met"] = judged["least_share_of_capacity"] >= NEEDED
    if balanced and partitioned:
        judged["over_partitioned"] = balanced["rows_per_s"] / partitioned["rows_per_s"]
        judged["over_partitioned_met"] = judged["over_partitioned"] >= NEEDED_OVER_PARTITIONED
    if spare:
        judged["drafter_waiting_with_spare"] = spare["drafter_waiting"]
        judged["waiting_met"] = spare["drafter_waiting"] < MOST_WAITING
    if one:
        curve = {n: found[f"shared, {n} drafters, d/t 1"]["rows_per_s"] for n in (1, 2)}
        curve[3] = found["shared, d/t 1"]["rows_per_s"]
        judged["efficiency_of_drafters"] = {n: rate / n / curve[1] for n, rate in curve.items()}
    return judged


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=json_file, help="JSON file to write")
    parser.add_argument("--seconds", type=positive, default=30.0, help="of the stages' own time in a run")
    parser.add_argument("--drafter-s", type=positive, default=0.15)
    parser.add_argument("--target-s", type=positive, default=None, help="measure this pair of stage times only")
    parser.add_argument("--averaging-s", type=not_negative, default=0.02)
    parser.add_argument("--jitter", type=not_negative, default=0.1)
    arguments = parser.parse_args()
    load = os.getloadavg()
    found = {}
    for case in make_cases(arguments):
        figures = found[case.name] = run_case(case)
        print(
            f"{case.name}: {figures['rows_per_s']:.1f} rows/s, {figures['share_of_capacity']:.3f} of capacity, "
            f"{figures['measured_to_expected']:.3f} of the model; drafters wait {figures['drafter_waiting']:.1%}, "
            f"targets {figures['target_waiting']:.1%}",
            flush=True,
        )
    judged = judge(found)
    print(json.dumps(judged, indent=1))
    if arguments.output:
        about = {"load_before": load, "load_after": os.getloadavg(), "environment": environment(torch.device("cpu"))}
        result = {"judged": judged, "cases": list(found.values()), **about}
        arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
