"""What a drafter borrows of a target that runs elsewhere: embedding, head and final norm, read from its files alone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from draftline.config.schema import TargetConfig
from draftline.errors import UserError
from draftline.records import FrozenEmbedding, FrozenHead
from draftline.target.facts import (
    NONSENSE,
    ModelSource,
    TargetFacts,
    auto_class_name,
    facts_from_hf,
    first_line,
    generation_eos_ids,
    is_gguf,
    load_hf_config,
    model_source,
)
from draftline.target.load import LoadedTarget, load_tokenizer, resolve_dtype, tokenizer_stop_ids
from draftline.target.modules import find_layers, find_norm
from draftline.target.states.stored_target import StoredTarget

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


@dataclass(frozen=True, slots=True)
class LentNames:
    """What the files of a target call the weights that drafters borrow: who knows it reads them without its code.

    Attributes:
        names: our name (`embedding`, `head`, `head_bias`) -> name in the files.
        tied: the head may be the embedding.
        digest: of the target's own embedding and head; see `_digest`.
    """

    names: Mapping[str, str]
    tied: bool
    stop_token_ids: frozenset[int]
    digest: str


def is_lent_by_name(config: TargetConfig) -> bool:
    """Whether a target that was loaded can tell `LentNames`: its files hold the weights as they are."""
    return config.backend.kind == "local" and config.quantization is None and not is_gguf(config)


def lent_names(target: LoadedTarget) -> LentNames | None:
    """Of a target that was loaded; None if drafters cannot read its weights by name: its files call them otherwise
    (transformers renames some as it loads them), or are no safetensors.
    """
    if not is_lent_by_name(target.config):
        return None
    names, tied = _names(target.model, None), _is_tied(target.model.config)
    try:
        weight_map = _weight_map(model_source(target.config))
    except UserError:
        return None
    missing = {key for key, name in names.items() if _stored_name(name, weight_map) is None}
    if missing - ({"head"} if tied else set()):
        return None
    head = target.head
    return LentNames(
        names, tied, target.stop_token_ids, _digest(target.embedding.weight_VH, head.weight_VH, head.bias_V)
    )


def read_lent(config: TargetConfig, facts: TargetFacts, lent: LentNames, device: torch.device) -> StoredTarget:
    """Embedding and head by their names; imports nothing of transformers. Without the final norm.

    Raises:
        UserError: see `load_lender`; they are not what the target has.
    """
    source = model_source(config)
    found = _read(source, lent.names, dtype=resolve_dtype(config, device), device=device, tied=lent.tied)
    _check_shapes(found, facts, source.name)
    embedding = found["embedding"]
    if _digest(embedding, found.get("head", embedding), found.get("head_bias")) != lent.digest:
        what = "its embedding or head is not the one of the loaded target"
        raise UserError(what, where=source.name, mend="put the same files on all hosts")
    return _lender(found, facts, None, lent.stop_token_ids, device)


def load_lender(
    config: TargetConfig, device: torch.device, *, share_with: StoredTarget | None = None, tokenizer: Any = None
) -> StoredTarget:
    """Reads three weights of a target and none of its layers.

    Args:
        share_with: already read; on the same device nothing is copied.
        tokenizer: saves reading it again for the stop token ids.

    Raises:
        UserError: the files hold no such weights, or are not safetensors.
    """
    if share_with is not None and share_with.device == device:
        return share_with
    hf_config = load_hf_config(config)
    facts = facts_from_hf(hf_config, generation_eos_ids(config, hf_config))
    model = _hollow(hf_config, config)
    decoder, _ = find_layers(model, facts)
    norm_name = find_norm(decoder)
    norm = None if norm_name is None else getattr(decoder, norm_name)
    names = _names(model, norm)
    source = model_source(config)
    found = _read(source, names, dtype=resolve_dtype(config, device), device=device, tied=_is_tied(hf_config))
    _check_shapes(found, facts, source.name)
    tokenizer = load_tokenizer(config) if tokenizer is None else tokenizer
    stops = frozenset((*facts.eos_token_ids, *tokenizer_stop_ids(tokenizer)))
    return _lender(found, facts, norm, stops, device)


def _lender(
    found: Mapping[str, torch.Tensor],
    facts: TargetFacts,
    norm: nn.Module | None,
    stops: frozenset[int],
    device: torch.device,
) -> StoredTarget:
    embedding = found["embedding"]
    if norm is not None:
        norm = norm.to_empty(device=device).requires_grad_(False)
        for key, value in found.items():
            if key.startswith("norm."):
                part = norm.get_parameter(key.removeprefix("norm."))
                part.data = value.to(device=device, dtype=embedding.dtype)
    return StoredTarget(
        embedding=FrozenEmbedding(embedding, facts.embedding_scale),
        head=FrozenHead(
            found.get("head", embedding), found.get("head_bias"), facts.logit_multiplier, facts.final_logit_softcapping
        ),
        device=device,
        dtype=embedding.dtype,
        stop_token_ids=stops,
        fingerprint=_fingerprint(found, facts),
        final_norm=norm,
    )


def _is_tied(hf_config: Any) -> bool:
    return bool(getattr(hf_config, "tie_word_embeddings", False))


def _hollow(hf_config: Any, config: TargetConfig) -> Any:
    """The model's modules without memory: only to learn the names of its weights."""
    import transformers

    auto_class = getattr(transformers, auto_class_name(hf_config) or "AutoModelForCausalLM")
    try:
        with torch.device("meta"):
            return auto_class.from_config(hf_config, trust_remote_code=config.trust_remote_code)
    except (OSError, ImportError, *NONSENSE) as error:
        what = f"describes no model that can be built ({first_line(error)})"
        raise UserError(what, where=f"target.model {config.model}", mend="repair its config.json") from error


def _check_shapes(found: Mapping[str, torch.Tensor], facts: TargetFacts, where: str) -> None:
    wanted = (facts.vocab_size, facts.hidden_size)
    for key in ("embedding", "head"):
        if key in found and tuple(found[key].shape) != wanted:
            raise UserError(
                f"its {key} has shape {list(found[key].shape)}, its configuration makes it {list(wanted)}",
                where=where,
                mend="give the weights that belong to its config.json",
            )


def _names(model: Any, norm: nn.Module | None) -> dict[str, str]:
    """Our name -> name in the model, of the weights that are wanted."""
    modules = {id(module): name for name, module in model.named_modules()}
    head = model.get_output_embeddings()
    names = {"embedding": f"{modules[id(model.get_input_embeddings())]}.weight", "head": f"{modules[id(head)]}.weight"}
    if getattr(head, "bias", None) is not None:
        names["head_bias"] = f"{modules[id(head)]}.bias"
    if norm is not None:
        names |= {f"norm.{part}": f"{modules[id(norm)]}.{part}" for part, _ in norm.named_parameters()}
    return names


def _read(
    source: ModelSource, names: Mapping[str, str], *, dtype: torch.dtype, device: torch.device, tied: bool
) -> dict[str, torch.Tensor]:
    if source.gguf_file is not None:
        raise UserError("is a .gguf file", where=source.name, mend="give the safetensors of the served model")
    weight_map = _weight_map(source)
    found: dict[str, torch.Tensor] = {}
    for key, name in names.items():
        stored = _stored_name(name, weight_map)
        if stored is None:
            if key == "head" and tied:
                continue
            untied = ", and its configuration does not tie the head to the embedding" if key == "head" else ""
            raise UserError(f"holds no {name}{untied}", where=source.name, mend="give the complete model")
        file = _file(source, weight_map[stored])
        try:
            with safe_open(file, framework="pt") as handle:
                found[key] = handle.get_tensor(stored).to(device=device, dtype=dtype)
        except (SafetensorError, OSError, ValueError) as error:
            raise UserError(f"broken file ({error})", where=str(file), mend="download the model again") from error
    return found


def _weight_map(source: ModelSource) -> dict[str, str]:
    """Stored name -> file."""
    index = _file(source, _INDEX, optional=True)
    if index is not None:
        try:
            content = json.loads(index.read_bytes())["weight_map"]
            return {str(name): str(file) for name, file in content.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(f"is no index ({error})", where=str(index), mend="download the model again") from error
    single = _file(source, _SINGLE)
    try:
        with safe_open(single, framework="pt") as handle:
            return dict.fromkeys(handle.keys(), _SINGLE)
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"broken file ({error})", where=str(single), mend="download the model again") from error


def _file(source: ModelSource, name: str, *, optional: bool = False) -> Any:
    """A file of the model as a path; None if it is optional and not there."""
    folder = Path(source.name)
    if folder.is_dir():
        path = folder / name
        if Path(name).name == name and path.is_file():
            return path
    else:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError

        try:
            return Path(hf_hub_download(source.name, name, revision=source.revision))
        except EntryNotFoundError:
            pass
        except (OSError, ValueError) as error:
            raise UserError(f"{name} cannot be fetched ({error})", where=source.name, mend="check the name") from error
    if optional:
        return None
    raise UserError(f"holds no {name}", where=source.name, mend="give a model stored as safetensors")


def _stored_name(name: str, stored: Iterable[str]) -> str | None:
    """The name itself, or the least nested one with the same last two parts (multimodal models nest otherwise)."""
    if name in stored:
        return name
    ending = "." + ".".join(name.split(".")[-2:])
    similar = sorted((n for n in stored if n.endswith(ending)), key=lambda n: (n.count("."), n))
    return similar[0] if similar else None


def _fingerprint(found: Mapping[str, torch.Tensor], facts: TargetFacts) -> str:
    """Of the facts and the weights read, in bfloat16. Not that of the loaded model: its layers are not known here."""
    digest = hashlib.sha256(json.dumps(asdict(facts), sort_keys=True, default=str).encode())
    for key in sorted(found):
        digest.update(_some_bytes(found[key]))
    return digest.hexdigest()[:32]


def _digest(embedding_VH: torch.Tensor, head_VH: torch.Tensor, bias_V: torch.Tensor | None) -> str:
    """Of some values of what drafters borrow, in bfloat16: the same on a CPU and a GPU."""
    parts = (embedding_VH, head_VH, *(() if bias_V is None else (bias_V,)))
    return hashlib.sha256(b"".join(map(_some_bytes, parts))).hexdigest()


def _some_bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().reshape(-1)
    step = max(1, flat.numel() // 64)
    return flat[::step][:64].to(torch.bfloat16).cpu().view(torch.int16).numpy().tobytes()
