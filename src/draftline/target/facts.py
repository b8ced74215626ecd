"""What a target is, read from its configuration alone: sizes, rope, scales, special tokens. Loads no weights.

Nothing here imports torch at module level, so that `plan` and `--dry-run` stay light.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftline.config.schema import TargetConfig
from draftline.errors import UserError
from draftline.target.hub import hub_fault

# Layers that look at other tokens through attention only; every other kind may carry a state along the sequence.
ATTENTION_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
# Families that carry a recurrent state but whose configuration does not list layer types.
_RECURRENT_MODEL_TYPES = frozenset({"mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm", "zamba"})
# Rotary embeddings whose frequencies depend on the longest position of a forward.
LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})
# What libraries raise over values of the wrong kind in a file that anybody may have written.
NONSENSE = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RuntimeError)
# Families whose embedding is multiplied by sqrt(hidden_size).
_SQRT_SCALED_PREFIX = "gemma"


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """Facts of a target model, all from its Hugging Face configuration.

    Attributes:
        model_type: of the text model (`qwen3`, `gemma3_text`, ...).
        architectures: class names of the whole model, as a server knows it.
        rope_parameters: transformers 5 schema: flat, or one entry a layer type; empty without rotary embedding.
        embedding_scale: what the looked-up embedding row is multiplied by.
        logit_multiplier: what `h @ head.T` is multiplied by before the soft cap.
        final_logit_softcapping: c of c * tanh(logits / c), or None.
        eos_token_ids: those of the configuration and the generation configuration, in that order.
        has_recurrent_layers: True if a layer carries a state along the sequence (linear attention, Mamba, conv, ...).
        layer_types: one a layer.
    """

    model_type: str
    architectures: tuple[str, ...]
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_parameters: dict[str, Any]
    max_position_embeddings: int
    embedding_scale: float
    logit_multiplier: float
    final_logit_softcapping: float | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    has_recurrent_layers: bool
    hidden_act: str
    layer_types: tuple[str, ...]

    @property
    def rope_types(self) -> frozenset[str]:
        """The kinds of rotary embedding in use, over all layer types."""
        nested = [v for v in self.rope_parameters.values() if isinstance(v, dict)]
        return frozenset(str(p.get("rope_type", "default")) for p in (nested or [self.rope_parameters]) if p)

    @property
    def rope_changes_at(self) -> int | None:
        """Longest text in tokens whose rotary frequencies are those of a short one; None: they never change."""
        nested = [v for v in self.rope_parameters.values() if isinstance(v, dict)]
        changing = [p for p in (nested or [self.rope_parameters]) if p.get("rope_type") in LENGTH_DEPENDENT_ROPE]
        # `dynamic` stretches from the configured context on, whatever else its entry holds.
        edges = [p.get("original_max_position_embeddings") if p["rope_type"] == "longrope" else None for p in changing]
        return min((int(edge or self.max_position_embeddings) for edge in edges), default=None)


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where transformers finds a target: `name` (folder or hub id), and `gguf_file` inside it or None."""

    name: str
    gguf_file: str | None
    revision: str | None
    trust_remote_code: bool
    is_remote: bool = False

    def kwargs(self) -> dict[str, Any]:
        """Keyword arguments of every `from_pretrained` call."""
        return {"trust_remote_code": self.trust_remote_code, **self.place_kwargs()}

    def place_kwargs(self) -> dict[str, Any]:
        """Those of them that say where to look; the cache alone if the hub cannot be reached."""
        kwargs: dict[str, Any] = {}
        if self.revision is not None:
            kwargs["revision"] = self.revision
        if self.gguf_file is not None:
            kwargs["gguf_file"] = self.gguf_file
        if self.is_remote and hub_fault() is not None:
            kwargs["local_files_only"] = True
        return kwargs

    def require_reachable(self, where: str) -> None:
        """To be called when reading failed: tells a hub that is out of reach from a model that is not as it should be.

        Raises:
            UserError: the hub cannot be reached, so only its cache was looked at.
        """
        fault = hub_fault() if self.is_remote else None
        if fault is not None:
            raise UserError(
                f"no such folder, not in the local cache, and the model hub cannot be reached ({fault})",
                where=where,
                mend="give the folder of the model, or mend the network",
            ) from None


def is_gguf(config: TargetConfig) -> bool:
    """True if `target.model` names a .gguf file."""
    return Path(config.model).suffix.lower() == ".gguf"


def model_source(config: TargetConfig) -> ModelSource:
    """Resolve `target.model` without touching the network.

    Raises:
        UserError: a path that does not exist, a file that is not GGUF, a folder without config.json, or the gguf
            extra missing.
    """
    path = Path(config.model).expanduser()
    if is_gguf(config):
        return _gguf_source(path, config)
    if path.is_file():
        raise UserError("is a file but not a .gguf file", where=_where(config), mend="give a model folder or hub id")
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UserError("the folder has no config.json", where=_where(config), mend="give a Hugging Face model")
        return ModelSource(str(path), None, config.revision, config.trust_remote_code)
    if path.is_absolute() or config.model.startswith((".", "~")) or config.model.count("/") > 1:
        raise UserError("no such folder", where=_where(config), mend="give a model folder, a hub id or a .gguf file")
    return ModelSource(config.model, None, config.revision, config.trust_remote_code, is_remote=True)


def _gguf_source(path: Path, config: TargetConfig) -> ModelSource:
    if not path.is_file():
        raise UserError("no such file", where=_where(config), mend="give the path of an existing .gguf file")
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"reading a .gguf file needs the package {' and '.join(missing)}",
            where=_where(config),
            mend="pip install 'draftline[gguf]'",
        )
    return ModelSource(str(path.parent), path.name, None, config.trust_remote_code)


def load_hf_config(config: TargetConfig) -> Any:
    """The whole Hugging Face configuration (of a multimodal model: the outer one).

    Raises:
        UserError: it cannot be read, its family is unknown, or it is not a causal language model.
    """
    from huggingface_hub.errors import StrictDataclassError

    source = model_source(config)
    try:
        hf_config = _read_hf_config(source)
    except (OSError, ImportError, StrictDataclassError, *NONSENSE) as error:
        source.require_reachable(_where(config))
        raise UserError(
            f"cannot read the model's configuration: {first_line(error)}",
            where=_where(config),
            mend="check the name, the folder, or the network",
        ) from error
    _require_causal_lm(hf_config, config)
    return hf_config


def _read_hf_config(source: ModelSource) -> Any:
    from transformers import AutoConfig

    if source.gguf_file is None:
        return AutoConfig.from_pretrained(source.name, **source.kwargs())
    stat = (Path(source.name) / source.gguf_file).stat()
    return copy.deepcopy(_read_gguf_config(source, stat.st_size, stat.st_mtime_ns))


@functools.lru_cache(maxsize=4)
def _read_gguf_config(source: ModelSource, _size_bytes: int, _mtime_ns: int) -> Any:
    """Kept, because transformers parses the file's whole vocabulary for it: seconds each time."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(source.name, **source.kwargs())


def target_facts(config: TargetConfig) -> TargetFacts:
    """Read the facts of a target from its configuration, without loading weights.

    Raises:
        UserError: see `load_hf_config`.
    """
    hf_config = load_hf_config(config)
    return facts_from_hf(hf_config, generation_eos_ids(config, hf_config))


def facts_from_hf(hf_config: Any, extra_eos_ids: tuple[int, ...] = ()) -> TargetFacts:
    """Facts of a Hugging Face configuration object; `extra_eos_ids` come from the generation configuration.

    Raises:
        UserError: a field is missing, or of a kind that it cannot be.
    """
    try:
        return _facts(hf_config, extra_eos_ids)
    except NONSENSE as error:
        kind = str(getattr(hf_config, "model_type", "model"))[:60]
        raise UserError(
            f"does not describe a language model ({first_line(error)})", where=f"configuration of the {kind}"
        ) from error


def _facts(hf_config: Any, extra_eos_ids: tuple[int, ...]) -> TargetFacts:
    text = hf_config.get_text_config(decoder=True)
    hidden, heads = int(text.hidden_size), int(text.num_attention_heads)
    layer_types = _layer_types(text)
    return TargetFacts(
        model_type=str(text.model_type),
        architectures=_architectures(hf_config),
        num_layers=int(text.num_hidden_layers),
        hidden_size=hidden,
        intermediate_size=int(_first(text, "intermediate_size", "n_inner", "ffn_dim", default=4 * hidden)),
        num_heads=heads,
        num_kv_heads=int(_first(text, "num_key_value_heads", default=heads)),
        head_dim=int(_first(text, "head_dim", default=hidden // heads)),
        vocab_size=int(text.vocab_size),
        rms_norm_eps=float(_first(text, "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", default=1e-6)),
        rope_parameters=_plain_dict(getattr(text, "rope_parameters", None)),
        max_position_embeddings=int(_first(text, "max_position_embeddings", default=2048)),
        embedding_scale=_embedding_scale(text),
        logit_multiplier=_logit_multiplier(text),
        final_logit_softcapping=_softcap(text),
        bos_token_id=_first(text, "bos_token_id", default=None),
        eos_token_ids=_eos_ids(text, hf_config, extra_eos_ids),
        pad_token_id=_first(text, "pad_token_id", default=None),
        has_recurrent_layers=_is_recurrent(text, layer_types),
        hidden_act=str(_first(text, "hidden_act", "hidden_activation", "activation_function", default="silu")),
        layer_types=layer_types,
    )


def generation_eos_ids(config: TargetConfig, hf_config: Any) -> tuple[int, ...]:
    """Stop ids of generation_config.json, or () where the model has none."""
    from transformers import GenerationConfig

    source = model_source(config)
    if source.gguf_file is not None:
        return _as_ids(hf_config.get_text_config(decoder=True).eos_token_id)
    try:
        generation = GenerationConfig.from_pretrained(source.name, **{"revision": "main", **source.place_kwargs()})
    except OSError:  # the file is optional
        return ()
    return _as_ids(generation.eos_token_id)


def first_line(error: BaseException) -> str:
    """The first line of an error's text, for a one-line message."""
    text = str(error).strip()
    return text.splitlines()[0].rstrip(".") if text else type(error).__name__


def _where(config: TargetConfig) -> str:
    return f"target.model {config.model}"


def _first(source: Any, *names: str, default: Any) -> Any:
    for name in names:
        value = getattr(source, name, None)
        if value is not None:
            return value
    return default


def _require_causal_lm(hf_config: Any, config: TargetConfig) -> None:
    if auto_class_name(hf_config) is None:
        raise UserError(
            f"a model of type {hf_config.model_type} is not a causal language model",
            where=_where(config),
            mend="give a text-generation model",
        )


def auto_class_name(hf_config: Any) -> str | None:
    """The transformers auto class that loads this configuration with a language-model head, or None."""
    from transformers.models.auto import modeling_auto

    own = getattr(hf_config, "auto_map", None) or {}
    names = (
        ("AutoModelForCausalLM", modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        ("AutoModelForImageTextToText", modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES),
    )
    if getattr(hf_config, "is_encoder_decoder", False):
        return None
    return next((name for name, mapping in names if hf_config.model_type in mapping or name in own), None)


def _architectures(hf_config: Any) -> tuple[str, ...]:
    named = getattr(hf_config, "architectures", None)
    if named:
        return tuple(named)
    from transformers.models.auto import modeling_auto

    mapped = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(hf_config.model_type)
    return () if mapped is None else (str(mapped),)


def _layer_types(text: Any) -> tuple[str, ...]:
    listed = _first(text, "layer_types", "layers_block_type", default=None)
    if listed:
        return tuple("full_attention" if kind == "attention" else str(kind) for kind in listed)
    kind = "full_attention"
    if text.model_type in _RECURRENT_MODEL_TYPES:
        kind = "linear_attention"
    elif getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True):
        kind = "sliding_attention"
    return (kind,) * int(text.num_hidden_layers)


def _is_recurrent(text: Any, layer_types: tuple[str, ...]) -> bool:
    attention_like = ("attention", "sparse", "moe")
    return text.model_type in _RECURRENT_MODEL_TYPES or any(
        kind not in ATTENTION_LAYER_TYPES and (kind == "linear_attention" or not kind.endswith(attention_like))
        for kind in layer_types
    )


def _embedding_scale(text: Any) -> float:
    if text.model_type.startswith(_SQRT_SCALED_PREFIX):
        return float(text.hidden_size) ** 0.5
    return float(_first(text, "embedding_multiplier", "scale_emb", default=1.0))


def _logit_multiplier(text: Any) -> float:
    """Granite divides by `logits_scaling`, MiniCPM by H / dim_model_base; Cohere and Falcon-H1 multiply."""
    multiplier = float(_first(text, "logit_scale", "lm_head_multiplier", default=1.0))
    multiplier /= float(_first(text, "logits_scaling", default=1.0))
    base = getattr(text, "dim_model_base", None)
    return multiplier if not base else multiplier * float(base) / float(text.hidden_size)


def _softcap(text: Any) -> float | None:
    cap = getattr(text, "final_logit_softcapping", None)
    return float(cap) if cap else None


def _as_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return (int(value),) if isinstance(value, int) else tuple(int(v) for v in value)


def _eos_ids(text: Any, hf_config: Any, extra: tuple[int, ...]) -> tuple[int, ...]:
    ids = (*_as_ids(getattr(text, "eos_token_id", None)), *_as_ids(getattr(hf_config, "eos_token_id", None)), *extra)
    return tuple(dict.fromkeys(ids))


def _plain_dict(value: Any) -> dict[str, Any]:
    if not value:
        return {}
    return {str(k): _plain_dict(v) if isinstance(v, dict) else v for k, v in dict(value).items()}
