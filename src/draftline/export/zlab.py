"""Drafters in z-lab's checkpoint format: what `dflash`, vLLM and SGLang load, and what this project reads back.

A folder holds config.json, model.safetensors and, if we wrote it, draftline.json with the whole DrafterSpec.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import ValidationError
from safetensors.torch import save_file

from draftline import __version__
from draftline.config.drafter_spec import DrafterSpec
from draftline.drafter.model import Drafter
from draftline.errors import UserError
from draftline.export.files import WEIGHTS, read_json, read_weights, whole_folder, write_json
from draftline.export.zlab_config import spec_from_config, zlab_config

CARD = "draftline.json"
SCHEMA_VERSION = 1
ExportDtype = Literal["bfloat16", "float32"]


def export_zlab(
    drafter: Drafter, path: Path, dtype: str = "bfloat16", *, provenance: Mapping[str, Any] | None = None
) -> Path:
    """Writes `drafter` to the folder `path`, whole or not at all.

    Args:
        drafter: its spec decides the configuration.
        path: must not exist, be empty, or be an earlier export of ours (which is replaced).
        dtype: "bfloat16" (what servers load) or "float32" (exact masters).
        provenance: JSON-able facts kept in draftline.json: target, data, run, step.

    Returns:
        `path`.

    Raises:
        UserError: a foreign folder at `path`, an unknown dtype, non-finite weights, or a spec that z-lab's class cannot
            serve as trained.
    """
    if dtype not in ("bfloat16", "float32"):
        raise UserError(f"dtype {dtype!r} cannot be exported", where="export", mend="use bfloat16 or float32")
    config = zlab_config(drafter.spec, dtype)
    weights = {
        name: tensor.detach().to("cpu", getattr(torch, dtype)).contiguous()
        for name, tensor in drafter.state_dict().items()
    }
    _refuse_non_finite(weights, "export")
    with whole_folder(Path(path), replaces=CARD) as folder:
        save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
        write_json(folder / "config.json", config)
        write_json(folder / CARD, _card(drafter.spec, dtype, provenance))
    return Path(path)


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
    spec = read_spec(path)
    weights = read_weights(path)
    try:
        with torch.device("meta"):
            expected = {name: tensor.shape for name, tensor in Drafter(spec).state_dict().items()}
    except (KeyError, TypeError, ValueError, RuntimeError, ArithmeticError) as error:
        where, reason = str(path / "config.json"), " ".join(str(error).split())[:300]
        raise UserError(
            f"describes no drafter that can be built ({reason})", where=where, mend="export again"
        ) from error
    _check_weights(weights, expected, str(path / WEIGHTS))
    drafter = Drafter(spec)
    stored = next(iter(weights.values())).dtype
    drafter.to(stored).load_state_dict(weights)
    return drafter.to(device=device, dtype=dtype or stored).eval()


def read_spec(path: Path) -> DrafterSpec:
    """The spec of an export, from config.json alone; a draftline.json beside it must say the same."""
    where = str(path / "config.json")
    try:
        spec = spec_from_config(read_json(path / "config.json"), where)
    except (TypeError, AttributeError, KeyError, ValueError, OverflowError) as error:
        raise UserError(f"holds a value of the wrong kind ({error})", where=where, mend="export again") from error
    if not (path / CARD).is_file():
        return spec
    card, where = read_json(path / CARD), str(path / CARD)
    if not isinstance(card.get("spec"), dict) or "block_layout" not in card["spec"]:
        raise UserError("spec.block_layout is missing", where=where, mend="export again; it cannot be guessed")
    try:
        recorded = DrafterSpec.model_validate(card["spec"])
    except ValidationError as error:
        raise UserError(error.errors()[0]["msg"], where=where, mend="export again") from error
    for name in DrafterSpec.model_fields:
        if not _agree(name, getattr(spec, name), getattr(recorded, name)):
            raise UserError(
                f"{name} is {getattr(recorded, name)}, but config.json says {getattr(spec, name)}",
                where=where,
                mend="one of the two was edited: restore it, or delete draftline.json if config.json is right",
            )
    return recorded


def _agree(name: str, from_config: Any, recorded: Any) -> bool:
    if name == "rope_parameters":
        return {"rope_type": "default", **from_config} == {"rope_type": "default", **recorded}
    # A window without a sliding layer means nothing and is not written to config.json.
    return from_config == recorded or (name == "sliding_window" and from_config is None)


def _card(spec: DrafterSpec, dtype: str, provenance: Mapping[str, Any] | None) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "format": "zlab",
        "draftline_version": __version__,
        "torch_version": torch.__version__,
        "dtype": dtype,
        "spec": spec.model_dump(mode="json"),
        "provenance": dict(provenance or {}),
    }


def _check_weights(weights: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Size], where: str) -> None:
    missing, unexpected = sorted(expected.keys() - weights.keys()), sorted(weights.keys() - expected.keys())
    if missing or unexpected:
        raise UserError(
            f"{len(missing)} missing weights {missing[:3]}, {len(unexpected)} unexpected {unexpected[:3]}",
            where=where,
            mend="give the weights that belong to this config.json",
        )
    for name, shape in expected.items():
        if weights[name].shape != shape:
            raise UserError(
                f"{name} has shape {tuple(weights[name].shape)}, config.json makes it {tuple(shape)}",
                where=where,
                mend="give the weights that belong to this config.json",
            )
    _refuse_non_finite(weights, where)


def _refuse_non_finite(weights: Mapping[str, torch.Tensor], where: str) -> None:
    for name, tensor in weights.items():
        if not torch.isfinite(tensor).all():
            raise UserError(f"{name} holds NaN or infinity", where=where, mend="take an earlier checkpoint")
