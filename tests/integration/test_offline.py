"""States captured once: the same weights as with the target at work, and refusals of what is not the same."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from draftline.cli import app
from draftline.config.schema import RunConfig
from draftline.errors import RunFailedError, UserError
from draftline.pipeline.capturing import capture_states
from draftline.pipeline.checkpoint import latest_checkpoint, read_checkpoint
from draftline.pipeline.coordinator import train
from draftline.pipeline.runplan import make_run_plan
from draftline.target.capture import TargetCapture
from draftline.target.states.manifest import read_states_manifest
from draftline.target.states.store import StatesWriter

TEACHER = "objective.kl_weight=0.5"
SMALL_SHARDS = "states.shard_bytes=20000"
SHORT = "max_rows=4"


def weights_of(config: RunConfig) -> dict[str, torch.Tensor]:
    return read_checkpoint(latest_checkpoint(config.output)[0]).weights


def trained(config: RunConfig) -> dict[str, torch.Tensor]:
    assert train(make_run_plan(config)).ledger.remaining == 0
    return weights_of(config)


def captured(config: RunConfig, **options: Any) -> list[str]:
    said: list[str] = []
    capture_states(config, say=said.append, **options)
    return said


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture
def no_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on nobody may load a target or run one."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the target was used")

    monkeypatch.setattr("draftline.pipeline.workers.load_target", refuse)
    monkeypatch.setattr(TargetCapture, "capture", refuse)


@pytest.mark.parametrize("objective", ["objective.kl_weight=0.0", TEACHER])
def test_offline_and_online_training_give_the_same_weights_bit_for_bit(
    make_run, tiny_data, tmp_path, objective, request
) -> None:
    """One target, one drafter, CPU, fp32; the validation rows too."""
    options = (
        objective,
        SHORT,
        SMALL_SHARDS,
        f"data.validation_path={tiny_data}",
        f"states.path={tmp_path / 'states'}",
    )
    online = trained(make_run(*options, name="online"))
    said = captured(make_run(*options, name="capture"))
    assert any("GiB in all; 0 samples are there" in line for line in said)
    assert len(read_states_manifest(tmp_path / "states").shards) > 1
    request.getfixturevalue("no_target")
    offline_run = make_run(*options, "states.mode=offline", name="offline")
    assert same(online, trained(offline_run))
    metrics = [json.loads(line) for line in (offline_run.output / "metrics.jsonl").read_text().splitlines()]
    assert any("validation" in json.dumps(m) for m in metrics)


def test_cache_mode_captures_in_the_first_run_and_reads_in_the_second(make_run, tmp_path, request) -> None:
    options = (TEACHER, SHORT, f"states.path={tmp_path / 'states'}", "states.mode=cache")
    first = trained(make_run(*options, name="first"))
    assert same(first, trained(make_run(TEACHER, SHORT, name="online")))
    request.getfixturevalue("monkeypatch").setattr(
        "draftline.target.states.capture.keep_row", lambda *a: pytest.fail("a row was captured again")
    )
    assert same(first, trained(make_run(*options, name="second")))
    request.getfixturevalue("no_target")
    assert same(first, trained(make_run(*options[:3], "states.mode=offline", name="offline")))


def test_cache_mode_completes_what_a_cut_capture_left(make_run, tmp_path) -> None:
    states = f"states.path={tmp_path / 'states'}"
    captured(make_run(states, "max_rows=3", name="part"))
    part = read_states_manifest(tmp_path / "states").n_samples
    assert 0 < part < 40
    with pytest.raises(UserError, match=rf"lacks {40 - part} of 40 samples"):
        make_run_plan(make_run(states, "states.mode=offline", name="early"))
    both = trained(make_run(states, "states.mode=cache", name="both"))
    assert read_states_manifest(tmp_path / "states").n_samples == 40
    assert same(both, trained(make_run(name="online")))


def test_several_targets_and_drafters_train_from_states(make_run, tmp_path, request) -> None:
    states = (f"states.path={tmp_path / 'states'}", "pipeline.target_devices=[cpu,cpu]")
    captured(make_run(*states, name="capture"))
    request.getfixturevalue("no_target")
    run = make_run(*states, "states.mode=offline", "pipeline.drafter_devices=[cpu,cpu]", "epochs=2", name="run")
    result = train(make_run_plan(run))
    assert (result.ledger.remaining, result.ledger.committed) == (0, result.ledger.planned)


def test_a_run_goes_on_from_another_folder_of_the_same_states(make_run, tmp_path, request) -> None:
    captured(make_run(SHORT, f"states.path={tmp_path / 'states'}", name="capture"))
    request.getfixturevalue("no_target")
    run = make_run(SHORT, f"states.path={tmp_path / 'states'}", "states.mode=offline", name="run")
    before = trained(run)
    (tmp_path / "states").rename(tmp_path / "moved")
    moved = run.model_copy(update={"states": run.states.model_copy(update={"path": tmp_path / "moved"})})
    assert train(make_run_plan(moved), resume=True).ledger.remaining == 0
    assert same(before, weights_of(run))


def test_fp8_states_are_smaller_train_and_tell_their_error(make_run, tmp_path) -> None:
    plain, fp8 = (f"states.path={tmp_path / name}" for name in ("plain", "fp8"))
    captured(make_run(TEACHER, SHORT, plain, name="a"))
    said = captured(make_run(TEACHER, SHORT, fp8, "states.dtype=fp8", name="b"))
    manifest = read_states_manifest(tmp_path / "fp8")
    assert manifest.n_bytes < 0.45 * read_states_manifest(tmp_path / "plain").n_bytes
    assert 0.0 < manifest.fp8_error < 0.04
    assert any(f"rounded to within {manifest.fp8_error:.1%}" in line for line in said)
    exact = trained(make_run(TEACHER, SHORT, plain, "states.mode=offline", name="exact"))
    rounded = trained(make_run(TEACHER, SHORT, fp8, "states.dtype=fp8", "states.mode=offline", name="rounded"))
    assert not same(exact, rounded)
    worst = max(float((exact[n] - rounded[n]).norm() / exact[n].norm()) for n in exact)
    assert worst < 0.05


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["drafter.taps=[0,1]"], r"taps is \[0, 2\] there, \[0, 1\] here"),
        ([TEACHER], "final_norm is none there, post here"),
        (["states.dtype=fp8"], "dtype is float32 there, fp8 here"),
        (["target.dtype=bfloat16"], "compute_dtype is float32 there, bfloat16 here"),
        (["target.quantization=int8"], "quantization is none there, int8 here"),
        (["target.fused_norms=true"], "fused_norms is (?i:false) there, (?i:true) here"),
    ],
)
def test_changed_settings_are_refused_with_both_values(make_run, tmp_path, changes, message) -> None:
    states = f"states.path={tmp_path / 'states'}"
    captured(make_run(states, SHORT, name="capture"))
    with pytest.raises(UserError, match=message):
        make_run_plan(make_run(states, *changes, "states.mode=offline", name="offline"))
    with pytest.raises(UserError, match=message):
        captured(make_run(states, *changes, name="again"))
    with pytest.raises(UserError, match=message):
        captured(make_run(states, *changes, name="told"), dry_run=True)


def test_states_of_a_server_are_not_taken_for_those_of_a_target_here(make_run, tmp_path) -> None:
    captured(make_run(f"states.path={tmp_path / 'states'}", SHORT, name="capture"))
    served = "target.backend={kind: files, path: x, aux_layer_ids: [1, 3, 4]}"
    with pytest.raises(UserError, match="backend is local there, files here"):
        make_run_plan(make_run(f"states.path={tmp_path / 'states'}", served, "states.mode=offline", name="offline"))


def test_a_quantised_targets_states_train_without_it_as_with_it(make_run, tmp_path, request) -> None:
    states, quantised = f"states.path={tmp_path / 'states'}", ("target.quantization=int8", "target.dtype=bfloat16")
    options = (SHORT, *quantised)
    online = trained(make_run(*options, name="online"))
    unquantised = trained(make_run(SHORT, "target.dtype=bfloat16", name="unquantised"))
    captured(make_run(states, *options, name="capture"))
    request.getfixturevalue("no_target")
    offline = trained(make_run(states, *options, "states.mode=offline", name="offline"))
    assert same(offline, online) and not same(offline, unquantised)


def test_states_train_for_a_worker_over_several_devices_as_for_one(make_run, tiny_data, tmp_path, request) -> None:
    """Whoever captured over two devices leaves them in the configuration; rows are on the first."""
    options = (SHORT, f"states.path={tmp_path / 'states'}", f"data.validation_path={tiny_data}")
    spread = "pipeline.target_devices=['cpu+cpu']"
    captured(make_run(*options, spread, name="capture"))
    request.getfixturevalue("no_target")
    both = [
        trained(make_run(*options, *more, "states.mode=offline", name=n)) for n, more in (("a", [spread]), ("b", []))
    ]
    assert same(*both)


def test_changed_data_and_another_target_are_refused_with_both_values(
    make_run, tmp_path, make_data, make_tiny_target, tiny_target_dir
) -> None:
    states = f"states.path={tmp_path / 'states'}"
    captured(make_run(states, SHORT, name="capture"))
    other_data = make_data(tmp_path / "other", seed=9)
    with pytest.raises(UserError, match=r"data is .* there, .* here"):
        make_run_plan(make_run(states, "states.mode=offline", name="b", data=other_data))
    other_target = make_tiny_target("qwen3", 5)
    with pytest.raises(UserError, match=f"model is .* there, {other_target.name} here"):
        make_run_plan(make_run(states, "states.mode=offline", name="c", model=other_target))
    same_name = shutil.copytree(other_target, tmp_path / "elsewhere" / tiny_target_dir.name)
    with pytest.raises(UserError, match=r"fingerprint is .* there, .* here"):
        captured(make_run(states, name="d", model=same_name))


def test_the_size_is_told_before_anything_starts(make_run, tmp_path, no_target, monkeypatch) -> None:
    config = make_run(f"states.path={tmp_path / 'states'}", name="capture")
    said = captured(config, dry_run=True)
    tokens = make_run_plan(config).dataset.manifest.n_tokens
    assert f"40 samples, {tokens} tokens, 512 bytes a token" in said[0]
    assert not (tmp_path / "states").exists()
    monkeypatch.setattr("draftline.pipeline.states._free_bytes", lambda folder: 1000)
    with pytest.raises(UserError, match=r"needs 0\.00 GiB more, 0\.00 GiB are free"):
        captured(config)


def test_a_run_that_would_fill_the_disk_is_refused_before_its_first_row(make_run, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("draftline.pipeline.states._free_bytes", lambda folder: 1000)
    with pytest.raises(UserError, match=r"needs 0\.00 GiB more, 0\.00 GiB are free"):
        train(make_run_plan(make_run(f"states.path={tmp_path / 'states'}", "states.mode=cache")))
    assert not (tmp_path / "states").exists()


def test_a_capture_beside_another_one_is_refused_and_changes_nothing(make_run, tmp_path) -> None:
    folder = tmp_path / "states"
    captured(make_run(f"states.path={folder}", "max_rows=2", name="first"))
    config = make_run(f"states.path={folder}", name="second")
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    caching = config.model_copy(update={"states": config.states.model_copy(update={"mode": "cache"})})
    with closing(StatesWriter(folder, read_states_manifest(folder).identity)):
        with pytest.raises(UserError, match="another process adds states to it"):
            captured(config)
        with pytest.raises(UserError, match="another process adds states to it"):
            train(make_run_plan(caching))
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    assert any("captured: 40 samples" in line for line in captured(config))


def test_damaged_states_are_refused_or_fail_by_name(make_run, tmp_path) -> None:
    states = f"states.path={tmp_path / 'states'}"
    captured(make_run(states, SHORT, name="capture"))
    shard = tmp_path / "states" / "shard-00000.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-8])
    offline = make_run(states, SHORT, "states.mode=offline", name="offline")
    with pytest.raises(UserError, match="the manifest says"):
        make_run_plan(offline)
    flipped = bytearray(whole)
    flipped[-3] ^= 1  # one bit of one state, in a file of the same size that is read without complaint
    shard.write_bytes(flipped)
    with pytest.raises(RunFailedError, match=r"target-0: .*shard-00000.safetensors: was changed: its hash") as failed:
        train(make_run_plan(make_run(states, SHORT, "states.mode=offline", name="flipped")))
    assert "\n" not in str(failed.value)
    shard.write_bytes(whole)
    borrowed = tmp_path / "states" / "borrowed.safetensors"
    borrowed.write_bytes(borrowed.read_bytes()[:-1] + b"\x01")
    with pytest.raises(UserError, match="was changed"):
        train(make_run_plan(offline))
    (tmp_path / "states" / "manifest.json").write_text("{}")
    with pytest.raises(UserError, match="not the manifest of captured states"):
        make_run_plan(offline)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["states.mode=offline"], "needs states.path"),
        (["states.mode=cache", "states.path=x", "pipeline.state_cache_bytes=1"], "state_cache_bytes: 0"),
        (["states.mode=offline", "states.path=x", "drafter.init=target_layers"], "does not load"),
        (
            ["target.fused_norms=true", "target.backend={kind: files, path: x, aux_layer_ids: [1, 3, 4]}"],
            "target.fused_norms: false",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(make_run, overrides, message) -> None:
    with pytest.raises(UserError, match=message):
        make_run(*overrides)


def test_the_command_captures_and_says_what_is_missing(make_run, tmp_path) -> None:
    make_run(name="cli")
    result = CliRunner().invoke(app, ["capture", "-c", str(tmp_path / "cli.yaml"), f"states.path={tmp_path / 's'}"])
    assert result.exit_code == 0, result.output
    assert "captured: 40 samples" in result.output
    result = CliRunner().invoke(app, ["capture", "-c", str(tmp_path / "cli.yaml"), "--dry-run"])
    assert isinstance(result.exception, UserError)
