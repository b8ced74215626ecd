"""Synchronizer: what happens when all drafters meet.

Consumes: the replicas of the drafters present, and how many supervised tokens each trained in the round.
Produces: equal weights in all replicas. Runs in the thread of the drafter that arrives last, while the others wait;
nobody touches a replica meanwhile. Everything is reduced into new tensors and checked before the first replica is
written, so a meeting interrupted by a failure can be repeated among those left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftline.config.schema import AverageSync, CopySync, GradientSync, OuterSync
from draftline.drafter.optimizer import MasterOptimizer
from draftline.errors import RunFailedError


@dataclass(slots=True)
class Replica:
    """One drafter's weights as the synchronizer sees them.

    Attributes:
        drafter: number of the drafter.
        optimizer: masters, moments, gradient sums.
        supervised_tokens: tokens trained since the last sync; the averaging weight.
    """

    drafter: int
    optimizer: MasterOptimizer
    supervised_tokens: int = 0


class Synchronizer:
    """Applies one kind of sync to the replicas present.

    Args:
        config: sync section of the configuration.
    """

    def __init__(self, config: AverageSync | CopySync | GradientSync | OuterSync) -> None:
        self._config = config
        self._outer: OuterState | None = None

    @property
    def kind(self) -> str:
        return self._config.kind

    def begin(self, replicas: Sequence[Replica]) -> None:
        """Called once before training, with equal replicas: remembers the global weights of the outer step."""
        if isinstance(self._config, OuterSync) and self._outer is None:
            masters = replicas[0].optimizer.masters
            self._outer = OuterState(
                [m.detach().clone() for m in masters], [torch.zeros_like(m, requires_grad=False) for m in masters]
            )

    @torch.no_grad()
    def run(self, present: Sequence[Replica], learning_rate: float) -> None:
        """Makes all replicas present equal.

        Args:
            present: replicas of the drafters that met, at least one.
            learning_rate: for `gradient`, the rate of the joint step.

        Raises:
            RunFailedError: a reduced value is not finite; no replica has been written then.
        """
        if isinstance(self._config, GradientSync):
            _joint_step(present, learning_rate)
        elif isinstance(self._config, CopySync):
            _copy_weights(present[0], present[1:])
        else:
            self._average(present)
        for replica in present:
            replica.supervised_tokens = 0
        for device in {r.optimizer.device for r in present if r.optimizer.device.type == "cuda"}:
            torch.cuda.synchronize(device)

    def _average(self, present: Sequence[Replica]) -> None:
        shares = averaging_shares([r.supervised_tokens for r in present])
        if shares is None:
            return
        weights = _reduce([r.optimizer.masters for r in present], shares)
        _require_finite(weights, "averaged weights")
        if isinstance(self._config, OuterSync):
            assert self._outer is not None, "begin() was not called"
            weights = self._outer.step(weights, self._config.outer_learning_rate, self._config.outer_momentum)
        moments_mode = self._config.moments if isinstance(self._config, AverageSync) else "keep"
        moments = None
        if moments_mode == "average" and len(present) > 1:
            moments = _averaged_moments(present, shares)
        for replica in present:
            for master, value in zip(replica.optimizer.masters, weights, strict=True):
                master.copy_(value)
            replica.optimizer.refresh()
            if moments is not None:
                replica.optimizer.load_moments(moments)
            elif moments_mode == "reset":
                replica.optimizer.reset_moments()

    def state(self) -> dict[str, Tensor]:
        """Tensors of the outer step for a checkpoint; empty for other kinds."""
        if self._outer is None:
            return {}
        named = {f"global.{i}": t for i, t in enumerate(self._outer.weights)}
        return named | {f"momentum.{i}": t for i, t in enumerate(self._outer.momentum)}

    @torch.no_grad()
    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Inverse of `state`, after `begin`."""
        if self._outer is None:
            return
        for i in range(len(self._outer.weights)):
            self._outer.weights[i].copy_(tensors[f"global.{i}"])
            self._outer.momentum[i].copy_(tensors[f"momentum.{i}"])


@dataclass(slots=True)
class OuterState:
    """Global weights and Nesterov momentum of the outer optimizer (DiLoCo, arXiv 2311.08105)."""

    weights: list[Tensor]
    momentum: list[Tensor]

    def step(self, averaged: Sequence[Tensor], learning_rate: float, momentum: float) -> list[Tensor]:
        """New global weights: v = mu v + d; w = w - lr (d + mu v) with d = w - averaged."""
        new = []
        for weight, velocity, mean in zip(self.weights, self.momentum, averaged, strict=True):
            delta = weight - mean.to(weight)
            velocity.mul_(momentum).add_(delta)
            weight.sub_(learning_rate * (delta + momentum * velocity))
            new.append(weight)
        return new


def averaging_shares(supervised_tokens: Sequence[int]) -> list[float] | None:
    """Share of each drafter in the average, or None if nobody trained anything."""
    total = sum(supervised_tokens)
    return [n / total for n in supervised_tokens] if total else None


def _reduce(replicas: Sequence[Sequence[Tensor]], shares: Sequence[float]) -> list[Tensor]:
    """Weighted sum over replicas, parameter by parameter, on the first replica's device, in new tensors."""
    reduced = []
    for tensors in zip(*replicas, strict=True):
        total = torch.zeros_like(tensors[0], requires_grad=False)
        for tensor, share in zip(tensors, shares, strict=True):
            if share:
                total.add_(tensor.to(total.device), alpha=share)
        reduced.append(total)
    return reduced


def _averaged_moments(present: Sequence[Replica], shares: Sequence[float]) -> dict[str, Tensor]:
    """Moments averaged like the weights; the step count is the largest (it only corrects the moments' start-up)."""
    per_replica = [dict(r.optimizer.moments()) for r in present]
    averaged = {}
    for key in per_replica[0]:
        values = [m[key] for m in per_replica]
        if key.endswith(".step"):
            averaged[key] = torch.stack([v.to(values[0].device) for v in values]).max()
        else:
            averaged[key] = _reduce([[v] for v in values], shares)[0]
    return averaged


def _joint_step(present: Sequence[Replica], learning_rate: float) -> None:
    """Sums gradients and denominators over replicas; every replica takes the same step.

    A replica that had no row gives zero numerator and zero denominator, and is none the less updated.
    """
    if len(present) > 1:
        gradients = _reduce([r.optimizer.gradients for r in present], [1.0] * len(present))
        first = present[0].optimizer.denominator
        denominator = sum((r.optimizer.denominator.to(first.device) for r in present), torch.zeros_like(first))
        for replica in present:
            for own, total in zip(replica.optimizer.gradients, gradients, strict=True):
                own.copy_(total)
            replica.optimizer.denominator.copy_(denominator)
    for replica in present:
        replica.optimizer.step(learning_rate)


def _copy_weights(source: Replica, others: Sequence[Replica]) -> None:
    _require_finite(source.optimizer.masters, f"weights of drafter {source.drafter}")
    for replica in others:
        for master, value in zip(replica.optimizer.masters, source.optimizer.masters, strict=True):
            master.copy_(value)
        replica.optimizer.refresh()


def _require_finite(tensors: Sequence[Tensor], what: str) -> None:
    finite = torch.stack([torch.isfinite(t).all() for t in tensors]).all()
    if not bool(finite):
        raise RunFailedError(f"{what} are not finite; nothing was applied", origin="synchronizer")
