"""Milliseconds of a decoding round, draft and verify apart: ordinary against static-shaped and compiled rounds.

    python benchmarks/decode_speed.py --output decode.json            random weights of Qwen3-8B's shape, a GPU
    python benchmarks/decode_speed.py --target FOLDER --drafter RUN   a real pair
    python benchmarks/decode_speed.py --tiny --output decode.json     the same code on any machine, in seconds

All modes stand behind the same context and take turns, round after round, so that a drift of the clock meets all alike;
a time is the median of its rounds. A round commits the same number of tokens in every mode, whatever was accepted: the
time does not depend on the tokens. `plain_step` is a verify of one token: what a round competes with. Compare times of
one run only.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from argtypes import json_file, whole, wholes
from draftline.config.schema import DrafterConfig, TargetConfig
from draftline.decode.chain import BoundDrafter
from draftline.decode.generation import device_clock
from draftline.decode.static_call import CompileMode, StaticCompiler, parse_compile_mode
from draftline.decode.static_drafter import StaticDrafter
from draftline.decode.static_target import StaticTarget
from draftline.decode.steps import DraftModel, RoundContext, SoloSession, TreeLayout
from draftline.decode.target_session import TargetSession
from draftline.decode.tree import build_tree, top_marginals
from draftline.decode.tree_generate import tree_inputs
from draftline.devices import resolve_devices
from draftline.drafter.model import Drafter
from draftline.drafter.spec import build_spec
from draftline.errors import DraftlineError
from draftline.evaluate.command import find_drafter
from draftline.target.backend import masked_attention
from draftline.target.facts import facts_from_hf
from draftline.target.load import LoadedTarget, load_target, wrap_model
from draftline.target.shape_plans import no_shape_plans
from measure import environment

BIG = Qwen3Config(
    vocab_size=151_936,
    hidden_size=4096,
    intermediate_size=12_288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=40_960,
    tie_word_embeddings=False,
)
TINY = Qwen3Config(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=4096,
    tie_word_embeddings=False,
)
TINY_DEFAULTS = {"contexts": (32, 96), "modes": "off,graph", "budgets": (8,), "rounds": 3}


@dataclass(slots=True)
class Lane:
    """One mode behind one context: its sessions, and the seconds of its parts by name."""

    name: CompileMode
    drafter: DraftModel
    session: SoloSession
    tokens: list[int]
    taps_SF: torch.Tensor | None
    seconds: dict[str, list[float]] = field(default_factory=dict)
    picked: list[list[int]] = field(default_factory=list)

    def add(self, part: str, seconds: float) -> None:
        self.seconds.setdefault(part, []).append(seconds)


@dataclass(frozen=True, slots=True)
class Trees:
    """Inputs of a verifying forward by name: a line of drafts (the chain) or a tree of so many drafts."""

    inputs: dict[str, tuple[torch.Tensor, TreeLayout | None]]

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(sorted({ids_N.shape[0] for ids_N, _ in self.inputs.values()}))


def random_target(config: Qwen3Config, device: torch.device, dtype: torch.dtype) -> LoadedTarget:
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    model.eval().requires_grad_(False)
    return wrap_model(model, config=TargetConfig(model="random weights"), facts=facts_from_hf(config, ()))


def load_pair(options: argparse.Namespace, device: torch.device) -> tuple[LoadedTarget, BoundDrafter]:
    """The target and drafter that were asked for; random ones where none was named."""
    if options.target is None:
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        target = random_target(TINY if options.tiny else BIG, device, dtype)
    else:
        named = TargetConfig(model=options.target)
        target = load_target(named.model_copy(update={"attention": masked_attention(named)}), str(device))
    if options.drafter is not None:
        source = find_drafter(Path(options.drafter))
        drafter = source.load(device, target.dtype, num_target_layers=target.num_layers)
    else:
        layers, block, taps = (2, 4, (1, 2)) if options.tiny else (5, 16, None)
        config = DrafterConfig(num_layers=layers, block_size=block, taps=taps, mask_token_id=target.vocab_size - 1)
        spec = build_spec(config, target.facts)
        with torch.device(device):
            drafter = Drafter(spec).to(device=device, dtype=target.dtype).eval()
    return target, BoundDrafter(drafter, target)


def verify_inputs(target: LoadedTarget, block_size: int, budgets: Sequence[int]) -> Trees:
    """Forwards of the sizes asked for. What the tokens are does not matter to the time."""
    device = target.device
    generator = torch.Generator().manual_seed(1)
    ids_N = torch.randint(target.vocab_size, (block_size,), generator=generator).to(device)
    inputs: dict[str, tuple[torch.Tensor, TreeLayout | None]] = {
        "plain_step": (ids_N[:1], None),
        "chain": (ids_N, None),
    }
    logits_DV = torch.randn(block_size - 1, target.vocab_size, generator=generator) * 1e-3
    for budget in budgets:
        tokens, layout = tree_inputs(build_tree(top_marginals(logits_DV, budget), budget), 0)
        inputs[f"tree@{budget}"] = tokens.on(device), layout
    return Trees(inputs)


@no_shape_plans()
def measure_context(
    target: LoadedTarget,
    bound: BoundDrafter,
    context: int,
    modes: Sequence[CompileMode],
    trees: Trees,
    rounds: int,
) -> dict[str, Any]:
    """Medians of each mode behind `context` tokens."""
    kept = max(1, bound.block_size // 2)
    columns = context + kept * (rounds + 2) + trees.widths[-1] + 1
    clock, prompt = device_clock(target.device), [i % (target.vocab_size - 1) for i in range(context)]
    with ExitStack() as stack:
        lanes, prepared_s = [], {}
        for mode in modes:
            started_s = clock()
            lanes.append(_open(stack, mode, target, bound, columns, trees))
            prepared_s[mode] = clock() - started_s
        for lane in lanes:
            lane.tokens = list(prompt)
            lane.drafter.start()
            logits_V, lane.taps_SF = lane.session.prefill(prompt)
            lane.tokens.append(int(logits_V.argmax()))
        for number in range(rounds + 1):
            for lane in lanes:
                _round(lane, bound.block_size, kept, trees, clock, timed=number > 0)
    return {
        "context_tokens": context,
        "committed_a_round": kept,
        "modes": {lane.name: _medians(lane, prepared_s[lane.name]) for lane in lanes},
        "same_tokens_as_first_mode": {lane.name: _agreement(lanes[0], lane) for lane in lanes},
    }


def _open(
    stack: ExitStack, mode: CompileMode, target: LoadedTarget, bound: BoundDrafter, columns: int, trees: Trees
) -> Lane:
    if mode == "off":
        return Lane(mode, bound.fork(), TargetSession(target, bound.taps), [], None)
    compiler = StaticCompiler(mode, target.device)
    static = stack.enter_context(StaticTarget(target, columns, compiler))
    static.warm(bound.taps, trees.widths)
    drafter = StaticDrafter(bound.fork(), columns, compiler)
    drafter.warm()
    return Lane(mode, drafter, static.session(bound.taps, trees.widths), [], None)


@torch.inference_mode()
def _round(lane: Lane, block_size: int, kept: int, trees: Trees, clock: Any, *, timed: bool) -> None:
    """One draft and one verify of each size; the last one, the chain's, is committed."""
    started_s = clock()
    drafts = lane.drafter.block_logits(RoundContext(lane.tokens, lane.taps_SF, block_size)).argmax(dim=-1)
    drafts.tolist()
    if timed:
        lane.add("draft", clock() - started_s)
    for name, (ids_N, layout) in sorted(trees.inputs.items(), key=lambda item: item[0] == "chain"):
        started_s = clock()
        logits_NV, taps_NF = lane.session.extend(ids_N, layout)
        picked = logits_NV.argmax(dim=-1).tolist()
        if timed:
            lane.add(name, clock() - started_s)
            lane.picked.append(picked)
        lane.session.commit(kept if name == "chain" else 0)
    lane.taps_SF = None if taps_NF is None else taps_NF[:kept]
    lane.tokens += trees.inputs["chain"][0][:kept].tolist()


def _medians(lane: Lane, prepared_s: float) -> dict[str, Any]:
    milliseconds = {part: 1e3 * statistics.median(times) for part, times in lane.seconds.items()}
    draft = milliseconds.pop("draft")
    return {
        "draft_ms": draft,
        "verify_ms": milliseconds,
        "round_ms": {name: draft + ms for name, ms in milliseconds.items() if name != "plain_step"},
        "prepared_s": prepared_s,
    }


def _agreement(first: Lane, lane: Lane) -> float:
    """Share of positions at which both pick the same token."""
    pairs = [
        (a, b) for one, other in zip(first.picked, lane.picked, strict=True) for a, b in zip(one, other, strict=True)
    ]
    return sum(a == b for a, b in pairs) / len(pairs)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", help="folder, hub id or .gguf file; default: random weights of Qwen3-8B's shape")
    parser.add_argument("--drafter", help="export or run folder; default: random weights, 5 layers, blocks of 16")
    parser.add_argument("--contexts", type=wholes, default=(512, 4096, 16384), help="context lengths in tokens")
    parser.add_argument("--modes", default="off,graph,inductor", help="off, graph, inductor, eager, aot_eager")
    parser.add_argument("--budgets", type=wholes, default=(64, 256), help="drafts of the trees")
    parser.add_argument("--rounds", type=whole(1), default=30, help="timed rounds")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tiny", action="store_true", help="a tiny pair, for any machine")
    parser.add_argument("--output", type=json_file, help="JSON file; default: print")
    options = parser.parse_args(arguments)
    if options.tiny:
        for name, value in TINY_DEFAULTS.items():
            if getattr(options, name) == parser.get_default(name):
                setattr(options, name, value)
    return options


def run(options: argparse.Namespace) -> dict[str, Any]:
    device = torch.device(resolve_devices([options.device])[0])
    modes = [parse_compile_mode(name) for name in options.modes.split(",")]
    started_s = time.monotonic()
    target, bound = load_pair(options, device)
    trees = verify_inputs(target, bound.block_size, options.budgets)
    found = [measure_context(target, bound, context, modes, trees, options.rounds) for context in options.contexts]
    return {
        "command": "python benchmarks/decode_speed.py" + (" --tiny" if options.tiny else ""),
        "target": {"model": Path(target.config.model).name, "dtype": str(target.dtype), "layers": target.num_layers},
        "block_size": bound.block_size,
        "rounds": options.rounds,
        "contexts": found,
        "environment": environment(device),
        "seconds": time.monotonic() - started_s,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        result = run(options)
    except DraftlineError as error:
        print(f"decode_speed: {error}", file=sys.stderr)
        return error.exit_code
    text = json.dumps(result, indent=2) + "\n"
    if options.output is None:
        print(text, end="")
    else:
        options.output.write_text(text, encoding="utf-8")
        print(f"result: {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
