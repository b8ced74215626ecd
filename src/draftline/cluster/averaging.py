"""What a reduction makes of the members' replicas, each member in its own process: the same formulas as on one host.

Every member ends with the same bits, because they come out of the same all-reduce, and each holds them beside its
weights until the round is committed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftline.cluster.group import ReductionGroup
from draftline.drafter.sync import JointStep, Reduced, Replica, Synchronizer, averaging_shares


@torch.no_grad()
def reduce_together(group: ReductionGroup, replica: Replica, synchronizer: Synchronizer, rate: float) -> Reduced:
    """This member's part of a reduction. Changes nothing.

    Args:
        rate: learning rate of the joint step of `gradient`.

    Raises:
        CollectiveBrokenError: it broke off; nothing is lost.
        RunFailedError: a reduced value is not finite.
    """
    if synchronizer.kind == "gradient":
        return Reduced(step=_joint_step(group, replica, rate))
    if synchronizer.kind == "copy":
        return synchronizer.of_copy(group.from_first(replica.optimizer.masters), n_present=group.size)
    return _averaged(group, replica, synchronizer)


def _joint_step(group: ReductionGroup, replica: Replica, rate: float) -> JointStep:
    if group.size == 1:
        return JointStep(rate)
    gradients = group.sum(replica.optimizer.gradients)
    (denominator,) = group.sum([replica.optimizer.denominator])
    return JointStep(rate, gradients, denominator)


def _averaged(group: ReductionGroup, replica: Replica, synchronizer: Synchronizer) -> Reduced:
    shares = averaging_shares(_tokens_of_all(group, replica))
    if shares is None:
        return Reduced()
    share = shares[group.rank]
    weights = group.sum([_share_of(master, share) for master in replica.optimizer.masters])
    moments = None
    if synchronizer.averages_moments and group.size > 1:
        moments = _averaged_moments(group, replica, share)
    return synchronizer.of_average(weights, moments)


def _tokens_of_all(group: ReductionGroup, replica: Replica) -> list[int]:
    counts = torch.zeros(group.size, dtype=torch.int64, device=group.device)
    counts[group.rank] = replica.supervised_tokens
    return [int(n) for n in group.sum([counts])[0].tolist()]


def _share_of(tensor: Tensor, share: float) -> Tensor:
    """What a member that trained nothing holds does not count, whatever it is."""
    return tensor.detach() * share if share else torch.zeros_like(tensor, requires_grad=False)


def _averaged_moments(group: ReductionGroup, replica: Replica, share: float) -> dict[str, Tensor]:
    """Moments averaged like the weights; the step count is the largest."""
    own = dict(replica.optimizer.moments())
    steps = [key for key in own if key.endswith(".step")]
    others = [key for key in own if not key.endswith(".step")]
    averaged = dict(zip(others, group.sum([_share_of(own[key], share) for key in others]), strict=True))
    return averaged | dict(zip(steps, group.max([own[key] for key in steps]), strict=True))
