"""`draftline eval`: its options. Imports nothing heavy before the command runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from draftline.cli_data import Device, SkipBad, Target, TemplateKwargs, TrustCode, json_object
from draftline.errors import UserError
from draftline.limits import MAX_SEED, MAX_TEMPERATURE

if TYPE_CHECKING:
    from draftline.config.schema import TargetConfig
    from draftline.evaluate.report import EvalReport


Prompts = Annotated[
    list[str], typer.Option("--prompts", "-p", help="JSONL or Parquet file, or builtin; may be repeated.")
]
Drafters = Annotated[list[Path] | None, typer.Option("--drafter", "-d", help="Export or run folder.")]
Compare = Annotated[
    tuple[Path, Path] | None,
    typer.Option("--compare", help="Two drafters A B: is B better than A? As --drafter twice."),
]
Methods = Annotated[str, typer.Option(help="Comma-separated: plain, lookup, chain, tree@64, ..., adaptive.")]
NewTokens = Annotated[int, typer.Option(min=1, help="Most new tokens a prompt.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Only the first prompts of each file.")]
Checkpoint = Annotated[str, typer.Option(help="Of run folders: newest, best (by validation), or a round.")]
Batch = Annotated[int, typer.Option(min=1, help="Prompts decoded together; times then come from --timed.")]
Timed = Annotated[int, typer.Option(min=0, help="With --batch: prompts also decoded one at a time, for speed.")]
Compile = Annotated[
    str, typer.Option("--compile", help="off, graph, inductor (eager, aot_eager: to check): static-shaped rounds.")
]
Temperature = Annotated[float, typer.Option(min=0, max=MAX_TEMPERATURE, help="0 is greedy.")]
Seed = Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Of what is drawn; each prompt adds its place.")]
TopP = Annotated[float, typer.Option(min=0, max=1, help="1 keeps all tokens.")]
TopK = Annotated[int, typer.Option(min=0, help="0 keeps all tokens.")]
Proposals = Annotated[str, typer.Option(help="Drafts of a sampled chain: argmax or sampled.")]
Dtype = Annotated[str, typer.Option(help="Of the target: auto, float32, bfloat16 or float16.")]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="JSON file for the report.")]
Plot = Annotated[Path | None, typer.Option(help="Plots to a .svg, .png or .html file.")]


def evaluate(
    target: Target,
    prompts: Prompts,
    drafter: Drafters = None,
    compare: Compare = None,
    methods: Methods = "plain,lookup,chain",
    max_new_tokens: NewTokens = 256,
    limit: Limit = None,
    checkpoint: Checkpoint = "newest",
    batch: Batch = 1,
    timed: Timed = 4,
    compile_: Compile = "off",
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    proposals: Proposals = "argmax",
    dtype: Dtype = "auto",
    chat_template_kwargs: TemplateKwargs = "{}",
    device: Device = "auto",
    output: Output = None,
    plot: Plot = None,
    seed: Seed = 0,
    skip_bad_rows: SkipBad = False,
    trust_remote_code: TrustCode = False,
) -> None:
    """Measure acceptance length by real decoding, beside plain decoding and prompt lookup."""
    _check_outputs(output, plot)
    from draftline.devices import resolve_devices
    from draftline.evaluate.command import evaluate_files
    from draftline.evaluate.entries import decoding_of

    report = evaluate_files(
        _target(target, dtype, json_object(chat_template_kwargs), trust_remote_code=trust_remote_code),
        [*(drafter or []), *(compare or ())],
        list(prompts),
        methods=methods.split(","),
        max_new_tokens=max_new_tokens,
        limit=limit,
        device=resolve_devices([device])[0],
        seed=seed,
        decoding=decoding_of(
            batch=batch,
            timed=timed,
            compile_name=compile_,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            proposals=proposals,
        ),
        checkpoint=checkpoint,
        skip_bad_rows=skip_bad_rows,
    )
    _tell(report, output, plot)


def _check_outputs(output: Path | None, plot: Path | None) -> None:
    """Refuses files that cannot be written before anything is decoded."""
    from draftline.data.storage import require_writable_file
    from draftline.evaluate.plots import require_plots

    for path in (output, plot):
        if path is not None:
            require_writable_file(path)
    if plot is not None:
        require_plots(plot)


def _tell(report: EvalReport, output: Path | None, plot: Path | None) -> None:
    """Writes the report before it prints it: nobody shall lose hours of decoding to a closed terminal."""
    if output is not None:
        report.write(output)
    report.print()
    if output is not None:
        typer.echo(f"report: {output}")
    if plot is not None:
        from draftline.evaluate.plots import write_plots

        write_plots(report, plot)
        typer.echo(f"plots: {plot}")


def _target(model: str, dtype: str, template_kwargs: dict[str, Any], *, trust_remote_code: bool) -> TargetConfig:
    from draftline.config.schema import TargetConfig

    known = get_args(TargetConfig.model_fields["dtype"].annotation)
    if dtype not in known:
        raise UserError(f"dtype {dtype!r} is not known", where="--dtype", mend=f"use {', '.join(known)}")
    return TargetConfig(
        model=model,
        dtype=dtype,  # type: ignore[arg-type] # checked above
        trust_remote_code=trust_remote_code,
        chat_template_kwargs=template_kwargs,
    )
