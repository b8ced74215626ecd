"""DrafterSpec: everything that fixes a drafter's architecture and serving semantics, as plain data.

It is written into every checkpoint and export; a drafter built from it alone gives the trainer's own hidden states.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

LayerType = Literal["full_attention", "sliding_attention"]
# How a sliding layer treats the inside of a block. "zlab" is z-lab's model with `is_causal` unset: sliding layers are
# causal inside the block, full layers see the whole block. "causal" / "bidirectional" treat all layers alike.
InBlockAttention = Literal["zlab", "causal", "bidirectional"]
# What the window is measured from: the query's own position ("query", as z-lab serves) or the anchor ("anchor",
# as speculators trains).
WindowOrigin = Literal["query", "anchor"]
_ROPE_NUMBERS = frozenset(
    {
        "rope_theta",
        "factor",
        "partial_rotary_factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "low_freq_factor",
        "high_freq_factor",
        "mscale",
        "mscale_all_dim",
    }
)


class Dflash2Spec(BaseModel):
    """What a DFlash2 drafter has beyond a DFlash one: short convolutions inside a block, and a candidate selector."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    conv_kernel_size: int = Field(default=2, ge=1)
    conv_group_size: int = Field(default=16, ge=1)
    selector_rank: int = Field(default=256, ge=1)
    selector_top_k: int = Field(default=16, ge=1)


class DrafterSpec(BaseModel):
    """Architecture of a drafter, DFlash or DFlash2. Sizes are counts of elements; `taps` 0-based decoder layer ids."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    hidden_size: int = Field(ge=1)
    intermediate_size: int = Field(ge=1)
    num_layers: int = Field(ge=1, le=1024)
    num_heads: int = Field(ge=1)
    num_kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=2)
    vocab_size: int = Field(ge=2)
    rms_norm_eps: float = Field(gt=0)
    rope_parameters: dict[str, Any]
    max_position_embeddings: int = Field(ge=1)
    hidden_act: str = "silu"
    initializer_range: float = Field(default=0.02, gt=0)

    block_size: int = Field(ge=2)
    mask_token_id: int = Field(ge=0)
    taps: tuple[int, ...] = Field(min_length=1)
    num_target_layers: int = Field(ge=2)

    layer_types: tuple[LayerType, ...]
    sliding_window: int | None = Field(default=None, ge=1)
    in_block_attention: InBlockAttention = "zlab"
    window_origin: WindowOrigin = "query"
    # Slot k of a block predicts the token AT p + k ("same"); other layouts are refused by name.
    block_layout: Literal["same"] = "same"

    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None

    # None: a DFlash drafter.
    dflash2: Dflash2Spec | None = None
    # Ids that can be drafted, rising; the head has only their rows. None: the whole vocabulary.
    draft_vocabulary: tuple[int, ...] | None = Field(default=None, min_length=1)

    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.mask_token_id >= self.vocab_size:
            raise ValueError(f"mask_token_id {self.mask_token_id} is outside the vocabulary of {self.vocab_size}")
        if len(self.layer_types) != self.num_layers:
            raise ValueError(f"layer_types has {len(self.layer_types)} entries for {self.num_layers} layers")
        if "sliding_attention" in self.layer_types and self.sliding_window is None:
            raise ValueError("layer_types has sliding_attention but sliding_window is not set")
        bad = [t for t in self.taps if not 0 <= t < self.num_target_layers - 1]
        if bad:
            raise ValueError(
                f"taps {bad} are outside 0..{self.num_target_layers - 2} "
                "(the last layer cannot be tapped: servers give its state after the final norm)"
            )
        if len(set(self.taps)) != len(self.taps) or list(self.taps) != sorted(self.taps):
            raise ValueError(f"taps {list(self.taps)} must rise and not repeat")
        self._check_rope()
        self._check_dflash2()
        self._check_vocabulary()
        return self

    def _check_rope(self) -> None:
        for key in _ROPE_NUMBERS & self.rope_parameters.keys():
            value = self.rope_parameters[key]
            number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf
            if value is not None and not number:
                raise ValueError(f"rope_parameters.{key} is {value!r}, not a number")

    def _check_dflash2(self) -> None:
        if self.dflash2 is None:
            return
        group, kernel, top_k = (
            self.dflash2.conv_group_size,
            self.dflash2.conv_kernel_size,
            self.dflash2.selector_top_k,
        )
        if self.hidden_size % group:
            raise ValueError(f"hidden_size {self.hidden_size} is not a multiple of conv_group_size {group}")
        if kernel > self.block_size:
            raise ValueError(f"conv_kernel_size {kernel} is above block_size {self.block_size}")
        if top_k > self.vocab_size:
            raise ValueError(f"selector_top_k {top_k} is above the vocabulary of {self.vocab_size}")

    def _check_vocabulary(self) -> None:
        ids = self.draft_vocabulary
        if ids is None:
            return
        if self.dflash2 is not None:
            raise ValueError("draft_vocabulary: a DFlash2 drafter drafts from the whole vocabulary")
        if not (ids[0] >= 0 and ids[-1] < self.vocab_size and all(a < b for a, b in itertools.pairwise(ids))):
            raise ValueError(f"draft_vocabulary must rise within 0..{self.vocab_size - 1}")


def default_taps(num_target_layers: int, num_taps: int) -> tuple[int, ...]:
    """z-lab's rule for tap layers: spread evenly over 1..N-3; one tap alone is N // 2.

    Source: `build_target_layer_ids` of the `dflash` package, restated.
    """
    if num_taps == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    return tuple(round(1 + i * span / (num_taps - 1)) for i in range(num_taps))
