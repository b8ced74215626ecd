"""`draftline capture`, `export` and `import`: their options. Imports nothing heavy before a command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from draftline.errors import UserError


def export(
    source: Annotated[
        Path | None, typer.Argument(help="Run folder (its last whole checkpoint), or an export to convert.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Folder to write; must not exist.")] = None,
    form: Annotated[str | None, typer.Option("--format", help="zlab (dflash, vLLM, SGLang) or speculators.")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float32, or fp8 (MLP and o_proj in 8 bits).")] = "bfloat16",
    target: Annotated[
        str | None, typer.Option("--target", help="Target as servers find it: hub id or folder. Default: the run's.")
    ] = None,
    report: Annotated[list[Path] | None, typer.Option(help="Report of `eval --output`, told in README.md.")] = None,
    check: Annotated[
        Path | None, typer.Option("--check", help="Look an export over for what servers would do otherwise.")
    ] = None,
    server: Annotated[list[str] | None, typer.Option(help="With --check: dflash, vllm or sglang.")] = None,
    checkpoint: Annotated[str, typer.Option(help="Of a run: newest, best (by validation), or a round.")] = "newest",
    draft_vocab_size: Annotated[
        int | None, typer.Option(help="Draft only so many tokens, the commonest (speculators' format).")
    ] = None,
    vocab_data: Annotated[
        Path | None, typer.Option(help="Prepared data in which they are counted. Default: the run's.")
    ] = None,
) -> None:
    """Write a drafter in a format that servers load, or check one."""
    from draftline.pipeline.exporting import check_command, export_command

    idle = {
        "RUN": source is not None,
        "--output": output is not None,
        "--dtype": dtype != "bfloat16",
        "--report": bool(report),
        "--checkpoint": checkpoint != "newest",
        "--draft-vocab-size": draft_vocab_size is not None,
        "--vocab-data": vocab_data is not None,
    }
    if check is not None:
        _refuse(idle, "means nothing with --check, which exports nothing")
    else:
        _refuse({"--server": bool(server)}, "is for --check")
        _refuse({"--vocab-data": draft_vocab_size is None and vocab_data is not None}, "is for --draft-vocab-size")
    if check is not None:
        lines, good = check_command(check, form=form, servers=server or [], target=target)
        typer.echo("\n".join(lines))
        raise typer.Exit(0 if good else 2)
    lines = export_command(
        source,
        output,
        form=form,
        dtype=dtype,
        target=target,
        reports=report or [],
        checkpoint=checkpoint,
        vocabulary=None if draft_vocab_size is None else (draft_vocab_size, vocab_data),
    )
    typer.echo("\n".join(lines))


def _refuse(given: dict[str, bool], what: str) -> None:
    """Refuses an option that would change nothing: whoever gives it expects otherwise."""
    for name in (name for name, is_given in given.items() if is_given):
        raise UserError(what, where=name, mend="leave it out")


def import_(
    checkpoint: Annotated[Path, typer.Argument(help="DFlash or DFlash2 drafter in z-lab's or speculators' format.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write; must not exist.")],
    target: Annotated[
        str | None, typer.Option("--target", help="Its target; speculators' format does not tell its layers.")
    ] = None,
) -> None:
    """Take over a drafter of others, to train it further."""
    from draftline.pipeline.exporting import import_command

    typer.echo("\n".join(import_command(checkpoint, output, target=target)))


def capture(
    config: Annotated[list[Path], typer.Option("--config", "-c", help="YAML file; may be repeated, later ones win.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value, for example states.path=X.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only tell how much it would be.")] = False,
) -> None:
    """Capture the hidden states of a run's data once, to train on them many times (states.mode: offline)."""
    from draftline.config.load import load_config
    from draftline.pipeline.capturing import capture_states

    capture_states(load_config(config, list(overrides or [])), dry_run=dry_run, say=typer.echo)
