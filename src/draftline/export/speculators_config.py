"""Between a DrafterSpec and the config.json of speculators' format, which vLLM reads. Pure dictionaries.

How vLLM takes such a file: one switch, `sliding_window_non_causal`, is turned into causality of ALL layers; windows are
measured from the query; taps are counted one higher than ours; factors on embedding and logits have no place. What
that cannot express is refused in `refuse_unservable_by_vllm`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draftline.config.drafter_spec import DrafterSpec
from draftline.errors import UserError
from draftline.export.common import causal_layers, slides
from draftline.export.zlab_config import (
    DFLASH2_KEYS,
    architecture_of,
    drafter_spec,
    transformer_config,
    transformer_fields,
)
from draftline.target.conventions import aux_ids_to_taps, taps_to_aux_ids

MODEL_TYPE, MODEL_TYPE_2 = "dflash", "dflash2"
SPECULATORS_VERSION = "0.9.0"  # whose DFlash fields these are


@dataclass(frozen=True, slots=True)
class Verifier:
    """The target as a server knows it.

    Attributes:
        name_or_path: hub id or folder; vLLM loads it when it is started with the drafter alone.
        architectures: class names from its config.json.
        num_layers: its decoder layers; None where only the drafter's file is known.
    """

    name_or_path: str
    architectures: tuple[str, ...] = ()
    num_layers: int | None = None


def speculators_config(spec: DrafterSpec, dtype: str, verifier: Verifier) -> dict[str, Any]:
    """config.json for `spec`.

    Raises:
        UserError: something that vLLM would serve otherwise than it was trained, with the reason.
    """
    refuse_unservable_by_vllm(spec)
    if not verifier.name_or_path:
        raise UserError("the target's name is not known", where="export", mend="give it with --target")
    kind = MODEL_TYPE if spec.dflash2 is None else MODEL_TYPE_2
    return {
        "architectures": [architecture_of(spec)],
        "speculators_model_type": kind,
        "speculators_version": SPECULATORS_VERSION,
        "aux_hidden_state_layer_ids": list(taps_to_aux_ids(spec.taps, spec.num_target_layers)),
        "block_size": spec.block_size,
        **({} if spec.dflash2 is None else spec.dflash2.model_dump()),
        "draft_vocab_size": spec.vocab_size if spec.draft_vocabulary is None else len(spec.draft_vocabulary),
        "mask_token_id": spec.mask_token_id,
        "sample_from_anchor": False,
        "sliding_window_non_causal": not any(causal_layers(spec)),
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "dtype": dtype,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": spec.block_size - 1,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": verifier.name_or_path, "architectures": list(verifier.architectures)},
        },
        "transformer_layer_config": {"model_type": "qwen3", **transformer_config(spec)},
    }


def refuse_unservable_by_vllm(spec: DrafterSpec) -> None:
    """Raises UserError for semantics that this format, as vLLM reads it, does not have."""
    causal, full = causal_layers(spec), "full_attention" in spec.layer_types
    reason = None
    if slides(spec) and spec.window_origin != "query":
        reason = f"window_origin {spec.window_origin!r}: vLLM measures the window from the query"
    elif any(causal) and not all(causal):
        reason = "causal sliding layers beside bidirectional full ones: vLLM would make all layers causal"
    elif all(causal) and full:
        reason = "causal full layers: vLLM would serve them, but the format's own class sees the whole block in them"
    elif slides(spec) and not any(causal) and (spec.sliding_window or 0) < spec.block_size:
        reason = f"a window of {spec.sliding_window} below the block size {spec.block_size} in bidirectional layers"
    elif spec.input_embedding_scale != 1.0:
        reason = f"input_embedding_scale {spec.input_embedding_scale:g}: the format has no such factor"
    elif spec.dflash2 is not None and (spec.output_multiplier != 1.0 or spec.final_logit_softcapping is not None):
        reason = "the selector adds to logits behind multiplier and soft cap, for which the format has no place"
    if reason is not None:
        raise UserError(
            f"cannot be served from speculators' format, {reason}", where="export", mend="export with --format zlab"
        )


def spec_from_speculators(config: Mapping[str, Any], where: str, unsaid: Mapping[str, Any]) -> DrafterSpec:
    """DrafterSpec of a config.json in speculators' format, by whoever wrote it, as it was TRAINED.

    speculators trains full layers bidirectional whatever the switch says, and measures windows from the anchor.

    Args:
        unsaid: fields of the spec that the format does not tell, where known from elsewhere; `num_target_layers` must
            be among them.

    Raises:
        UserError: another algorithm, missing or contradicting fields, a shifted layout.
    """
    _check_kind(config, where)
    inner = config.get("transformer_layer_config")
    if not isinstance(inner, Mapping):
        raise UserError("transformer_layer_config is missing", where=where, mend="give a DFlash speculator")
    if config.get("sample_from_anchor", False):
        raise UserError("sample_from_anchor is set: slots are shifted by one against ours", where=where)
    for name in ("aux_hidden_state_layer_ids", "block_size", "mask_token_id"):
        if config.get(name) is None:
            raise UserError(f"{name} is missing", where=where, mend=f"add {name}; it cannot be guessed")
    _check_vocabulary(config, inner, unsaid.get("draft_vocabulary"), where)
    _check_hidden(config, inner, where)
    num_target_layers = unsaid.get("num_target_layers")
    if num_target_layers is None:
        raise UserError(
            "the format does not tell the target's number of layers", where=where, mend="give the target (--target)"
        )
    kinds = tuple(inner.get("layer_types") or ("full_attention",) * int(inner.get("num_hidden_layers", 0)))
    sliding = "sliding_attention" in kinds
    taps = _taps(config["aux_hidden_state_layer_ids"], num_target_layers, where)
    return drafter_spec(
        {
            **transformer_fields(inner, where),
            "block_size": config["block_size"],
            "mask_token_id": config["mask_token_id"],
            "taps": taps,
            "layer_types": kinds,
            "sliding_window": inner.get("sliding_window") if sliding else None,
            "in_block_attention": "bidirectional" if sliding and non_causal(config) else "zlab",
            "window_origin": "anchor" if sliding else "query",
            "dflash2": _dflash2(config, where),
            **unsaid,
        },
        where,
    )


def non_causal(config: Mapping[str, Any]) -> bool:
    """The switch as speculators' class reads it: absent means causal sliding layers, in DFlash2 bidirectional ones."""
    return bool(config.get("sliding_window_non_causal", config.get("speculators_model_type") == MODEL_TYPE_2))


def _check_kind(config: Mapping[str, Any], where: str) -> None:
    kind = config.get("speculators_model_type")
    if kind not in (MODEL_TYPE, MODEL_TYPE_2):
        what = f"speculators_model_type is {kind!r}, expected 'dflash' or 'dflash2'"
        raise UserError(what, where=where, mend="give a DFlash one")


def _dflash2(config: Mapping[str, Any], where: str) -> dict[str, Any] | None:
    if config.get("speculators_model_type") == MODEL_TYPE:
        return None
    for key in DFLASH2_KEYS:
        if config.get(key) is None:
            raise UserError(f"{key} is missing", where=where, mend=f"add {key}; it cannot be guessed")
    return {key: config[key] for key in DFLASH2_KEYS}


def is_pruned(config: Mapping[str, Any]) -> bool:
    """True if only a part of the target's vocabulary can be drafted."""
    inner = config.get("transformer_layer_config")
    return isinstance(inner, Mapping) and config.get("draft_vocab_size") != inner.get("vocab_size")


def _check_vocabulary(
    config: Mapping[str, Any], inner: Mapping[str, Any], ids: Sequence[int] | None, where: str
) -> None:
    drafted, found = config.get("draft_vocab_size"), inner.get("vocab_size") if ids is None else len(ids)
    if drafted != found:
        what = "the target's vocabulary" if ids is None else "the map in the weights"
        raise UserError(
            f"draft_vocab_size is {drafted}, {what} has {found} tokens",
            where=where,
            mend="give the weights that belong to this config.json",
        )


def _check_hidden(config: Mapping[str, Any], inner: Mapping[str, Any], where: str) -> None:
    target_hidden = config.get("target_hidden_size")
    if target_hidden is not None and target_hidden != inner.get("hidden_size"):
        raise UserError(
            f"target_hidden_size is {target_hidden}, hidden_size {inner.get('hidden_size')}",
            where=where,
            mend="a drafter must have its target's hidden size",
        )


def _taps(aux_ids: Sequence[int], num_target_layers: int, where: str) -> tuple[int, ...]:
    try:
        return aux_ids_to_taps([int(i) for i in aux_ids], num_target_layers)
    except UserError as error:
        raise UserError(
            f"aux_hidden_state_layer_ids {list(aux_ids)} for a target of {num_target_layers} layers: {error.what}",
            where=where,
            mend=error.mend,
        ) from error
