"""Drafters in z-lab's checkpoint format: what `dflash`, vLLM and SGLang load, and what this project reads back.

A folder holds config.json, model.safetensors and, if we wrote it, draftline.json with the whole DrafterSpec.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from draftline.config.drafter_spec import DrafterSpec
from draftline.drafter.model import Drafter
from draftline.export.common import CARD, README, build_drafter, read_checked_spec, require_dtype, write_export
from draftline.export.files import read_weights
from draftline.export.model_card import model_card
from draftline.export.zlab_config import spec_from_config, zlab_config

__all__ = ["CARD", "export_zlab", "load_export", "read_spec"]


def export_zlab(
    drafter: Drafter,
    path: Path,
    dtype: str = "bfloat16",
    *,
    provenance: Mapping[str, Any] | None = None,
    texts: Mapping[str, str] | None = None,
) -> Path:
    """Writes `drafter` to the folder `path`, whole or not at all.

    Args:
        drafter: its spec decides the configuration.
        path: must not exist, be empty, or be an earlier export of ours (which is replaced).
        dtype: "bfloat16" (what servers load), "float32" (exact masters) or "fp8" (see `quantize.py`).
        provenance: JSON-able facts kept in draftline.json and told in README.md: target, data, run, step.
        texts: further text files of the folder, by name.

    Returns:
        `path`.

    Raises:
        UserError: a foreign folder at `path`, an unknown dtype, non-finite weights, or a spec that z-lab's class cannot
            serve as trained.
    """
    require_dtype(dtype)
    return write_export(
        drafter,
        path,
        dtype,
        form="zlab",
        config=zlab_config(drafter.spec, "bfloat16" if dtype == "fp8" else dtype),
        provenance=provenance,
        texts={
            README: model_card(drafter.spec, form="zlab", dtype=dtype, provenance=provenance or {}),
            **(texts or {}),
        },
    )


def load_export(path: Path, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> Drafter:
    """Reads a drafter in z-lab's format, ours or another's, and checks everything that could be guessed wrong.

    Args:
        path: folder with config.json and safetensors.
        device: where to put it.
        dtype: None keeps the dtype of the weights.

    Raises:
        UserError: see `spec_from_config`; missing, unexpected or misshapen weights; a card that says otherwise.
    """
    path = Path(path).expanduser()
    return build_drafter(path, read_spec(path), read_weights(path), device, dtype)


def read_spec(path: Path) -> DrafterSpec:
    """The spec of an export, from config.json alone; a draftline.json beside it must say the same."""
    return read_checked_spec(path, spec_from_config)
