"""Targets that are quantised, or spread over devices: the same self-test, whole runs, and real decoding."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from draftline.config.schema import TargetConfig
from draftline.devices import resolve_devices
from draftline.errors import UserError
from draftline.evaluate.command import evaluate_files
from draftline.pipeline.checkpoint import latest_checkpoint, read_checkpoint
from draftline.pipeline.coordinator import train
from draftline.pipeline.runplan import estimate_memory, make_run_plan
from draftline.target.load import load_target
from draftline.target.quantized import plain
from draftline.target.selftest import self_test
from draftline.target.spread import device_map


def weights_of(output: Path) -> dict[str, torch.Tensor]:
    return read_checkpoint(latest_checkpoint(output)[0]).weights


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "held-out.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "How are you?"}]}) + "\n")
    return path


@pytest.mark.parametrize("kind", ["int8", "int8_dynamic"])
def test_a_quantised_target_trains_and_evaluates_end_to_end(make_run, tmp_path, prompts, kind) -> None:
    run = make_run(f"target.quantization={kind}", "objective.kl_weight=0.5", "max_rows=2")
    result = train(make_run_plan(run))
    assert result.ledger.remaining == 0
    report = evaluate_files(run.target, [result.export], [prompts], methods=["plain", "chain"], max_new_tokens=12)
    assert report.find("chain", "export").n_prompts == 1
    assert report.divergences == 0


def test_a_quantised_target_is_another_target_and_lends_plain_numbers(tiny_target_dir) -> None:
    exact = load_target(TargetConfig(model=str(tiny_target_dir)), "cpu")
    rounded = load_target(TargetConfig(model=str(tiny_target_dir), quantization="int8"), "cpu")
    assert rounded.fingerprint != exact.fingerprint
    layer = rounded.layers[0].self_attn.q_proj.weight
    assert type(layer.detach()) is not torch.Tensor
    own = plain(layer)
    wanted = exact.layers[0].self_attn.q_proj.weight
    assert 0.0 < float((own - wanted).norm() / wanted.norm()) < 0.02
    assert type(rounded.embedding.weight_VH) is type(rounded.head.weight_VH) is torch.Tensor
    assert self_test(rounded, (0, 2)).head_top1 == 1.0


def test_fused_norms_train_on_the_same_states_to_rounding(make_run) -> None:
    weights = []
    for chosen in ("false", "true"):
        run = make_run("max_rows=2", f"target.fused_norms={chosen}", name=chosen)
        assert train(make_run_plan(run)).ledger.remaining == 0
        weights.append(weights_of(run.output))
    assert all(torch.allclose(weights[0][name], weights[1][name], atol=1e-4) for name in weights[0])


def test_a_drafter_starts_from_the_layers_of_a_quantised_target(make_run) -> None:
    run = make_run(
        "target.quantization=int8", "drafter.init=target_layers", "drafter.intermediate_size=null", "max_rows=2"
    )
    assert train(make_run_plan(run)).ledger.remaining == 0


def test_a_missing_package_is_one_line(monkeypatch, tiny_target_dir) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"draftline\[quantized\]"):
        load_target(TargetConfig(model=str(tiny_target_dir), quantization="int8"), "cpu")
    with pytest.raises(UserError, match="needs accelerate"):
        load_target(TargetConfig(model=str(tiny_target_dir)), "cpu+cpu")


@pytest.mark.parametrize("kind", ["llama_tied", "qwen3_next"])
def test_a_spread_target_passes_the_self_test_and_captures_the_same(make_tiny_target, kind) -> None:
    """On one machine's CPU: accelerate's hooks move every layer's states, as they would between GPUs."""
    config = TargetConfig(model=str(make_tiny_target(kind)))
    whole, spread = load_target(config, "cpu"), load_target(config, "cpu+cpu")
    assert spread.place == "cpu+cpu"
    assert all(hasattr(layer, "_hf_hook") for layer in spread.layers)
    assert self_test(spread, (0, 2)).layout == self_test(whole, (0, 2)).layout
    assert spread.fingerprint == whole.fingerprint


def test_layers_are_shared_out_by_bytes_and_the_rest_stays_first(tiny_target_dir) -> None:
    target = load_target(TargetConfig(model=str(tiny_target_dir)), "cpu")
    places = device_map(target.model, list(target.layers), ["cuda:0", "cuda:1"])
    assert [places[f"model.layers.{i}"] for i in range(4)] == ["cuda:0", "cuda:0", "cuda:1", "cuda:1"]
    assert {places[name] for name in ("model.embed_tokens", "model.norm", "lm_head")} == {"cuda:0"}


def test_a_run_over_a_spread_target_gives_the_same_weights(make_run) -> None:
    one = make_run("max_rows=2", name="one")
    two = make_run("max_rows=2", "pipeline.target_devices=['cpu+cpu']", name="two")
    train(make_run_plan(one))
    plan = make_run_plan(two)
    assert plan.num_targets == 1
    assert estimate_memory(plan)[0].device == "cpu"
    train(plan)
    a, b = weights_of(one.output), weights_of(two.output)
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_places_are_checked_part_by_part(monkeypatch) -> None:
    assert resolve_devices(["cpu+CPU", "cpu"]) == ["cpu+cpu", "cpu"]
    with pytest.raises(UserError, match=r"cpu\+cuda:99 does not exist"):
        resolve_devices(["cpu+cuda:99"])
    monkeypatch.setattr("draftline.devices._cuda_names", lambda: ["cuda:0", "cuda:1"])
    assert resolve_devices(["cuda:0+cuda:1"]) == ["cuda:0+cuda:1"]
    with pytest.raises(UserError, match="mixes CPU and GPU"):
        resolve_devices(["cuda:0+cpu"])
