"""Drafters in speculators' checkpoint format, which vLLM serves by itself: `vllm serve FOLDER` also finds the target.

The format has room for copies of the target's embedding and head. For a whole vocabulary we write none, as speculators
0.9: both it and vLLM take the target's own. A pruned vocabulary wants its rows of the head and a map; its head is
frozen in speculators too, so on reading copies are left out and the map is enough.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from draftline.config.drafter_spec import DrafterSpec
from draftline.drafter.model import Drafter
from draftline.errors import UserError
from draftline.export.common import (
    README,
    build_drafter,
    read_checked_spec,
    read_recorded_spec,
    require_dtype,
    write_export,
)
from draftline.export.files import WEIGHTS, read_json, read_weights
from draftline.export.model_card import model_card
from draftline.export.speculators_config import Verifier, is_pruned, spec_from_speculators, speculators_config
from draftline.export.vocabulary import (
    NOT_THE_DRAFTERS,
    TO_DRAFT,
    TO_TARGET,
    read_vocabulary,
    refuse_idle_map,
    vocabulary_tensors,
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
    head_DH: torch.Tensor | None = None,
) -> Path:
    """Writes `drafter` to the folder `path`, whole or not at all. Arguments and errors as for `export_zlab`.

    Args:
        verifier: the target, as servers will find it.
        head_DH: the rows of the target's head for the spec's `draft_vocabulary`; needed if it has one.

    Raises:
        UserError: also a spec that vLLM would serve otherwise than it was trained.
    """
    require_dtype(dtype)
    if dtype == "fp8":
        raise UserError(
            "fp8 weights are not possible in speculators' format", where="export", mend="export with --format zlab"
        )
    ids, borrowed = drafter.spec.draft_vocabulary, None
    if ids is not None:
        if head_DH is None or head_DH.shape != (len(ids), drafter.spec.hidden_size):
            raise UserError(
                "a pruned vocabulary needs its rows of the target's head", where="export", mend="give --target"
            )
        borrowed = vocabulary_tensors(ids, head_DH, drafter.spec.vocab_size)
    facts = {"target": verifier.name_or_path, **(provenance or {})}
    return write_export(
        drafter,
        path,
        dtype,
        form="speculators",
        config=speculators_config(drafter.spec, dtype, verifier),
        provenance=facts,
        borrowed=borrowed,
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
    spec, stored = read_speculators_spec(path, num_target_layers), read_weights(path)
    if spec.draft_vocabulary is None:
        refuse_idle_map(stored, str(path / WEIGHTS))
    weights = {name: value for name, value in stored.items() if name not in NOT_THE_DRAFTERS}
    return build_drafter(path, spec, weights, device, dtype)


def read_speculators_spec(path: Path, num_target_layers: int | None = None) -> DrafterSpec:
    """The spec of an export, from config.json; what it cannot tell from draftline.json or the argument."""
    recorded, config = read_recorded_spec(path), read_json(path / "config.json")
    unsaid: dict[str, Any] = {"num_target_layers": num_target_layers}
    if recorded is not None:
        unsaid |= {name: getattr(recorded, name) for name in _UNSAID}
    if is_pruned(config):
        wanted = (TO_TARGET, TO_DRAFT)
        unsaid["draft_vocabulary"] = read_vocabulary(read_weights(path, wanted), str(path / WEIGHTS))
    return read_checked_spec(path, lambda config, where: spec_from_speculators(config, where, unsaid))
