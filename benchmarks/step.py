"""A whole drafter step against SpecForge's on the same shapes in one run, and what each ingredient of a recipe costs.

    python benchmarks/step.py --output step.json              all shapes, a GPU with 140 GB
    python benchmarks/step.py --tiny --output step.json       the same code on any machine, in a minute

q8: hidden 4096, vocabulary 151,936, 512 anchors x 16. q27: hidden 5120, vocabulary 248,320, 1024 anchors x 32. small:
hidden 576, vocabulary 49,152 (SmolLM2-135M's), 512 anchors x 16: bound by the host. Rows of 4096 context tokens, five
layers, five taps, random weights and data. `step` is forward, backward and clipping; `train` adds AdamW on fp32
masters. For `step` all sides live on the device at once and are timed in turn, so that a drift of the clock meets all;
for `train` memory allows only one at a time. Memory of a side is what it holds (inputs and frozen weights too) plus
the peak of its step. FLOPs are those of the model: nothing that is computed again in the backward is counted.
SpecForge is timed where it is installed (`pip install --no-deps specforge`).
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from argtypes import json_file, one_of, whole
from draftline.config.drafter_spec import DrafterSpec
from draftline.config.schema import ExponentialDecay, FeatureNoise, ObjectiveConfig, OptimizerConfig
from draftline.drafter.compile_cache import compiled_kernels, process_cache
from draftline.drafter.model import Drafter
from draftline.drafter.optimizer import MasterOptimizer
from draftline.drafter.step import DrafterStep
from draftline.records import FrozenEmbedding, FrozenHead, HiddenStateRow
from measure import GIB, Stopwatch, environment, graph_pool_bytes, measure_ceiling, peak_bytes
from peers import SpecForgeSide, has_specforge

LEARNING_RATE = 1e-4
PARTS, TIMED = ("small", "q8", "q27", "ingredients"), ("step", "train")
WARM_UP_STEPS = 2
# Steps that are timed in one go: the host then runs ahead of the device, as it does in training.
STEPS_AT_ONCE = 10


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a step: `anchors` blocks of `block_size` slots over a row of `row_tokens` tokens."""

    name: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocab: int
    anchors: int
    block_size: int
    head_dim: int = 128
    layers: int = 5
    row_tokens: int = 4096
    window: int | None = None

    def spec(self) -> DrafterSpec:
        sliding = {} if self.window is None else {"sliding_window": self.window}
        kinds = ["sliding_attention" if self.window else "full_attention"] * (self.layers - 1) + ["full_attention"]
        return DrafterSpec(
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_layers=self.layers,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            vocab_size=self.vocab,
            rms_norm_eps=1e-6,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
            max_position_embeddings=32768,
            layer_types=tuple(kinds),
            block_size=self.block_size,
            mask_token_id=self.vocab - 1,
            taps=tuple(range(1, 1 + 6 * self.layers, 6)),
            num_target_layers=6 * self.layers + 6,
            **sliding,
        )

    def flops(self) -> float:
        """Model FLOPs of forward and backward. Trained products: 6 per weight and token; the frozen head: 4; taps
        receive no gradient, so `fc` costs 4. Attention: 12 per query, visible key and head dimension, with anchors
        spread evenly over the row."""
        slots, context = self.anchors * self.block_size, self.row_tokens
        q_width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        per_slot = 2 * self.hidden * q_width + 3 * self.hidden * self.intermediate
        layer = 6.0 * (slots * per_slot + (slots + context) * 2 * self.hidden * kv_width)
        seen = self.block_size + context / 2
        if self.window is not None:
            start = min(self.window, context)
            seen = self.block_size + start - start**2 / (2 * context)
        attention = 12.0 * slots * q_width * seen
        fc = 4.0 * context * self.layers * self.hidden**2
        head = 4.0 * (slots - self.anchors) * self.hidden * self.vocab
        return self.layers * (layer + attention) + fc + head


Q8 = Shape("q8", 4096, 12_288, 32, 8, 151_936, 512, 16)
Q27 = Shape("q27", 5120, 17_408, 40, 8, 248_320, 1024, 32)
SMALL = Shape("small", 576, 1536, 9, 3, 49_152, 512, 16, head_dim=64)
TINY_Q8 = Shape("q8", 128, 256, 2, 1, 512, 16, 8, head_dim=64, layers=2, row_tokens=256)
TINY_SMALL = replace(TINY_Q8, name="small", kv_heads=2)
TINY_Q27 = replace(TINY_Q8, name="q27", anchors=24, block_size=16)


class Inputs:
    """Random weights of a frozen target's ends, and a row of random states."""

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
        g = torch.Generator(device).manual_seed(0)

        def normal(*sizes: int, std: float) -> torch.Tensor:
            return torch.randn(*sizes, generator=g, device=device, dtype=dtype).mul_(std)

        n_tokens = shape.row_tokens
        self.shape, self.device, self.dtype = shape, device, dtype
        self.embedding_VH = normal(shape.vocab, shape.hidden, std=0.02)
        self.head_VH = normal(shape.vocab, shape.hidden, std=1.5 / shape.hidden**0.5)
        self.row = HiddenStateRow(
            row_id=0,
            epoch=0,
            sample_ids=("benchmark",),
            lengths=(n_tokens,),
            input_ids_T=torch.randint(0, shape.vocab - 1, (n_tokens,), generator=g, device=device),
            loss_mask_T=torch.ones(n_tokens, dtype=torch.bool, device=device),
            document_ids_T=torch.zeros(n_tokens, dtype=torch.int32, device=device),
            position_ids_T=torch.arange(n_tokens, device=device),
            taps_TF=normal(n_tokens, shape.layers * shape.hidden, std=1.0),
            final_hidden_TH=normal(n_tokens, shape.hidden, std=1.0),
            final_hidden_norm="post",
            tap_layer_ids=shape.spec().taps,
        )


def plain_objective(shape: Shape) -> ObjectiveConfig:
    return ObjectiveConfig(anchors=shape.anchors, decay=ExponentialDecay(gamma=7.0))


class OurSide:
    """draftline's step."""

    name = "draftline"

    def __init__(
        self, inputs: Inputs, objective: ObjectiveConfig, *, with_optimizer: bool = False, graphs: bool = False
    ) -> None:
        shape, device = inputs.shape, inputs.device
        with torch.device("meta"):
            drafter = Drafter(shape.spec())
        drafter = drafter.to(inputs.dtype).to_empty(device=device)
        generator = torch.Generator(device).manual_seed(0)
        with torch.no_grad():
            for parameter in drafter.parameters():
                parameter.fill_(1.0) if parameter.ndim == 1 else parameter.normal_(0.0, 0.02, generator=generator)
        if device.type == "cuda":
            drafter.kernels = compiled_kernels(process_cache().device(str(device)), layers=True)
        head = FrozenHead(inputs.head_VH)
        self._inputs, self._parameters = inputs, list(drafter.parameters())
        self.step = DrafterStep(
            drafter,
            FrozenEmbedding(inputs.embedding_VH),
            head,
            objective,
            teacher=head if objective.needs_teacher else None,
            row_tokens=shape.row_tokens,
            seed=0,
            static_shapes=True,
            cuda_graphs=graphs and device.type == "cuda",
        )
        self.optimizer = None
        if with_optimizer:
            self.optimizer = MasterOptimizer(drafter, OptimizerConfig(learning_rate=LEARNING_RATE))

    def warm(self) -> None:
        run = self.run_train if self.optimizer else self.run_step
        if self._inputs.device.type == "cuda":
            process_cache().device(str(self._inputs.device)).warm(run)
        for _ in range(WARM_UP_STEPS):
            run()

    def run_step(self) -> None:
        """Forward, backward, clipping."""
        for parameter in self._parameters:
            parameter.grad = None
        self.step.forward_backward(self._inputs.row)
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0, foreach=True)

    def run_train(self) -> None:
        """Forward, backward, AdamW on fp32 masters (which clips)."""
        assert self.optimizer is not None
        stats = self.step.forward_backward(self._inputs.row)
        self.optimizer.absorb(stats.denominator)
        self.optimizer.step(LEARNING_RATE)


def run_of(side: Any) -> Callable[[], None]:
    run: Callable[[], None] = side.run_train if side.optimizer is not None else side.run_step
    return run


def several(side: Any) -> Callable[[], None]:
    run = run_of(side)

    def steps() -> None:
        for _ in range(STEPS_AT_ONCE):
            run()

    return steps


def hold(device: torch.device) -> int:
    gc.collect()
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(device)


@dataclass(slots=True)
class Ready:
    """A side that is built and warmed."""

    side: Any
    memory_gib: float | None
    warm_up_s: float


def make_ready(inputs: Inputs, build: Callable[[], Any]) -> Ready:
    device = inputs.device
    shared = sum(t.numel() * t.element_size() for t in (inputs.embedding_VH, inputs.head_VH, inputs.row.taps_TF))
    before, pools_before = hold(device), graph_pool_bytes(device)
    side = build()
    warm_up_s = Stopwatch(device).time(side.warm)
    held, pools = hold(device) - before, graph_pool_bytes(device) - pools_before
    peak = peak_bytes(device, run_of(side))
    return Ready(side, None if peak is None else (shared + held + peak + pools) / GIB, warm_up_s)


def compare(inputs: Inputs, sides: dict[str, Callable[[], Any]], rounds: int, ceiling: float) -> dict[str, Any]:
    """Seconds, tokens/s, memory, share of the ceiling and largest kernels of each side, timed in turn."""
    watch = Stopwatch(inputs.device)
    ready = {name: make_ready(inputs, build) for name, build in sides.items()}
    times: dict[str, list[float]] = {name: [] for name in ready}
    for _ in range(rounds):
        for name, made in ready.items():
            times[name].append(watch.time(several(made.side)) / STEPS_AT_ONCE)
    found = {name: describe(inputs, made, times[name], ceiling) for name, made in ready.items()}
    if inputs.device.type == "cuda":
        for name, made in ready.items():
            found[name]["profile_ms"] = profile_step(run_of(made.side))
    return found


def one_by_one(inputs: Inputs, sides: dict[str, Callable[[], Any]], rounds: int, ceiling: float) -> dict[str, Any]:
    """As `compare`, with one side on the device at a time and without profile."""
    watch, found = Stopwatch(inputs.device), {}
    for name, build in sides.items():
        made = make_ready(inputs, build)
        times = [watch.time(several(made.side)) / STEPS_AT_ONCE for _ in range(rounds)]
        found[name] = describe(inputs, made, times, ceiling)
        del made
        hold(inputs.device)
    return found


def describe(inputs: Inputs, made: Ready, times: list[float], ceiling: float) -> dict[str, Any]:
    seconds, flops = statistics.median(times), inputs.shape.flops()
    return {
        "median_s": seconds,
        "rounds_s": times,
        "context_tokens_per_s": inputs.shape.row_tokens / seconds,
        "model_tflops": flops / seconds / 1e12,
        "share_of_ceiling": flops / seconds / ceiling,
        "memory_gib": made.memory_gib,
        "warm_up_s": made.warm_up_s,
    }


def profile_step(run: Callable[[], None], top: int = 18) -> dict[str, float]:
    """Milliseconds of device time of the largest kernels of one step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    kernels = sorted(profiler.key_averages(), key=lambda e: -e.device_time_total)[:top]
    total = sum(e.device_time_total for e in profiler.key_averages()) / 1e3
    return {"all kernels": total} | {f"{e.key[:80]} x{e.count}": round(e.device_time_total / 1e3, 3) for e in kernels}


def our_forms(objective: ObjectiveConfig, fp8: bool) -> dict[str, tuple[ObjectiveConfig, bool]]:
    """(objective, with CUDA graphs) by name."""
    forms = {"draftline": (objective, False), "draftline_graphs": (objective, True)}
    if fp8:
        forms["draftline_fp8_head"] = (objective.model_copy(update={"head_dtype": "fp8"}), False)
        forms["draftline_fp8"] = (objective.model_copy(update={"head_dtype": "fp8", "mlp_dtype": "fp8"}), False)
    return forms


def against_peer(inputs: Inputs, rounds: int, ceiling: float, fp8: bool, timed: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part, with_optimizer, run in (("step", False, compare), ("train", True, one_by_one)):
        if part not in timed:
            continue
        sides: dict[str, Callable[[], Any]] = {}
        if has_specforge():
            sides["specforge"] = lambda opt=with_optimizer: SpecForgeSide(inputs, with_optimizer=opt)
        for name, (objective, graphs) in our_forms(plain_objective(inputs.shape), fp8).items():
            sides[name] = lambda o=objective, g=graphs, opt=with_optimizer: OurSide(
                inputs, o, with_optimizer=opt, graphs=g
            )
        found[part] = run(inputs, sides, rounds, ceiling)
        peer = found[part].get("specforge")
        for result in found[part].values():
            result["speed_against_specforge"] = peer["median_s"] / result["median_s"] if peer else None
        hold(inputs.device)
    return found


def ingredients(big: Shape, small_anchors: int, small_block: int, device: torch.device, rounds: int) -> dict[str, Any]:
    """Seconds of a step as ingredients are added one after another to the plain recipe, forward and backward only."""
    plain = replace(big, anchors=small_anchors, block_size=small_block)
    wide = replace(plain, block_size=big.block_size)
    window = max(big.row_tokens // 2, 1)
    noise = FeatureNoise(kind="uniform", scale=0.05)
    ladder: list[tuple[str, Shape, dict[str, Any]]] = [
        (f"plain: {plain.anchors} anchors x {plain.block_size}, CE", plain, {}),
        (f"block {wide.block_size}", wide, {}),
        (f"{big.anchors} anchors", big, {}),
        (f"window {window} on all layers but the last", replace(big, window=window), {}),
        ("uniform noise", replace(big, window=window), {"feature_noise": noise}),
        ("KL 0.15", replace(big, window=window), {"feature_noise": noise, "kl_weight": 0.15}),
        ("CAP 0.1", replace(big, window=window), {"feature_noise": noise, "kl_weight": 0.15, "cap_weight": 0.1}),
    ]
    found: dict[str, Any] = {}
    before = None
    for name, shape, extra in ladder:
        inputs = Inputs(shape, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
        side = OurSide(inputs, plain_objective(shape).model_copy(update=extra))
        side.warm()
        peak = peak_bytes(device, side.run_step)
        seconds = Stopwatch(device).median(several(side), rounds) / STEPS_AT_ONCE
        found[name] = {
            "median_s": seconds,
            "added_share": None if before is None else (seconds - before) / seconds,
            "step_peak_gib": None if peak is None else peak / GIB,
        }
        before = seconds
        del side, inputs
        hold(device)
    return found


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=json_file, required=True, help="JSON file to write")
    parser.add_argument("--tiny", action="store_true", help="small shapes, for any machine")
    parser.add_argument("--parts", type=one_of(PARTS), default=PARTS, help="comma-separated")
    parser.add_argument("--rounds", type=whole(1), default=7)
    parser.add_argument("--no-fp8", action="store_true")
    parser.add_argument("--timed", type=one_of(TIMED), default=TIMED, help="without the optimizer, with it")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shapes = {shape.name: shape for shape in ((TINY_SMALL, TINY_Q8, TINY_Q27) if arguments.tiny else (SMALL, Q8, Q27))}
    ceiling = measure_ceiling(device, dtype, 256 if arguments.tiny else 8192, Stopwatch(device))
    report: dict[str, Any] = {"environment": environment(device), "ceiling_tflops": ceiling / 1e12}
    fp8 = device.type == "cuda" and not arguments.no_fp8
    for part in arguments.parts:
        if part == "ingredients":
            big = shapes["q27"]
            report[part] = ingredients(big, big.anchors // 2, big.block_size // 2, device, arguments.rounds)
        else:
            inputs = Inputs(shapes[part], device, dtype)
            report[part] = {"shape": asdict(inputs.shape)} | against_peer(
                inputs, arguments.rounds, ceiling, fp8, arguments.timed
            )
            del inputs
            hold(device)
        arguments.output.write_text(json.dumps(report, indent=2) + "\n")
        print_part(part, report[part])


def print_part(part: str, found: dict[str, Any]) -> None:
    rows = {f"{kind} {name}": r for kind in ("step", "train") for name, r in found.get(kind, {}).items()}
    for name, r in (rows or found).items():
        facts = {k: round(v, 3) for k, v in r.items() if isinstance(v, float)}
        print(part, name, json.dumps(facts), flush=True)
        for kernel, ms in r.get("profile_ms", {}).items():
            print(f"      {ms:9.2f} ms  {kernel}")


if __name__ == "__main__":
    main()
