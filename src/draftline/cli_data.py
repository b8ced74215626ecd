"""The commands that prepare data and look at it. As `cli`: read the arguments, call one room, print, return."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from draftline.errors import UserError
from draftline.limits import MAX_SEED

Target = Annotated[str, typer.Option("--target", help="Target model: folder, hub id, or path of a .gguf file.")]
TrustCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run code from the model repository.")]
DataFolder = Annotated[Path, typer.Argument(help="Folder written by `draftline prepare`.")]
Device = Annotated[str, typer.Option("--device", help="cpu, cuda:0, ... or auto.")]


Sources = Annotated[
    list[str] | None, typer.Argument(help="JSONL or Parquet files, or hf:NAME:SPLIT; with =WEIGHT to mix them.")
]
Output = Annotated[Path, typer.Option("--output", "-o", help="Folder to write; must not exist.")]
Mix = Annotated[list[str] | None, typer.Option("--mix", help="SOURCE=WEIGHT; sources may follow.")]
MaxTokens = Annotated[int, typer.Option(min=2, help="Longest sample, in tokens; longer ones are cut.")]
MaxPrompt = Annotated[int | None, typer.Option(min=1, help="Drop samples with a longer prompt, in tokens.")]
MinSupervised = Annotated[int, typer.Option(min=0, help="Drop samples with fewer labels.")]
Turns = Annotated[str, typer.Option(help="Assistant turns that are supervised: all or last.")]
Fraction = Annotated[float, typer.Option(help="Share of conversations held out in validation/.")]
Seed = Annotated[
    int, typer.Option(min=0, max=MAX_SEED, help="Of the split, the mix, and the choice of samples that are shown.")
]
ChoiceSeed = Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Of the choice.")]
EvalFiles = Annotated[list[Path] | None, typer.Option(help="Evaluation prompts to keep clear of; may be repeated.")]
RunWords = Annotated[int, typer.Option(min=1, help="Words of a run shared with such a prompt that counts.")]
TemplateKwargs = Annotated[str, typer.Option(help='JSON for the chat template, e.g. {"enable_thinking": false}.')]
Workers = Annotated[int, typer.Option(min=1, help="Processes; the data set is the same for any number.")]
Show = Annotated[int, typer.Option("--preview", min=0, help="Show so many samples with their mask.")]
Check = Annotated[
    int, typer.Option("--check-labels", min=0, help="Let the target check the labels of so many samples.")
]
SkipBad = Annotated[bool, typer.Option("--skip-bad-rows", help="Count bad rows and go on, instead of refusing.")]


def prepare(
    output: Output,
    target: Target,
    sources: Sources = None,
    mix: Mix = None,
    max_tokens: MaxTokens = 4096,
    max_prompt_tokens: MaxPrompt = None,
    min_supervised_tokens: MinSupervised = 0,
    turns: Turns = "all",
    validation_fraction: Fraction = 0.0,
    seed: Seed = 0,
    decontaminate: EvalFiles = None,
    decontaminate_words: RunWords = 13,
    chat_template_kwargs: TemplateKwargs = "{}",
    workers: Workers = 1,
    show: Show = 0,
    check: Check = 0,
    device: Device = "auto",
    skip_bad_rows: SkipBad = False,
    trust_remote_code: TrustCode = False,
) -> None:
    """Turn conversations into token shards with exact loss masks."""
    from draftline.config.schema import TargetConfig
    from draftline.data.interrupt import unwound_by_signals
    from draftline.data.options import weighted_sources
    from draftline.data.prepare import prepare as run

    names, weights = weighted_sources([*(mix or []), *(sources or [])])
    config = TargetConfig(
        model=target, trust_remote_code=trust_remote_code, chat_template_kwargs=json_object(chat_template_kwargs)
    )
    with unwound_by_signals("prepare"):
        report = run(
            names,
            output,
            target=config,
            max_tokens=max_tokens,
            turns=turns,
            skip_bad_rows=skip_bad_rows,
            validation_fraction=validation_fraction,
            seed=seed,
            max_prompt_tokens=max_prompt_tokens,
            min_supervised_tokens=min_supervised_tokens,
            weights=weights,
            decontaminate=[str(path) for path in decontaminate or ()],
            decontaminate_words=decontaminate_words,
            workers=workers,
            progress=True,
        )
    _print_lines(report.summary_lines())
    if check:
        _check_labels(output, config, check, seed, device)
    if show:
        _preview(output, config, show, seed)


def preview(
    data: DataFolder,
    target: Target,
    samples: Annotated[int, typer.Option(min=1, help="How many.")] = 3,
    seed: ChoiceSeed = 0,
    trust_remote_code: TrustCode = False,
) -> None:
    """Show samples as text with what is supervised coloured, or in brackets where there is no colour."""
    from draftline.config.schema import TargetConfig

    _preview(data, TargetConfig(model=target, trust_remote_code=trust_remote_code), samples, seed)


def check_labels(
    data: DataFolder,
    target: Target,
    samples: Annotated[int, typer.Option(min=1, help="How many to look at.")] = 64,
    seed: ChoiceSeed = 0,
    device: Device = "auto",
    trust_remote_code: TrustCode = False,
) -> None:
    """Tell how often the label is the target's own first choice, and write it into the manifest."""
    from draftline.config.schema import TargetConfig

    _check_labels(data, TargetConfig(model=target, trust_remote_code=trust_remote_code), samples, seed, device)


def json_object(text: str) -> dict[str, Any]:
    """The value of an option that takes a JSON object.

    Raises:
        UserError: it is none.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise UserError(
            f"{text[:100]!r} is no JSON object", where="--chat-template-kwargs", mend='write {"key": value}'
        )
    return value


def _preview(data: Path, config: Any, samples: int, seed: int) -> None:
    from draftline.data.preview import preview as run
    from draftline.target.load import load_tokenizer

    run(data, load_tokenizer(config), n_samples=samples, seed=seed)


def _check_labels(data: Path, config: Any, samples: int, seed: int, device: str) -> None:
    from draftline.data.label_check import check_labels as run
    from draftline.data.label_check import label_lines
    from draftline.data.manifest import read_manifest, require_tokenizer
    from draftline.devices import resolve_devices
    from draftline.target.load import load_target, load_tokenizer

    tokenizer = load_tokenizer(config)
    require_tokenizer(read_manifest(data), tokenizer, where=str(data))
    target = load_target(config, resolve_devices([device])[0], tokenizer=tokenizer)
    _print_lines(label_lines(run(data, target, n_samples=samples, seed=seed)))


def _print_lines(lines: list[str]) -> None:
    for line in lines:
        typer.echo(line)
