"""The self-test passes on sound targets and refuses each known fault, naming the layer and the value."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from draftline.errors import RunFailedError, UserError
from draftline.records import FrozenEmbedding, FrozenHead, HiddenStateRow, PlannedRow
from draftline.target import capture as capture_module
from draftline.target import selftest as selftest_module
from draftline.target.capture import CaptureLayout, SampleLike, TargetCapture
from draftline.target.load import LoadedTarget
from draftline.target.selftest import self_test

LoadTiny = Callable[..., LoadedTarget]
TAPS = (0, 2)
KINDS = ("qwen3", "llama_tied", "gemma2", "mistral_sliding", "qwen3_next", "gemma3_multimodal")


class FaultyCapture:
    """A capture whose rows are changed by `fault(row) -> changes` before they are handed out."""

    def __init__(self, inner: TargetCapture, fault: Callable[[HiddenStateRow], dict[str, Any]]) -> None:
        self._inner, self._fault = inner, fault

    def capture(self, planned: PlannedRow, samples: Sequence[SampleLike]) -> HiddenStateRow:
        row = self._inner.capture(planned, samples)
        return dataclasses.replace(row, **self._fault(row))


def with_fault(fault: Callable[[HiddenStateRow], dict[str, Any]]) -> Any:
    def make(target: LoadedTarget, taps: tuple[int, ...], layout: CaptureLayout) -> FaultyCapture:
        return FaultyCapture(TargetCapture(target, taps, want_final=True, layout=layout), fault)

    return make


def changed_tap(row: HiddenStateRow, index: int, change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
    taps_TF = row.taps_TF.clone()
    taps_TF[:, index * 64 : (index + 1) * 64] = change(taps_TF[:, index * 64 : (index + 1) * 64])
    return {"taps_TF": taps_TF}


@pytest.mark.parametrize("kind", KINDS)
def test_sound_targets_pass_in_fp32(load_tiny: LoadTiny, kind: str) -> None:
    report = self_test(load_tiny(kind), TAPS)
    assert report.head_error <= 1e-5 and report.head_top1 == 1.0 and report.final_error <= 1e-5
    assert max(report.tap_errors.values()) <= 1e-5 and set(report.tap_errors) == set(TAPS)
    assert min(report.tap_rms.values()) > 0 and report.isolation_error <= 1e-5 and report.layout_error <= 1e-4
    assert report.layout == "padded" and not report.notes
    assert "cpu" in report.line() and "top-1 100%" in report.line()


@pytest.mark.parametrize("kind", KINDS)
def test_sound_targets_pass_in_bf16(load_tiny: LoadTiny, kind: str) -> None:
    report = self_test(load_tiny(kind, dtype="bfloat16"), TAPS)
    assert report.dtype == "bfloat16" and max(report.tap_errors.values()) <= 1e-2


def test_a_packed_layout_that_leaks_falls_back_to_padded(load_tiny: LoadTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest_module, "natural_layout", lambda target: "packed")
    assert self_test(load_tiny("qwen3"), TAPS).layout == "packed"
    report = self_test(load_tiny("qwen3_next"), TAPS)  # a recurrent state runs on into the next sample
    assert report.layout == "padded" and "packed rows are not used" in report.notes[0]


def test_a_kernel_that_this_machine_lacks_falls_back(load_tiny: LoadTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest_module, "natural_layout", lambda target: "varlen")
    report = self_test(load_tiny("qwen3"), TAPS)
    assert report.layout == "packed" and "varlen rows are not used" in report.notes[0]


def test_a_mask_that_ignores_documents_is_caught(load_tiny: LoadTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest_module, "natural_layout", lambda target: "packed")
    leaky = capture_module.block_diagonal_mask

    def one_document(documents_T: torch.Tensor, attention: str, dtype: torch.dtype) -> torch.Tensor:
        return leaky(torch.zeros_like(documents_T), attention, dtype)

    monkeypatch.setattr(capture_module, "block_diagonal_mask", one_document)
    report = self_test(load_tiny("qwen3"), TAPS)
    assert report.layout == "padded" and "see each other" in report.notes[0]


def test_states_one_layer_early_are_refused(load_tiny: LoadTiny) -> None:
    def make(target: LoadedTarget, taps: tuple[int, ...], layout: CaptureLayout) -> TargetCapture:
        return TargetCapture(target, tuple(t - 1 for t in taps), want_final=True, layout=layout)

    with pytest.raises(RunFailedError, match=r"layer 1 differs .* nearest is hidden_states\[1\].*expected .*\[2\]"):
        self_test(load_tiny("qwen3"), (1, 2), make_capture=make)


def test_a_last_state_before_the_norm_is_refused(load_tiny: LoadTiny) -> None:
    target = load_tiny("qwen3")

    def make(target: LoadedTarget, taps: tuple[int, ...], layout: CaptureLayout) -> TargetCapture:
        made = TargetCapture(target, taps, want_final=True, layout=layout)
        made._decoder.norm = torch.nn.Identity()
        return made

    with pytest.raises(RunFailedError, match=r"last hidden state differs.*final norm is missing"):
        self_test(target, TAPS, make_capture=make)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda row: changed_tap(row, 1, lambda x: x * 0), "layer 2 is all zero"),
        (lambda row: changed_tap(row, 0, lambda x: x * float("nan")), "layer 0 has .* not finite"),
        (lambda row: changed_tap(row, 1, lambda x: x[:1].expand_as(x)), "layer 2 hardly varies"),
        (lambda row: changed_tap(row, 1, lambda x: x + 0.001 * x.roll(1, -1)), "layer 2 differs"),
        (lambda row: changed_tap(row, 0, lambda x: x.roll(1, 0)), "layer 0 differs"),
        (lambda row: {"final_hidden_TH": row.final_hidden_TH * 1.0001}, "last hidden state differs"),
        (lambda row: {"final_hidden_norm": "pre"}, "no last hidden state after the final norm"),
        (lambda row: {"final_hidden_TH": None}, "no last hidden state after the final norm"),
    ],
)
def test_injected_faults_are_refused_by_layer(load_tiny: LoadTiny, fault: Any, message: str) -> None:
    with pytest.raises(RunFailedError, match=message) as caught:
        self_test(load_tiny("qwen3"), TAPS, make_capture=with_fault(fault))
    assert caught.value.origin == "target on cpu"


def test_a_capture_that_repeats_itself_is_refused(load_tiny: LoadTiny) -> None:
    kept: list[HiddenStateRow] = []

    def stale(row: HiddenStateRow) -> dict[str, Any]:
        kept.append(row)
        return {} if len(row.lengths) == 1 else {"taps_TF": kept[4].taps_TF, "final_hidden_TH": kept[4].final_hidden_TH}

    with pytest.raises(RunFailedError, match="stale"):
        self_test(load_tiny("qwen3"), TAPS, make_capture=with_fault(stale))


def test_a_head_with_an_unknown_scale_or_cap_is_refused(load_tiny: LoadTiny) -> None:
    target = load_tiny("gemma2")
    for head in (dataclasses.replace(target.head, softcap=None), dataclasses.replace(target.head, multiplier=1.01)):
        assert isinstance(head, FrozenHead)
        with pytest.raises(RunFailedError, match="head's logits"):
            self_test(dataclasses.replace(target, head=head), TAPS)


def test_an_embedding_without_its_scale_is_refused(load_tiny: LoadTiny) -> None:
    target = load_tiny("gemma2")
    wrong = dataclasses.replace(target, embedding=FrozenEmbedding(target.embedding.weight_VH, 1.0))
    with pytest.raises(UserError, match="cannot borrow this target's embedding"):
        self_test(wrong, TAPS)


def test_learned_positions_are_the_targets_own_affair() -> None:
    import transformers as hf

    from draftline.config.schema import TargetConfig
    from draftline.target.facts import facts_from_hf
    from draftline.target.load import wrap_model

    config = hf.GPT2Config(vocab_size=512, n_embd=64, n_layer=4, n_head=4, n_positions=64)
    model = hf.GPT2LMHeadModel(config).eval().requires_grad_(False)
    report = self_test(wrap_model(model, config=TargetConfig(model="m"), facts=facts_from_hf(config)), TAPS)
    assert "learned positions" in report.notes[0] and report.final_error <= 1e-5


def test_a_layer_that_gives_zeros_is_refused(load_tiny: LoadTiny) -> None:
    """As a hybrid target whose recurrent layers returned nothing (all else looked fine)."""
    target = load_tiny("qwen3")
    model = copy.deepcopy(target.model)
    model.model.layers[2].register_forward_hook(lambda module, args, output: torch.zeros_like(output))
    from draftline.target.load import wrap_model

    with pytest.raises(RunFailedError, match="layer 2 is all zero"):
        self_test(wrap_model(model, config=target.config, facts=target.facts), TAPS)


def test_bad_taps_are_refused(load_tiny: LoadTiny) -> None:
    with pytest.raises(UserError, match="last layer"):
        self_test(load_tiny("qwen3"), (0, 3))
