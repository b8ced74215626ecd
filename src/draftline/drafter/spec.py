"""From the user's drafter section and the target's facts to a complete DrafterSpec. No torch here.

Every mistake that can be seen without weights is met here with one line: sizes, taps, the mask token, RoPE.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from draftline.config.dflash2 import Dflash2Config
from draftline.config.drafter_spec import Dflash2Spec, DrafterSpec, LayerType, default_taps
from draftline.config.schema import DrafterConfig
from draftline.errors import UserError

if TYPE_CHECKING:
    from draftline.target.facts import TargetFacts

DEFAULT_ROPE_THETA = 10_000.0
# RoPE whose frequencies depend on the longest position of a call: a key cached early and a key made late would
# disagree, and a packed row would not equal its blocks. The drafter learns its own attention and does without.
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


def build_spec(config: DrafterConfig, facts: TargetFacts, *, stop_token_ids: Collection[int] = ()) -> DrafterSpec:
    """Complete a drafter configuration with the target's sizes.

    Args:
        config: the `drafter` section; null sizes are taken from the target.
        facts: what the target's configuration says.
        stop_token_ids: further tokens that end an answer (chat template, generation configuration).

    Raises:
        UserError: sizes, taps or mask token that cannot work with this target.
    """
    check_mask_token(config.mask_token_id, facts, stop_token_ids)
    sizes = _sizes(config, facts)
    try:
        return DrafterSpec(
            **sizes,
            hidden_size=facts.hidden_size,
            num_layers=config.num_layers,
            vocab_size=facts.vocab_size,
            rms_norm_eps=facts.rms_norm_eps,
            rope_parameters=drafter_rope(facts.rope_parameters, facts.max_position_embeddings),
            max_position_embeddings=facts.max_position_embeddings,
            block_size=config.block_size,
            mask_token_id=config.mask_token_id,
            taps=choose_taps(config, facts.num_layers),
            num_target_layers=facts.num_layers,
            **_sliding(config),
            input_embedding_scale=facts.embedding_scale,
            output_multiplier=facts.logit_multiplier,
            final_logit_softcapping=facts.final_logit_softcapping,
            dflash2=_dflash2(config),
            bos_token_id=facts.bos_token_id,
            eos_token_id=_eos(facts.eos_token_ids),
            pad_token_id=facts.pad_token_id,
        )
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        where = f"drafter.{field}" if field else "drafter"
        raise UserError(first["msg"].removeprefix("Value error, "), where=where) from error


def check_target(spec: DrafterSpec, facts: TargetFacts, *, where: str = "drafter") -> None:
    """Refuse a drafter (a warm start, an export) that was made for another target.

    Args:
        where: which of the two was named, for the message.

    Raises:
        UserError: names both values of the first size that disagrees.
    """
    pairs = (
        ("hidden size", spec.hidden_size, facts.hidden_size),
        ("vocabulary size", spec.vocab_size, facts.vocab_size),
        ("number of target layers", spec.num_target_layers, facts.num_layers),
    )
    for name, ours, theirs in pairs:
        if ours != theirs:
            raise UserError(
                f"the drafter's {name} is {ours}, the target's is {theirs}",
                where=where,
                mend="use the target that this drafter was made for, or build a new drafter",
            )


def choose_taps(config: DrafterConfig, num_target_layers: int) -> tuple[int, ...]:
    """Explicit taps, checked; or z-lab's rule for `num_taps` (null: one a drafter layer).

    Raises:
        UserError: a tap outside the model, on its last layer, repeated or out of order.
    """
    by_rule = config.taps is None
    taps = config.taps or default_taps(num_target_layers, config.num_taps or config.num_layers)
    where = "drafter.num_taps" if by_rule else "drafter.taps"
    last = num_target_layers - 1
    if last in taps and not by_rule:
        raise UserError(
            f"tap {last} is the target's last layer, whose state servers give after the final norm",
            where=where,
            mend=f"use layers 0..{last - 1}",
        )
    if any(not 0 <= tap < last for tap in taps) or list(taps) != sorted(set(taps)):
        what = f"{len(taps)} taps by rule give {list(taps)}" if by_rule else f"taps {list(taps)} are not usable"
        raise UserError(
            f"{what} for a target of {num_target_layers} layers",
            where=where,
            mend=f"name rising layers within 0..{last - 1} in drafter.taps, or fewer in drafter.num_taps",
        )
    return tuple(taps)


def check_mask_token(mask_token_id: int, facts: TargetFacts, stop_token_ids: Collection[int] = ()) -> None:
    """The mask token must be an embedding row of the target that text never uses.

    Raises:
        UserError: outside the vocabulary, or a token that begins, ends or pads text.
    """
    where, mend = "drafter.mask_token_id", "choose an embedding row that text never uses (a reserved or unused token)"
    if not 0 <= mask_token_id < facts.vocab_size:
        raise UserError(
            f"{mask_token_id} is outside the target's vocabulary of {facts.vocab_size} tokens", where=where, mend=mend
        )
    uses: dict[str, set[int | None]] = {
        "end-of-text": set(facts.eos_token_ids),
        "padding": {facts.pad_token_id},
        "begin-of-text": {facts.bos_token_id},
        "stop": set(stop_token_ids),
    }
    for use, ids in uses.items():
        if mask_token_id in ids:
            raise UserError(f"{mask_token_id} is the target's {use} token", where=where, mend=mend)


def drafter_rope(target_rope: dict[str, Any], max_position_embeddings: int) -> dict[str, Any]:
    """RoPE parameters of a drafter: the target's theta and scaling, whole, with four deliberate changes.

    * A target with one RoPE per layer type (Gemma) gives the one of its full-attention layers.
    * `partial_rotary_factor` is dropped: z-lab's model rotates the whole head whatever the field says, and a copied
      field makes servers rotate a part. The "proportional" type, whose frequencies hold the part, keeps it.
    * Multimodal sections (`mrope_*`) are dropped: on text all sections carry the same position.
    * Frequencies that depend on the sequence length become plain RoPE with the same theta.

    A target without RoPE gives the usual theta of 10000.
    """
    rope = _one_rope(target_rope)
    rope_type = rope.pop("type", None) or "default"
    rope = {key: value for key, value in rope.items() if value is not None and not key.startswith("mrope")}
    rope.setdefault("rope_type", rope_type)
    rope.setdefault("rope_theta", DEFAULT_ROPE_THETA)
    if rope["rope_type"] in (*LENGTH_DEPENDENT_ROPE, "mrope"):
        rope = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    if rope["rope_type"] != "proportional":
        rope.pop("partial_rotary_factor", None)
    if rope["rope_type"] in ("llama3", "yarn"):
        rope.setdefault("original_max_position_embeddings", max_position_embeddings)
    return rope


def _one_rope(target_rope: dict[str, Any]) -> dict[str, Any]:
    nested = {key: value for key, value in target_rope.items() if isinstance(value, dict)}
    if not nested:
        return dict(target_rope)
    return dict(nested.get("full_attention") or next(iter(nested.values())))


def _sizes(config: DrafterConfig, facts: TargetFacts) -> dict[str, Any]:
    sizes: dict[str, Any] = {
        name: getattr(config, name) or getattr(facts, name)
        for name in ("intermediate_size", "num_heads", "num_kv_heads", "head_dim")
    }
    for name, value in sizes.items():
        if not value:
            raise UserError("the target's configuration does not tell it", where=f"drafter.{name}", mend="set it")
    if sizes["head_dim"] % 2:
        raise UserError(f"{sizes['head_dim']} is odd, RoPE needs pairs", where="drafter.head_dim", mend="set it even")
    return sizes


def _sliding(config: DrafterConfig) -> dict[str, Any]:
    sliding = config.sliding
    slides = set(sliding.layers) if sliding else set()
    types: list[LayerType] = [
        "sliding_attention" if i in slides else "full_attention" for i in range(config.num_layers)
    ]
    if sliding is None:
        return {"layer_types": tuple(types)}
    return {
        "layer_types": tuple(types),
        "sliding_window": sliding.window_tokens if slides else None,
        "in_block_attention": sliding.in_block,
        "window_origin": sliding.origin,
    }


def _dflash2(config: DrafterConfig) -> Dflash2Spec | None:
    if config.kind != "dflash2":
        return None
    return Dflash2Spec(**(config.dflash2 or Dflash2Config()).model_dump())


def _eos(ids: Collection[int]) -> int | list[int] | None:
    found = list(ids)
    return found[0] if len(found) == 1 else (found or None)
