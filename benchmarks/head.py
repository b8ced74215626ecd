"""Time, memory and gradient error of the frozen-head loss, form by form, in one run on one device.

    python benchmarks/head.py --output head.json            the 27B shape: 32,768 positions x 5120 x 248,320, a GPU
    python benchmarks/head.py --tiny --output head.json     the same code on any machine, in seconds

Weights and data are random. All forms are warmed up first and then timed in turn, round after round, so that a drift of
the clock meets all alike; a form's time is the median of its rounds, forward and backward to the hidden states. Peak
memory counts what is allocated beyond the weight and the inputs. Compare times of one run only.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from argtypes import json_file, whole, wholes
from draftline.drafter.head import HeadForm, Teacher, product, run_head
from draftline.drafter.head_fp8 import Fp8Head, quantize_head, require_fp8
from draftline.drafter.head_plan import plan_slots
from draftline.drafter.loss import LossTerms
from draftline.errors import UserError
from draftline.records import FrozenHead
from measure import GIB, Stopwatch, environment, measure_ceiling, peak_bytes

TARGET_RATIO, TARGET_S, TARGET_GIB = 0.60, 0.315, 4.0
REFERENCE_CHUNK = 2048


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the problem: `blocks` blocks of `block_size` slots predict from `context` positions."""

    blocks: int = 1024
    block_size: int = 32
    context: int = 4096
    hidden: int = 5120
    vocab: int = 248_320

    @property
    def positions(self) -> int:
        return self.blocks * self.block_size


TINY = Shape(blocks=16, block_size=8, context=64, hidden=64, vocab=1000)
# The gradient is checked against fp64 on this much of the big shape.
CHECKED = Shape(blocks=64, block_size=32, context=512, hidden=5120, vocab=8192)


@dataclass(frozen=True, slots=True)
class Variant:
    """One form of the head. `chunk` positions at once; `products` V x H products per position, teacher apart."""

    name: str
    terms: LossTerms
    chunk: int
    form: HeadForm = "fused"
    plain_bf16: bool = False
    fp8: bool = False

    @property
    def products(self) -> int:
        return 2 if self.form == "fused" else 3


class Problem:
    """Random inputs of a shape, on a device."""

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype, seed: int = 0) -> None:
        g = torch.Generator(device).manual_seed(seed)
        self.shape = shape
        # Logits of standard deviation 1.5, as spread as those of a drafter in training.
        weight = torch.randn(shape.vocab, shape.hidden, generator=g, device=device, dtype=dtype)
        weight.mul_(1.5 / shape.hidden**0.5)
        self.head = FrozenHead(weight)
        self._head8: Fp8Head | None = None
        self.hidden = torch.randn(shape.positions, shape.hidden, generator=g, device=device, dtype=dtype)
        self.hidden.requires_grad_()
        self.label = torch.randint(0, shape.vocab, (shape.positions,), generator=g, device=device)
        self.teacher = torch.randn(shape.context, shape.hidden, generator=g, device=device, dtype=dtype)
        anchors = torch.randint(1, shape.context - shape.block_size, (shape.blocks,), generator=g, device=device)
        self.index = (anchors[:, None] + torch.arange(shape.block_size, device=device) - 1).flatten()
        self.mask = torch.ones_like(self.label, dtype=torch.bool)
        self.weight = torch.rand(shape.positions, generator=g, device=device) + 0.5

    def run(self, variant: Variant) -> Tensor:
        """Forward and backward; the gradient lands in `hidden.grad`. Returns the numerator."""
        self.hidden.grad = None
        if variant.plain_bf16:
            return self._run_plain(variant.chunk)
        plan = plan_slots(self.mask, self.index, chunk=variant.chunk)
        teacher = Teacher(self.head, self.teacher) if variant.terms.needs_teacher else None
        head = self._in_fp8() if variant.fp8 else self.head
        out = run_head(self.hidden, self.label, plan, head, variant.terms, teacher, form=variant.form)
        weight = self.weight.to(out.values.ce.dtype)
        out.backward(weight)
        coefficients = variant.terms.coefficients().items()
        total = sum((c * getattr(out.values, name) for name, c in coefficients if c), torch.zeros_like(weight))
        return (weight * total).sum()

    def _in_fp8(self) -> Fp8Head:
        """Made at first use, in the warm-up: a run makes it once."""
        if self._head8 is None:
            self._head8 = quantize_head(self.head)
        return self._head8

    def _run_plain(self, chunk: int) -> Tensor:
        """What one would write first: logits of the compute dtype, cross-entropy in fp32, a checkpoint per chunk."""

        def chunk_loss(x: Tensor, label: Tensor, weight: Tensor) -> Tensor:
            logits = F.linear(x, self.head.weight_VH).float()
            return (weight * F.cross_entropy(logits, label, reduction="none")).sum()

        parts = [
            checkpoint(chunk_loss, x, label, weight, use_reentrant=False, preserve_rng_state=False)
            for x, label, weight in zip(
                self.hidden.split(chunk), self.label.split(chunk), self.weight.split(chunk), strict=True
            )
        ]
        total = torch.stack(parts).sum()
        total.backward()
        return total.detach()


def has_fp8(device: torch.device) -> bool:
    try:
        require_fp8(device)
    except UserError as reason:
        print(f"without the fp8 form: {reason}")
        return False
    return True


def make_variants(chunks: Sequence[int], fp8: bool) -> list[Variant]:
    ce = LossTerms()
    recipe = LossTerms(ce=0.85, kl=0.15, cap=0.1)
    variants = [
        Variant("plain_bf16_checkpointed_ce", ce, REFERENCE_CHUNK, "checkpointed", plain_bf16=True),
        Variant("checkpointed_ce", ce, REFERENCE_CHUNK, "checkpointed"),
        Variant("checkpointed_kl_cap", recipe, REFERENCE_CHUNK, "checkpointed"),
    ]
    for chunk in chunks:
        variants += [
            Variant(f"fused_ce_{chunk}", ce, chunk),
            Variant(f"fused_kl_cap_{chunk}", recipe, chunk),
            Variant(f"fused_all_{chunk}", replace(recipe, tv=0.1, reverse_kl=0.1), chunk),
        ]
        if fp8:
            variants += [
                Variant(f"fp8_ce_{chunk}", ce, chunk, fp8=True),
                Variant(f"fp8_kl_cap_{chunk}", recipe, chunk, fp8=True),
            ]
    return variants


def measure_products(problem: Problem, chunk: int, watch: Stopwatch) -> dict[str, float]:
    """FLOP/s of the two products of one chunk: to logits, and back to hidden states."""
    shape = problem.shape
    chunk = min(chunk, shape.positions)
    x, weight = problem.hidden.detach()[:chunk], problem.head.weight_VH
    g = torch.randn(chunk, shape.vocab, device=x.device, dtype=x.dtype)
    flops = 2.0 * chunk * shape.hidden * shape.vocab
    calls = {"to_logits": lambda: product(x, weight.t()), "to_hidden": lambda: product(g, weight)}
    found = {}
    for name, call in calls.items():
        call()
        found[name] = flops / watch.median(call, 7)
    return found


def measure_peak_bytes(problem: Problem, variant: Variant, device: torch.device) -> int | None:
    """Most bytes allocated beyond what is there before, the gradient of the hidden states included."""
    problem.hidden.grad = None
    peak = peak_bytes(device, lambda: problem.run(variant))
    problem.hidden.grad = None
    return peak


def time_variants(problem: Problem, variants: list[Variant], rounds: int, watch: Stopwatch) -> dict[str, list[float]]:
    """Seconds of each round of each variant, variants in turn."""
    for variant in variants:
        problem.run(variant)
    times: dict[str, list[float]] = {variant.name: [] for variant in variants}
    for _ in range(rounds):
        for variant in variants:
            times[variant.name].append(watch.time(lambda v=variant: problem.run(v)))
    return times


def check_gradients(shape: Shape, variants: list[Variant], device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Relative error of gradient and numerator of each variant against fp64 autograd on the same rounded inputs."""
    problem, exact = Problem(shape, device, dtype), Problem(shape, device, torch.float64)
    exact.head = FrozenHead(problem.head.weight_VH.double())
    exact.hidden = problem.hidden.detach().double().requires_grad_()
    exact.teacher, exact.weight = problem.teacher.double(), problem.weight.double()
    exact.label, exact.index = problem.label, problem.index
    found, wanted = {}, {}
    for variant in variants:
        if variant.terms not in wanted:
            numerator = exact.run(Variant("exact", variant.terms, 256, "checkpointed"))
            wanted[variant.terms] = (float(numerator), exact.hidden.grad.clone())
        numerator = float(problem.run(variant))
        value, gradient = wanted[variant.terms]
        found[variant.name] = {
            "gradient_error": float((problem.hidden.grad.double() - gradient).norm() / gradient.norm()),
            "numerator_error": abs(numerator - value) / abs(value),
        }
    return found


def describe(variant: Variant, times: list[float], peak: int | None, shape: Shape, ceiling: float) -> dict[str, Any]:
    seconds = statistics.median(times)
    teacher = shape.context if variant.terms.needs_teacher else 0
    teacher *= 1 if variant.form == "fused" else 2
    flops = 2.0 * shape.hidden * shape.vocab * (variant.products * shape.positions + teacher)
    return {
        "chunk": variant.chunk,
        "form": variant.form,
        "products": "fp8" if variant.fp8 else "compute dtype",
        "terms": {name: c for name, c in variant.terms.coefficients().items() if c},
        "median_s": seconds,
        "rounds_s": times,
        "peak_gib": None if peak is None else peak / GIB,
        "tflops": flops / seconds / 1e12,
        "share_of_ceiling": flops / seconds / ceiling,
    }


def judge(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The best fused CE against the checkpointed form, and the memory of all terms at the same chunk.

    Chunks whose memory with all terms is over the bound are not candidates, unless all are.
    """

    def peak_of(name: str) -> float:
        return results[name.replace("fused_ce", "fused_all")]["peak_gib"] or 0.0

    fused = [n for n in results if n.startswith("fused_ce_")]
    candidates = [n for n in fused if peak_of(n) < TARGET_GIB] or fused
    best = min(candidates, key=lambda n: results[n]["median_s"])
    ratio = results[best]["median_s"] / results["checkpointed_ce"]["median_s"]
    everything = results[best.replace("fused_ce", "fused_all")]
    peak = everything["peak_gib"]
    return {
        "best": best,
        "ratio_to_checkpointed": ratio,
        "ratio_to_plain_bf16": results[best]["median_s"] / results["plain_bf16_checkpointed_ce"]["median_s"],
        "ratio_met": ratio <= TARGET_RATIO,
        "seconds": results[best]["median_s"],
        "seconds_met": results[best]["median_s"] <= TARGET_S,
        "peak_gib_all_terms": peak,
        "peak_met": None if peak is None else peak < TARGET_GIB,
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=json_file, required=True, help="JSON file to write")
    parser.add_argument("--tiny", action="store_true", help="small shapes, for any machine")
    parser.add_argument("--chunks", type=wholes, default=(1024, 1664, 2048, 3328), help="chunk sizes of the fused form")
    parser.add_argument("--rounds", type=whole(1), default=5)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shape, checked = (TINY, TINY) if arguments.tiny else (Shape(), CHECKED)
    variants = make_variants(arguments.chunks, has_fp8(device))
    watch = Stopwatch(device)
    errors = check_gradients(checked, variants, device, dtype)
    ceiling = measure_ceiling(device, dtype, 256 if arguments.tiny else 8192, watch)
    problem = Problem(shape, device, dtype)
    products = {str(v.chunk): measure_products(problem, v.chunk, watch) for v in variants}
    times = time_variants(problem, variants, arguments.rounds, watch)
    results = {}
    for variant in variants:
        peak = measure_peak_bytes(problem, variant, device)
        results[variant.name] = describe(variant, times[variant.name], peak, shape, ceiling) | errors[variant.name]
    report = {
        "environment": environment(device),
        "shape": asdict(shape) | {"positions": shape.positions, "dtype": str(dtype)},
        "ceiling_tflops": ceiling / 1e12,
        "product_tflops": {chunk: {n: f / 1e12 for n, f in found.items()} for chunk, found in products.items()},
        "results": results,
        "verdict": judge(results),
    }
    arguments.output.write_text(json.dumps(report, indent=2) + "\n")
    print_report(report)


def print_report(report: dict[str, Any]) -> None:
    print(f"{report['environment']['device']}: ceiling {report['ceiling_tflops']:.1f} TFLOP/s; products in TFLOP/s:")
    for chunk, found in report["product_tflops"].items():
        print(f"  chunk {chunk}: " + ", ".join(f"{name} {value:.1f}" for name, value in found.items()))
    for name, r in report["results"].items():
        peak = "-" if r["peak_gib"] is None else f"{r['peak_gib']:.2f}"
        print(
            f"{name:28} {r['median_s'] * 1e3:9.2f} ms  {r['tflops']:7.1f} TFLOP/s ({r['share_of_ceiling']:.0%})"
            f"  peak {peak} GiB  gradient error {r['gradient_error']:.1e}"
        )
    print(json.dumps(report["verdict"], indent=2))


if __name__ == "__main__":
    main()
