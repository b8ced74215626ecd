"""Norms in one kernel each: the same states to rounding, only in the capture's view, only where it is the formula."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from draftline.records import PlannedRow
from draftline.target import selftest as selftest_module
from draftline.target.capture import TargetCapture
from draftline.target.fused_norms import FusedNorm, with_fused_norms
from draftline.target.load import LoadedTarget
from draftline.target.selftest import ProbeSample, relative_error, self_test

LoadTiny = Callable[..., LoadedTarget]
RowOf = Callable[[list[ProbeSample]], PlannedRow]


class Norm(nn.Module):
    """An RMS norm as transformers spells it out, with one thing changed."""

    def __init__(self, change: str = "") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(16) + 0.5)
        self.variance_epsilon = 1e-6
        self.change = change

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        centred = hidden - hidden.mean(-1, keepdim=True) if self.change == "centred" else hidden
        variance = centred.pow(2).mean(-1, keepdim=True)
        if self.change == "eps outside":
            return self.weight * centred / (variance.sqrt() + self.variance_epsilon)
        weight = 1 + self.weight if self.change == "one plus weight" else self.weight
        return weight * centred * torch.rsqrt(variance + self.variance_epsilon)


def fused_in(module: nn.Module) -> list[str]:
    return [name for name, child in module.named_modules() if isinstance(child, FusedNorm)]


@pytest.mark.parametrize("kind", ["qwen3", "llama_tied", "mistral_sliding"])
def test_states_are_the_same_to_rounding(load_tiny: LoadTiny, samples: list[ProbeSample], row_of: RowOf, kind: str):
    target = load_tiny(kind)
    plain, fused = (TargetCapture(target, (0, 2), want_final=True, fused_norms=fused) for fused in (False, True))
    norms = fused_in(fused._decoder)
    per_layer = 4 if kind == "qwen3" else 2  # Qwen3 has norms of queries and keys, too
    assert len(norms) == per_layer * target.num_layers + 1 and not fused_in(plain._decoder)
    rows = [capture.capture(row_of(samples), samples) for capture in (plain, fused)]
    assert relative_error(rows[1].taps_TF, rows[0].taps_TF) <= 1e-5
    assert relative_error(rows[1].final_hidden_TH, rows[0].final_hidden_TH) <= 1e-5


def test_the_model_itself_keeps_its_norms_and_shares_their_weights(load_tiny: LoadTiny):
    target = load_tiny("qwen3")
    twin = with_fused_norms(target.decoder)
    assert not fused_in(target.decoder)
    own, theirs = twin.layers[1].input_layernorm, target.layers[1].input_layernorm
    assert own.weight is theirs.weight and own.eps == theirs.variance_epsilon
    assert twin.layers[0].self_attn.q_proj is target.layers[0].self_attn.q_proj


def test_norms_of_another_formula_stay(load_tiny: LoadTiny):
    for change in ("one plus weight", "centred", "eps outside"):
        module = nn.Sequential(Norm(change))
        assert with_fused_norms(module) is module, change
    assert fused_in(with_fused_norms(nn.Sequential(Norm()))) == ["0"]
    decoder = load_tiny("gemma3_multimodal").decoder
    assert with_fused_norms(decoder) is decoder  # 1 + weight


def test_each_norm_of_a_class_is_tried_whose_settings_differ():
    assert fused_in(with_fused_norms(nn.Sequential(Norm(), Norm("one plus weight"), Norm()))) == ["0", "2"]


def test_a_norm_that_takes_other_inputs_stays():
    class Picky(Norm):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            raise ValueError("three dimensions")

    module = nn.Sequential(Picky())
    assert with_fused_norms(module) is module


def test_norms_that_somebody_hooked_stay():
    module = nn.Sequential(Norm())
    module[0].register_forward_hook(lambda *_: None)
    assert with_fused_norms(module) is module


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_self_test_proves_the_norms_against_the_models_own(load_tiny: LoadTiny, dtype: str):
    report = self_test(load_tiny("qwen3", dtype=dtype, fused_norms=True), (0, 2))
    assert max(report.tap_errors.values()) <= 1e-5  # of the exact form, in which taps and head are proved
    assert report.layout_error <= (1e-5 if dtype == "float32" else 0.02)
    assert report.notes == ("target.fused_norms: 17 norms of this target can run in one kernel each",)


def test_a_target_without_such_norms_is_told(load_tiny: LoadTiny):
    (note,) = self_test(load_tiny("gemma3_multimodal", fused_norms=True), (0, 2)).notes
    assert note == "target.fused_norms: no norms of this target can run in one kernel each"


def test_the_self_test_refuses_norms_that_are_another_formula(load_tiny: LoadTiny, monkeypatch: pytest.MonkeyPatch):
    def wrong(self: FusedNorm, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(hidden, self.weight.shape, 1 + self.weight, self.eps)

    monkeypatch.setattr(FusedNorm, "forward", wrong)
    with pytest.raises(selftest_module.RunFailedError, match="row differs from the model's own"):
        self_test(load_tiny("qwen3", fused_norms=True), (0, 2))


def test_the_configuration_decides_where_nothing_is_said(load_tiny: LoadTiny):
    def view(**changes: Any) -> nn.Module:
        capture: Any = TargetCapture(load_tiny("qwen3", **changes), (0, 2), want_final=True)
        view: nn.Module = capture._decoder
        return view

    assert fused_in(view(fused_norms=True)) and not fused_in(view())
