"""The same run by threads and by Ray actors on this host: tokens/s of both, and what a row costs beyond its work.

    python benchmarks/cluster_throughput.py --target DIR --data DIR --rows 24 --output FILE     (extra `cluster`)

`--target` and `--data` are what `draftline demo` leaves in its folder (`target`, `data`): SmolLM2-135M and its own
answers. Loading is not counted. Runs take turns, so that a busy machine slows both; the quickest of each counts.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from argtypes import json_file, one_of, whole
from draftline.cluster.train import cluster_plan, train_on_cluster
from draftline.config.load import load_config
from draftline.pipeline.coordinator import TrainResult, train
from draftline.pipeline.runplan import make_run_plan
from draftline.recipes import recipe_path
from measure import environment

NEEDED = 0.8
KINDS = ("threads", "slab", "objects")


def run_once(kind: str, arguments: argparse.Namespace, output: Path) -> TrainResult:
    overrides = [
        f"output={output}",
        f"target.model={arguments.target.resolve()}",
        f"data.path={arguments.data.resolve()}",
        f"max_rows={arguments.rows}",
        f"cluster.transport={kind if kind in ('slab', 'objects') else 'auto'}",
    ]
    config = load_config([recipe_path("demo-cpu")], overrides)
    if kind == "threads":
        return train(make_run_plan(config))
    return train_on_cluster(cluster_plan(config), "auto")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--rows", type=whole(1), default=24)
    parser.add_argument("--rounds", type=whole(1), default=2)
    parser.add_argument("--kinds", type=one_of(KINDS), default=KINDS, help="threads among them")
    parser.add_argument("--output", type=json_file)
    arguments = parser.parse_args()
    kinds = arguments.kinds
    if "threads" not in kinds or len(kinds) < 2:
        parser.error("--kinds: threads and at least one other, for the others are measured against threads")
    speeds: dict[str, list[float]] = {kind: [] for kind in kinds}
    work = Path(tempfile.mkdtemp())
    for number in range(arguments.rounds):
        for kind in kinds:
            result = run_once(kind, arguments, work / f"{kind}-{number}")
            speeds[kind].append(result.tokens / result.training_s)
            print(f"{kind:8} {speeds[kind][-1]:8.1f} tokens/s, {result.training_s:.1f} s")
            shutil.rmtree(work / f"{kind}-{number}")
    best = {kind: max(values) for kind, values in speeds.items()}
    ratios: dict[str, Any] = {kind: best[kind] / best["threads"] for kind in kinds if kind != "threads"}
    for kind, ratio in ratios.items():
        print(f"{kind}: {ratio:.2f} of threads")
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        report = {
            "environment": environment(torch.device("cpu")),
            "tokens_per_s": speeds,
            "ratios": ratios,
            "rows": arguments.rows,
        }
        arguments.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if min(ratios.values()) < NEEDED:
        raise SystemExit(f"below {NEEDED} of threads")


if __name__ == "__main__":
    main()
