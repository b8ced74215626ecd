"""The spec of a run that starts from a checkpoint: what the configuration names, and the rest as it was trained."""

from __future__ import annotations

from pathlib import Path

from draftline.config.drafter_spec import DrafterSpec
from draftline.errors import UserError
from draftline.export.common import causal_layers, slides, told
from draftline.export.formats import read_drafter_spec

# What the configuration has no key for: a checkpoint of others keeps its own, whatever our defaults for its target are.
_KEPT = (
    "rms_norm_eps",
    "rope_parameters",
    "max_position_embeddings",
    "hidden_act",
    "initializer_range",
    "input_embedding_scale",
    "output_multiplier",
    "final_logit_softcapping",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


def spec_to_train_on(wanted: DrafterSpec, checkpoint: Path | None) -> DrafterSpec:
    """`wanted` with those fields of the checkpoint that no configuration names. None: `wanted` itself.

    Raises:
        UserError: the checkpoint cannot be read.
    """
    if checkpoint is None:
        return wanted
    found = read_drafter_spec(checkpoint.expanduser(), num_target_layers=wanted.num_target_layers)
    return wanted.model_copy(update={name: getattr(found, name) for name in _KEPT})


def require_same_spec(found: DrafterSpec, wanted: DrafterSpec, where: Path) -> None:
    """A drafter that is trained further must be the one that the configuration describes.

    A DFlash drafter may go on as a DFlash2 one, whose further parts start without effect. A pruned vocabulary is a
    matter of exports: training is over the whole one.

    Raises:
        UserError: names each field that differs, with both values.
    """
    fields = [n for n in DrafterSpec.model_fields if not _same(n, found, wanted)]
    if fields:
        raise UserError(
            "is a drafter of another shape: "
            + ", ".join(f"{n} {told(getattr(found, n))} there, {told(getattr(wanted, n))} here" for n in fields),
            where=str(where),
            mend="change the drafter section (`draftline import` writes the right one), or start from another drafter",
        )


def _same(name: str, found: DrafterSpec, wanted: DrafterSpec) -> bool:
    """Equal in effect: some fields mean nothing without a sliding layer, some settings have two names."""
    if name == "in_block_attention":
        return causal_layers(found) == causal_layers(wanted)
    if name in ("window_origin", "sliding_window") and not slides(found):
        return True
    if name == "draft_vocabulary" or (name == "dflash2" and found.dflash2 is None):
        return True
    return bool(getattr(found, name) == getattr(wanted, name))
