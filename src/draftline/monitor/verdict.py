"""Why a run is as fast as it is, in words; splits come from the one capacity model (capacity.py).

Order of judgement: what stops everything (dead, stuck, compiling, stalled), then what the workers really waited for,
and, where nothing has been observed yet, the capacities alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean, median

from draftline.capacity import best_split
from draftline.monitor.status import Capacities, Cause, QueueGauge, Verdict, Wait, WorkerStatus

# A side that waits less than this share of its time is not held up: sampling noise and hand-over alone reach a few %.
WAITING_SHARE = 0.10
OVERHEAD_SHARE = 0.25
# Below this share of its peers' speed a target is called slow; above it ordinary spread between devices.
SLOW_SHARE = 0.6
# A first compile takes seconds on any machine; only a longer one needs to be explained.
LONG_COMPILE_S = 10.0
# A row that takes this many times its usual time is stuck, if it also lasted `stall_after_s`.
STUCK_FACTOR = 10.0
_OVERHEADS = {
    "averaging": "raise sync.every_rows",
    "checkpointing": "raise checkpoint.every_rounds",
    "validating": "validate on fewer rows",
}


def bottleneck(
    capacities: Capacities,
    workers: Sequence[WorkerStatus] = (),
    queue: QueueGauge | None = None,
    *,
    stall_after_s: float = 60.0,
) -> Verdict:
    """Name what limits the run and the split of workers that would balance it.

    Args:
        capacities: tokens per second of working time of each side.
        workers: what the workers are doing and waited for; empty when planning.
        queue: rows waiting, named when nothing moves.
        stall_after_s: how long everything must have stood still to be called stalled.
    """
    if not workers:
        return _by_capacity(capacities)
    if all(w.state == "ended" for w in workers):
        return _all_ended(capacities)
    running = [w for w in workers if w.state == "running"]
    return (
        _dead(workers)
        or _without_drafters(workers, running)
        or _compiling(running)
        or _stuck(running, stall_after_s)
        or _stalled(running, queue, stall_after_s)
        or _starting(running, stall_after_s)
        or _by_waiting(running, capacities)
    )


def rate(tokens_per_s: float | None) -> str:
    """`41.2 ktok/s`, `950 tok/s`, `? tok/s`, `3.1 Mtok/s`."""
    if tokens_per_s is None:
        return "? tok/s"
    value, unit = tokens_per_s, ""
    for larger in ("k", "M", "G"):
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    return f"{value:.{1 if unit and value < 99.95 else 0}f} {unit}tok/s"


def count(number: int, noun: str) -> str:
    """`1 row`, `2 rows`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _dead(workers: Sequence[WorkerStatus]) -> Verdict | None:
    dead = [w for w in workers if w.state == "failed"]
    if not dead:
        return None
    first = dead[0]
    left = sum(w.state == "running" and w.role == first.role for w in workers)
    others = (
        f"{count(left, first.role)} {'carries' if left == 1 else 'carry'} on" if left else f"no {first.role} is left"
    )
    reason = f" ({first.reason})" if first.reason else ""
    names = ", ".join(w.name for w in dead)
    return Verdict(cause="dead_worker", sentence=f"{names} {'is' if len(dead) == 1 else 'are'} dead{reason}; {others}")


def _without_drafters(workers: Sequence[WorkerStatus], running: Sequence[WorkerStatus]) -> Verdict | None:
    """A run that ends: whoever is still at something does it for nobody."""
    if any(w.role == "drafter" for w in running) or not any(w.role == "drafter" for w in workers):
        return None
    left = ", ".join(f"{w.name} ({w.activity or 'idle'} {w.what}".rstrip() + ")" for w in running)
    return Verdict(cause="ended", sentence=f"all drafters have ended; still there: {left}")


def _compiling(workers: Sequence[WorkerStatus]) -> Verdict | None:
    compiling = [w for w in workers if w.activity == "compiling" and w.since_s >= LONG_COMPILE_S]
    if not compiling:
        return None
    longest = max(compiling, key=lambda w: w.since_s)
    what = f" {longest.what}" if longest.what else ""
    sentence = f"{longest.name} has been compiling{what} for {longest.since_s:.0f} s; the others wait for it"
    return Verdict(cause="compiling", sentence=sentence)


def _stuck(workers: Sequence[WorkerStatus], stall_after_s: float) -> Verdict | None:
    for worker in workers:
        peers = (w.row_s for w in workers if w.role == worker.role and w.row_s is not None)
        usual = worker.row_s if worker.row_s is not None else max(peers, default=None)
        if worker.activity != "working" or usual is None:
            continue
        if worker.since_s >= max(stall_after_s, STUCK_FACTOR * usual):
            sentence = (
                f"{worker.name} is stuck: working on {worker.what or 'a row'} for {worker.since_s:.0f} s, "
                f"a row usually takes {'it' if worker.row_s is not None else f'a {worker.role}'} {usual:.2g} s"
            )
            return Verdict(cause="stuck_worker", sentence=sentence)
    return None


def _stalled(workers: Sequence[WorkerStatus], queue: QueueGauge | None, stall_after_s: float) -> Verdict | None:
    waiting = [w for w in workers if w.activity == "waiting" and w.what != Wait.END]
    still = min((w.since_s for w in waiting), default=0.0)
    if not waiting or len(waiting) < len(workers) or still < stall_after_s:
        return None
    each = ", ".join(f"{w.name} waits for {w.what}" for w in waiting)
    holds = f"; the queue holds {count(queue.rows, 'row')}" if queue else ""
    return Verdict(cause="stalled", sentence=f"stalled: nothing has moved for {still:.0f} s: {each}{holds}")


def _starting(workers: Sequence[WorkerStatus], stall_after_s: float) -> Verdict | None:
    """Nobody knows yet how long a row takes: whoever has been at something for long is named, but not called stuck."""
    if any(w.role == "drafter" and w.rows for w in workers) or not any(w.role == "drafter" for w in workers):
        return None
    at_it = [w for w in workers if w.activity not in (None, "waiting") and w.since_s >= stall_after_s]
    told = "".join(f"; {w.name} has been {w.activity} {w.what}".rstrip() + f" for {w.since_s:.0f} s" for w in at_it[:3])
    return Verdict(cause="starting", sentence=f"starting: no row has been trained yet{told}")


def _by_waiting(workers: Sequence[WorkerStatus], capacities: Capacities) -> Verdict:
    targets = [w for w in workers if w.role == "target"]
    drafters = [w for w in workers if w.role == "drafter"]
    starved = _mean(w.wait_shares.get(Wait.ROW, 0.0) for w in drafters)
    blocked = _mean(w.wait_shares.get(Wait.SLOT, 0.0) for w in targets)
    loading = _mean(w.wait_shares.get(Wait.SAMPLES, 0.0) for w in targets)
    overhead, share = _overhead(drafters)
    if share >= OVERHEAD_SHARE and share > starved:
        sentence = f"{overhead} takes {share:.0%} of the drafters' time; {_OVERHEADS[overhead]}"
        return Verdict(cause="overhead", sentence=sentence, split=_split(capacities))
    if starved >= WAITING_SHARE and starved >= blocked:
        working = _mean(w.shares.get("working", 0.0) for w in targets)
        if loading >= WAITING_SHARE and (loading >= working or _targets_suffice(capacities)):
            return _slow_data(capacities, loading)
        return _slow_target(targets) or _unbalanced("starved_drafters", capacities)
    if blocked >= WAITING_SHARE:
        return _unbalanced("drafter_bound", capacities)
    sentence = f"balanced: no side waits for the other more than {WAITING_SHARE:.0%} of its time"
    return Verdict(cause="balanced", sentence=sentence, split=_split(capacities))


def _targets_suffice(c: Capacities) -> bool:
    """Without any waiting for samples the targets would keep the drafters busy."""
    supply, demand = c.target_tokens_per_s, c.drafter_tokens_per_s
    return supply is not None and demand is not None and supply >= (1 - WAITING_SHARE) * demand


def _overhead(drafters: Sequence[WorkerStatus]) -> tuple[str, float]:
    shares = {name: _mean(w.shares.get(name, 0.0) for w in drafters) for name in _OVERHEADS}
    shares["averaging"] += _mean(w.wait_shares.get(Wait.MEETING, 0.0) for w in drafters)
    name = max(shares, key=shares.__getitem__)
    return name, shares[name]


def _slow_data(capacities: Capacities, loading: float) -> Verdict:
    able = f", which could deliver {rate(capacities.target_tokens_per_s)}" if capacities.target_tokens_per_s else ""
    sentence = (
        f"data loading is the limit: the targets wait for samples {loading:.0%} of their time{able}; "
        "put the prepared data on a faster disk"
    )
    return Verdict(cause="slow_data", sentence=sentence, split=_split(capacities))


def _slow_target(targets: Sequence[WorkerStatus]) -> Verdict | None:
    speeds = {w.name: w.tokens_per_s for w in targets if w.tokens_per_s}
    if len(speeds) < 2:
        return None
    slowest = min(speeds, key=speeds.__getitem__)
    usual = median(s for name, s in speeds.items() if name != slowest)
    if speeds[slowest] >= SLOW_SHARE * usual:
        return None
    sentence = (
        f"drafters are starved: {slowest} delivers {rate(speeds[slowest])}, the other targets {rate(usual)} each; "
        "look for another process or a slower device there"
    )
    return Verdict(cause="slow_target", sentence=sentence)


def _all_ended(capacities: Capacities) -> Verdict:
    """Of a finished run its speeds still tell what limited it."""
    limit = _by_capacity(capacities)
    told = "" if limit.cause == "starting" else f"; by their speeds, {limit.sentence}"
    return Verdict(cause="ended", sentence=f"all workers have ended{told}", split=limit.split)


def _by_capacity(capacities: Capacities) -> Verdict:
    supply, demand = capacities.target_tokens_per_s, capacities.drafter_tokens_per_s
    if supply is None or demand is None:
        return Verdict(cause="starting", sentence="starting: speeds are not known yet")
    if supply < (1 - WAITING_SHARE) * demand:
        return _unbalanced("starved_drafters", capacities)
    if demand < (1 - WAITING_SHARE) * supply:
        return _unbalanced("drafter_bound", capacities)
    sentence = f"balanced: targets deliver {rate(supply)}, drafters take {rate(demand)}"
    return Verdict(cause="balanced", sentence=sentence, split=_split(capacities))


def _unbalanced(cause: Cause, c: Capacities) -> Verdict:
    targets, drafters = count(c.targets, "target"), count(c.drafters, "drafter")
    deliver, take = rate(c.target_tokens_per_s), rate(c.drafter_tokens_per_s)
    split = _split(c)
    better = split is not None and split != (c.targets, c.drafters)
    if _contradicts(cause, c):
        return _uneven(cause, c, split)
    if cause == "starved_drafters":
        why = f"drafters are starved: {targets} can deliver {deliver}, {drafters} could take {take}"
        mend = "add a target or use the idle time with more objective.anchors"
    else:
        why = f"targets wait: drafters are the limit: {drafters} can take {take}, {targets} could deliver {deliver}"
        mend = "add a drafter or lower objective.anchors"
    if better and split is not None:
        mend += f"; of {c.targets + c.drafters} workers {split[0]}:{split[1]} (targets:drafters) would balance best"
    return Verdict(cause=cause, sentence=f"{why}; {mend}", split=split)


def _contradicts(cause: Cause, c: Capacities) -> bool:
    """The side that waits is the slower one: it is not the other's speed that it waits for."""
    if c.target_tokens_per_s is None or c.drafter_tokens_per_s is None:
        return False
    surplus = c.target_tokens_per_s - c.drafter_tokens_per_s
    return surplus > 0 if cause == "starved_drafters" else surplus < 0


def _uneven(cause: Cause, c: Capacities, split: tuple[int, int] | None) -> Verdict:
    able = f"targets can deliver {rate(c.target_tokens_per_s)} and drafters take {rate(c.drafter_tokens_per_s)}"
    if cause == "starved_drafters":
        sentence = f"drafters wait for rows although {able}: rows come unevenly; raise pipeline.hs_queue_depth"
    else:
        mend = "raise pipeline.hs_queue_depth or sync.every_rows"
        sentence = f"targets wait although {able}: rows are taken unevenly, as around meetings; {mend}"
    return Verdict(cause=cause, sentence=sentence, split=split)


def _split(c: Capacities) -> tuple[int, int] | None:
    if not c.targets or not c.drafters or not c.target_tokens_per_s or not c.drafter_tokens_per_s:
        return None
    per_target, per_drafter = c.target_tokens_per_s / c.targets, c.drafter_tokens_per_s / c.drafters
    return best_split(per_target, per_drafter, c.targets + c.drafters)


def _mean(shares: Iterable[float]) -> float:
    values = list(shares)
    return fmean(values) if values else 0.0
