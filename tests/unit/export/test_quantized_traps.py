"""Exports in 8 bits, spoilt on purpose: what a server would round otherwise than the evaluation did is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from decoding_kit import tiny_spec
from dflash2_kit import DFLASH2
from draftline.config.drafter_spec import Dflash2Spec
from draftline.drafter.model import Drafter
from draftline.export.check import check_export
from draftline.export.quantize import quantize_weights
from draftline.export.zlab import export_zlab

SPEC = tiny_spec(dflash2=Dflash2Spec(**DFLASH2), eos_token_id=3)
LAYER = "layers.0.self_attn"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return export_zlab(Drafter(SPEC), tmp_path / "export", "fp8")


def refusals(path: Path) -> list[str]:
    return [finding.line() for finding in check_export(path).findings if finding.level == "refuse"]


def round_more(path: Path, name: str) -> None:
    """Another weight in fp8 with its scale, and the configuration told of it."""
    file, weights = path / "model.safetensors", load_file(path / "model.safetensors")
    fp8, scale = quantize_weights({"x.mlp.up_proj.weight": weights[f"{name}.weight"]}).values()
    save_file({**weights, f"{name}.weight": fp8, f"{name}.weight_scale": scale}, file)


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads((path / "config.json").read_text())
    change(content["quantization_config"])
    (path / "config.json").write_text(json.dumps(content))


def test_an_export_of_ours_in_8_bits_is_served_as_evaluated(path: Path) -> None:
    assert refusals(path) == []


@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj"])
def test_each_joined_projection_alone_is_refused_in_8_bits(path: Path, name: str) -> None:
    round_more(path, f"{LAYER}.{name}")
    edit(path, lambda q: q.update(ignore=["re:.*(fc|_projection)$"]))
    assert any(f"vllm: {LAYER}.{name}.weight is float8_e4m3fn: servers join" in line for line in refusals(path))


@pytest.mark.parametrize("name", ["fc", "layers.1.mlp_conv.kernel_projection", "candidate_selector.hidden_projection"])
def test_what_servers_read_without_a_scale_is_refused_in_8_bits(path: Path, name: str) -> None:
    round_more(path, name)
    assert any(f"{name}.weight is float8_e4m3fn: servers read it as it is" in line for line in refusals(path))


ACTIVATIONS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}


def group(config: dict[str, Any]) -> dict[str, Any]:
    return config["config_groups"]["group_0"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q: group(q).update(input_activations=ACTIVATIONS), "input_activations are rounded in group_0"),
        (lambda q: group(q).update(output_activations=ACTIVATIONS), "output_activations are rounded in group_0"),
        (lambda q: q.update(kv_cache_scheme=ACTIVATIONS), "kv_cache_scheme is set"),
        (lambda q: q.update(quant_method="fp8"), "quant_method is 'fp8'"),
        (lambda q: q.update(config_groups={}), "config_groups is missing"),
        (lambda q: q.pop("config_groups"), "config_groups is missing"),
        (lambda q: group(q).update(weights=None), "weights.num_bits of group_0 is None"),
        (lambda q: group(q)["weights"].update(type="int"), "weights.type of group_0 is 'int'"),
        (lambda q: group(q)["weights"].update(strategy="block"), "weights.strategy of group_0 is 'block'"),
        (lambda q: group(q)["weights"].update(symmetric=False), "weights.symmetric of group_0 is False"),
        (lambda q: q.update(ignore=["lm_head"]), "takes it for rounded"),
        (lambda q: q.update(ignore=["re:.*"]), "takes it for not rounded"),
        (lambda q: group(q).update(targets=["Conv1d"]), "takes it for not rounded"),
        (lambda q: q.update(ignore=["re:((a+)+)+b"]), "cannot be judged"),
        (lambda q: q.update(ignore=["re:(("]), "cannot be judged"),
    ],
)
def test_a_configuration_that_rounds_something_else_is_refused(
    path: Path, change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    edit(path, change)
    lines = refusals(path)
    assert any(message in line for line in lines), lines


def test_activations_in_8_bits_beside_weights_in_bf16_are_refused(tmp_path: Path, path: Path) -> None:
    """Nothing in the weights shows it."""
    plain = export_zlab(Drafter(SPEC), tmp_path / "plain")
    told = json.loads((path / "config.json").read_text())["quantization_config"]
    group(told).update(input_activations=ACTIVATIONS, weights=None)
    config = json.loads((plain / "config.json").read_text()) | {"quantization_config": told}
    (plain / "config.json").write_text(json.dumps(config))
    assert any("input_activations are rounded" in line for line in refusals(plain))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float8_e4m3fn])
def test_a_scale_that_is_no_number_is_one_line(path: Path, dtype: torch.dtype) -> None:
    name, weights = f"{LAYER}.o_proj.weight_scale", load_file(path / "model.safetensors")
    save_file({**weights, name: weights[name].to(dtype)}, path / "model.safetensors")
    assert any("the scale of" in line for line in refusals(path))
