"""Unpacking of a .gguf target into a folder of safetensors: reading the file takes most of a minute each time."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path

from safetensors.torch import save_file

from draftline.config.schema import TargetConfig
from draftline.target.facts import is_gguf
from draftline.target.gguf_once import read_gguf_once
from draftline.target.load import load_target, load_tokenizer


def unpack_target(config: TargetConfig, folder: Path) -> TargetConfig:
    """Writes the target's dequantised weights (fp32), configuration and tokenizer to `folder`.

    transformers refuses to save a model that came from a quantised file, though its weights are plain by then.

    Returns:
        the configuration of the same target in its new place.
    """
    with read_gguf_once() if is_gguf(config) else nullcontext():
        tokenizer = load_tokenizer(config)
        target = load_target(config.model_copy(update={"dtype": "float32"}), "cpu", tokenizer=tokenizer)
    hf_config = copy.deepcopy(target.model.config)
    if hasattr(hf_config, "quantization_config"):
        del hf_config.quantization_config
    hf_config.architectures = [type(target.model).__name__]  # a .gguf file does not tell; servers load by it
    hf_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if target.model.generation_config is not None:
        target.model.generation_config.save_pretrained(folder)
    unique = {value.data_ptr(): name for name, value in reversed(target.model.state_dict().items())}
    kept = set(unique.values())  # a tied head is kept once, under the embedding's name
    weights = {name: value.contiguous() for name, value in target.model.state_dict().items() if name in kept}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return config.model_copy(update={"model": str(folder)})
