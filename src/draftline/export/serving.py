"""How each server is started with an export, and the lines that a configuration needs to train it further."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from draftline.config.dflash2 import Dflash2Config
from draftline.config.drafter_spec import DrafterSpec
from draftline.config.load import dump_config
from draftline.config.schema import DrafterConfig, SlidingWindowConfig
from draftline.export.common import ExportFormat, slides

# Tokens restored from a prefix cache were never seen by the drafter, which then drafts without their context.
_VLLM_NO_PREFIX_CACHE = "--no-enable-prefix-caching"
_SGLANG_NO_PREFIX_CACHE = "--disable-radix-cache"


def serve_commands(spec: DrafterSpec, form: ExportFormat, folder: str, target: str) -> dict[str, str]:
    """Command lines by server. None of them was run by this project's tests: no server is installed there.

    Args:
        folder: of the export, as the server will see it.
        target: hub id or folder of the target.
    """
    mixed = slides(spec) and "full_attention" in spec.layer_types
    runner = "VLLM_USE_V2_MODEL_RUNNER=1 " if mixed else ""
    told = {"method": "dflash", "model": folder, "num_speculative_tokens": spec.block_size - 1}
    speculation = shlex.quote(json.dumps(told, ensure_ascii=False))
    folder, target = shlex.quote(folder), shlex.quote(target)  # a name may be anybody's
    if form == "speculators":
        return {"vLLM": f"{runner}vllm serve {folder} {_VLLM_NO_PREFIX_CACHE}"}
    return {
        "vLLM": f"{runner}vllm serve {target} --speculative-config {speculation} {_VLLM_NO_PREFIX_CACHE}",
        "SGLang": (
            f"python -m sglang.launch_server --model-path {target} --speculative-algorithm DFLASH "
            f"--speculative-draft-model-path {folder} --speculative-num-draft-tokens {spec.block_size} "
            f"{_SGLANG_NO_PREFIX_CACHE}"
        ),
    }


def drafter_section(spec: DrafterSpec, init_from: Path) -> str:
    """YAML of the `drafter` section with which a run trains this export further."""
    sliding = None
    if slides(spec) and spec.sliding_window is not None:
        layers = tuple(i for i, kind in enumerate(spec.layer_types) if kind == "sliding_attention")
        sliding = SlidingWindowConfig(
            window_tokens=spec.sliding_window,
            layers=layers,
            in_block=spec.in_block_attention,
            origin=spec.window_origin,
        )
    names = ("num_layers", "block_size", "mask_token_id", "taps", "intermediate_size", "num_heads", "num_kv_heads")
    fields: dict[str, Any] = {name: getattr(spec, name) for name in (*names, "head_dim")}
    if spec.dflash2 is not None:
        fields |= {"kind": "dflash2", "dflash2": Dflash2Config(**spec.dflash2.model_dump())}
    config = DrafterConfig(**fields, sliding=sliding, init="checkpoint", init_from=init_from)
    lines = dump_config(config).splitlines()
    return "\n".join(["drafter:", *(f"  {line}" for line in lines)]) + "\n"
