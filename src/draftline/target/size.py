"""The size of a target, known without loading a weight."""

from __future__ import annotations

from dataclasses import dataclass

from draftline.config.schema import TargetConfig
from draftline.target.facts import auto_class_name, load_hf_config


@dataclass(frozen=True, slots=True)
class TargetSize:
    """Counts of elements.

    Attributes:
        parameters: of the whole model, shared weights once.
        borrowed: of what a drafter on another device needs a copy of: embedding and output head, shared once.
    """

    parameters: int
    borrowed: int


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
    return TargetSize(sum(p.numel() for p in model.parameters()), borrowed)
