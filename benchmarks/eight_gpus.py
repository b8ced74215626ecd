"""The big run: T targets of the Qwen3.6-27B shape feed D drafters, measured part by part beside what `plan` predicts.

    python benchmarks/eight_gpus.py --output out --gpus 8 --splits 5:3,4:4,plan        eight GPUs
    python benchmarks/eight_gpus.py --output out --gpus 4 --splits 2:2,plan            four
    python benchmarks/eight_gpus.py --output out --gpus 2 --target-layers 32           two (1:1), a smaller target
    python benchmarks/eight_gpus.py --output out --tiny --splits 2:2                   the same code on a CPU, tiny

Random weights, made on the devices, and random tokens; all else is the product: its coordinator, loops, exchange,
synchronizer, checkpoints. Each part writes part-NAME.json into the output folder and is not run again while that file
is there, so a call that was cut off goes on where it stopped; `--budget-s` starts no further part after so many
seconds. summary.json and report.md are written anew by every call.

Parts: `single` (one target alone, one drafter alone), `together` (all workers at once without the pipeline: what they
lose to one another), `run-TxD-SCHEME` for each split, `stop` (coordinated stop, checkpoint, resume to the end).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from argtypes import one_of, positive, whole
from big_target import LAYERS, choose_kind
from draftline.capacity import Rates, ranked_splits
from draftline.errors import UserError
from draftline.pipeline.planning import rounds_of
from eight_parts import predict, run, single, stop_and_resume, together
from eight_report import report_lines
from eight_setup import Setup
from measure import environment

TINY_LAYERS = 6
SINGLE_ROWS, TOGETHER_S = 12, 10.0
Part = Callable[[], dict[str, Any]]


@dataclass
class Parts:
    """Runs parts once, each into a file of its own.

    Args:
        output: where the files are.
        until_s: no part starts after this moment (time.monotonic).
    """

    output: Path
    until_s: float
    environment: dict[str, Any]

    def done(self, name: str, part: Part) -> dict[str, Any] | None:
        """The figures of a part, measured now or earlier; None if there is no time left for it."""
        file = self.output / f"part-{name}.json"
        if not file.exists():
            if time.monotonic() > self.until_s:
                print(f"{name}: left for another call", flush=True)
                return None
            print(f"{name}: measuring", flush=True)
            begin = time.monotonic()
            figures = part()
            figures |= {"part_s": time.monotonic() - begin, "environment": self.environment}
            temporary = file.with_suffix(".tmp")
            temporary.write_text(json.dumps(figures, indent=1), encoding="utf-8")
            temporary.rename(file)
            print(f"{name}: {figures['part_s']:.1f} s", flush=True)
        return json.loads(file.read_text(encoding="utf-8"))


PARTS = ("single", "together", "run", "stop")


def checked_splits(text: str) -> str:
    """`--splits`, each checked: T:D of whole numbers above 0, or `plan`."""
    for item in text.split(","):
        sides = item.split(":")
        if item != "plan" and not (len(sides) == 2 and all(s.isdecimal() and int(s) > 0 for s in sides)):
            raise argparse.ArgumentTypeError(f"{item!r} is neither T:D, as 5:3, nor plan")
    return text


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for results and run folders")
    parser.add_argument("--gpus", type=whole(1), default=None, help="GPUs used, from cuda:0 on; default: all")
    parser.add_argument(
        "--splits", type=checked_splits, default="plan", help="T:D, comma-separated; `plan`: what the plan recommends"
    )
    parser.add_argument("--scheme", choices=("shared", "partitioned", "both"), default="shared")
    parser.add_argument("--sync", choices=("average", "copy"), default="average", help="copy: one way, the old scheme")
    parser.add_argument("--parts", type=one_of(PARTS), default=PARTS, help="which parts, comma-separated")
    parser.add_argument("--target-layers", type=whole(1), default=None, help=f"default {LAYERS}, tiny {TINY_LAYERS}")
    parser.add_argument("--target-kind", choices=("auto", "hybrid", "dense"), default="auto")
    parser.add_argument(
        "--every-rows", type=whole(1), default=None, help="rows of a drafter a round; 50, with copy 100"
    )
    parser.add_argument("--rounds", type=whole(1), default=1, help="rounds counted in a run")
    parser.add_argument("--samples-per-row", type=whole(1), default=4)
    parser.add_argument("--single-rows", type=whole(1), default=SINGLE_ROWS, help="rows counted for one worker alone")
    parser.add_argument("--stop-every-rows", type=whole(1), default=4, help="every-rows of the part `stop`")
    parser.add_argument("--budget-s", type=positive, default=540.0)
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--set", action="append", default=[], metavar="section.key=value", help="of the configuration")
    return parser.parse_args(arguments)


def make_setup(arguments: argparse.Namespace) -> Setup:
    if arguments.tiny or not torch.cuda.is_available():
        if not arguments.tiny:
            raise SystemExit("there is no GPU here; --tiny runs on the CPU")
        devices = ["cpu"]
    else:
        torch.cuda.init()
        count = arguments.gpus or torch.cuda.device_count()
        if not 1 <= count <= torch.cuda.device_count():
            raise SystemExit(f"--gpus {count}: this machine has {torch.cuda.device_count()}")
        devices = [f"cuda:{i}" for i in range(count)]
    return Setup(
        devices=devices,
        kind=choose_kind("hybrid" if arguments.tiny and arguments.target_kind == "auto" else arguments.target_kind),
        layers=arguments.target_layers or (TINY_LAYERS if arguments.tiny else LAYERS),
        tiny=arguments.tiny,
        samples_per_row=arguments.samples_per_row,
        every_rows=arguments.every_rows or (100 if arguments.sync == "copy" else 50),
        output=arguments.output,
        overrides=(f"sync.kind={arguments.sync}", *arguments.set),
    )


def chosen_splits(setup: Setup, text: str, alone: dict[str, Any] | None) -> list[tuple[int, int]]:
    """Splits as asked for, `plan` by the rates of `single`, each once."""
    splits: list[tuple[int, int]] = []
    for item in text.split(","):
        if item != "plan":
            targets, _, drafters = item.partition(":")
            splits.append((int(targets), int(drafters)))
        elif len(setup.devices) < 3:
            splits.append((1, 1))
        elif alone is not None:
            splits.append(recommended(setup, alone))
    return list(dict.fromkeys(splits))


def recommended(setup: Setup, alone: dict[str, Any]) -> tuple[int, int]:
    target, drafter = alone["target"], alone["drafter"]
    rates = Rates(target["tokens_per_s"], drafter["tokens_per_s"], max(target["jitter"], drafter["jitter"]))
    rounds = rounds_of(setup.plan(1, 1, "prediction", rows=2), setup.ceiling)
    best = ranked_splits(rates, len(setup.devices), rounds)[0]
    return best.targets, best.drafters


def measure_all(setup: Setup, parts: Parts, arguments: argparse.Namespace) -> dict[str, Any]:
    """All parts asked for, as far as time allows."""
    wanted = arguments.parts
    found: dict[str, Any] = {"runs": []}
    alone = None
    if wanted != ("stop",) or ("plan" in arguments.splits.split(",") and len(setup.devices) > 2):
        alone = parts.done("single", lambda: single(setup, arguments.single_rows))
    found["single"] = alone
    splits = chosen_splits(setup, arguments.splits, alone)
    schemes = ("shared", "partitioned") if arguments.scheme == "both" else (arguments.scheme,)
    for targets, drafters in splits if "run" in wanted else ():
        for scheme in schemes:
            if scheme == "partitioned" and (targets < drafters or targets == 1):  # impossible, or the same as shared
                continue
            name = f"run-{targets}x{drafters}-{scheme}" + ("-copy" if arguments.sync == "copy" else "")
            measured = parts.done(name, _run_part(setup, targets, drafters, scheme, arguments.rounds))
            if measured is not None and alone is not None:
                found["runs"].append(measured | _beside(setup, measured, alone))
    first = splits[0] if splits else (1, 1)
    if "together" in wanted and alone is not None and (setup.on_cpu or len(setup.devices) > 1):
        found["together"] = parts.done("together", lambda: together(setup, *first, alone, _together_s(setup)))
    if "stop" in wanted:
        setup.every_rows = arguments.stop_every_rows
        found["stop"] = parts.done("stop", lambda: stop_and_resume(setup, *first))
    return found


def _run_part(setup: Setup, targets: int, drafters: int, scheme: str, rounds: int) -> Part:
    return lambda: run(setup, targets, drafters, scheme, rounds)


def _together_s(setup: Setup) -> float:
    return 0.2 if setup.on_cpu else TOGETHER_S


def _beside(setup: Setup, measured: dict[str, Any], alone: dict[str, Any]) -> dict[str, Any]:
    """The prediction, and the measured share of it."""
    predicted = predict(setup, measured["targets"], measured["drafters"], measured["scheme"], alone)
    return {"predicted": predicted, "measured_to_predicted": measured["tokens_per_s"] / predicted["tokens_per_s"]}


def main(arguments: list[str] | None = None) -> int:
    chosen = parse_arguments(arguments)
    setup = make_setup(chosen)
    chosen.output.mkdir(parents=True, exist_ok=True)
    about = environment(torch.device(setup.devices[0])) | {
        "devices": len(setup.devices),
        "target": f"{setup.kind}, {setup.layers} layers" + (", tiny" if setup.tiny else ""),
        "every_rows": setup.every_rows,
    }
    setup.keep_first_weights()
    parts = Parts(chosen.output, time.monotonic() + chosen.budget_s, about)
    try:
        found = measure_all(setup, parts, chosen)
    except UserError as error:
        print(f"eight_gpus: {error}", file=sys.stderr)
        return 2
    found["environment"] = about
    (chosen.output / "summary.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    lines = report_lines(found)
    (chosen.output / "report.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
