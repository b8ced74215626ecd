"""`draftline report`: its options. Imports nothing heavy before the command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folder; with --compare two or more.")],
    compare: Annotated[bool, typer.Option("--compare", help="Lay several runs side by side.")] = False,
    evaluation: Annotated[
        list[Path] | None, typer.Option("--evaluation", "-e", help="Report of `eval --output`; may be repeated.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write. Default: report.html in the run folder.")
    ] = None,
) -> None:
    """Write one HTML page about a run: curves, what each worker did, evaluations, configuration, data."""
    from draftline.report.command import write_report

    file = write_report(runs, compare=compare, evaluations=evaluation or [], output=output)
    typer.echo(f"report: {file}")
