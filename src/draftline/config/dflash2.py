"""The sections of a DFlash2 drafter: its two further modules, and the loss of its candidate selector."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from draftline.config.sections import Section


class Dflash2Config(Section):
    """Sizes of a DFlash2 drafter's convolutions and candidate selector. The defaults are those of published ones."""

    conv_kernel_size: int = Field(default=2, ge=1, description="Slots that a convolution reads: its own and earlier.")
    conv_group_size: int = Field(default=16, ge=1, description="Channels that share a dynamic kernel.")
    selector_rank: int = Field(default=256, ge=1, description="Rank of the selector's two codebooks, vocabulary each.")
    selector_top_k: int = Field(default=16, ge=1, description="Likeliest tokens of a slot that the selector ranks.")


class SelectorObjective(Section):
    """Loss of the candidate selector: cross-entropy of the data's token among a slot's candidates, teacher-forced."""

    weight: float = Field(
        default=1.0, ge=0, description="Factor on it beside the other terms; 0: not trained, nor decayed."
    )
    missing: Literal["skip", "inject"] = Field(
        default="skip", description="Where the token is no candidate: no loss, or it takes the weakest one's place."
    )
    stop_gradient: bool = Field(default=False, description="Train the selector alone: nothing goes back into the rest.")
    warmup_rows: int = Field(default=0, ge=0, description="Rows over which its weight rises from 0.")
