"""Ray's object store behind the transport's interface, and what Ray's errors mean here."""

from __future__ import annotations

from typing import Any

import ray
from ray import exceptions

from draftline.cluster.transport import RowLostError
from draftline.errors import RunFailedError

GET_TIMEOUT_S = 120.0


class ObjectStore:
    """Put and get by reference; arrays come back as read-only views of shared memory."""

    def put(self, value: Any) -> Any:
        """See `transport.Store`.

        Raises:
            RunFailedError: the object store is full: it was sized for all admitted rows, so something else fills it.
        """
        try:
            return ray.put(value)
        except exceptions.ObjectStoreFullError as error:
            raise RunFailedError(
                "the object store is full; give Ray more with --object-store-memory", origin="row transport"
            ) from error

    def get(self, ref: Any) -> Any:
        """See `transport.Store`."""
        try:
            return ray.get(ref, timeout=GET_TIMEOUT_S)
        except (exceptions.ObjectLostError, exceptions.GetTimeoutError) as error:
            raise RowLostError(str(error).splitlines()[0]) from error


class DirectStore:
    """The same for tensors that stay on their device and travel by NIXL."""

    def put(self, value: Any) -> Any:
        """See `transport.Store`."""
        return ray.put(value, _tensor_transport="nixl")

    def get(self, ref: Any) -> Any:
        """See `transport.Store`."""
        return ObjectStore().get(ref)
