"""A run folder made up without a run: what `draftline train` would have left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from draftline.config.load import dump_config, load_config
from draftline.monitor.status import (
    Capacities,
    LedgerCounts,
    ProcessInfo,
    RunEnd,
    StatusFile,
    StatusSnapshot,
    Verdict,
)

YAML = """
output: {output}
target: {{model: "org/<name>"}}
data: {{path: "{output}/no-data", row_tokens: 64}}
drafter: {{num_layers: 2, block_size: 4, taps: [0, 2], mask_token_id: 500, intermediate_size: 64}}
optimizer: {{learning_rate: {rate}}}
"""


def make_run(folder: Path, *, rows: int = 40, every: int = 1, rate: float = 1e-3, final: float = 2.0) -> Path:
    """A finished run of `rows` rows with figures at every `every`-th of them, and spans of 5000 rows at most."""
    folder.mkdir(parents=True)
    source = folder / "given.yaml"
    source.write_text(YAML.format(output=folder, rate=rate))
    (folder / "config.yaml").write_text(dump_config(load_config([source])))
    source.unlink()
    (folder / "run.json").write_text(
        json.dumps({"fingerprints": {"data": "d1", "target": "t1"}, "spec": {}, "versions": {"torch": "2.99"}})
    )
    (folder / "status.json").write_text(status(rows).model_dump_json())
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, rows + 1, every):
            file.write(json.dumps(figures(step, rows, final)) + "\n")
    write_events(folder / "events.jsonl", min(rows, 5000))
    return folder


def status(rows: int) -> StatusFile:
    """Status of a run that ended well."""
    snapshot = StatusSnapshot(
        elapsed_s=float(rows),
        ledger=LedgerCounts(planned=rows, committed=rows),
        rows_trained=rows,
        capacities=Capacities(targets=1, drafters=1),
        verdict=Verdict(cause="ended", sentence="all workers have ended"),
    )
    process = ProcessInfo(pid=1, start_wall_s=0.0, host="elsewhere")
    end = RunEnd(outcome="closed", wall_s=1000.0 + rows)
    return StatusFile(process=process, written_wall_s=1000.0 + rows, end=end, snapshot=snapshot)


def figures(step: int, rows: int, final: float) -> dict[str, Any]:
    """One line of `metrics.jsonl`."""
    loss = final + 8.0 * (1 - step / rows)
    recalls = {f"train/recall_{k}/slot_{s}": 0.1 * k / s for k in (1, 2) for s in (1, 2, 3)}
    trees = {"validation/acceptance": 1.5, "validation/acceptance_tree_16": 1.9, "validation/acceptance_tree_64": 2.2}
    walk = {"validation/acceptance_walk": 1.4}
    return {
        "step": step,
        "wall": 1000.0 + step,
        "train/loss": loss,
        "train/ce": loss,
        "train/tv": 0.0,
        "train/acceptance": 1 + step / rows,
        "train/learning_rate": 1e-3 * (1 - step / rows),
        "train/grad_norm": "nan" if step == 2 else 1.0,
        "train/tokens_per_s": 100.0,
        **recalls,
        **trees,
        **walk,
    }


def write_events(path: Path, rows: int) -> None:
    """A target and a drafter that take a second a row; the drafter waits a quarter of it."""
    with path.open("w") as file:
        file.write('{"anchor":1,"wall":1000,"mono":10,"pid":1}\n')
        for row in range(rows):
            t = 10.0 + row
            for line in (
                {"w": "target-0", "a": "working", "d": f"row {row}", "t0": t, "t1": t + 1, "f": {"tokens": 60}},
                {"w": "drafter-0", "a": "waiting", "d": "a row", "t0": t, "t1": t + 0.25},
                {"w": "drafter-0", "a": "working", "d": f"row {row}", "t0": t + 0.25, "t1": t + 1},
            ):
                file.write(json.dumps(line) + "\n")
        file.write(json.dumps({"n": "end", "t": 10.0 + rows, "f": {"outcome": "closed", "reason": ""}}) + "\n")


def evaluation(path: Path) -> Path:
    """A report of `draftline eval --output`."""
    common = {"prompt_set": "all", "n_prompts": 5, "tokens_per_s": 10.0, "speedup": 1.2, "equality": {"equal": 5}}
    groups = [{"kind": "category", "name": "maths", "n_prompts": 3, "acceptance_length": 1.125, "interval": None}]
    common |= {"groups": groups, "drafted_by_position": [8, 8, 0], "accepted_by_position": [6, 2, 0]}
    results = [
        {**common, "method": m, "drafter": d, "acceptance_length": tau, "interval": [tau - 0.1, tau + 0.1]}
        for m, d, tau in (("plain", None, 1.0), ("chain", "new", 1.75), ("tree@64", "new", 2.25))
    ]
    content = {"schema_version": 2, "definition": "tokens", "versions": {}, "results": results, "comparisons": []}
    path.write_text(json.dumps(content))
    return path
