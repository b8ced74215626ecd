"""One target replica over several local devices, `cuda:0+cuda:1`: its layers one after the other on each.

transformers and accelerate place the modules and move the states between them. Embedding, final norm and head stay on
the first device, where rows are put together and from where drafters borrow.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from torch import nn

from draftline.errors import UserError

SEPARATOR = "+"


def device_parts(place: str) -> list[str]:
    """The devices of one worker, in order."""
    return place.split(SEPARATOR)


def first_device(place: str) -> str:
    """Where a worker's rows are."""
    return device_parts(place)[0]


def require_accelerate() -> None:
    """Raises UserError where the package that moves states between devices is missing."""
    if importlib.util.find_spec("accelerate") is None:
        raise UserError(
            "a target over several devices needs accelerate",
            where="pipeline.target_devices",
            mend="pip install 'draftline[gguf]', or name one device for each worker",
        )


def device_map(model: Any, layers: list[nn.Module], parts: list[str]) -> dict[str, str]:
    """Module name -> device: layers in equal shares of bytes, everything else on the first device.

    Args:
        model: built anywhere, also on the meta device.
        layers: its decoder layers, in order.
    """
    by_layer = {id(layer): number for number, layer in enumerate(layers)}
    sizes = [sum(p.numel() * p.element_size() for p in layer.parameters()) for layer in layers]
    total, placed, before = sum(sizes), {}, 0
    for number, size in enumerate(sizes):
        middle = before + size / 2
        placed[number] = parts[min(len(parts) - 1, int(len(parts) * middle / total))]
        before += size
    found: dict[str, str] = {}
    _fill(model, "", by_layer, placed, parts[0], found)
    return found


def _fill(
    module: nn.Module, prefix: str, by_layer: dict[int, int], placed: dict[int, str], first: str, found: dict[str, str]
) -> None:
    """The coarsest names that say where everything is."""
    inside = any(id(child) in by_layer for child in module.modules())
    if id(module) in by_layer:
        found[prefix] = placed[by_layer[id(module)]]
    elif not inside:
        found[prefix] = first
    else:
        for name, child in module.named_children():
            _fill(child, f"{prefix}.{name}" if prefix else name, by_layer, placed, first, found)


def spread(model: Any, layers: list[nn.Module], parts: list[str]) -> Any:
    """Puts a loaded model on its devices, with hooks that move states from one to the next."""
    from accelerate import dispatch_model

    places = device_map(model, layers, parts)
    # Hooks also where all devices are one, so that a CPU shows what several GPUs do.
    return dispatch_model(model, places, main_device=parts[0], force_hooks=True)
