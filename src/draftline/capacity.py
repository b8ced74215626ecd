"""The capacity model: what T targets and D drafters get done together. The only one: the plan, the verdicts of a
running job and the scaling study all use it. Imports no torch.

Let t and d be tokens/s of one target and one drafter that never wait.

    shared queue   X = min(T t, D d')           any drafter takes any row
    partitioned    X = sum_j min(T_j t, d')     target i feeds drafter i mod D alone, T_j targets feed drafter j

d' is d less the time of the meetings: a drafter trains R rows of n tokens in R n / d seconds, then waits w for the
others to finish the row in their hands, and a for the averaging. Stage times scatter by the factor c (standard
deviation over mean), so w = min(1/2, c sqrt(R)) (D - 1) / D rows. While drafters average, targets fill the queue, and
stop when its K rows are full.

Scatter also empties or fills a queue whose sides are equally fast. With rates l and m in rows/s, drift g = l - m and
variance v = c^2 (l + m), the queue's length is a Brownian motion between two reflecting walls, and the drafters are
idle for U = g / (exp(2 g K / v) - 1) rows/s, or v / (2 K) where g = 0 (J. M. Harrison, Brownian Motion and Stochastic
Flow Systems, 1985, chapter 5): X = n (m - U).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

Scheme = Literal["shared", "partitioned"]
FP32_BYTES = 4
_MOST_EXPONENT = 700.0  # exp of more is not a float


@dataclass(frozen=True, slots=True)
class Rates:
    """What one worker of each side does while it never waits.

    Attributes:
        target_tokens_per_s, drafter_tokens_per_s: t and d.
        jitter: c, standard deviation of a row's time over its mean.
    """

    target_tokens_per_s: float
    drafter_tokens_per_s: float
    jitter: float = 0.0


@dataclass(frozen=True, slots=True)
class Rounds:
    """What flows, and how often drafters meet.

    Attributes:
        row_tokens: n, mean tokens of a row.
        rows_per_drafter: R, rows of a drafter between two meetings.
        averaging_s: a, seconds of a meeting's work.
        queue_rows: K, rows that may wait between the sides, for all drafters together.
    """

    row_tokens: float
    rows_per_drafter: int = 50
    averaging_s: float = 0.0
    queue_rows: int = 8

    def of_one_drafter(self, drafters: int) -> Rounds:
        """The same with a queue for each drafter."""
        return replace(self, queue_rows=max(1, self.queue_rows // drafters))


@dataclass(frozen=True, slots=True)
class Expectation:
    """What T targets and D drafters are expected to do. Shares are of a worker's time, averaged over its side.

    Attributes:
        tokens_per_s: X.
        target_waiting, drafter_waiting: waiting for a slot, for a row, or for the other drafters.
        averaging: share of a drafter's time that meetings work.
    """

    targets: int
    drafters: int
    scheme: Scheme
    tokens_per_s: float
    target_waiting: float
    drafter_waiting: float
    averaging: float


def expect(rates: Rates, targets: int, drafters: int, rounds: Rounds, scheme: Scheme = "shared") -> Expectation:
    """Throughput and waiting of a split, each worker on a device of its own.

    Args:
        scheme: `partitioned` needs a target for each drafter.

    Raises:
        ValueError: no target, no drafter, or `partitioned` with fewer targets than drafters.
    """
    if targets < 1 or drafters < 1:
        raise ValueError(f"{targets} targets and {drafters} drafters: at least one of each is needed")
    if scheme == "shared":
        tokens_per_s = _flow(rates, targets, drafters, rounds, drafters)
    else:
        if targets < drafters:
            raise ValueError(f"{targets} targets cannot feed {drafters} drafters one by one")
        own = rounds.of_one_drafter(drafters)
        tokens_per_s = sum(_flow(rates, n, 1, own, drafters) for n in partition(targets, drafters))
    working = tokens_per_s / (drafters * rates.drafter_tokens_per_s)
    round_s = rounds.rows_per_drafter * drafters * rounds.row_tokens / tokens_per_s
    averaging = min(rounds.averaging_s / round_s, 1.0 - working)
    return Expectation(
        targets=targets,
        drafters=drafters,
        scheme=scheme,
        tokens_per_s=tokens_per_s,
        target_waiting=max(0.0, 1.0 - tokens_per_s / (targets * rates.target_tokens_per_s)),
        drafter_waiting=max(0.0, 1.0 - working - averaging),
        averaging=averaging,
    )


def expect_sharing(rates: Rates, rounds: Rounds) -> Expectation:
    """One target and one drafter that take turns on one device: 1 / X = 1 / t + 1 / d'."""
    supply, demand = rates.target_tokens_per_s, _with_meetings(rates, 1, rounds)
    tokens_per_s = supply * demand / (supply + demand)
    working = tokens_per_s / rates.drafter_tokens_per_s
    averaging = max(0.0, tokens_per_s / demand - working)
    return Expectation(
        targets=1,
        drafters=1,
        scheme="shared",
        tokens_per_s=tokens_per_s,
        target_waiting=1.0 - tokens_per_s / supply,
        drafter_waiting=1.0 - working - averaging,
        averaging=averaging,
    )


def partition(targets: int, drafters: int) -> list[int]:
    """T_j: how many targets feed each drafter when target i feeds drafter i mod D."""
    return [len(range(j, targets, drafters)) for j in range(drafters)]


def splits(workers: int) -> list[tuple[int, int]]:
    """All (targets, drafters) of so many workers."""
    return [(t, workers - t) for t in range(1, workers)]


def best_split(target_tokens_per_s: float, drafter_tokens_per_s: float, workers: int) -> tuple[int, int]:
    """(targets, drafters) that let most tokens through, meetings and scatter left out.

    Args:
        target_tokens_per_s, drafter_tokens_per_s: capacity of ONE worker of each side.
        workers: how many there are to share out, at least 2.
    """
    return max(splits(workers), key=lambda s: min(s[0] * target_tokens_per_s, s[1] * drafter_tokens_per_s))


def ranked_splits(rates: Rates, workers: int, rounds: Callable[[int, int], Rounds]) -> list[Expectation]:
    """What every split of so many workers (at least 2) is expected to do, the best first.

    Args:
        rounds: of (targets, drafters); averaging and the queue grow with them.
    """
    expected = [expect(rates, t, d, rounds(t, d)) for t, d in splits(workers)]
    return sorted(expected, key=lambda e: -e.tokens_per_s)


def row_traffic_bytes_per_s(tokens_per_s: float, bytes_per_token: float) -> float:
    """Bytes/s of captured states from targets to drafters on other devices."""
    return tokens_per_s * bytes_per_token


def averaging_bytes(parameters: int, drafters: int, *, with_moments: bool) -> int:
    """Bytes that one averaging moves between devices: fp32 masters, and both moments if they are averaged too, from
    every other drafter to the leader and back."""
    kinds = 3 if with_moments else 1
    return 2 * (drafters - 1) * kinds * FP32_BYTES * parameters


def _flow(rates: Rates, targets: int, drafters: int, rounds: Rounds, meeting: int) -> float:
    """Tokens/s of targets and drafters on one queue; `meeting` drafters meet in all."""
    supply, demand = targets * rates.target_tokens_per_s, drafters * _with_meetings(rates, meeting, rounds)
    supply *= 1.0 - _blocked_share(supply, demand, drafters, rounds)
    arrivals, served = supply / rounds.row_tokens, demand / rounds.row_tokens
    idle = _idle_rows_per_s(arrivals - served, rates.jitter**2 * (arrivals + served), rounds.queue_rows)
    return max(0.0, min(supply, demand, rounds.row_tokens * (served - idle)))


def _with_meetings(rates: Rates, drafters: int, rounds: Rounds) -> float:
    """d': tokens/s of a drafter, its meetings counted."""
    row_s = rounds.row_tokens / rates.drafter_tokens_per_s
    training_s = rounds.rows_per_drafter * row_s
    others_s = min(0.5, rates.jitter * math.sqrt(rounds.rows_per_drafter)) * row_s * (drafters - 1) / drafters
    return rounds.rows_per_drafter * rounds.row_tokens / (training_s + others_s + rounds.averaging_s)


def _blocked_share(supply: float, demand: float, drafters: int, rounds: Rounds) -> float:
    """Share of the time in which targets have filled the queue while the drafters average."""
    round_s = rounds.rows_per_drafter * drafters * rounds.row_tokens / min(supply, demand)
    filled_s = rounds.queue_rows * rounds.row_tokens / supply
    return max(0.0, rounds.averaging_s - filled_s) / round_s


def _idle_rows_per_s(drift: float, variance: float, queue_rows: int) -> float:
    """U: what a server loses to an empty queue; see the module's text."""
    if variance <= 0.0:
        return max(0.0, -drift)
    exponent = 2.0 * drift * queue_rows / variance
    if abs(exponent) < 1e-6:
        return variance / (2.0 * queue_rows)
    if exponent > _MOST_EXPONENT:
        return 0.0
    return drift / math.expm1(max(exponent, -_MOST_EXPONENT))
