"""The simulator: drives the pure core through random schedules, and through all schedules of small cases.

    python -m draftline.pipeline.core.simulate --schedules 100000 --seed 0

prints a JSON summary; it exits 1 at the first broken promise, with what to type to see that schedule again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from draftline.pipeline.core.items import End, ProtocolError
from draftline.pipeline.core.simstate import fingerprint, fork
from draftline.pipeline.core.simworkers import STUCK, At, SimDrafter
from draftline.pipeline.core.simworld import BrokenPromiseError, Case, Fault, World

MakeWorld = Callable[[Case], World]
BROKEN = (BrokenPromiseError, ProtocolError)
FAULT_CODE = 1000
PATIENCE = 6  # steps that a fault waits for its chance (a row in hand, for example)
MOST_STEPS = 400  # several times what the largest case needs: whoever runs longer goes round in circles


@dataclass
class Summary:
    """What was covered. `violation` tells what broke and how to see it again."""

    schedules: int = 0
    distinct: int = 0
    ends: dict[str, int] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)
    longest: int = 0
    violation: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Explored:
    """All schedules of one case: distinct states, and the number of paths through them from start to end."""

    states: int
    schedules: int
    ends: dict[str, int]


def no_way_on(where: list[At], n_steps: int) -> str:
    """For people: deadlock or livelock, and where each worker stands."""
    names = ", ".join(at.name.lower() for at in where)
    return f"{'livelock' if n_steps > MOST_STEPS else 'deadlock'} after {n_steps} steps, workers at {names}"


# ---- random schedules


def draw_case(rng: random.Random) -> Case:
    """A small case; small ones meet each other's edges most often."""
    draw = rng.random
    return Case(
        n_targets=1 + int(3 * draw() ** 1.5),
        n_drafters=1 + int(draw() * 3),
        n_rows=1 + int(6 * draw() ** 2),
        rows_per_drafter=1 + int(draw() * 3),
        prefetch_rows=int(draw() * 2),
        tight=draw() < 0.5,
        byte_bound=draw() < 0.3,
        ordered=draw() < 0.3,
        max_set_aside=int(draw() * 3) * 2,
    )


def draw_faults(rng: random.Random, case: Case) -> list[tuple[int, Fault, int]]:
    """Faults as (step, kind, worker), the first one last; half of all schedules have none."""
    faults: list[tuple[int, Fault, int]] = []
    for _ in range(max(0, int(rng.random() * 6) - 2)):
        fault = Fault(min(int(rng.random() * 10), Fault.STOP if rng.random() < 0.8 else Fault.FAIL))
        n_workers = case.n_targets if fault <= Fault.TARGET_BLAMES else case.n_drafters
        blames = fault in (Fault.TARGET_BLAMES, Fault.DRAFTER_BLAMES)  # it takes two to set a row aside
        step, index = int(rng.random() * (4 + 5 * case.n_rows)), int(rng.random() * n_workers)
        faults += [(step, fault, index)] * (2 if blames else 1)
    return sorted(faults, reverse=True)


class RandomRun:
    """One random schedule. Half of them follow priorities, so that some workers are far ahead of others."""

    def __init__(self, rng: random.Random, make_world: MakeWorld) -> None:
        self.rng = rng
        self.case = draw_case(rng)
        self.faults = draw_faults(rng, self.case)
        self.world = make_world(self.case)
        self.trace: list[int] = []
        self.order = list(range(len(self.world.workers)))  # by priority
        self.favour = 0.8 if rng.random() < 0.5 else 0.0  # how often the first in order goes first
        rng.shuffle(self.order)

    def run(self) -> End:
        """Run to the end.

        Raises:
            BrokenPromiseError, ProtocolError: a promise was broken.
        """
        world, trace, workers, draw, favour = self.world, self.trace, self.world.workers, self.rng.random, self.favour
        active = self.order
        ready = active.copy()
        next_fault = self.faults[-1][0] if self.faults else sys.maxsize
        while active:
            if len(trace) >= next_fault:
                next_fault = self._fault()
                active = [code for code in active if workers[code].at is not At.OVER]
                ready = active.copy()
                continue
            if not ready or len(trace) > MOST_STEPS:
                raise BrokenPromiseError(no_way_on([workers[code].at for code in active], len(trace)))
            drawn = draw()
            at = 0 if drawn < favour else int(draw() * len(ready))
            code = ready[at]
            worker = workers[code]
            action = worker.step(world, draw())
            if action == STUCK:
                del ready[at]
                continue
            trace.append(code * 4 + action)
            world.check()
            if worker.at is At.OVER:
                active.remove(code)
            ready = active.copy()
        return world.check_end()

    def _fault(self) -> int:
        """Apply the next fault, or try again a step later; returns the step at which to come back."""
        step, fault, index = self.faults[-1]
        now = len(self.trace)
        if self.world.apply(fault, index):
            self.trace.append(FAULT_CODE + fault * 8 + index)
            self.world.check()
        elif now < step + PATIENCE:
            return now + 1
        self.faults.pop()
        return self.faults[-1][0] if self.faults else sys.maxsize


def run_one(seed: int, index: int, make_world: MakeWorld = World) -> RandomRun:
    """The schedule number `index` of a seed, not yet run."""
    return RandomRun(random.Random(seed * 1_000_003 + index), make_world)


def run_random(schedules: int, seed: int, make_world: MakeWorld = World) -> Summary:
    """Run random schedules until `schedules` distinct ones are done; stops at the first violation."""
    summary, seen = Summary(), set[int]()
    ends, faults = Counter[str](), Counter[str]()
    for index in itertools.count():
        if len(seen) >= schedules:
            break
        run = run_one(seed, index, make_world)
        try:
            end = run.run()
        except BROKEN as error:
            summary.violation = {
                "what": f"{type(error).__name__}: {error}",
                "case": asdict(run.case),
                "trace": run.trace,
                "replay": f"python -m draftline.pipeline.core.simulate --replay {seed}:{index}",
            }
            break
        seen.add(hash((run.case, *run.trace)))
        summary.schedules += 1
        ends[end.value] += 1
        summary.longest = max(summary.longest, len(run.trace))
        for code in run.trace:
            if code >= FAULT_CODE:
                faults[Fault((code - FAULT_CODE) // 8).name.lower()] += 1
    summary.distinct, summary.ends, summary.faults = len(seen), dict(ends), dict(faults)
    return summary


# ---- all schedules of a small case


class Explorer:
    """Depth-first search over all schedules of a case, each state once."""

    def __init__(self, make_world: MakeWorld = World) -> None:
        self.make_world = make_world
        self.paths: dict[Any, int] = {}
        self.ends: Counter[str] = Counter()

    def explore(self, case: Case, n_faults: int) -> Explored:
        """Every interleaving of a case, with every fault at every step, up to `n_faults` of them.

        Raises:
            BrokenPromiseError, ProtocolError: a promise was broken.
        """
        self.paths.clear()
        self.ends.clear()
        schedules = self._visit(self.make_world(case), n_faults, 0)
        return Explored(len(self.paths), schedules, dict(self.ends))

    def _visit(self, world: World, n_faults: int, depth: int) -> int:
        key = (n_faults, fingerprint(world))
        if (known := self.paths.get(key)) is not None:
            return known
        world.check()
        moves = list(self._moves(world))
        if not moves or depth > MOST_STEPS:
            if active := world.active():
                raise BrokenPromiseError(no_way_on([world.workers[code].at for code in active], depth))
            self.ends[world.check_end().value] += 1
        faults = self._faults(world) if n_faults else ()
        paths = sum(self._visit(after, n_faults, depth + 1) for after in moves)
        paths += sum(self._visit(after, n_faults - 1, depth + 1) for after in faults)
        self.paths[key] = max(paths, 1)
        return self.paths[key]

    @staticmethod
    def _moves(world: World) -> Iterator[World]:
        for code in world.active():
            worker = world.workers[code]
            draws = (0.0, 1.0) if isinstance(worker, SimDrafter) and worker.can_choose(world) else (0.0,)
            for draw in draws:
                after = fork(world)
                if after.workers[code].step(after, draw) != STUCK:
                    yield after

    @staticmethod
    def _faults(world: World) -> Iterator[World]:
        for fault in Fault:
            if fault >= Fault.STOP:
                n_workers = 1
            else:
                n_workers = world.case.n_targets if fault <= Fault.TARGET_BLAMES else world.case.n_drafters
            for index in range(n_workers):
                after = fork(world)
                if after.apply(fault, index):
                    yield after


# ---- command


def replay(seed: int, index: int) -> int:
    """Run one schedule again and print it step by step."""
    run = run_one(seed, index)
    print(run.case, [(at, fault.name, worker) for at, fault, worker in reversed(run.faults)])
    try:
        print(run.run())
    except BROKEN as error:
        print(f"{type(error).__name__}: {error}")
        return 1
    finally:
        print(run.trace)
    return 0


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="simulate", description="Simulate the pipeline's core.")
    parser.add_argument("--schedules", type=int, default=100_000, help="distinct random schedules")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--replay", metavar="SEED:INDEX", help="run one schedule again")
    options = parser.parse_args(arguments)
    if options.replay:
        seed, index = map(int, options.replay.split(":"))
        return replay(seed, index)
    started = time.perf_counter()
    summary = run_random(options.schedules, options.seed)
    figures = asdict(summary) | {"seed": options.seed, "elapsed_s": round(time.perf_counter() - started, 2)}
    print(json.dumps(figures, indent=2))
    return 1 if summary.violation else 0


if __name__ == "__main__":
    sys.exit(main())
