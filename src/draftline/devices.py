"""Names of devices, resolved and checked in one place, and their memory."""

from __future__ import annotations

from collections.abc import Sequence

from draftline.errors import UserError


def resolve_devices(names: Sequence[str]) -> list[str]:
    """Device names as users write them, as the names that torch uses.

    `auto` stands for every CUDA device, or the CPU where there is none; `cuda` for `cuda:0`. A device may be named
    several times: workers may share it. `cuda:0+cuda:1` is one worker over two devices.

    Raises:
        UserError: a device that does not exist, naming those that do.
    """
    resolved: list[str] = []
    for name in names:
        text = name.strip().lower()
        if text == "auto":
            resolved += _cuda_names() or ["cpu"]
        else:
            resolved.append("+".join(_existing("cuda:0" if t == "cuda" else t, name) for t in text.split("+")))
            if "cpu" in resolved[-1] and "cuda" in resolved[-1]:
                raise UserError(f"{name} mixes CPU and GPU", mend="spread a worker over devices of one kind")
    if not resolved:
        raise UserError("no device is named", mend=f"use {_known()}")
    return resolved


def available_devices() -> list[str]:
    """All devices of this machine, the CPU last."""
    return [*_cuda_names(), "cpu"]


def device_memory_bytes(device: str) -> tuple[int, int]:
    """(free, total) memory of a device in bytes; of the machine for the CPU."""
    if device.startswith("cuda"):
        import torch

        free, total = torch.cuda.mem_get_info(device)
        return int(free), int(total)
    import psutil

    memory = psutil.virtual_memory()
    return int(memory.available), int(memory.total)


def _existing(text: str, name: str) -> str:
    if text not in available_devices():
        raise UserError(f"device {name} does not exist", mend=f"use {_known()}")
    return text


def _known() -> str:
    return ", ".join([*available_devices(), "auto"])


def _cuda_names() -> list[str]:
    import torch

    return [f"cuda:{i}" for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
