"""Whether the model hub can be reached, found out once and quickly.

The hub's own client tries again for half a minute before it says that there is no network; a name that is no folder
and in no cache would make every command wait for that.
"""

from __future__ import annotations

import functools
import ssl
import urllib.error
import urllib.request

PROBE_S = 5.0


def hub_fault() -> str | None:
    """Why the hub cannot be reached, or None if it can be (or is not to be asked: HF_HUB_OFFLINE)."""
    from huggingface_hub import constants

    return None if constants.HF_HUB_OFFLINE else _fault_of(constants.ENDPOINT)


@functools.cache
def _fault_of(endpoint: str) -> str | None:
    """One attempt, kept for the process. Any answer at all is an answer; certificates are the client's matter."""
    request = urllib.request.Request(endpoint, method="HEAD", headers={"User-Agent": "draftline"})
    try:
        with urllib.request.urlopen(request, timeout=PROBE_S):
            return None
    except urllib.error.HTTPError:
        return None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLError):
            return None
        return str(getattr(reason, "strerror", None) or reason) or type(error).__name__
