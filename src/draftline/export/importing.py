"""From a checkpoint of others, or an export of ours, to one that training goes on from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftline.config.drafter_spec import DrafterSpec
from draftline.drafter.spec import check_target
from draftline.errors import UserError
from draftline.export.common import read_provenance, slides
from draftline.export.files import read_headers
from draftline.export.formats import detect_format, load_drafter_export
from draftline.export.quantized_traps import FP8
from draftline.export.serving import drafter_section
from draftline.export.vocabulary import NOT_THE_DRAFTERS
from draftline.export.zlab import export_zlab
from draftline.export.zlab_config import refuse_unservable
from draftline.target.facts import TargetFacts

SECTION_FILE = "drafter.yaml"


@dataclass(frozen=True, slots=True)
class Imported:
    """What was made.

    Attributes:
        path: an export in z-lab's format with the same weights, bit for bit, and a drafter.yaml.
        mended: what is otherwise from now on, one line each.
    """

    path: Path
    spec: DrafterSpec
    mended: tuple[str, ...]

    def lines(self) -> list[str]:
        """For people: what was mended, where it is, and how to train it further."""
        return [
            *(f"mended: {line}" for line in self.mended),
            f"imported: {self.path}",
            f"to train it further, lay {self.path / SECTION_FILE} over a run's configuration (train -c RUN -c THIS)",
        ]


def import_checkpoint(
    source: Path, output: Path, *, num_target_layers: int | None = None, target: TargetFacts | None = None
) -> Imported:
    """Writes `source`, in any format that can be read, to `output`.

    Args:
        num_target_layers: of the target; needed for speculators' format without a card of ours.
        target: the whole target, where it is known: it must be the drafter's.

    Raises:
        UserError: `source` cannot be read, is for another target, or holds what no server could serve as trained.
    """
    source, output = Path(source).expanduser(), Path(output).expanduser()
    if source.resolve() == output.resolve():
        raise UserError("is the checkpoint itself", where=str(output), mend="choose another output folder")
    layers = num_target_layers if target is None else target.num_layers
    drafter = load_drafter_export(source, num_target_layers=layers)
    if target is not None:
        check_target(drafter.spec, target, where=str(source))
    spec, mended = mend_spec(drafter.spec)
    refuse_unservable(spec)
    drafter.spec = spec
    stored = str(drafter.fc.weight.dtype).removeprefix("torch.")
    kinds = sorted({kind for name, kind in read_headers(source)[1].items() if name not in NOT_THE_DRAFTERS})
    if len(kinds) > 1 and FP8 not in kinds:
        mended.append(f"weights of {' and '.join(kinds)} are all kept as float32, which changes none of them")
    export_zlab(
        drafter,
        output,
        "bfloat16" if stored == "bfloat16" else "float32",
        provenance={
            **read_provenance(source),
            "imported_from": source.name,
            "imported_format": detect_format(source),
            "mended": list(mended),
        },
        texts={SECTION_FILE: drafter_section(spec, output.absolute())},
    )
    return Imported(output, spec, tuple(mended))


def mend_spec(spec: DrafterSpec, *, keeps_vocabulary: bool = False) -> tuple[DrafterSpec, list[str]]:
    """The spec as it will be trained on and served, and what that changes.

    Training and z-lab's format are over the whole vocabulary, which a drafter of a pruned one drafts from as well.
    Servers measure windows from the query. A drafter trained with windows from the anchor loses up to a block of old
    tokens in late slots there, so training goes on with what will be served.
    """
    changes: dict[str, Any] = {}
    lines = []
    if slides(spec) and spec.window_origin == "anchor":
        changes["window_origin"] = "query"
        lines.append("the window is measured from the query, as servers do; it was trained from the anchor")
    if spec.draft_vocabulary is not None and not keeps_vocabulary:
        changes["draft_vocabulary"] = None
        lines.append(f"drafts from the whole vocabulary; it was pruned to {len(spec.draft_vocabulary)} tokens")
    return spec.model_copy(update=changes), lines
