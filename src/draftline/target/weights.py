"""The target's weight files, looked over without loading them: there, whole, complete, and of what size."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path

from draftline.config.schema import TargetConfig
from draftline.errors import UserError
from draftline.target.facts import ModelSource, model_source

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_MOST_INDEX_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """What lies there.

    Attributes:
        files: in order of name; empty if the model is not on this machine.
        n_bytes: their sum.
        elements: numbers in all tensors, as the files' headers tell; None for .gguf, which packs them.
    """

    files: tuple[Path, ...]
    n_bytes: int
    elements: int | None


def weight_files(config: TargetConfig) -> WeightFiles:
    """Reads the headers of all files, and no weight. Looks on this machine only.

    Raises:
        UserError: a file is missing, cut off or not what its name says, or there are pickled weights only.
    """
    source = model_source(config)
    if source.gguf_file is not None:
        return _gguf(Path(source.name) / source.gguf_file)
    folder = _folder(source)
    if folder is None:
        return WeightFiles((), 0, None)
    files = _listed(folder)
    elements = sum(_elements(file) for file in files)
    return WeightFiles(tuple(files), sum(file.stat().st_size for file in files), elements)


def _folder(source: ModelSource) -> Path | None:
    """The model's folder; for a hub id its snapshot in the local cache, or None."""
    if Path(source.name).is_dir():
        return Path(source.name)
    from huggingface_hub import try_to_load_from_cache

    for name in (INDEX, SINGLE):
        found = try_to_load_from_cache(source.name, name, revision=source.revision)
        if isinstance(found, str):
            return Path(found).parent
    return None


def _listed(folder: Path) -> list[Path]:
    index = folder / INDEX
    if index.is_file():
        names: Iterable[str] = sorted(set(_weight_map(index).values()))
    elif (folder / SINGLE).is_file():
        names = [SINGLE]
    else:
        pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
        what = f"holds pickled weights only ({pickled[0]})" if pickled else f"holds no {SINGLE}"
        raise UserError(what, where=str(folder), mend="give the model in safetensors")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise UserError(
            f"{len(missing)} weight files are missing, first {missing[0]}",
            where=str(folder),
            mend="fetch the model again",
        )
    return [folder / name for name in names]


def _weight_map(index: Path) -> dict[str, str]:
    mend = "fetch the model again"
    try:
        if index.stat().st_size > _MOST_INDEX_BYTES:
            raise UserError("is far too large", where=str(index), mend=mend)
        found = json.loads(index.read_bytes())["weight_map"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"holds no weight_map ({error!r})", where=str(index), mend=mend) from error
    if not isinstance(found, dict) or not found:
        raise UserError("holds no weight_map", where=str(index), mend=mend)
    for name in found.values():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise UserError(f"names {name!r}, which is no safetensors file of its folder", where=str(index), mend=mend)
    return found


def _elements(file: Path) -> int:
    """Numbers that a safetensors file holds; its header says so, and its length must fit."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="np") as opened:
            return sum(prod(opened.get_slice(name).get_shape()) for name in opened.keys())  # noqa: SIM118  no mapping
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(
            f"is not a whole safetensors file ({error})", where=str(file), mend="fetch the file again"
        ) from error


def _gguf(file: Path) -> WeightFiles:
    from gguf import GGUFReader

    n_bytes = file.stat().st_size
    try:
        tensors = GGUFReader(file).tensors
        end = max(int(tensor.data_offset) + int(tensor.n_bytes) for tensor in tensors)
    except (OSError, ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
        raise UserError(f"is not a whole .gguf file ({error})", where=str(file), mend="fetch it again") from error
    if end > n_bytes:
        raise UserError(f"ends at byte {n_bytes}, its tensors at {end}", where=str(file), mend="fetch it again")
    return WeightFiles((file,), n_bytes, None)
