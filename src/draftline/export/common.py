"""What all export formats share: the card with the whole DrafterSpec, and weights checked on the way in and out.

A folder of ours holds config.json, model.safetensors, draftline.json (the spec and where the drafter came from) and
README.md (the model card). draftline.json is for us alone: servers never read it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from pydantic import ValidationError
from safetensors.torch import save_file

from draftline import __version__
from draftline.config.drafter_spec import DrafterSpec
from draftline.drafter.model import Drafter
from draftline.errors import UserError
from draftline.export.card_facts import checked_facts
from draftline.export.files import WEIGHTS, read_json, whole_folder, write_json
from draftline.export.quantize import quantization_config, quantize_weights, unquantized

CARD = "draftline.json"
README = "README.md"
SCHEMA_VERSION = 1
_MOST_TOLD = 64
ExportDtype = Literal["bfloat16", "float32", "fp8"]
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_CODEBOOKS = ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook")
ExportFormat = Literal["zlab", "speculators"]
ReadSpec = Callable[[Mapping[str, Any], str], DrafterSpec]


def write_export(
    drafter: Drafter,
    path: Path,
    dtype: str,
    *,
    form: ExportFormat,
    config: Mapping[str, Any],
    provenance: Mapping[str, Any] | None,
    texts: Mapping[str, str],
    borrowed: Mapping[str, torch.Tensor] | None = None,
) -> Path:
    """Writes config.json, weights, draftline.json and the files in `texts` to `path`, whole or not at all.

    Args:
        borrowed: further tensors, of any shapes, that the format wants beside the drafter's own, such as rows of the
            target's head.

    Raises:
        UserError: a foreign folder at `path`, or non-finite weights.
    """
    stored = torch.float32 if dtype == "float32" else torch.bfloat16
    weights = {
        name: tensor.detach().to("cpu", stored if tensor.is_floating_point() else tensor.dtype).contiguous()
        for name, tensor in {**drafter.state_dict(), **(borrowed or {})}.items()
    }
    refuse_non_finite(weights, "export")
    if dtype == "fp8":
        weights, config = quantize_weights(weights), {**config, "quantization_config": quantization_config()}
    card = {
        "schema_version": SCHEMA_VERSION,
        "format": form,
        "draftline_version": __version__,
        "torch_version": torch.__version__,
        "dtype": dtype,
        "spec": drafter.spec.model_dump(mode="json"),
        "provenance": dict(provenance or {}),
    }
    with whole_folder(Path(path), replaces=CARD) as folder:
        save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
        write_json(folder / "config.json", dict(config))
        write_json(folder / CARD, card)
        for name, text in texts.items():
            (folder / name).write_bytes(text.encode("utf-8", "replace"))  # a foreign name may hold half a character
    return Path(path)


def require_dtype(dtype: str) -> None:
    """Raises UserError for a dtype that no export is written in."""
    if dtype not in get_args(ExportDtype):
        raise UserError(f"dtype {dtype!r} cannot be exported", where="export", mend="use bfloat16, float32 or fp8")


def read_provenance(path: Path) -> dict[str, Any]:
    """What the card of an export tells about its origin; empty if there is no card. Errors as for `checked_facts`."""
    if not (path / CARD).is_file():
        return {}
    provenance = read_json(path / CARD).get("provenance")
    return checked_facts(provenance, str(path / CARD)) if isinstance(provenance, dict) else {}


def read_recorded_spec(path: Path) -> DrafterSpec | None:
    """The spec in an export's card, or None if there is no card.

    Raises:
        UserError: a card without layout, or whose spec is no spec.
    """
    if not (path / CARD).is_file():
        return None
    card, where = read_json(path / CARD), str(path / CARD)
    if not isinstance(card.get("spec"), dict) or "block_layout" not in card["spec"]:
        raise UserError("spec.block_layout is missing", where=where, mend="export again; it cannot be guessed")
    try:
        return DrafterSpec.model_validate(card["spec"])
    except ValidationError as error:
        raise UserError(error.errors()[0]["msg"], where=where, mend="export again") from error


def read_checked_spec(path: Path, read: ReadSpec) -> DrafterSpec:
    """The spec that config.json describes; a card beside it must say the same, and then its wording counts.

    Raises:
        UserError: config.json describes no drafter, or the two disagree.
    """
    where = str(path / "config.json")
    try:
        spec = read(read_json(path / "config.json"), where)
    except (TypeError, AttributeError, KeyError, ValueError, OverflowError) as error:
        raise UserError(f"holds a value of the wrong kind ({error})", where=where, mend="export again") from error
    recorded = read_recorded_spec(path)
    if recorded is None:
        return spec
    for name in DrafterSpec.model_fields:
        if not _agree(name, spec, recorded):
            raise UserError(
                f"{name} is {told(getattr(recorded, name))}, but config.json says {told(getattr(spec, name))}",
                where=str(path / CARD),
                mend="one of the two was edited: restore it, or delete draftline.json if config.json is right",
            )
    return recorded


def told(value: object) -> str:
    """A field's value for a message; a whole vocabulary would be no line."""
    return f"a list of {len(value)}" if isinstance(value, tuple) and len(value) > _MOST_TOLD else str(value)


def causal_layers(spec: DrafterSpec) -> tuple[bool, ...]:
    """For each layer, whether a slot is blind to the later slots of its block."""
    if spec.in_block_attention == "zlab":
        return tuple(kind == "sliding_attention" for kind in spec.layer_types)
    return (spec.in_block_attention == "causal",) * spec.num_layers


def slides(spec: DrafterSpec) -> bool:
    """True if any layer has a sliding window."""
    return "sliding_attention" in spec.layer_types


def _agree(name: str, from_config: DrafterSpec, recorded: DrafterSpec) -> bool:
    ours, theirs = getattr(from_config, name), getattr(recorded, name)
    if name == "rope_parameters":
        return {"rope_type": "default", **ours} == {"rope_type": "default", **theirs}
    if name == "in_block_attention":  # several names for one thing where all layers are of one type
        return causal_layers(from_config) == causal_layers(recorded)
    if name == "window_origin" and not slides(recorded):
        return True
    # A window without a sliding layer means nothing and is not written to config.json.
    return bool(ours == theirs) or (name == "sliding_window" and ours is None and not slides(recorded))


def build_drafter(
    path: Path,
    spec: DrafterSpec,
    weights: Mapping[str, torch.Tensor],
    device: torch.device | str,
    dtype: torch.dtype | None,
) -> Drafter:
    """The drafter of a spec with these weights, each of the shape its name asks for. `dtype` None: their widest, exact.

    Raises:
        UserError: missing, unexpected, misshapen or non-finite weights, or a spec that cannot be built.
    """
    try:
        with torch.device("meta"):
            expected = {name: tensor.shape for name, tensor in Drafter(spec).state_dict().items()}
    except (KeyError, TypeError, ValueError, RuntimeError, ArithmeticError) as error:
        where, reason = str(path / "config.json"), " ".join(str(error).split())[:300]
        raise UserError(
            f"describes no drafter that can be built ({reason})", where=where, mend="export again"
        ) from error
    weights = unquantized(_bare_codebooks(weights), read_json(path / "config.json"), str(path / WEIGHTS))
    _check_weights(weights, expected, str(path / WEIGHTS))
    drafter = Drafter(spec)
    stored = widest([tensor.dtype for tensor in weights.values()])
    drafter.to(stored).load_state_dict(weights)
    return drafter.to(device=device, dtype=dtype or stored).eval()


def widest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """The narrowest dtype that holds numbers of all these exactly."""
    return functools.reduce(torch.promote_types, dtypes)


def _bare_codebooks(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Published checkpoints name the selector's codebooks without `.weight`, z-lab's own saves with it."""
    renamed = {f"{name}.weight": name for name in _CODEBOOKS}
    return {renamed.get(name, name): tensor for name, tensor in weights.items()}


def _check_weights(weights: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Size], where: str) -> None:
    missing, unexpected = sorted(expected.keys() - weights.keys()), sorted(weights.keys() - expected.keys())
    if missing or unexpected:
        raise UserError(
            f"{len(missing)} missing weights {missing[:3]}, {len(unexpected)} unexpected {unexpected[:3]}",
            where=where,
            mend="give the weights that belong to this config.json",
        )
    for name, shape in expected.items():
        if weights[name].dtype not in _FLOATS:
            kind = str(weights[name].dtype).removeprefix("torch.")
            raise UserError(
                f"{name} is {kind}, which is no dtype of a drafter's weights",
                where=where,
                mend="give them in bfloat16, float16 or float32",
            )
        if weights[name].shape != shape:
            raise UserError(
                f"{name} has shape {tuple(weights[name].shape)}, config.json makes it {tuple(shape)}",
                where=where,
                mend="give the weights that belong to this config.json",
            )
    refuse_non_finite(weights, where)


def refuse_non_finite(weights: Mapping[str, torch.Tensor], where: str) -> None:
    """Raises UserError that names the first tensor, of whatever shape, with NaN or infinity."""
    for name, tensor in weights.items():
        if not torch.isfinite(tensor).all():
            raise UserError(f"{name} holds NaN or infinity", where=where, mend="take an earlier checkpoint")
