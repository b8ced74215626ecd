"""From a run folder, or from another export, to an export in the format that a server wants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from draftline.config.drafter_spec import DrafterSpec
from draftline.config.load import load_config
from draftline.config.schema import TargetConfig
from draftline.drafter.model import Drafter
from draftline.drafter.spec import check_target
from draftline.errors import UserError
from draftline.export.card_facts import checked_facts
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
from draftline.pipeline.pruning import data_of_run, head_rows, prune_spec, target_ends
from draftline.pipeline.run_folder import CONFIG_FILE
from draftline.target.facts import TargetFacts, target_facts


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
    known = _target(target, may_be_elsewhere=True)
    drafter, facts = _source(_chosen(source, checkpoint)[0], known, keeps_vocabulary=form == "speculators")
    if known is not None:
        check_target(drafter.spec, known, where=f"--target {target}")
    facts |= evaluation_facts(reports) | _named(target, known)
    if vocabulary is not None:
        size, data = vocabulary
        data = data_of_run(source) if data is None else data
        ends = target_ends(_lender(source, facts)) if form == "speculators" else ()
        drafter.spec, used = prune_spec(drafter.spec, size, data, text_ends=ends)
        facts["draft_vocabulary"] = {"tokens": size, "used in the data": used}
    if form == "speculators":
        named = Verifier(str(facts.get("target") or ""), tuple(facts.get("target_architectures") or ()))
        head_DH = None if drafter.spec.draft_vocabulary is None else head_rows(drafter.spec, _lender(source, facts))
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
    """`draftline export`: exports, then checks what it wrote. Returns what to print.

    Raises:
        UserError: no run or no output, an unknown form, or whatever `export_run` refuses.
    """
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
    return [f"exported: {output}{label}", *_vocabulary_lines(output), *report.lines()]


def _vocabulary_lines(output: Path) -> list[str]:
    """Tells where a draft vocabulary is larger than what the data use."""
    counted = read_provenance(output).get("draft_vocabulary")
    if not counted or counted["used in the data"] == counted["tokens"]:
        return []
    used, tokens = counted["used in the data"], counted["tokens"]
    return [f"draft vocabulary: the data use {used} of its {tokens} tokens; the others are those of the lowest ids"]


def check_command(
    path: Path, *, form: str | None, servers: Sequence[str], target: str | None
) -> tuple[list[str], bool]:
    """`draftline export --check`: what to print, and whether every server that was asked about is fine.

    Raises:
        UserError: a server that is not known, or a folder that is no drafter.
    """
    known = _target(target)
    asked = []
    for name in servers:
        if name not in SERVERS:
            raise UserError(f"{name!r} is no server", where="--server", mend=f"use {', '.join(SERVERS)}")
        asked.append(name)
    report = check_export(path, servers=asked, form=_form(form), target=known)
    return report.lines(), report.good_for == report.servers


def import_command(checkpoint: Path, output: Path, *, target: str | None) -> list[str]:
    """`draftline import`: what to print. The target is looked up by the name in the file where none is given."""
    named = target
    if named is None and detect_format(checkpoint) == "speculators" and read_recorded_spec(checkpoint) is None:
        named = _named_target(checkpoint).get("target")
    return import_checkpoint(checkpoint, output, target=_target(named)).lines()


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
    passed_over = "".join(f"; passed over: {line}" for line in choice.passed_over)
    return choice.folder, f" ({choice.label} of {source}{passed_over})"


def _source(source: Path, target: TargetFacts | None, *, keeps_vocabulary: bool) -> tuple[Drafter, dict[str, Any]]:
    if not (source / "config.json").is_file():
        checkpoint = read_checkpoint(source)
        committed = LedgerState.from_json(checkpoint.state["ledger"]).n_committed
        run = source.parents[1]
        return _build(source, checkpoint), run_provenance(run, committed_rows=committed)
    drafter = load_drafter_export(source, num_target_layers=None if target is None else target.num_layers)
    drafter.spec, mended = mend_spec(drafter.spec, keeps_vocabulary=keeps_vocabulary)
    facts = {**_named_target(source), **read_provenance(source)}
    if drafter.spec.draft_vocabulary is None:
        facts.pop("draft_vocabulary", None)
    return drafter, {**facts, "mended": mended} if mended else facts


def _named_target(source: Path) -> dict[str, Any]:
    """The target as a file in speculators' format names it.

    Raises:
        UserError: what stands there is no name.
    """
    file = source / "config.json"
    inner = read_json(file).get("speculators_config")
    verifier = inner.get("verifier") if isinstance(inner, Mapping) else None
    if not isinstance(verifier, Mapping) or not verifier.get("name_or_path"):
        return {}
    facts = {"target": verifier["name_or_path"], "target_architectures": verifier.get("architectures") or []}
    return checked_facts(facts, f"{file} (speculators_config.verifier)")


def _target(name: str | None, *, may_be_elsewhere: bool = False) -> TargetFacts | None:
    """The target by name, from its configuration.

    Args:
        may_be_elsewhere: a name that only the server can resolve will do; nothing is known of it then.
    """
    if name is None:
        return None
    try:
        return target_facts(TargetConfig(model=name))
    except UserError:
        if may_be_elsewhere:
            return None
        raise


def _named(target: str | None, known: TargetFacts | None) -> dict[str, Any]:
    """What --target changes in the facts of an export."""
    if target is None:
        return {}
    if known is None:
        return {"target": target, "target_revision": None}
    return {
        "target": target,
        "target_revision": None,
        "target_architectures": list(known.architectures),
        "target_is_recurrent": known.has_recurrent_layers,
    }


def _lender(source: Path, facts: Mapping[str, Any]) -> TargetConfig:
    """The target whose head lends rows: as the run loaded it, or as the export names it."""
    name, file = str(facts.get("target") or ""), Path(source).expanduser() / CONFIG_FILE
    if not name:
        raise UserError("the target's name is not known", where="export", mend="give it with --target")
    own = load_config([file]).target if file.is_file() else None
    if own is None or own.model != name:
        return TargetConfig(model=name, revision=facts.get("target_revision"))
    return TargetConfig(model=name, revision=own.revision, trust_remote_code=own.trust_remote_code)


def _build(folder: Path, checkpoint: Checkpoint) -> Drafter:
    try:
        drafter = Drafter(DrafterSpec.model_validate(checkpoint.state.get("spec")))
        drafter.load_state_dict(checkpoint.weights)
    except (ValidationError, RuntimeError, ValueError, KeyError, TypeError, ArithmeticError) as error:
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{folder}: weights and description do not make a drafter ({reason})") from error
    return drafter
