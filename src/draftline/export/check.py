"""`draftline export --check`: whether a folder would be served as it was trained, and by whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from draftline.drafter.spec import check_target
from draftline.errors import UserError
from draftline.export.common import CARD, ExportFormat, read_provenance
from draftline.export.files import read_headers, read_json
from draftline.export.formats import detect_format, load_drafter_export, read_drafter_spec
from draftline.export.traps import SERVERS, Server, Subject, TrapFinding, find_traps
from draftline.target.facts import TargetFacts


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What a check found.

    Attributes:
        servers: those that were asked about.
        refused_by: why a server would not serve it as trained; empty: it would.
    """

    path: Path
    form: ExportFormat
    servers: tuple[Server, ...]
    findings: tuple[TrapFinding, ...]

    @property
    def good_for(self) -> tuple[Server, ...]:
        """Servers that would serve it as it was trained."""
        refused = {f.server for f in self.findings if f.level == "refuse"}
        return () if "any" in refused else tuple(s for s in self.servers if s not in refused)

    def lines(self) -> list[str]:
        """For people: a line a finding, then the verdict."""
        verdict = f"as trained: {', '.join(self.good_for)}" if self.good_for else "served by none of them as trained"
        return [*(f.line() for f in self.findings), f"{self.path} ({self.form}): {verdict}"]


def check_export(
    path: Path,
    *,
    servers: Sequence[Server] | None = None,
    form: ExportFormat | None = None,
    num_target_layers: int | None = None,
    target: TargetFacts | None = None,
) -> CheckReport:
    """Reads a folder whole and looks for the serving traps.

    Args:
        servers: who is asked about; None: those that read its format.
        form: format that the folder is expected to be in; None: as found.
        num_target_layers: of the target, for speculators' format without a card of ours.
        target: the whole target, where it is known: it must be the drafter's.

    Raises:
        UserError: no drafter, another format than expected, or one that cannot be read at all.
    """
    path = Path(path).expanduser()
    found = detect_format(path)
    if form is not None and form != found:
        raise UserError(f"is in {found} format, not {form}", where=str(path), mend=f"export it with --format {form}")
    shapes, dtypes = read_headers(path)
    if target is not None:
        num_target_layers = target.num_layers
    spec, provenance = read_drafter_spec(path, num_target_layers=num_target_layers), read_provenance(path)
    subject = Subject(
        form=found,
        config=read_json(path / "config.json"),
        spec=spec,
        is_ours=(path / CARD).is_file(),
        shapes=shapes,
        dtypes=dtypes,
        provenance=provenance if target is None else provenance | {"target_is_recurrent": target.has_recurrent_layers},
        target=target,
    )
    asked = tuple(servers) if servers else (("vllm",) if found == "speculators" else SERVERS)
    findings = [f for f in find_traps(subject) if f.server == "any" or f.server in asked]
    try:
        load_drafter_export(path, num_target_layers=num_target_layers)
    except UserError as error:  # weights that are missing, misshapen or not finite
        findings.insert(0, TrapFinding("refuse", "any", error.what, error.mend or "export it again"))
    try:
        if target is not None:
            check_target(spec, target)
    except UserError as error:
        findings.insert(0, TrapFinding("refuse", "any", error.what, error.mend or "give its own target"))
    return CheckReport(path, found, asked, tuple(findings))
