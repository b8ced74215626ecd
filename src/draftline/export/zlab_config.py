"""Between a DrafterSpec and the config.json of z-lab's format. Pure dictionaries; nothing here reads a file.

z-lab's class and the servers read the same facts from different places, and fill in silently what they do not find. So
every key is written, twice where two places are read, and reading refuses what is missing or contradicts itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import ValidationError

from draftline.config.drafter_spec import Dflash2Spec, DrafterSpec, InBlockAttention
from draftline.errors import UserError

ARCHITECTURE = "DFlashDraftModel"
ARCHITECTURE_2 = "DFlash2DraftModel"
DFLASH2_KEYS = tuple(Dflash2Spec.model_fields)
_ROPE_KEYS_OF_THE_CLASS = ("default", "linear", "yarn", "llama3")


def zlab_config(spec: DrafterSpec, dtype: str) -> dict[str, Any]:
    """config.json for `spec`.

    Raises:
        UserError: something that z-lab's class would serve otherwise than it was trained, with the reason.
    """
    refuse_unservable(spec)
    inner: dict[str, Any] = {
        "block_size": spec.block_size,
        "mask_token_id": spec.mask_token_id,
        "target_layer_ids": list(spec.taps),
        "block_layout": spec.block_layout,
        "window_origin": spec.window_origin,
        "input_embedding_scale": spec.input_embedding_scale,
        "output_multiplier": spec.output_multiplier,
        "final_logit_softcapping": spec.final_logit_softcapping,
    }
    if spec.dflash2 is not None:
        inner |= spec.dflash2.model_dump()
    architecture = architecture_of(spec)
    config: dict[str, Any] = {
        "architectures": [architecture],
        "auto_map": {"AutoModel": f"dflash.{architecture}"},
        "model_type": "qwen3",
        "block_size": spec.block_size,
        "num_target_layers": spec.num_target_layers,
        "dflash_config": inner,
        **transformer_config(spec),
        "dtype": dtype,
    }
    if spec.in_block_attention != "zlab":
        config["is_causal"] = inner["causal"] = spec.in_block_attention == "causal"
    return config


def architectures(config: Mapping[str, Any]) -> list[str]:
    """The class names in a config.json; none where it tells nonsense."""
    names = config.get("architectures")
    return [str(name) for name in names] if isinstance(names, list | tuple) else []


def architecture_of(spec: DrafterSpec) -> str:
    """Name of the class that servers load; with the wrong one DFlash2's own weights are left out silently."""
    return ARCHITECTURE if spec.dflash2 is None else ARCHITECTURE_2


def transformer_config(spec: DrafterSpec) -> dict[str, Any]:
    """The keys of a Qwen3 configuration, all of them: what is left out is filled in silently by whoever reads it."""
    rope = {"rope_type": "default", **spec.rope_parameters}
    sliding = "sliding_attention" in spec.layer_types
    return {
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab_size,
        "rms_norm_eps": spec.rms_norm_eps,
        "hidden_act": spec.hidden_act,
        "initializer_range": spec.initializer_range,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "layer_types": list(spec.layer_types),
        "sliding_window": spec.sliding_window if sliding else None,
        "use_sliding_window": sliding,
        "max_window_layers": spec.num_layers,
        "max_position_embeddings": spec.max_position_embeddings,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": _old_rope_scaling(rope),
        "rope_parameters": rope,
        "bos_token_id": spec.bos_token_id,
        "eos_token_id": spec.eos_token_id,
        "pad_token_id": spec.pad_token_id,
        "tie_word_embeddings": False,
        "use_cache": True,
    }


def refuse_unservable(spec: DrafterSpec) -> None:
    """Raises UserError for semantics that z-lab's class does not have."""
    sliding = "sliding_attention" in spec.layer_types
    reason, mend = None, "train without it"
    rope_type = spec.rope_parameters.get("rope_type", "default")
    if sliding and spec.window_origin != "query":
        reason = f"window_origin {spec.window_origin!r}: z-lab's class measures the window from the query"
    elif "rope_theta" not in spec.rope_parameters:
        reason = "rope_parameters without rope_theta: servers would take 10000"
    elif rope_type not in _ROPE_KEYS_OF_THE_CLASS:
        reason = f"rope_type {rope_type!r}: z-lab's class rotates by {', '.join(_ROPE_KEYS_OF_THE_CLASS)} only"
    elif spec.rope_parameters.get("partial_rotary_factor") not in (None, 1):
        reason = "partial_rotary_factor below 1: z-lab's class rotates whole heads"
    elif spec.draft_vocabulary is not None:
        reason = f"a head of {len(spec.draft_vocabulary)} tokens: z-lab's class drafts from the whole vocabulary"
        mend = "export with --format speculators"
    if reason is not None:
        raise UserError(f"cannot be served from z-lab's format, {reason}", where="export", mend=mend)


def spec_from_config(config: Mapping[str, Any], where: str) -> DrafterSpec:
    """DrafterSpec of a config.json in z-lab's format, older or newer, by whoever wrote it.

    Args:
        config: the whole file.
        where: its path, for messages.

    Raises:
        UserError: missing or contradicting taps, mask token, block size, layout or mask semantics; other architectures.
    """
    read = _Reader(config, where)
    dflash2 = _dflash2(read)
    layer_types, window = _layer_types(read)
    return drafter_spec(
        {
            **transformer_fields(config, where),
            "block_size": read.either("block_size"),
            "mask_token_id": read.either("mask_token_id"),
            "taps": tuple(read.either("target_layer_ids")),
            "num_target_layers": read.top("num_target_layers"),
            "layer_types": layer_types,
            "sliding_window": window,
            "in_block_attention": _in_block(read, layer_types),
            "window_origin": read.either("window_origin", default="query"),
            "block_layout": _layout(read),
            "input_embedding_scale": read.either("input_embedding_scale", default=1.0),
            "output_multiplier": read.either("output_multiplier", default=1.0),
            "final_logit_softcapping": read.either("final_logit_softcapping", default=None) or None,
            "dflash2": dflash2,
        },
        where,
    )


def transformer_fields(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Fields of a DrafterSpec that stand in a Qwen3 configuration.

    Raises:
        UserError: a size that is missing, a bias, or rotary parameters that are missing or contradict themselves.
    """
    read = _Reader(config, where)
    if config.get("attention_bias"):
        raise UserError("attention_bias is set", where=where, mend="only drafters without biases can be read")
    return {
        "hidden_size": read.top("hidden_size"),
        "intermediate_size": read.top("intermediate_size"),
        "num_layers": read.top("num_hidden_layers"),
        "num_heads": read.top("num_attention_heads"),
        "num_kv_heads": read.top("num_key_value_heads"),
        "head_dim": read.top("head_dim"),
        "vocab_size": read.top("vocab_size"),
        "rms_norm_eps": read.top("rms_norm_eps"),
        "rope_parameters": _rope(read),
        "max_position_embeddings": read.top("max_position_embeddings"),
        "hidden_act": config.get("hidden_act", "silu"),
        "initializer_range": config.get("initializer_range", 0.02),
        "bos_token_id": config.get("bos_token_id"),
        "eos_token_id": config.get("eos_token_id"),
        "pad_token_id": config.get("pad_token_id"),
    }


def drafter_spec(fields: Mapping[str, Any], where: str) -> DrafterSpec:
    """The spec with these fields. Raises UserError naming the first that cannot be."""
    try:
        return DrafterSpec(**fields)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise UserError(f"{field}: {message}" if field else message, where=where, mend="repair the file") from error


class _Reader:
    """Looks keys up where z-lab's class does, without its silent defaults."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        inner = config.get("dflash_config", {})
        if not isinstance(inner, Mapping):
            raise UserError("dflash_config is not an object", where=where, mend="repair the file")
        self.config, self.inner, self.where = config, inner, where

    def top(self, key: str) -> Any:
        value = self.config.get(key)
        if value is None:
            raise self.missing(key)
        return value

    def either(self, key: str, **default: Any) -> Any:
        """Value in `dflash_config` or at the top; both must agree, and one must be there unless there is a default."""
        found = [place[key] for place in (self.inner, self.config) if key in place]
        if len(found) == 2 and found[0] != found[1]:
            raise UserError(
                f"{key} is {found[0]} in dflash_config and {found[1]} at the top level",
                where=self.where,
                mend="make both the value it was trained with",
            )
        if not found or (found[0] is None and "default" not in default):
            if "default" in default:
                return default["default"]
            raise self.missing(key)
        return found[0]

    def missing(self, key: str) -> UserError:
        return UserError(f"{key} is missing", where=self.where, mend=f"add {key}; it cannot be guessed")


def _dflash2(read: _Reader) -> dict[str, Any] | None:
    """DFlash2's sizes, or None for a DFlash drafter; the architecture's name decides, as in z-lab's loader."""
    names = architectures(read.config)
    if ARCHITECTURE_2 in names:
        return {key: read.either(key) for key in DFLASH2_KEYS}
    if ARCHITECTURE not in names:
        found = f"architecture {', '.join(names)}" if names else "no architecture"
        raise UserError(
            f"{found}, expected {ARCHITECTURE} or {ARCHITECTURE_2}", where=read.where, mend="give a DFlash drafter"
        )
    present = [key for key in DFLASH2_KEYS if read.either(key, default=None) is not None]
    if present:
        raise UserError(
            f"{present[0]} is set, but the architecture is {ARCHITECTURE}: a loader would leave DFlash2's weights out",
            where=read.where,
            mend=f"name {ARCHITECTURE_2} in architectures",
        )
    return None


def _layout(read: _Reader) -> Literal["same"]:
    """z-lab's architecture has one layout; a file that says otherwise is not guessed about."""
    if read.either("sample_from_anchor", default=False):
        raise UserError(
            "sample_from_anchor is set: slots are shifted by one against ours",
            where=read.where,
            mend="convert it first",
        )
    layout = read.either("block_layout", default="same")
    if layout != "same":
        raise UserError(f"block_layout {layout!r} is not known", where=read.where, mend="only 'same' can be read")
    return "same"


def _layer_types(read: _Reader) -> tuple[tuple[Any, ...], int | None]:
    """Layer types and the window. Absent layer types follow Qwen3's rule: sliding from max_window_layers on."""
    config, number = read.config, read.top("num_hidden_layers")
    if not 1 <= number <= 1024:
        raise UserError(f"num_hidden_layers is {number}", where=read.where, mend="repair the file")
    slides = bool(config.get("use_sliding_window", False))
    kinds = config.get("layer_types")
    if kinds is None:
        first = config.get("max_window_layers", number)
        kinds = ["sliding_attention" if slides and i >= first else "full_attention" for i in range(number)]
    window = config.get("sliding_window")
    if "sliding_attention" in kinds and (window is None or not slides):
        raise UserError(
            "layer_types has sliding_attention, but sliding_window or use_sliding_window is not set",
            where=read.where,
            mend="set both; servers would drop the window",
        )
    if read.inner.get("use_swa") and "sliding_attention" not in kinds:
        raise UserError(
            "dflash_config.use_swa is set but layer_types are all full: servers disagree about such a file",
            where=read.where,
            mend="say sliding_attention in layer_types, or drop use_swa",
        )
    return tuple(kinds), window if "sliding_attention" in kinds else None


def _in_block(read: _Reader, layer_types: tuple[Any, ...]) -> InBlockAttention:
    """`is_causal` holds for all layers; without it sliding layers are causal inside a block and full ones are not."""
    is_causal, causal = read.config.get("is_causal"), read.inner.get("causal")
    if read.inner.get("is_causal") is not None and read.inner["is_causal"] != is_causal:
        raise UserError(
            f"is_causal is {read.inner['is_causal']} in dflash_config, where no server reads it",
            where=read.where,
            mend="set it at the top level to the value it was trained with",
        )
    if is_causal is not None and causal is not None and bool(is_causal) != bool(causal):
        raise UserError(
            f"is_causal is {is_causal} but dflash_config.causal is {causal}", where=read.where, mend="make them agree"
        )
    if is_causal is not None:
        return "causal" if is_causal else "bidirectional"
    if causal is None or {kind == "sliding_attention" for kind in layer_types} == {bool(causal)}:
        return "zlab"
    raise UserError(
        f"dflash_config.causal is {causal} without is_causal: servers disagree about such a file",
        where=read.where,
        mend="set is_causal to the value it was trained with",
    )


def _rope(read: _Reader) -> dict[str, Any]:
    """Rotary parameters in the new schema, from either schema; both must agree where both are there."""
    new = read.config.get("rope_parameters")
    theta = read.config.get("rope_theta")
    if not new and theta is None:
        raise read.missing("rope_theta or rope_parameters")
    old: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": theta,
        **_renamed(read.config.get("rope_scaling") or {}),
    }
    if not new:
        return old
    given = {"rope_type": "default", **_renamed(new)}
    if "rope_theta" not in given:
        raise read.missing("rope_parameters.rope_theta")
    if theta is not None:
        for key in sorted(old.keys() | given.keys()):
            if old.get(key) != given.get(key) and ("rope_scaling" in read.config or key == "rope_theta"):
                raise UserError(
                    f"{key} is {given.get(key)} in rope_parameters and {old.get(key)} in rope_theta/rope_scaling",
                    where=read.where,
                    mend="make both the value it was trained with",
                )
    return given


def _renamed(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Old files say `type` for `rope_type`."""
    return {("rope_type" if key == "type" else key): value for key, value in rope.items()}


def _old_rope_scaling(rope: Mapping[str, Any]) -> dict[str, Any] | None:
    """transformers 4's schema: null for plain RoPE, else everything but the base."""
    if rope["rope_type"] == "default":
        return None
    return {key: value for key, value in rope.items() if key != "rope_theta"}
