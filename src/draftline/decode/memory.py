"""How much memory tensors can still be given."""

from __future__ import annotations

import psutil
import torch


def free_bytes(device: torch.device) -> int:
    """Memory that is free on a device now, with what torch's allocator keeps of tensors that are gone: the buffers of
    the method before, for example, go to the next one.
    """
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + kept
    return int(psutil.virtual_memory().available)
