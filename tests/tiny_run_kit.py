"""A tiny data set and configuration of a run, for whole-pipeline tests on the CPU, on one host and on several."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from typer.testing import CliRunner

from draftline.cli import app
from draftline.config.load import load_config
from draftline.config.schema import RunConfig
from draftline.data.manifest import DatasetFacts
from draftline.data.shards import ShardWriter
from draftline.pipeline.coordinator import train
from draftline.pipeline.runplan import make_run_plan
from tiny_tokenizer import tiny_fingerprint

TINY_YAML = """
output: {output}
seed: 3
target: {{model: "{model}"}}
data: {{path: "{data}", row_tokens: 64}}
drafter: {{num_layers: 2, block_size: 4, taps: [0, 2], mask_token_id: 500, intermediate_size: 64}}
objective: {{anchors: 16, decay: {{kind: exponential, gamma: 4}}}}
optimizer: {{learning_rate: 1e-3}}
pipeline: {{target_devices: [cpu], drafter_devices: [cpu], stall_timeout_s: 120}}
sync: {{kind: average, every_rows: 3}}
checkpoint: {{every_rounds: 1, keep: 3}}
"""


def write_dataset(path: Path, *, n_samples: int = 40, seed: int = 0) -> Path:
    """Random samples of 12 to 30 tokens, the first six of each a prompt."""
    rng = np.random.default_rng(seed)
    with ShardWriter(path) as writer:
        for i in range(n_samples):
            n = int(rng.integers(12, 31))
            mask = [False] * 6 + [True] * (n - 6)
            writer.add(f"sample-{i}", rng.integers(3, 400, n).tolist(), mask)
        writer.finish(
            DatasetFacts(tokenizer_fingerprint=tiny_fingerprint(), template_hash="tiny", vocab_size=400, max_tokens=64)
        )
    return path


def finished_run(folder: Path, model: Path, data: Path, *overrides: str) -> Path:
    """The folder of a run trained to its end, below `folder`."""
    train(make_run_plan(tiny_config(folder, "run", overrides, model=model, data=data)))
    return folder / "run"


def invoke(*arguments: object) -> tuple[int, str]:
    """(exit code, output) of the command line; other errors than an exit are raised."""
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def tiny_config(folder: Path, name: str, overrides: Sequence[str], **paths: object) -> RunConfig:
    """A configuration whose output is `folder`/`name`; `paths`: model, data, or another output."""
    file = folder / f"{name}.yaml"
    file.write_text(TINY_YAML.format(**{"output": folder / name, **paths}), encoding="utf-8")
    return load_config([file], overrides)
