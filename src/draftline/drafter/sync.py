"""Synchronizer: what happens when all drafters meet, in two halves.

reduce    the leader's thread, while the others wait and before the round is committed: consumes the replicas of the
          drafters present, and how many supervised tokens each trained in the round; produces a Reduced, all in new
          tensors. No replica and no state of the synchronizer changes.
apply     each member's own thread, after the commit: writes the Reduced into that member's replica.

So a meeting that is interrupted before its commit leaves every replica as it was and is repeated among those left; one
that was committed is what every member left applies. A member that fails while it applies is lost with its replica.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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


@dataclass(frozen=True, slots=True)
class OuterState:
    """Global weights and Nesterov momentum of the outer optimizer (DiLoCo, arXiv 2311.08105).

    Attributes:
        weights, momentum: fp32, one each in the shape of every parameter.
    """

    weights: list[Tensor]
    momentum: list[Tensor]

    def stepped(self, averaged: Sequence[Tensor], learning_rate: float, momentum: float) -> OuterState:
        """The state after one step: v = mu v + d; w = w - lr (d + mu v) with d = w - averaged. In new tensors, of
        the same shapes."""
        after = OuterState([], [])
        for weight, velocity, mean in zip(self.weights, self.momentum, averaged, strict=True):
            delta = weight - mean.to(weight)
            velocity = (velocity * momentum).add_(delta)
            after.weights.append(weight - learning_rate * (delta + momentum * velocity))
            after.momentum.append(velocity)
        return after


@dataclass(frozen=True, slots=True)
class JointStep:
    """One optimizer step that all members take: summed gradients and denominator; None: the only member's own."""

    learning_rate: float
    gradients: list[Tensor] | None = None
    denominator: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Reduced:
    """What the members of a meeting agreed on, before any of them has applied it.

    Attributes:
        weights: new masters; None: they stay.
        moments: new AdamW state by key; None: each member keeps its own, or (`resets_moments`) starts anew.
        outer: the outer optimizer's state after the meeting; None for other kinds, or if nobody trained.
        step: the step of `gradient`.
    """

    weights: list[Tensor] | None = None
    moments: dict[str, Tensor] | None = None
    resets_moments: bool = False
    outer: OuterState | None = None
    step: JointStep | None = None


class Synchronizer:
    """Holds one kind of sync.

    Args:
        config: sync section of the configuration.
    """

    def __init__(self, config: AverageSync | CopySync | GradientSync | OuterSync) -> None:
        self._config = config
        self._outer: OuterState | None = None

    @property
    def kind(self) -> str:
        """`average`, `copy`, `gradient` or `outer`."""
        return self._config.kind

    @property
    def leaves_moments_alike(self) -> bool:
        """True if all members have the same AdamW state after a meeting."""
        if isinstance(self._config, AverageSync):
            return self._config.moments != "keep"
        return isinstance(self._config, GradientSync)

    def begin(self, replicas: Sequence[Replica]) -> None:
        """Called once before training, with equal replicas: remembers the global weights of the outer step."""
        if isinstance(self._config, OuterSync) and self._outer is None:
            masters = replicas[0].optimizer.masters
            self._outer = OuterState(
                [m.detach().clone() for m in masters], [torch.zeros_like(m, requires_grad=False) for m in masters]
            )

    @torch.no_grad()
    def reduce(self, present: Sequence[Replica], learning_rate: float) -> Reduced:
        """What the replicas present shall become. Changes nothing.

        Args:
            present: replicas of the drafters that met, at least one.
            learning_rate: for `gradient`, the rate of the joint step.

        Raises:
            RunFailedError: a reduced value is not finite.
        """
        devices = {r.optimizer.device for r in present}
        _finish(devices)  # what the members launched on streams of their own
        if isinstance(self._config, GradientSync):
            reduced = Reduced(step=_joint_step(present, learning_rate))
        elif isinstance(self._config, CopySync):
            reduced = Reduced(weights=_copied_weights(present[0], n_present=len(present)))
        else:
            reduced = self._averaged(present)
        _finish(devices)
        return reduced

    @torch.no_grad()
    def apply(self, replica: Replica, reduced: Reduced) -> tuple[Tensor, Tensor] | None:
        """Writes what a committed meeting agreed on into one replica.

        Returns:
            (gradient norm, skipped) if this was an optimizer step, see `MasterOptimizer.step`; else None.
        """
        optimizer, outcome = replica.optimizer, None
        if reduced.weights is not None:
            for master, value in zip(optimizer.masters, reduced.weights, strict=True):
                master.copy_(value)
            optimizer.refresh()
        if reduced.moments is not None:
            optimizer.load_moments(reduced.moments)
        elif reduced.resets_moments:
            optimizer.reset_moments()
        if reduced.outer is not None:
            self._outer = reduced.outer  # the same for every member
        if reduced.step is not None:
            outcome = _take(optimizer, reduced.step)
        replica.supervised_tokens = 0
        _finish([optimizer.device])
        return outcome

    def run(self, present: Sequence[Replica], learning_rate: float) -> None:
        """Both halves at once, for all replicas present."""
        reduced = self.reduce(present, learning_rate)
        for replica in present:
            self.apply(replica, reduced)

    def _averaged(self, present: Sequence[Replica]) -> Reduced:
        shares = averaging_shares([r.supervised_tokens for r in present])
        if shares is None:
            return Reduced()
        weights = _weighted_sum([r.optimizer.masters for r in present], shares)
        moments = _averaged_moments(present, shares) if self.averages_moments and len(present) > 1 else None
        return self.of_average(weights, moments)

    @property
    def averages_moments(self) -> bool:
        """True if members' moments are averaged with their weights."""
        return isinstance(self._config, AverageSync) and self._config.moments == "average"

    def of_average(self, weights: list[Tensor], moments: dict[str, Tensor] | None) -> Reduced:
        """What members become whose weights (in the masters' shapes) and moments were averaged, however that was done.

        Raises:
            RunFailedError: an averaged weight is not finite.
        """
        _require_finite(weights, "averaged weights")
        if isinstance(self._config, OuterSync):
            assert self._outer is not None, "begin() was not called"
            outer = self._outer.stepped(weights, self._config.outer_learning_rate, self._config.outer_momentum)
            return Reduced(weights=outer.weights, outer=outer)
        resets = isinstance(self._config, AverageSync) and self._config.moments == "reset"
        return Reduced(weights=weights, moments=moments, resets_moments=resets)

    def of_copy(self, weights: list[Tensor], *, n_present: int) -> Reduced:
        """The same for `copy`: `weights` are a copy of the first member's. See `of_average` for shapes and errors."""
        _require_finite(weights, "weights of the first drafter")
        return Reduced(weights=weights if n_present > 1 else None)

    def state(self) -> dict[str, Tensor]:
        """`global.N` and `momentum.N` of the outer step, in the N-th parameter's shape; empty for other kinds."""
        if self._outer is None:
            return {}
        named = {f"global.{i}": t for i, t in enumerate(self._outer.weights)}
        return named | {f"momentum.{i}": t for i, t in enumerate(self._outer.momentum)}

    @torch.no_grad()
    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Inverse of `state`, after `begin`: the same names and shapes. KeyError: one is missing."""
        if self._outer is None:
            return
        for i in range(len(self._outer.weights)):
            self._outer.weights[i].copy_(tensors[f"global.{i}"])
            self._outer.momentum[i].copy_(tensors[f"momentum.{i}"])


def averaging_shares(supervised_tokens: Sequence[int]) -> list[float] | None:
    """Share of each drafter in the average, or None if nobody trained anything."""
    total = sum(supervised_tokens)
    return [n / total for n in supervised_tokens] if total else None


def _finish(devices: Iterable[torch.device]) -> None:
    """Waits until devices have done what was launched on them; nothing to wait for on the CPU."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def _weighted_sum(replicas: Sequence[Sequence[Tensor]], shares: Sequence[float]) -> list[Tensor]:
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
            averaged[key] = _weighted_sum([[v] for v in values], shares)[0]
    return averaged


def _joint_step(present: Sequence[Replica], learning_rate: float) -> JointStep:
    """Sums gradients and denominators over replicas.

    A replica that had no row gives zero numerator and zero denominator, and is none the less updated.
    """
    if len(present) == 1:
        return JointStep(learning_rate)
    gradients = _weighted_sum([r.optimizer.gradients for r in present], [1.0] * len(present))
    first = present[0].optimizer.denominator
    denominator = sum((r.optimizer.denominator.to(first.device) for r in present), torch.zeros_like(first))
    return JointStep(learning_rate, gradients, denominator)


def _take(optimizer: MasterOptimizer, step: JointStep) -> tuple[Tensor, Tensor]:
    if step.gradients is not None and step.denominator is not None:
        for own, total in zip(optimizer.gradients, step.gradients, strict=True):
            own.copy_(total)
        optimizer.denominator.copy_(step.denominator)
    return optimizer.step(step.learning_rate)


def _copied_weights(source: Replica, *, n_present: int) -> list[Tensor] | None:
    """A copy, because the source trains on as soon as the meeting is committed; None if there is nobody to give it."""
    masters = source.optimizer.masters
    _require_finite(masters, f"weights of drafter {source.drafter}")
    return [m.detach().clone() for m in masters] if n_present > 1 else None


def _require_finite(tensors: Sequence[Tensor], what: str) -> None:
    finite = torch.stack([torch.isfinite(t).all() for t in tensors]).all()
    if not bool(finite):
        raise RunFailedError(f"{what} are not finite; nothing was applied", origin="synchronizer")
