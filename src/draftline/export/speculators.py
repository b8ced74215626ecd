"""Drafters in speculators' checkpoint format, which vLLM serves by itself: `vllm serve FOLDER` also finds the target.

The format has room for copies of the target's embedding and head. We write none: speculators 0.9 writes none either for
a whole vocabulary, and both it and vLLM take the target's own. Copies in a file of others are left out on reading.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from draftline.config.drafter_spec import DrafterSpec
from draftline.drafter.model import Drafter
from draftline.export.common import (
    README,
    build_drafter,
    read_checked_spec,
    read_recorded_spec,
    require_dtype,
    write_export,
)
from draftline.export.files import read_weights
from draftline.export.model_card import model_card
from draftline.export.speculators_config import Verifier, spec_from_speculators, speculators_config

# The target's, or maps of a pruned vocabulary, which `spec_from_speculators` has refused by then.
_NOT_THE_DRAFTERS = frozenset(
    {"embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight", "t2d", "d2t"}
)
# Fields that the format has no place for; a card of ours tells them.
_UNSAID = (
    "num_target_layers",
    "window_origin",
    "input_embedding_scale",
    "output_multiplier",
    "final_logit_softcapping",
    "block_layout",
)


def export_speculators(
    drafter: Drafter,
    path: Path,
    verifier: Verifier,
    dtype: str = "bfloat16",
    *,
    provenance: Mapping[str, Any] | None = None,
) -> Path:
    """Writes `drafter` to the folder `path`, whole or not at all. Arguments and errors as for `export_zlab`.

    Args:
        verifier: the target, as servers will find it.

    Raises:
        UserError: also a spec that vLLM would serve otherwise than it was trained.
    """
    require_dtype(dtype)
    facts = {"target": verifier.name_or_path, **(provenance or {})}
    return write_export(
        drafter,
        path,
        dtype,
        form="speculators",
        config=speculators_config(drafter.spec, dtype, verifier),
        provenance=facts,
        texts={README: model_card(drafter.spec, form="speculators", dtype=dtype, provenance=facts)},
    )


def load_speculators(
    path: Path,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    *,
    num_target_layers: int | None = None,
) -> Drafter:
    """Reads a drafter in speculators' format, ours or another's. Arguments and errors as for `load_export`.

    Args:
        num_target_layers: of the target, needed where no card of ours tells it.
    """
    path = Path(path).expanduser()
    spec = read_speculators_spec(path, num_target_layers)
    weights = {name: value for name, value in read_weights(path).items() if name not in _NOT_THE_DRAFTERS}
    return build_drafter(path, spec, weights, device, dtype)


def read_speculators_spec(path: Path, num_target_layers: int | None = None) -> DrafterSpec:
    """The spec of an export, from config.json; what it cannot tell from draftline.json or the argument."""
    recorded = read_recorded_spec(path)
    unsaid: dict[str, Any] = {} if recorded is None else {name: getattr(recorded, name) for name in _UNSAID}
    if num_target_layers is not None:
        unsaid["num_target_layers"] = num_target_layers
    return read_checked_spec(path, lambda config, where: spec_from_speculators(config, where, unsaid))
