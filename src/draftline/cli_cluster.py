"""`draftline train --cluster` and `scale`. Imports nothing heavy before a command runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from draftline.config.schema import RunConfig


def train(run: RunConfig, address: str, *, dry_run: bool, resume: bool) -> None:
    """`draftline train` with --cluster."""
    from draftline.cluster.joining import find_cluster, require_ray
    from draftline.cluster.train import cluster_plan, train_on_cluster
    from draftline.config.load import dump_config
    from draftline.pipeline.run_folder import check_run_folder
    from draftline.pipeline.runplan import plan_lines

    require_ray()
    if not dry_run:
        address = find_cluster(address)  # what is wrong with it is said at once, not behind the seconds of a plan
    plan = cluster_plan(run)
    if dry_run:
        check_run_folder(plan, resume=resume)
        lines = [dump_config(plan.config), *plan_lines(plan)]
    else:
        lines = train_on_cluster(plan, address, resume=resume).summary_lines()
    for line in lines:
        typer.echo(line)


def scale(
    run: Annotated[Path, typer.Argument(help="Folder of a run that `train --cluster` is training now.")],
    targets: Annotated[int, typer.Option("--targets", help="How many more; a negative number: how many fewer.")],
) -> None:
    """Add targets to a run on a cluster, or let some go, while it trains."""
    from draftline.cluster.control import scale as scale_run

    scale_run(run, targets)
    typer.echo(f"{run}: asked for {targets:+d} targets")
