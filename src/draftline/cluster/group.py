"""A torch.distributed group of the members of one reduction, made anew for each attempt.

Members find each other through the queue actor, so that no port of ours listens for rendezvous and a reduction that
became void (a member was lost) wakes everybody at once. Gloo on the CPU, NCCL where the weights are on GPUs. A peer
that dies breaks its connections, a host that only fell silent is waited for until the timeout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

BUCKET_BYTES = 256 << 20


class CollectiveBrokenError(Exception):
    """A reduction broke off: a member is gone or a link is."""


class QueueStore(dist.Store):
    """Where members of one attempt find each other: keys and values kept by the queue actor.

    Args:
        set_key, get_key, has_keys: of this attempt; `get_key` waits, and gives None once the attempt is void.
    """

    def __init__(
        self,
        set_key: Callable[[str, bytes], None],
        get_key: Callable[[str], bytes | None],
        has_keys: Callable[[Sequence[str]], bool],
    ) -> None:
        super().__init__()
        self._set, self._get, self._has = set_key, get_key, has_keys

    def set(self, key: str, value: bytes | str) -> None:
        """See torch.distributed.Store."""
        self._set(key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        """Waits for the key. Raises CollectiveBrokenError once nobody will set it."""
        value = self._get(key)
        if value is None:
            raise CollectiveBrokenError("the reduction became void while its members were looking for each other")
        return value

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Waits for all keys; the queue's own deadlines count, not `timeout`."""
        del timeout
        for key in keys:
            self.get(key)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there."""
        return self._has(list(keys))

    def clone(self) -> QueueStore:
        """The same store."""
        return QueueStore(self._set, self._get, self._has)


class ReductionGroup:
    """Members of one attempt. Every method is collective and raises CollectiveBrokenError if it broke off.

    Args:
        store: shared by the members.
        rank, size: of this member.
        device: of the tensors; its kind chooses Gloo or NCCL.
        timeout_s: how long a silent member is waited for.
        address: of this host, by which others reach it.
    """

    def __init__(
        self, store: dist.Store, rank: int, size: int, device: torch.device, timeout_s: float, address: str
    ) -> None:
        self.rank, self.size, self.device = rank, size, device
        self._group: Any = None
        if size > 1:
            make = _nccl if device.type == "cuda" else _gloo
            self._group = _guarded(lambda: make(store, rank, size, timeout_s, address))

    def sum(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Sums over the members, in new tensors of the same shapes; the same bits on every member."""
        return self._in_buckets(tensors, dist.ReduceOp.SUM)

    def max(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Largest values over the members, in new tensors of the same shapes."""
        return self._in_buckets(tensors, dist.ReduceOp.MAX)

    def from_first(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The first member's values, in new tensors of the same shapes."""
        mine = tensors if self.rank == 0 else [torch.zeros_like(t, requires_grad=False) for t in tensors]
        return self.sum(mine)

    def close(self) -> None:
        """Lets the connections go; a NCCL group is aborted, for a member of it may be gone."""
        group, self._group = self._group, None
        if group is not None and self.device.type == "cuda":
            group.abort()

    def _in_buckets(self, tensors: Sequence[Tensor], operation: Any) -> list[Tensor]:
        found: list[Tensor] = []
        for bucket in _buckets(tensors):
            flat = torch.cat([t.detach().reshape(-1) for t in bucket])
            self._all_reduce(flat, operation)
            sizes = [t.numel() for t in bucket]
            found += [part.view(t.shape) for part, t in zip(flat.split(sizes), bucket, strict=True)]
        return found

    def _all_reduce(self, flat: Tensor, operation: Any) -> None:
        if self._group is None:
            return
        options = dist.AllreduceOptions()
        options.reduceOp = operation

        def act() -> None:
            self._group.allreduce([flat], options).wait()
            if flat.device.type == "cuda":
                torch.cuda.current_stream(flat.device).synchronize()

        _guarded(act)


def _buckets(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Neighbours of one dtype, together at most BUCKET_BYTES (or one tensor)."""
    buckets: list[list[Tensor]] = []
    room = 0
    for tensor in tensors:
        n_bytes = tensor.numel() * tensor.element_size()
        if not buckets or n_bytes > room or buckets[-1][0].dtype != tensor.dtype:
            buckets.append([])
            room = BUCKET_BYTES
        buckets[-1].append(tensor)
        room -= n_bytes
    return buckets


def _guarded(act: Callable[[], Any]) -> Any:
    try:
        return act()
    except RuntimeError as error:
        raise CollectiveBrokenError(str(error).splitlines()[0]) from error


def _gloo(store: dist.Store, rank: int, size: int, timeout_s: float, address: str) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=timeout_s)
    options._devices = [gloo.create_device(hostname=address)]
    return gloo(store, rank, size, options)


def _nccl(store: dist.Store, rank: int, size: int, timeout_s: float, address: str) -> Any:
    del address  # NCCL finds its interfaces itself
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    return dist.ProcessGroupNCCL(store, rank, size, options)
