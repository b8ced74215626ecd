"""Bad input through the real command: one clear line, exit 2, no traceback, nothing half-written."""

from __future__ import annotations

import json
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from draftline import cli
from draftline.pipeline.coordinator import train
from draftline.pipeline.runplan import make_run_plan
from tiny_run_kit import write_dataset
from tiny_tokenizer import tiny_fingerprint

Command = Callable[..., str]


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """`refused("train", ...)` runs a command that must end with exit 2, and no status above it; gives its last line."""

    def run(*args: Any) -> str:
        monkeypatch.setattr(sys, "argv", ["draftline", *map(str, args)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        lines = capfd.readouterr().err.strip().splitlines()
        assert ended.value.code == 2, lines
        assert lines[-1].startswith("draftline: ") and sum("draftline: " in line for line in lines) == 1, lines
        assert not any(word in line for line in lines for word in ("Traceback", "LOAD REPORT", "tok/s")), lines
        return lines[-1]

    return run


@pytest.fixture
def training(make_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Configuration file and output folder of a run that would succeed."""
    make_run()
    return tmp_path / "run.yaml", tmp_path / "run"


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """Data that another tokenizer made, with a vocabulary of the same size."""
    folder = write_dataset(tmp_path / "other")
    manifest = folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace(tiny_fingerprint(), "ids:" + "0" * 64))
    return folder


@contextmanager
def largest_file(n_bytes: int) -> Iterator[None]:
    """A disk on which no file grows beyond `n_bytes`."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("drafter.mask_token_id=300", "a token that text uses"),
        ("drafter.mask_token_id=2", "end-of-text"),
        ("drafter.init_from=nowhere", "nowhere/config.json: no such file"),
        ("drafter.init={}", "drafter.init"),
        ("data.validation_path=nowhere", "nowhere: no such folder"),
        ("objective.head_dtype=fp8", "fp8 needs a GPU"),
        ("drafter.sliding={layers: [1], origin: anchor}", "cannot be served"),
        ("optimizer.betas=[1, 0.9]", "betas [1.0, 0.9] must be at least 0 and below 1"),
        ("optimizer.learning_rate=.inf", "must be a finite number"),
        ("pipeline.queue_bytes=1", "below the largest row"),
        ("pipeline.drafter_devices=[cuda:77]", "does not exist"),
    ],
)
def test_training_refuses_before_it_loads_the_target(
    refused: Command, training: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, override: str, words: str
) -> None:
    config, output = training
    monkeypatch.setattr("draftline.pipeline.coordinator.load_targets", lambda plan: pytest.fail("target was loaded"))
    assert words in refused("train", "-c", config, override)
    assert words in refused("train", "-c", config, override, "--dry-run")
    assert not output.exists()


@pytest.mark.parametrize("field", ["data.path", "data.validation_path"])
def test_data_of_another_tokenizer_is_refused_though_its_vocabulary_is_as_large(
    refused: Command, training: tuple[Path, Path], other: Path, field: str
) -> None:
    """Its ids would train without any error, to a drafter that is worth nothing."""
    config, output = training
    told = refused("train", "-c", config, f"{field}={other}")
    assert (
        f"{other}: the data was prepared with tokenizer 000000000000, the target has {tiny_fingerprint()[4:16]}" in told
    )
    assert not output.exists()


def test_no_command_takes_data_of_another_tokenizer(
    refused: Command, training: tuple[Path, Path], other: Path, tiny_target_dir: Path, tmp_path: Path
) -> None:
    config, _ = training
    (tmp_path / "states").mkdir()
    files = (
        "target.backend.kind=files",
        f"target.backend.path={tmp_path}/states",
        "target.backend.aux_layer_ids=[1,3]",
    )
    for words in (
        ("train", "-c", config, f"data.path={other}", *files),
        ("capture", "-c", config, f"data.path={other}", f"states.path={tmp_path}/captured"),
        ("check-labels", other, "--target", tiny_target_dir, "--device", "cpu"),
    ):
        assert "was prepared with tokenizer 000000000000" in refused(*words)
    assert not (tmp_path / "captured").exists()


def test_validation_data_must_not_hold_the_mask_token_nor_overlong_samples(
    refused: Command, training: tuple[Path, Path], tmp_path: Path
) -> None:
    from draftline.data.manifest import DatasetFacts
    from draftline.data.shards import ShardWriter

    for name, ids in {"mask": [7, 500, 7], "long": [7] * 65}.items():
        with ShardWriter(tmp_path / name) as writer:
            writer.add("a", ids, [False] + [True] * (len(ids) - 1))
            writer.finish(DatasetFacts(tokenizer_fingerprint="t", template_hash="t", vocab_size=512, max_tokens=64))
    config, _ = training
    assert "500 is a token that text uses" in refused("train", "-c", config, f"data.validation_path={tmp_path}/mask")
    assert "more than data.row_tokens" in refused("train", "-c", config, f"data.validation_path={tmp_path}/long")


def test_a_folder_that_cannot_be_used_is_refused_before_the_target_is_loaded(
    refused: Command, training: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, output = training
    monkeypatch.setattr("draftline.pipeline.coordinator.load_targets", lambda plan: pytest.fail("target was loaded"))
    output.mkdir()
    (output / "mine.txt").write_text("x")
    for dry in ([], ["--dry-run"]):
        assert "holds another run" in refused("train", "-c", config, *dry)
        assert "holds no run to resume" in refused("train", "-c", config, "--resume", *dry)
        assert "cannot be used" in refused("train", "-c", config, f"output={config}/x", *dry)
    assert [p.name for p in output.iterdir()] == ["mine.txt"]
    assert "name too long" in refused("train", "-c", config, f"data.path={'n' * 300}")


def test_resuming_another_run_is_refused_before_the_target_is_loaded(
    refused: Command, make_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(make_run_plan(make_run("max_rows=1")))
    monkeypatch.setattr("draftline.pipeline.coordinator.load_targets", lambda plan: pytest.fail("target was loaded"))
    assert "seed was 3, is 9" in refused(
        "train", "-c", tmp_path / "run.yaml", "max_rows=1", "seed=9", "--resume", "--dry-run"
    )
    assert "seed was 3, is 9" in refused("train", "-c", tmp_path / "run.yaml", "max_rows=1", "seed=9", "--resume")


def test_a_refusal_after_loading_leaves_no_run_behind(refused: Command, training: tuple[Path, Path]) -> None:
    config, output = training
    assert "drafter.init" in refused("train", "-c", config, "drafter.init=target_layers")  # of another MLP size
    assert not output.exists()


def test_damaged_target_weights_are_named_in_one_line(
    refused: Command, training: tuple[Path, Path], tiny_target_dir: Path, tmp_path: Path
) -> None:
    config, output = training
    target = tmp_path / "target"
    shutil.copytree(tiny_target_dir, target)
    file = target / "model.safetensors"
    weights, name = load_file(file), "model.layers.1.mlp.up_proj.weight"
    save_file(weights | {name: weights[name][:8].contiguous()}, file, metadata={"format": "pt"})
    assert f"1 weights are missing or of another shape, first {name}" in refused(
        "train", "-c", config, f"target.model={target}"
    )
    file.write_bytes(file.read_bytes()[:5000])
    assert "cannot load the model" in refused("train", "-c", config, f"target.model={target}")
    assert not output.exists()


def test_outputs_that_cannot_be_written_are_refused(
    refused: Command, make_run: Any, tiny_target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(make_run_plan(make_run("max_rows=1")))
    run, file, long = tmp_path / "run", tmp_path / "conversations.jsonl", tmp_path / ("n" * 300)
    file.write_text(json.dumps({"prompt": "How are you?", "response": "I am fine."}) + "\n")
    target = ("--target", tiny_target_dir)
    for place in (file / "below", Path("/proc/nowhere"), long):
        refused("export", run, "-o", place)
        refused("prepare", file, "-o", place, *target)
        refused("regenerate", file, "-o", place.with_suffix(".jsonl"), *target, "--device", "cpu")
    with largest_file(20_000):
        assert "cannot be written" in refused("export", run, "-o", tmp_path / "export")
    evaluation = ("eval", *target, "-p", file, "--device", "cpu")
    monkeypatch.setattr("draftline.target.load.load_target", lambda *a, **k: pytest.fail("target was loaded"))
    for place in (file / "below", tmp_path, long):
        refused(*evaluation, "-d", run, "-o", place)
    for drafter, words in ((tmp_path, "no checkpoint"), (file, "no such folder"), (tiny_target_dir, "architecture")):
        assert words in refused(*evaluation, "-d", drafter)
    assert not [p for p in tmp_path.iterdir() if ".tmp" in p.name or "partial" in p.name or p.name == "export"]


def test_regeneration_on_a_full_disk_ends_with_one_line_and_goes_on_afterwards(
    refused: Command, tiny_target_dir: Path, tmp_path: Path
) -> None:
    from draftline.config.schema import TargetConfig
    from draftline.data.regenerate import regenerate

    prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text("".join(json.dumps({"id": str(i), "prompt": f"Number {i}?"}) + "\n" for i in range(6)))
    given = {"max_new_tokens": 20, "batch_size": 2, "temperature": 0.0, "top_p": 1.0, "top_k": 0, "seed": 0}
    options = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    with largest_file(900):
        line = refused("regenerate", prompts, "-o", answers, "--target", tiny_target_dir, "--device=cpu", *options)
    assert "no space left" in line
    report = regenerate(
        str(prompts), answers, target=TargetConfig(model=str(tiny_target_dir)), device="cpu", limit=None, **given
    )
    assert "6 in == " in report.summary_lines()[0]
    ids = [json.loads(row)["id"] for row in answers.read_text().splitlines()]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize(("kind", "backend"), [("gemma2", "eager"), ("qwen3", "sdpa")])
def test_trees_get_a_backend_that_takes_their_mask_and_keeps_the_targets_cap(
    make_tiny_target: Any, kind: str, backend: str
) -> None:
    from draftline.config.schema import TargetConfig
    from draftline.target.backend import masked_attention

    assert masked_attention(TargetConfig(model=str(make_tiny_target(kind)))) == backend
