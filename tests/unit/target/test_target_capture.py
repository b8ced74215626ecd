"""Captured states are the model's own, sample by sample, whatever shares the row, the thread or the model."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftline.errors import RunFailedError, UserError
from draftline.records import HiddenStateRow, PlannedRow
from draftline.target.capture import CaptureLayout, TargetCapture, fallback_layouts, natural_layout, sub_batches
from draftline.target.load import LoadedTarget
from draftline.target.selftest import ProbeSample

LoadTiny = Callable[..., LoadedTarget]
RowOf = Callable[[list[ProbeSample]], PlannedRow]
TAPS = (0, 2)
PACKABLE = ("qwen3", "llama_tied", "gemma2", "mistral_sliding", "gemma3_multimodal")


def truth_of(target: LoadedTarget, samples: list[ProbeSample]) -> tuple[torch.Tensor, torch.Tensor]:
    """Taps [T, F] and last hidden state [T, H] from the model's own forward of each sample alone."""
    taps, finals = [], []
    for sample in samples:
        ids = torch.from_numpy(sample.input_ids.astype(np.int64))[None]
        with torch.no_grad():
            hidden = target.model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
        taps.append(torch.cat([hidden[i + 1][0] for i in TAPS], dim=-1))
        finals.append(hidden[-1][0])
    return torch.cat(taps), torch.cat(finals)


def assert_is_truth(row: HiddenStateRow, truth: tuple[torch.Tensor, torch.Tensor]) -> None:
    torch.testing.assert_close(row.taps_TF, truth[0], rtol=1e-4, atol=1e-5)
    if row.final_hidden_TH is not None:
        torch.testing.assert_close(row.final_hidden_TH, truth[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("attention", ["auto", "eager"])
@pytest.mark.parametrize("kind", PACKABLE)
def test_packed_samples_are_as_if_alone(
    load_tiny: LoadTiny, samples: list[ProbeSample], row_of: RowOf, kind: str, attention: str
) -> None:
    target = load_tiny(kind, attention=attention)
    row = TargetCapture(target, TAPS, want_final=True, layout="packed").capture(row_of(samples), samples)
    assert_is_truth(row, truth_of(target, samples))


@pytest.mark.parametrize("layout", ["padded", "single"])
@pytest.mark.parametrize("kind", ["qwen3", "gemma2", "qwen3_next"])
def test_sub_batches_are_as_if_alone_also_with_recurrent_layers(
    load_tiny: LoadTiny, samples: list[ProbeSample], row_of: RowOf, kind: str, layout: CaptureLayout
) -> None:
    target = load_tiny(kind)
    row = TargetCapture(target, TAPS, want_final=True, layout=layout).capture(row_of(samples), samples)
    assert_is_truth(row, truth_of(target, samples))


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_another_sample_in_the_row_changes_nothing(
    load_tiny: LoadTiny, make_samples: Any, samples: list[ProbeSample], row_of: RowOf, layout: CaptureLayout
) -> None:
    capture = TargetCapture(load_tiny("qwen3"), TAPS, want_final=True, layout=layout)
    others = [*make_samples((17,), seed=9), *samples[1:]]
    first, second = capture.capture(row_of(samples), samples), capture.capture(row_of(others), others)
    assert torch.equal(first.taps_TF[17:], second.taps_TF[17:])
    assert not torch.equal(first.taps_TF[:17], second.taps_TF[:17])


def test_the_row_says_what_it_holds(load_tiny: LoadTiny, samples: list[ProbeSample], row_of: RowOf) -> None:
    row = TargetCapture(load_tiny("qwen3"), TAPS, want_final=True).capture(row_of(samples), samples)
    assert (row.row_id, row.epoch, row.tap_layer_ids, row.final_hidden_norm) == (5, 1, TAPS, "post")
    assert row.sample_ids == ("s0", "s1", "s2", "s3", "s4") and row.lengths == (17, 33, 1, 30, 25)
    assert row.taps_TF.shape == (106, 128) and row.final_hidden_TH is not None
    assert row.final_hidden_TH.shape == (106, 64) and row.ready is None
    assert row.input_ids_T.tolist() == np.concatenate([s.input_ids for s in samples]).tolist()
    assert row.loss_mask_T.tolist() == np.concatenate([s.loss_mask for s in samples]).tolist()
    assert row.document_ids_T.tolist() == [0] * 17 + [1] * 33 + [2] + [3] * 30 + [4] * 25
    assert row.position_ids_T.tolist() == [*range(17), *range(33), 0, *range(30), *range(25)]
    kinds = (row.input_ids_T.dtype, row.loss_mask_T.dtype, row.document_ids_T.dtype, row.position_ids_T.dtype)
    assert kinds == (torch.int64, torch.bool, torch.int32, torch.int64)


def test_without_final_state_nothing_behind_the_last_tap_runs(
    load_tiny: LoadTiny, samples: list[ProbeSample], row_of: RowOf
) -> None:
    target = load_tiny("qwen3")
    ran: list[str] = []
    watched = {"layer 1": target.layers[1].mlp, "layer 3": target.layers[3].mlp, "norm": target.final_norm}
    watched["head"] = target.model.lm_head
    handles = [m.register_forward_hook(lambda *_, n=name: ran.append(n)) for name, m in watched.items()]
    try:
        short = TargetCapture(target, (0, 1), want_final=False, layout="packed").capture(row_of(samples), samples)
        assert ran == ["layer 1"] and short.final_hidden_TH is None
        ran.clear()
        whole = TargetCapture(target, (0, 1), want_final=True, layout="packed").capture(row_of(samples), samples)
        assert ran == ["layer 1", "layer 3", "norm"]  # the head stays out of it
    finally:
        for handle in handles:
            handle.remove()
    assert torch.equal(short.taps_TF, whole.taps_TF)


def test_a_capture_leaves_the_shared_model_as_it_was(
    load_tiny: LoadTiny, samples: list[ProbeSample], row_of: RowOf
) -> None:
    target = load_tiny("qwen3")
    before = (list(target.layers), [len(m._forward_hooks) for m in target.layers], target.final_norm)
    TargetCapture(target, (0, 1), want_final=False).capture(row_of(samples), samples)
    assert before == (list(target.layers), [len(m._forward_hooks) for m in target.layers], target.final_norm)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_next"])
def test_threads_on_one_shared_model_never_mix_their_samples(
    load_tiny: LoadTiny, make_samples: Any, row_of: RowOf, kind: str
) -> None:
    target = load_tiny(kind)
    batches = [make_samples((12 + i, 7, 20), seed=i) for i in range(4)]
    truths = [truth_of(target, samples) for samples in batches]
    captures = [TargetCapture(target, TAPS, want_final=True) for _ in batches]
    barrier, failures = threading.Barrier(len(batches), timeout=60), []

    def work(index: int) -> None:
        barrier.wait()
        for _ in range(5):
            row = captures[index].capture(row_of(batches[index]), batches[index])
            try:
                assert_is_truth(row, truths[index])
            except AssertionError as error:
                failures.append((index, str(error)))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(batches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not failures and not any(t.is_alive() for t in threads)


def test_one_capture_may_serve_two_threads(load_tiny: LoadTiny, make_samples: Any, row_of: RowOf) -> None:
    target = load_tiny("qwen3")
    capture = TargetCapture(target, TAPS, want_final=True)
    rows: dict[int, HiddenStateRow] = {}

    def work(index: int) -> None:
        samples = make_samples((20, 9 + index), seed=index)
        rows[index] = capture.capture(row_of(samples), samples)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    for index, row in rows.items():
        assert_is_truth(row, truth_of(target, make_samples((20, 9 + index), seed=index)))


def test_captured_states_can_be_trained_on(load_tiny: LoadTiny, samples: list[ProbeSample], row_of: RowOf) -> None:
    row = TargetCapture(load_tiny("qwen3"), TAPS, want_final=True).capture(row_of(samples), samples)
    layer = torch.nn.Linear(128, 4)
    layer(row.taps_TF).square().sum().backward()  # an inference-mode tensor could not be saved for this
    assert layer.weight.grad is not None and not row.taps_TF.is_inference() and not row.taps_TF.requires_grad


def test_taps_keep_the_targets_dtype(load_tiny: LoadTiny, samples: list[ProbeSample], row_of: RowOf) -> None:
    row = TargetCapture(load_tiny("qwen3", dtype="bfloat16"), TAPS, want_final=True).capture(row_of(samples), samples)
    assert row.taps_TF.dtype == torch.bfloat16 and row.final_hidden_TH is not None
    assert row.final_hidden_TH.dtype == torch.bfloat16


def test_bad_rows_are_refused_by_name(load_tiny: LoadTiny, samples: list[ProbeSample], row_of: RowOf) -> None:
    capture = TargetCapture(load_tiny("qwen3"), TAPS, want_final=False)
    with pytest.raises(RunFailedError, match="row 5 is planned with 106 tokens"):
        capture.capture(row_of(samples), samples[:-1])
    bad = ProbeSample("odd", np.array([3, 512], dtype=np.int32), np.ones(2, dtype=np.bool_))
    with pytest.raises(UserError, match=r"sample odd: token id 512 is outside .* 512"):
        capture.capture(row_of([bad]), [bad])


@pytest.mark.parametrize("taps", [(3,), (0, 4), (2, 1), ()])
def test_bad_taps_are_refused_at_once(load_tiny: LoadTiny, taps: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match="taps"):
        TargetCapture(load_tiny("qwen3"), taps, want_final=False)


def test_a_tapped_layer_that_does_not_run_is_an_error(
    load_tiny: LoadTiny, samples: list[ProbeSample], row_of: RowOf
) -> None:
    capture = TargetCapture(load_tiny("qwen3"), TAPS, want_final=False)
    capture._decoder.layers = capture._decoder.layers[:1]  # belongs to the capture's own view
    with pytest.raises(RunFailedError, match=r"tapped layers \[2\] did not run"):
        capture.capture(row_of(samples), samples)


def test_layouts_follow_the_architecture(load_tiny: LoadTiny) -> None:
    import dataclasses

    target = load_tiny("qwen3")
    gpu = dataclasses.replace(target, device=torch.device("cuda", 0))
    assert natural_layout(target) == "padded" and natural_layout(gpu) == "packed"  # fp32
    assert natural_layout(dataclasses.replace(gpu, dtype=torch.bfloat16)) == "varlen"
    hybrid = dataclasses.replace(load_tiny("qwen3_next"), device=torch.device("cuda", 0))
    assert natural_layout(hybrid) == "padded"
    long_rope = dataclasses.replace(target.facts, rope_parameters={"rope_type": "longrope"})
    assert natural_layout(dataclasses.replace(gpu, facts=long_rope)) == "single"
    chunked = dataclasses.replace(target.facts, layer_types=("chunked_attention", *target.facts.layer_types[1:]))
    assert natural_layout(dataclasses.replace(gpu, facts=chunked)) == "padded"
    assert fallback_layouts("varlen") == ("varlen", "packed", "padded") and fallback_layouts("single") == ("single",)
    assert TargetCapture(gpu, (0,), want_final=False).layout == "padded"  # packed only on the self-test's word


@given(st.lists(st.integers(1, 300), min_size=1, max_size=40), st.sampled_from([0.5, 0.75, 1.0, 2.0]))
def test_sub_batches_hold_every_sample_once_with_little_padding(lengths: list[int], fill: float) -> None:
    groups = sub_batches(lengths, fill)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    for group in groups:
        longest = max(lengths[i] for i in group)
        assert len(group) == 1 or min(lengths[i] for i in group) >= fill * longest
