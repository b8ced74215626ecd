"""Where a Hugging Face causal LM keeps its decoder layers and its final norm."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import nn

from draftline.errors import UserError
from draftline.target.facts import TargetFacts

_NORM_NAMES = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "final_norm", "norm_f")


def find_layers(model: Any, facts: TargetFacts) -> tuple[Any, str]:
    """The module that runs the layers, and the name it keeps them under.

    Raises:
        UserError: no list of as many layers as the configuration says.
    """
    for decoder in (model.get_decoder(), *model.modules()):
        for name in ("layers", "h", "blocks"):
            layers = getattr(decoder, name, None)
            if isinstance(layers, nn.ModuleList) and len(layers) == facts.num_layers:
                return decoder, name
    raise UserError(
        f"no list of {facts.num_layers} decoder layers found in {type(model).__name__}",
        mend="this architecture is not supported as a target",
    )


def find_norm(decoder: Any) -> str | None:
    """Attribute of the decoder that holds the final norm, or None."""
    return next((name for name in _NORM_NAMES if isinstance(getattr(decoder, name, None), nn.Module)), None)


def twin(module: nn.Module, change: Callable[[nn.Module], nn.Module]) -> Any:
    """A shallow twin of a module tree in which `change(m)` stands wherever that is not `m` itself.

    Weights and modules below which nothing changes are shared; the tree itself stays as it is. A changed module gets
    the twins of its children.
    """
    children = {name: None if child is None else twin(child, change) for name, child in module._modules.items()}
    changed = change(module)
    if changed is module and all(children[name] is child for name, child in module._modules.items()):
        return module
    result = copy.copy(module) if changed is module else changed
    result._modules = children
    return result
