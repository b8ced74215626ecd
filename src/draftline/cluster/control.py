"""Changing a run while it goes on, from another process."""

from __future__ import annotations

import json
from pathlib import Path

from draftline.cluster.joining import NAMESPACE, connected
from draftline.cluster.messages import Scale
from draftline.errors import UserError

ADDRESS_FILE = "cluster.json"
_MOST_BYTES = 4096


def scale(run: Path, targets: int) -> None:
    """Asks a run for so many targets more, or fewer. Returns when the run has taken note of it.

    Raises:
        UserError: the folder's run is not on a cluster, or has ended.
    """
    cluster, queue = _address(run)
    with connected(cluster, store_bytes=0, cpus=1):
        import ray

        try:
            actor = ray.get_actor(queue, namespace=NAMESPACE)
        except ValueError as error:
            raise UserError("the run has ended", where=str(run), mend="resume it, then scale it") from error
        ray.get(actor.tell.remote(Scale(targets)))


def _address(run: Path) -> tuple[str, str]:
    file = run / ADDRESS_FILE
    try:
        if file.stat().st_size > _MOST_BYTES:
            raise ValueError("too large")
        content = json.loads(file.read_bytes())
        return str(content["cluster"]), str(content["queue"])
    except FileNotFoundError as error:
        mend = "give the folder of a run that `draftline train --cluster` is training now"
        raise UserError("holds no run on a cluster", where=str(run), mend=mend) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"cannot be read ({error})", where=str(file), mend="scale the run from its own host") from error
