"""Commands only: each reads its arguments, calls one room, prints, and returns. `--help` imports no torch."""

from __future__ import annotations

import errno
import io
import os
import sys
import threading
from pathlib import Path
from typing import Annotated

import typer

from draftline import __version__, cli_cluster, cli_data, cli_eval, cli_export, cli_regenerate, cli_report
from draftline.errors import DraftlineError, UserError
from draftline.help_pages import page_of

INTERRUPTED = 130
# What a path or a disk of the user's can be wrong with, wherever it is met first.
_USERS_PATHS = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOSPC, errno.EDQUOT}
)

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    help="Train, evaluate and ship the drafters of speculative decoding.",
)

app.command()(cli_data.prepare)
app.command()(cli_data.preview)
app.command()(cli_data.check_labels)
app.command()(cli_regenerate.regenerate)


@app.command()
def plan(
    config: Annotated[Path, typer.Argument(help="YAML file of the run.")],
    gpus: Annotated[int, typer.Option("--gpus", help="GPUs to share out; without a GPU, workers on the CPU.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value, for example seed=1.")] = None,
    gpu: Annotated[str | None, typer.Option("--gpu", help="Plan for this GPU, for example H200.")] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Run both stages on one device for a moment.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Recommend how many GPUs should be targets and how many drafters, and tell what to expect."""
    from draftline.config.load import load_config
    from draftline.pipeline.planning import plan_split

    report = plan_split(load_config([config], list(overrides or [])), gpus, gpu=gpu, measure=measure)
    _print_lines([report.to_json()] if as_json else report.lines())


@app.command()
def train(
    config: Annotated[list[Path], typer.Option("--config", "-c", help="YAML file; may be repeated, later ones win.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value, for example seed=1.")] = None,
    target_devices: Annotated[str | None, typer.Option(help="For example cuda:0,cuda:1 or cpu,cpu.")] = None,
    drafter_devices: Annotated[str | None, typer.Option(help="For example cuda:2 or cpu,cpu.")] = None,
    auto_split: Annotated[bool, typer.Option("--auto-split", help="Share the devices out as `plan` would.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would run; load no weights.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the run's last checkpoint.")] = False,
    profile: Annotated[
        int | None, typer.Option("--profile", min=1, help="Write a torch profiler trace of so many rows per worker.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option("--cluster", help="Run on this Ray cluster: HOST:PORT, or auto. Extra `cluster`.")
    ] = None,
) -> None:
    """Train a drafter: T targets feed D drafters through one queue."""
    from draftline.config.load import dump_config, load_config

    items = list(overrides or [])
    for key, value in (("target_devices", target_devices), ("drafter_devices", drafter_devices)):
        if value is not None:
            items.append(f"pipeline.{key}=[{value}]")
    run = load_config(config, items)
    if cluster is not None:
        if auto_split or profile is not None:
            raise UserError("is for one host", where="--auto-split, --profile", mend="leave it out with --cluster")
        cli_cluster.train(run, cluster, dry_run=dry_run, resume=resume)
        return
    if auto_split:
        from draftline.pipeline.planning import auto_split as share_out

        run, report = share_out(run)
        typer.echo(report.split_line())
    from draftline.pipeline.signals import StopSignals

    with StopSignals() as signals:
        from draftline.pipeline.runplan import make_run_plan, plan_lines

        run_plan = make_run_plan(run)
        if dry_run:
            from draftline.pipeline.run_folder import check_run_folder

            check_run_folder(run_plan, resume=resume)
            typer.echo(dump_config(run_plan.config))
            _print_lines(plan_lines(run_plan))
            return
        from draftline.pipeline.coordinator import train as run_training

        result = run_training(run_plan, resume=resume, profile_rows=profile, signals=signals)
    _print_lines(result.summary_lines())


app.command()(cli_cluster.scale)
app.command(name="eval")(cli_eval.evaluate)


app.command()(cli_export.capture)
app.command()(cli_export.export)
app.command(name="import")(cli_export.import_)


@app.command()
def doctor(
    run: Annotated[Path | None, typer.Argument(help="Run folder to look over.")] = None,
    target: Annotated[str | None, typer.Option(help="Target to check against.")] = None,
    data: Annotated[Path | None, typer.Option(help="Prepared folder to check.")] = None,
    devices: Annotated[str, typer.Option(help="Comma-separated devices to check.")] = "auto",
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="YAML file of a run: would it fit into memory now?")
    ] = None,
    preview: Annotated[int, typer.Option(min=0, help="With data and target: samples shown with their mask.")] = 1,
) -> None:
    """Check this machine, its devices, the data and a run folder, and say how to mend what is wrong."""
    from draftline.doctor import doctor_command

    code = doctor_command(target=target, data=data, devices=devices.split(","), run=run, config=config, samples=preview)
    raise typer.Exit(code)


@app.command()
def watch(
    run: Annotated[Path, typer.Argument(help="Run folder, in progress or finished.")],
    once: Annotated[bool, typer.Option("--once", help="Print one status and end.")] = False,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Write the run's spans for Perfetto (.json or .json.gz), and end.")
    ] = None,
    web: Annotated[
        bool, typer.Option("--web", help="Serve a page that follows the run; needs the extra `web`.")
    ] = False,
    host: Annotated[
        str, typer.Option(help="With --web: address to listen on; others than this need a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="With --web: port; 0 takes any free one.")] = 8765,
) -> None:
    """Show what each worker of a run does now, and what the run is limited by."""
    if trace is not None:
        from draftline.report.perfetto import write_trace

        counts = write_trace(run, trace)
        typer.echo(f"{trace}: {counts.spans} spans of {counts.sessions} session(s); open it at ui.perfetto.dev")
        return
    if web:
        from draftline.live.server import serve

        serve(run, host=host, port=port, say=typer.echo)
        return
    from draftline.monitor.watch import watch_run

    watch_run(run, once=once)


app.command()(cli_report.report)


@app.command()
def demo(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for everything the demo makes.")] = Path(
        "demo"
    ),
    short: Annotated[bool, typer.Option("--short", help="A few rows only: shows that everything runs.")] = False,
) -> None:
    """The whole job on a real small model and a CPU: regenerate, train, evaluate, export, decode."""
    from draftline.demo import run_demo

    run_demo(output, short=short)


def _version(show: bool) -> None:
    if show:
        typer.echo(f"draftline {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    del version


def _print_lines(lines: list[str]) -> None:
    for line in lines:
        typer.echo(line)


def _exit(code: int) -> None:
    """Ends the process. A worker thread that hangs (a stalled run) must not hold it up, nor crash it on the way out."""
    if any(thread.name.startswith(("target-", "drafter-")) for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def main() -> None:
    """Entry point: errors meant for the user are one line on stderr and an exit code, nothing else."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A log shows each line when it is printed, not pages later; what a stream cannot show becomes `?`.
        sys.stdout.reconfigure(line_buffering=True, errors="replace")
    try:
        app()
    except DraftlineError as error:
        page = page_of(error)
        typer.echo(f"draftline: {error}" + (f" [{page}]" if page else ""), err=True)
        _exit(error.exit_code)
    except OSError as error:
        if error.errno not in _USERS_PATHS:
            raise
        where = f"{str(error.filename)[:300]}: " if error.filename else ""
        typer.echo(f"draftline: {where}{error.strerror}; check the path, its rights and the disk", err=True)
        _exit(2)
    except KeyboardInterrupt:
        typer.echo("draftline: interrupted", err=True)
        sys.exit(INTERRUPTED)
    except SystemExit as end:
        if end.code == INTERRUPTED:  # so typer ends at Ctrl-C, without a word
            typer.echo("draftline: interrupted", err=True)
        raise
