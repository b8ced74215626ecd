"""A worker's calls to the queue actor, over a link that may break.

Calls are numbered and made one after the other; the queue does each once, however often it comes. A call that meets a
broken link is made again until the link is back, the queue is known to be dead, or the patience is over.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from draftline.cluster.messages import Call, Reply, Step
from draftline.errors import RunFailedError

FIRST_RETRY_S, LONGEST_RETRY_S = 0.1, 2.0
WAITING = frozenset({"lease_slot", "get", "await_turn", "await_checkpoint", "next_duty", "await_weights", "group_get"})


class GoneError(Exception):
    """This worker takes no part in the run any more: it was reported lost, or came too late."""


class QueueLink:
    """One worker's line to the queue. Thread-safe: calls of several threads follow one another.

    Args:
        queue: handle of the actor.
        worker: whose calls these are; unique in the run.
        patience_s: how long a link may be broken before the worker gives up.
    """

    def __init__(self, queue: Any, worker: str, patience_s: float) -> None:
        self._queue, self._worker, self._patience_s = queue, worker, patience_s
        self._number = 0
        self._lock = threading.Lock()

    def call(self, *steps: Step) -> Any:
        """Does the steps in order; the last one's value.

        Raises:
            RunFailedError: the run has failed, or the queue cannot be reached any more.
            GoneError: this worker was reported lost.
        """
        with self._lock:
            self._number += 1
            reply = self._reply(Call(self._worker, self._number, steps))
        if reply.kind == "failed":
            origin, reason = reply.value
            raise RunFailedError(reason, origin=origin)
        if reply.kind == "gone":
            raise GoneError(reply.value)
        return reply.value

    def tell(self, event: Any) -> None:
        """An event for the driver, without waiting for anything."""
        self._queue.tell.remote(event)

    def _reply(self, call: Call) -> Reply:
        import ray  # here, so that what only calls can be tested where Ray is not installed
        from ray import exceptions

        waits = call.steps[-1][0] in WAITING
        method = (self._queue.wait if waits else self._queue.ask).options(concurrency_group="wait" if waits else "ask")
        broken_since: float | None = None
        pause_s = FIRST_RETRY_S
        while True:
            try:
                return ray.get(method.remote(call))
            except exceptions.ActorUnavailableError as error:
                broken_since = broken_since or time.monotonic()
                if time.monotonic() - broken_since > self._patience_s:
                    what = f"the queue could not be reached for {self._patience_s:g} s"
                    raise RunFailedError(what, origin=self._worker) from error
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_RETRY_S)
            except exceptions.RayActorError as error:
                raise RunFailedError("the queue is gone", origin="queue") from error
