"""Attention by bounds: what reaches the kernel is right, and only the capture's own view of the model uses it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

from draftline.errors import RunFailedError
from draftline.records import PlannedRow
from draftline.target import selftest as selftest_module
from draftline.target import varlen as varlen_module
from draftline.target.capture import TargetCapture
from draftline.target.load import LoadedTarget
from draftline.target.selftest import ProbeSample, self_test

LoadTiny = Callable[..., LoadedTarget]


def kernel_twin(
    q_THD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    bounds: torch.Tensor,
    longest: int,
    scale: float | None,
    window: int,
) -> torch.Tensor:
    """The kernel's meaning in plain operations: each sample alone under a dense causal, windowed mask."""
    out = []
    edges = bounds.tolist()
    assert longest == max(b - a for a, b in pairwise(edges))
    for start, stop in pairwise(edges):
        q, k, v = (x[start:stop].transpose(0, 1) for x in (q_THD, k_THD, v_THD))
        place = torch.arange(stop - start)
        behind = place[:, None] - place[None, :]
        mask = (behind >= 0) & ((behind <= window) | (window < 0))
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True)
        out.append(attended.transpose(0, 1))
    return torch.cat(out)


@pytest.mark.parametrize("kind", ["qwen3", "llama_tied", "mistral_sliding", "gemma3_multimodal"])
def test_rows_by_bounds_prove_themselves(load_tiny: LoadTiny, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(varlen_module, "varlen_kernel", kernel_twin)
    monkeypatch.setattr(selftest_module, "natural_layout", lambda target: "varlen")
    report = self_test(load_tiny(kind), (0, 2))
    assert report.layout == "varlen" and report.layout_error <= 1e-5 and not report.notes


def test_the_model_itself_keeps_its_attention(
    load_tiny: LoadTiny,
    monkeypatch: pytest.MonkeyPatch,
    samples: list[ProbeSample],
    row_of: Callable[[list[ProbeSample]], PlannedRow],
) -> None:
    target = load_tiny("qwen3")
    calls: list[int] = []

    def counted(*args: Any) -> torch.Tensor:
        calls.append(1)
        return kernel_twin(*args)

    monkeypatch.setattr(varlen_module, "varlen_kernel", counted)
    capture = TargetCapture(target, (0, 2), want_final=False, layout="varlen")
    capture.capture(row_of(samples), samples)
    assert len(calls) == 3 and target.attention == "sdpa"  # one a layer up to the last tap
    with torch.no_grad():
        target.model(input_ids=torch.arange(5)[None])
    assert len(calls) == 3
    own = capture._decoder.layers[1].self_attn
    assert own.q_proj.weight is target.layers[1].self_attn.q_proj.weight  # weights are shared
    assert own.config is not target.layers[1].self_attn.config


@pytest.mark.parametrize("extra", [{"softcap": 5.0}, {"s_aux": torch.ones(2)}])
def test_what_the_kernel_cannot_do_is_refused(extra: dict[str, Any]) -> None:
    states = torch.zeros(1, 2, 3, 4)
    bounds = torch.tensor([0, 3], dtype=torch.int32)
    with pytest.raises(RunFailedError, match="has no"):
        varlen_module.varlen_attention_forward(
            torch.nn.Identity(), states, states, states, None, cu_seq_lens_q=bounds, max_length_q=3, **extra
        )


def test_a_model_that_drops_the_bounds_is_refused() -> None:
    states = torch.zeros(1, 2, 3, 4)
    with pytest.raises(RunFailedError, match="bounds"):
        varlen_module.varlen_attention_forward(torch.nn.Identity(), states, states, states, None)
