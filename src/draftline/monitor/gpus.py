"""Utilisation and memory of the GPUs of a run, asked of NVIDIA's management library where that is installed.

Read by the monitor thread, once a snapshot; a reading takes well under a millisecond a GPU. What cannot be told (no
library, no driver, a device without counters) is None, never an error: a run must not need to be watched.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from draftline.monitor.status import GpuGauge

_log = logging.getLogger(__name__)


class GpuReader:
    """Reads the GPUs named at its making.

    Args:
        uuids: torch's name of each device (`cuda:0`) -> its UUID as torch gives it, without the `GPU-` in front.
            By UUID, since a process may see fewer devices, in another order, than the library does.
    """

    def __init__(self, uuids: Mapping[str, str]) -> None:
        self._library = _library() if uuids else None
        self._handles = {name: self._handle(uuid) for name, uuid in uuids.items()}

    def read(self) -> tuple[GpuGauge, ...]:
        """One gauge a device, in the order given."""
        return tuple(self._gauge(name, handle) for name, handle in self._handles.items())

    def _handle(self, uuid: str) -> Any | None:
        if self._library is None:
            return None
        prefix = "" if uuid.startswith(("GPU-", "MIG-")) else "GPU-"
        return self._asked(self._library.nvmlDeviceGetHandleByUUID, prefix + uuid)

    def _gauge(self, name: str, handle: Any | None) -> GpuGauge:
        if self._library is None or handle is None:
            return GpuGauge(device=name)
        rates = self._asked(self._library.nvmlDeviceGetUtilizationRates, handle)
        memory = self._asked(self._library.nvmlDeviceGetMemoryInfo, handle)
        return GpuGauge(
            device=name,
            busy_share=None if rates is None else rates.gpu / 100,
            memory_used_bytes=None if memory is None else int(memory.used),
            memory_total_bytes=None if memory is None else int(memory.total),
        )

    def _asked(self, question: Any, about: Any) -> Any | None:
        assert self._library is not None
        try:
            return question(about)
        except self._library.NVMLError as error:
            _log.debug("NVML does not tell: %s", error)
            return None


def _library() -> Any | None:
    """NVML, started; None where it is not installed or there is no driver for it."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        _log.debug("NVML does not start: %s", error)
        return None
    return pynvml
