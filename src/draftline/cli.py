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

from draftline import __version__
from draftline.errors import DraftlineError

# What a path or a disk of the user's can be wrong with, wherever it is met first.
_USERS_PATHS = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOSPC})

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    help="Train, evaluate and ship the drafters of speculative decoding.",
)

Target = Annotated[str, typer.Option("--target", help="Target model: folder, hub id, or path of a .gguf file.")]
TrustCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run code from the model repository.")]
SkipBad = Annotated[bool, typer.Option("--skip-bad-rows", help="Count bad rows and go on, instead of refusing.")]
Device = Annotated[str, typer.Option("--device", help="cpu, cuda:0, ... or auto.")]


@app.command()
def prepare(
    sources: Annotated[list[str], typer.Argument(help="JSONL files of conversations, or hf:NAME:SPLIT.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write; must not exist.")],
    target: Target,
    max_tokens: Annotated[int, typer.Option(min=2, help="Longest sample, in tokens.")] = 4096,
    turns: Annotated[str, typer.Option(help="Assistant turns that are supervised: all or last.")] = "all",
    skip_bad_rows: SkipBad = False,
    trust_remote_code: TrustCode = False,
) -> None:
    """Turn conversations into token shards with exact loss masks."""
    from draftline.config.schema import TargetConfig
    from draftline.data.prepare import prepare as run

    report = run(
        sources,
        output,
        target=TargetConfig(model=target, trust_remote_code=trust_remote_code),
        max_tokens=max_tokens,
        turns=turns,
        skip_bad_rows=skip_bad_rows,
        progress=True,
    )
    _print_lines(report.summary_lines())


@app.command()
def regenerate(
    source: Annotated[str, typer.Argument(help="JSONL file of prompts or conversations, hf:NAME:SPLIT, or builtin.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="JSONL file to write; a killed run goes on in it.")],
    target: Target,
    device: Device = "auto",
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 512,
    batch_size: Annotated[int, typer.Option(min=1)] = 16,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0, max=1)] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="0 keeps all tokens.")] = 0,
    seed: int = 0,
    limit: Annotated[int | None, typer.Option(min=1, help="Answer only the first prompts.")] = None,
    skip_bad_rows: SkipBad = False,
    trust_remote_code: TrustCode = False,
) -> None:
    """Let the target answer the prompts itself, so that the drafter learns the target's own words."""
    from draftline.config.schema import TargetConfig
    from draftline.data.regenerate import regenerate as run
    from draftline.devices import resolve_devices

    report = run(
        source,
        output,
        target=TargetConfig(model=target, trust_remote_code=trust_remote_code),
        device=resolve_devices([device])[0],
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        limit=limit,
        skip_bad_rows=skip_bad_rows,
    )
    _print_lines(report.summary_lines())


@app.command()
def train(
    config: Annotated[list[Path], typer.Option("--config", "-c", help="YAML file; may be repeated, later ones win.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value, for example seed=1.")] = None,
    target_devices: Annotated[str | None, typer.Option(help="For example cuda:0,cuda:1 or cpu,cpu.")] = None,
    drafter_devices: Annotated[str | None, typer.Option(help="For example cuda:2 or cpu,cpu.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would run; load no weights.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the run's last checkpoint.")] = False,
) -> None:
    """Train a drafter: T targets feed D drafters through one queue."""
    from draftline.config.load import dump_config, load_config

    items = list(overrides or [])
    for key, value in (("target_devices", target_devices), ("drafter_devices", drafter_devices)):
        if value is not None:
            items.append(f"pipeline.{key}=[{value}]")
    run = load_config(config, items)
    from draftline.pipeline.runplan import make_run_plan, plan_lines

    plan = make_run_plan(run)
    if dry_run:
        from draftline.pipeline.run_folder import check_run_folder

        check_run_folder(plan, resume=resume)
        typer.echo(dump_config(plan.config))
        _print_lines(plan_lines(plan))
        return
    from draftline.pipeline.coordinator import train as run_training

    result = run_training(plan, resume=resume)
    _print_lines(result.summary_lines())


@app.command(name="eval")
def evaluate(
    target: Target,
    prompts: Annotated[list[Path], typer.Option("--prompts", "-p", help="JSONL file of prompts; may be repeated.")],
    drafter: Annotated[list[Path] | None, typer.Option("--drafter", "-d", help="Export or run folder.")] = None,
    methods: Annotated[
        str, typer.Option(help="Comma-separated: plain, lookup, chain, tree@64, ...")
    ] = "plain,lookup,chain",
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 256,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first prompts of each file.")] = None,
    device: Device = "auto",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="JSON file for the report.")] = None,
    seed: int = 0,
    trust_remote_code: TrustCode = False,
) -> None:
    """Measure acceptance length by real decoding, beside plain decoding and prompt lookup."""
    from draftline.config.schema import TargetConfig
    from draftline.data.storage import require_writable_file
    from draftline.devices import resolve_devices
    from draftline.evaluate.command import evaluate_files

    if output is not None:
        require_writable_file(output)
    report = evaluate_files(
        TargetConfig(model=target, trust_remote_code=trust_remote_code),
        drafter or [],
        prompts,
        methods=methods.split(","),
        max_new_tokens=max_new_tokens,
        limit=limit,
        device=resolve_devices([device])[0],
        seed=seed,
    )
    report.print()
    if output is not None:
        report.write(output)
        typer.echo(f"report: {output}")


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="Run folder; its last whole checkpoint is exported.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write; must not exist.")],
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
) -> None:
    """Write a drafter in z-lab's checkpoint format from a run's last checkpoint."""
    from draftline.pipeline.exporting import export_run

    typer.echo(f"exported: {export_run(run, output, dtype=dtype)}")


@app.command()
def doctor(
    run: Annotated[Path | None, typer.Argument(help="Run folder to look over.")] = None,
    target: Annotated[str | None, typer.Option(help="Target to check against.")] = None,
    data: Annotated[Path | None, typer.Option(help="Prepared folder to check.")] = None,
    devices: Annotated[str, typer.Option(help="Comma-separated devices to check.")] = "auto",
) -> None:
    """Check this machine, its devices, the data and a run folder, and say how to mend what is wrong."""
    from draftline.doctor import doctor_command

    raise typer.Exit(doctor_command(target=target, data=data, devices=devices.split(","), run=run))


@app.command()
def watch(
    run: Annotated[Path, typer.Argument(help="Run folder, in progress or finished.")],
    once: Annotated[bool, typer.Option("--once", help="Print one status and end.")] = False,
) -> None:
    """Show what each worker of a run does now, and what the run is limited by."""
    from draftline.monitor.watch import watch_run

    watch_run(run, once=once)


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
        sys.stdout.reconfigure(line_buffering=True)  # a log shows each line when it is printed, not pages later
    try:
        app()
    except DraftlineError as error:
        typer.echo(f"draftline: {error}", err=True)
        _exit(error.exit_code)
    except OSError as error:
        if error.errno not in _USERS_PATHS:
            raise
        where = f"{str(error.filename)[:300]}: " if error.filename else ""
        typer.echo(f"draftline: {where}{error.strerror}; check the path, its rights and the disk", err=True)
        _exit(2)
    except KeyboardInterrupt:
        typer.echo("draftline: interrupted", err=True)
        sys.exit(130)
