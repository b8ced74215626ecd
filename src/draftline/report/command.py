"""`draftline report`: from run folders to one file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from draftline.config.load import dump_config
from draftline.data.storage import require_writable_file, write_text_atomic
from draftline.errors import UserError
from draftline.report.compare import compared_charts, compared_tables, names_of
from draftline.report.figures import run_charts
from draftline.report.page import Part, Text, render_page, require_plotly
from draftline.report.source import RunSource, read_run
from draftline.report.tables import evaluation_tables, fact_tables, glance

PAGE, COMPARISON = "report.html", "comparison.html"


def write_report(
    runs: Sequence[Path], *, compare: bool = False, evaluations: Sequence[Path] = (), output: Path | None = None
) -> Path:
    """Write one page about a run, or about several side by side. Returns its path.

    Args:
        runs: one run folder; with `compare` two or more.
        evaluations: reports of `draftline eval --output`, besides those found in the folder; of one run only.
        output: the file; None: `report.html` in the run's folder, or `comparison.html` in the first one's.

    Raises:
        UserError: a run that cannot be read, plotly is missing, the file cannot be written, or a wrong number of runs.
    """
    _check(runs, compare=compare, evaluations=evaluations)
    require_plotly()
    sources = [read_run(path, evaluations) for path in runs]
    file = output or runs[0] / (COMPARISON if compare else PAGE)
    require_writable_file(file)
    if compare:
        named = dict(zip(names_of(sources), sources, strict=True))
        ends, differences = compared_tables(named)
        page = render_page(" against ".join(named), [ends, *compared_charts(named), differences])
    else:
        page = render_page(f"draftline run: {sources[0].name}", run_parts(sources[0]))
    write_text_atomic(file, page)
    return file


def run_parts(run: RunSource) -> list[Part]:
    """The parts of one run's page, in reading order."""
    parts: list[Part] = [glance(run), *run_charts(run), *evaluation_tables(run.evaluations), *fact_tables(run)]
    parts.append(Text("Configuration", dump_config(run.config)))
    if run.failures:
        parts.append(Text("Failures", run.failures))
    return parts


def _check(runs: Sequence[Path], *, compare: bool, evaluations: Sequence[Path]) -> None:
    if not runs:
        raise UserError("no run folder is given", mend="name the output folder of a run")
    if compare and len(runs) < 2:
        raise UserError("a comparison needs two runs", where="--compare", mend="name another run folder")
    if not compare and len(runs) > 1:
        raise UserError("several run folders are given", mend="add --compare, or name one")
    if compare and evaluations:
        mend = "copy it into its run's folder as evaluation.json"
        raise UserError("an evaluation belongs to one run", where="--evaluation", mend=mend)
