"""From a run folder, or from another export, to an export in the format that a server wants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from draftline.config.drafter_spec import DrafterSpec
from draftline.config.schema import TargetConfig
from draftline.drafter.model import Drafter
from draftline.errors import UserError
from draftline.export.check import check_export
from draftline.export.common import ExportDtype, ExportFormat, read_provenance, read_recorded_spec
from draftline.export.files import read_json
from draftline.export.formats import detect_format, load_drafter_export
from draftline.export.importing import import_checkpoint, mend_spec
from draftline.export.model_card import FORMAT_NAMES
from draftline.export.speculators import export_speculators
from draftline.export.speculators_config import Verifier
from draftline.export.traps import SERVERS
from draftline.export.zlab import export_zlab
from draftline.pipeline.checkpoint import Checkpoint, CheckpointError, read_checkpoint
from draftline.pipeline.choice import NEWEST, choose_checkpoint
from draftline.pipeline.core import LedgerState
from draftline.pipeline.provenance import evaluation_facts, run_provenance
from draftline.pipeline.pruning import data_of_run, head_rows, prune_spec
from draftline.target.facts import target_facts


def drafter_of_run(run: Path) -> Drafter:
    """The drafter of a run's newest whole checkpoint, fp32, on the CPU.

    Raises:
        UserError: the folder holds no checkpoint, or none that is whole.
    """
    return drafter_of_checkpoint(choose_checkpoint(run).folder)


def drafter_of_checkpoint(folder: Path) -> Drafter:
    """The drafter of one training checkpoint, fp32, on the CPU. Raises CheckpointError if it is not whole."""
    return _build(folder, read_checkpoint(folder))


def export_run(
    source: Path,
    output: Path,
    *,
    dtype: str = "bfloat16",
    form: ExportFormat = "zlab",
    target: str | None = None,
    reports: Sequence[Path] = (),
    checkpoint: str = NEWEST,
    vocabulary: tuple[int, Path | None] | None = None,
) -> Path:
    """Exports a checkpoint of a run, or converts an export of any format, to `output`.

    Args:
        source: run folder or export.
        target: how servers find the target (hub id or folder); None: as the run or export names it.
        reports: evaluation reports whose numbers go into the card.
        checkpoint: of a run: `newest`, `best` by validation, or the number of a round.
        vocabulary: how many tokens can be drafted, and the data whose commonest they are (None: the run's).

    Raises:
        UserError: nothing to export, or a format that would be served otherwise than it was trained.
    """
    if dtype not in get_args(ExportDtype):
        names = ", ".join(get_args(ExportDtype))
        raise UserError(f"dtype {dtype!r} is not known", where="--dtype", mend=f"use one of {names}")
    verifier = _verifier(target, may_be_elsewhere=True)
    drafter, facts = _source(_chosen(source, checkpoint)[0], verifier, keeps_vocabulary=form == "speculators")
    if vocabulary is not None:
        size, data = vocabulary
        drafter.spec = prune_spec(drafter.spec, size, data_of_run(source) if data is None else data)
    facts |= evaluation_facts(reports)
    if verifier is not None:
        facts["target"] = verifier.name_or_path
        if verifier.architectures:
            facts["target_architectures"] = list(verifier.architectures)
    if form == "speculators":
        named = Verifier(str(facts.get("target") or ""), tuple(facts.get("target_architectures") or ()))
        ids = drafter.spec.draft_vocabulary
        head_DH = None if ids is None else head_rows(named.name_or_path, ids)
        export_speculators(drafter, output, named, dtype, provenance=facts, head_DH=head_DH)
    else:
        export_zlab(drafter, output, dtype=dtype, provenance=facts)
    return output


def export_command(
    source: Path | None,
    output: Path | None,
    *,
    form: str | None,
    dtype: str,
    target: str | None,
    reports: Sequence[Path],
    checkpoint: str = NEWEST,
    vocabulary: tuple[int, Path | None] | None = None,
) -> list[str]:
    """`draftline export`: exports, then checks what it wrote. Returns what to print."""
    if source is None or output is None:
        missing = "a run folder" if source is None else "--output"
        raise UserError(f"{missing} is missing", where="export", mend="draftline export RUN --output FOLDER")
    chosen = _form(form) or "zlab"
    _, label = _chosen(source, checkpoint)
    export_run(
        source,
        output,
        dtype=dtype,
        form=chosen,
        target=target,
        reports=reports,
        checkpoint=checkpoint,
        vocabulary=vocabulary,
    )
    report = check_export(output, form=chosen)
    return [f"exported: {output}{label}", *report.lines()]


def check_command(
    path: Path, *, form: str | None, servers: Sequence[str], target: str | None
) -> tuple[list[str], bool]:
    """`draftline export --check`: what to print, and whether every server that was asked about is fine."""
    asked = []
    for name in servers:
        if name not in SERVERS:
            raise UserError(f"{name!r} is no server", where="--server", mend=f"use {', '.join(SERVERS)}")
        asked.append(name)
    verifier = _verifier(target)
    layers = None if verifier is None else verifier.num_layers
    report = check_export(path, servers=asked, form=_form(form), num_target_layers=layers)
    return report.lines(), report.good_for == report.servers


def import_command(checkpoint: Path, output: Path, *, target: str | None) -> list[str]:
    """`draftline import`: what to print. The target is looked up by the name in the file where none is given."""
    named = target
    if named is None and detect_format(checkpoint) == "speculators" and read_recorded_spec(checkpoint) is None:
        named = _named_target(read_json(checkpoint / "config.json")).get("target")
    verifier = _verifier(named)
    imported = import_checkpoint(
        checkpoint, output, num_target_layers=None if verifier is None else verifier.num_layers
    )
    return imported.lines()


def _form(name: str | None) -> ExportFormat | None:
    if name is None or name in FORMAT_NAMES:
        return name  # type: ignore[return-value]
    raise UserError(f"{name!r} is no format", where="--format", mend=f"use {' or '.join(FORMAT_NAMES)}")


def _chosen(source: Path, checkpoint: str) -> tuple[Path, str]:
    """The export or checkpoint that is meant, and how to tell it behind the output's name."""
    source = Path(source).expanduser()
    if (source / "config.json").is_file():
        if checkpoint != NEWEST:
            raise UserError("is an export, which holds one drafter", where=str(source), mend="leave --checkpoint out")
        return source, ""
    choice = choose_checkpoint(source, checkpoint)
    return choice.folder, f" ({choice.label} of {source})"


def _source(source: Path, verifier: Verifier | None, *, keeps_vocabulary: bool) -> tuple[Drafter, dict[str, Any]]:
    if not (source / "config.json").is_file():
        checkpoint = read_checkpoint(source)
        committed = LedgerState.from_json(checkpoint.state["ledger"]).n_committed
        run = source.parents[1]
        return _build(source, checkpoint), run_provenance(run, committed_rows=committed)
    drafter = load_drafter_export(source, num_target_layers=None if verifier is None else verifier.num_layers)
    drafter.spec, mended = mend_spec(drafter.spec, keeps_vocabulary=keeps_vocabulary)
    facts = {**_named_target(read_json(source / "config.json")), **read_provenance(source)}
    return drafter, {**facts, "mended": mended} if mended else facts


def _named_target(config: Mapping[str, Any]) -> dict[str, Any]:
    """The target as a file in speculators' format names it."""
    inner = config.get("speculators_config")
    verifier = inner.get("verifier") if isinstance(inner, Mapping) else None
    if not isinstance(verifier, Mapping) or not verifier.get("name_or_path"):
        return {}
    return {"target": verifier["name_or_path"], "target_architectures": list(verifier.get("architectures") or ())}


def _verifier(target: str | None, *, may_be_elsewhere: bool = False) -> Verifier | None:
    """The target by name, with architectures and layers from its configuration.

    Args:
        may_be_elsewhere: a name that only the server can resolve will do.
    """
    if target is None:
        return None
    try:
        facts = target_facts(TargetConfig(model=target))
    except UserError:
        if not may_be_elsewhere:
            raise
        return Verifier(target)
    return Verifier(target, facts.architectures, facts.num_layers)


def _build(folder: Path, checkpoint: Checkpoint) -> Drafter:
    try:
        drafter = Drafter(DrafterSpec.model_validate(checkpoint.state.get("spec")))
        drafter.load_state_dict(checkpoint.weights)
    except (ValidationError, RuntimeError, ValueError, KeyError, TypeError, ArithmeticError) as error:
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{folder}: weights and description do not make a drafter ({reason})") from error
    return drafter
