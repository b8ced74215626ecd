"""Capture of a target's hidden states against plain forwards of the same model, tokens/s, in one run on one device.

    python benchmarks/capture.py --output capture.json            Qwen3-8B's shape, rows of 4096 tokens, a GPU
    python benchmarks/capture.py --tiny --output capture.json     the same code on any machine

Five taps, no teacher, random weights and tokens. The peers, both in transformers' SDPA attention without gradient:
`hf_logits` is the model as one would call it (all layers, logits of every position); `hf_states` asks for the hidden
states of all layers and the logits of the last position only. Peers see a row as one document; draftline is timed on
the same row and on the same number of tokens packed from samples of about 400, each also with `target.fused_norms`.
Timed in turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from argtypes import json_file, whole
from draftline.config.drafter_spec import default_taps
from draftline.config.schema import TargetConfig
from draftline.records import PlannedRow
from draftline.target.capture import TargetCapture, natural_layout
from draftline.target.facts import facts_from_hf
from draftline.target.load import LoadedTarget, wrap_model
from measure import GIB, Stopwatch, environment, measure_ceiling, peak_bytes

QWEN3_8B = {
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 256,
}


# Rows that are timed in one go, so that the host's part overlaps with the device's as in a run.
CALLS_AT_ONCE = 3


@dataclass(frozen=True, slots=True)
class Sample:
    sample_id: str
    input_ids: np.ndarray
    loss_mask: np.ndarray


def random_target(sizes: dict[str, int], device: torch.device, dtype: torch.dtype) -> LoadedTarget:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(**sizes, tie_word_embeddings=False, max_position_embeddings=32_768)
    config._attn_implementation = "sdpa"
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config).to(dtype)
    model = model.to_empty(device=device).eval().requires_grad_(False)
    generator = torch.Generator(device).manual_seed(0)
    for parameter in model.parameters():
        parameter.fill_(1.0) if parameter.ndim == 1 else parameter.normal_(0.0, 0.02, generator=generator)
    rotary = model.model.rotary_emb
    fresh = type(rotary)(config).to(device)  # its frequencies are a buffer, which to_empty left undefined
    model.model.rotary_emb = fresh
    return wrap_model(
        model, config=TargetConfig(model="random"), facts=facts_from_hf(config), known_fingerprint="random"
    )


def make_samples(lengths: list[int], vocab: int) -> list[Sample]:
    rng = np.random.default_rng(0)
    return [
        Sample(f"s{i}", rng.integers(0, vocab, n, dtype=np.int32), np.ones(n, dtype=np.bool_))
        for i, n in enumerate(lengths)
    ]


def planned(samples: list[Sample]) -> PlannedRow:
    n_tokens = sum(len(s.input_ids) for s in samples)
    return PlannedRow(0, 0, tuple(range(len(samples))), n_tokens, n_tokens)


def make_calls(target: LoadedTarget, row_tokens: int, sample_tokens: int) -> dict[str, Callable[[], Any]]:
    taps = default_taps(target.num_layers, 5)
    plain_norms, fused_norms = (
        TargetCapture(target, taps, want_final=False, layout=natural_layout(target), fused_norms=fused)
        for fused in (False, True)
    )
    one = make_samples([row_tokens], target.vocab_size)
    short = make_samples([sample_tokens] * (row_tokens // sample_tokens), target.vocab_size)
    rest = row_tokens % sample_tokens
    short += make_samples([rest], target.vocab_size) if rest else []
    ids = torch.from_numpy(one[0].input_ids.astype(np.int64))[None].to(target.device)
    model = target.model

    @torch.no_grad()
    def plain(**options: Any) -> None:
        model(input_ids=ids, use_cache=False, **options)

    return {
        "hf_logits": plain,
        "hf_states": lambda: plain(output_hidden_states=True, logits_to_keep=1),
        "draftline": lambda: plain_norms.capture(planned(one), one),
        "draftline_packed": lambda: plain_norms.capture(planned(short), short),
        "draftline_fused": lambda: fused_norms.capture(planned(one), one),
        "draftline_fused_packed": lambda: fused_norms.capture(planned(short), short),
    }


def measure(target: LoadedTarget, row_tokens: int, sample_tokens: int, rounds: int) -> dict[str, Any]:
    calls, watch = make_calls(target, row_tokens, sample_tokens), Stopwatch(target.device)
    for call in calls.values():
        call()
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(watch.time(lambda c=call: [c() for _ in range(CALLS_AT_ONCE)]) / CALLS_AT_ONCE)
    found: dict[str, Any] = {}
    for name, call in calls.items():
        peak = peak_bytes(target.device, call)
        seconds = statistics.median(times[name])
        found[name] = {
            "median_s": seconds,
            "rounds_s": times[name],
            "tokens_per_s": row_tokens / seconds,
            "peak_gib": None if peak is None else peak / GIB,
        }
    for name in (name for name in calls if name.startswith("draftline")):
        for peer in ("hf_logits", "hf_states"):
            found[name][f"speed_against_{peer}"] = found[peer]["median_s"] / found[name]["median_s"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=json_file, required=True, help="JSON file to write")
    parser.add_argument("--tiny", action="store_true", help="small shapes, for any machine")
    parser.add_argument("--rounds", type=whole(1), default=9)
    arguments = parser.parse_args()
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    sizes, row_tokens, sample_tokens = (TINY, 128, 40) if arguments.tiny else (QWEN3_8B, 4096, 400)
    target = random_target(sizes, device, dtype)
    report = {
        "environment": environment(device),
        "shape": sizes | {"row_tokens": row_tokens, "sample_tokens": sample_tokens, "dtype": str(dtype)},
        "layout": natural_layout(target),
        "ceiling_tflops": measure_ceiling(device, dtype, 256 if arguments.tiny else 8192, Stopwatch(device)) / 1e12,
        "results": measure(target, row_tokens, sample_tokens, arguments.rounds),
    }
    arguments.output.write_text(json.dumps(report, indent=2) + "\n")
    for name, result in report["results"].items():
        print(name, json.dumps({k: round(v, 3) for k, v in result.items() if isinstance(v, float)}))


if __name__ == "__main__":
    main()
