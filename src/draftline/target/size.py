"""The size of a target, known without loading a weight."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from draftline.config.schema import TargetConfig
from draftline.target.facts import auto_class_name, load_hf_config

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class TargetSize:
    """Counts of elements.

    Attributes:
        parameters: of the whole model, shared weights once.
        borrowed: of what a drafter on another device needs a copy of: embedding and output head, shared once.
        active_by_layer: of each decoder layer, what one token goes through (of a mixture, the experts it is sent to).
    """

    parameters: int
    borrowed: int
    active_by_layer: tuple[int, ...] = field(default=())


def target_size(config: TargetConfig) -> TargetSize:
    """Builds the model on the meta device (shapes, no memory) and counts."""
    import torch
    import transformers

    hf_config = load_hf_config(config)
    auto_class = getattr(transformers, auto_class_name(hf_config) or "AutoModelForCausalLM")
    with torch.device("meta"):
        model = auto_class.from_config(hf_config, trust_remote_code=config.trust_remote_code)
    model.tie_weights()
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    borrowed = embedding.numel() + (0 if head is embedding else head.numel())
    text = hf_config.get_text_config(decoder=True)
    return TargetSize(sum(p.numel() for p in model.parameters()), borrowed, _active_by_layer(model.get_decoder(), text))


def _active_by_layer(decoder: Any, text: Any) -> tuple[int, ...]:
    counts = [0.0] * int(text.num_hidden_layers)
    for name, parameter in decoder.named_parameters():
        found = _LAYER.search(name)
        if found is not None and int(found[1]) < len(counts):
            share = _active_share(text) if ".experts." in name else 1.0
            counts[int(found[1])] += share * parameter.numel()
    return tuple(map(round, counts))


def _active_share(text: Any) -> float:
    """Experts of a token over experts of a layer."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((int(n) for name in names if (n := getattr(text, name, None))), 0)
    used = getattr(text, "num_experts_per_tok", None) or getattr(text, "top_k_experts", None) or experts
    return int(used) / experts if experts else 1.0
