"""Static-shaped and compiled rounds change no token: fixed widths and lengths, buffers for a growing cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from decoding_kit import NoisyDrafter, greedy_text, random_prompt, tiny_spec, tiny_target
from draftline.config.schema import TargetConfig
from draftline.decode.budget import AdaptiveBudget, CostCurve, FixedBudget
from draftline.decode.chain import BoundDrafter, ChainSource, chain_generate
from draftline.decode.linear import linear_steps
from draftline.decode.plain import plain_generate, plain_steps
from draftline.decode.static_call import StaticCompiler, column_stops, parse_compile_mode, smallest_fit
from draftline.decode.static_drafter import StaticDrafter
from draftline.decode.static_target import StaticTarget
from draftline.decode.steps import RoundContext, Task, run_steps
from draftline.decode.tree_generate import tree_generate, tree_steps
from draftline.drafter.model import Drafter
from draftline.errors import UserError
from draftline.target.load import load_target

CPU = torch.device("cpu")
LIMIT = 19


@pytest.fixture(params=["graph", "aot_eager"])
def compiler(request: pytest.FixtureRequest) -> Iterator[StaticCompiler]:
    yield StaticCompiler(request.param, CPU)
    torch.compiler.reset()


def test_chain_tree_and_plain_rounds_are_those_of_ordinary_decoding(compiler: StaticCompiler) -> None:
    """Prompts of several lengths share the buffers; nothing is compiled again after the warm-up."""
    target = tiny_target(4, num_hidden_layers=2)
    spec = tiny_spec(block_size=5, num_layers=1, taps=(0,), num_target_layers=2, layer_types=("full_attention",))
    bound = BoundDrafter(Drafter(spec).eval(), target)
    drafter = StaticDrafter(bound, 80, compiler)
    options: dict[str, Any] = {"max_new_tokens": LIMIT, "stop_token_ids": ()}
    with StaticTarget(target, 80, compiler) as static:
        for taps, widths in (((), (1,)), (bound.taps, (5,)), (bound.taps, (12,))):
            static.warm(taps, widths)
        drafter.warm()
        warmed = compiler.compilations
        for seed, length in ((1, 3), (2, 17), (3, 1)):
            prompt = random_prompt(seed, length)
            task = Task(prompt, LIMIT, ())
            plain = run_steps(session := static.session(), plain_steps(session, task))
            assert plain.output_ids == plain_generate(target, prompt, **options).output_ids
            session = static.session(bound.taps, (5,))
            chain = run_steps(session, linear_steps(session, ChainSource(drafter), task))
            expected = chain_generate(target, bound, prompt, **options)
            assert (chain.output_ids, chain.acceptance_lengths) == (expected.output_ids, expected.acceptance_lengths)
            for budget in (FixedBudget(11), AdaptiveBudget(CostCurve(1.0, ((0, 1.0), (11, 1.2))))):
                session = static.session(bound.taps, (12,))
                tree = run_steps(session, tree_steps(session, drafter, task, budget))
                expected = tree_generate(target, bound, prompt, budget=budget, **options)
                assert (tree.output_ids, tree.acceptance_lengths) == (expected.output_ids, expected.acceptance_lengths)
                assert tree.tree_nodes == expected.tree_nodes
        assert compiler.compilations == warmed


@pytest.mark.parametrize("kind", ["gemma2", "mistral_sliding"])
def test_windows_and_caps_survive_static_shapes(make_tiny_target: Callable[..., Path], kind: str) -> None:
    target = load_target(TargetConfig(model=str(make_tiny_target(kind))), "cpu")
    prompt = random_prompt(1, 11, 400)
    drafter = NoisyDrafter(greedy_text(target, prompt, 30), target.vocab_size, 6, seed=1, strength=4.0, taps=(0, 2))
    with StaticTarget(target, 64, StaticCompiler("graph", CPU)) as static:
        session = static.session(drafter.taps, (20,))
        found = run_steps(session, tree_steps(session, drafter, Task(prompt, 26, ()), FixedBudget(14)))
    expected = tree_generate(target, drafter, prompt, budget=FixedBudget(14), max_new_tokens=26, stop_token_ids=())
    assert (found.output_ids, found.acceptance_lengths) == (expected.output_ids, expected.acceptance_lengths)
    assert max(found.acceptance_lengths) > 1


@pytest.mark.parametrize("origin", ["query", "anchor"])
@pytest.mark.parametrize("in_block", ["zlab", "causal", "bidirectional"])
def test_static_blocks_have_the_logits_of_growing_ones(origin: str, in_block: str) -> None:
    """Also where the length limit shortens the block, and past the window of a sliding layer."""
    target = tiny_target(1)
    kinds = ("sliding_attention", "full_attention")
    spec = tiny_spec(
        layer_types=kinds, sliding_window=5, in_block_attention=in_block, window_origin=origin, block_size=4
    )
    bound = BoundDrafter(Drafter(spec).eval(), target)
    static = StaticDrafter(bound, 40, StaticCompiler("graph", CPU))
    generator = torch.Generator().manual_seed(0)
    bound.start()
    static.start()
    length = 0
    for new, slots in ((9, 4), (3, 4), (1, 3), (4, 2), (2, 4)):
        taps_SF = torch.randn(new, 32, generator=generator)
        length += new
        context = RoundContext([3] * (length + 1), taps_SF, slots)
        torch.testing.assert_close(static.block_logits(context), bound.block_logits(context), atol=1e-4, rtol=1e-4)


def test_a_closed_target_is_left_without_hooks() -> None:
    target = tiny_target(0)
    with StaticTarget(target, 30, StaticCompiler("graph", CPU)) as static:
        static.session((1, 2), (3,)).prefill([1, 2, 3])
        assert len(target.layers[1]._forward_hooks) == 1
    assert not any(layer._forward_hooks for layer in target.layers)


def test_sizes_are_prepared_by_doubling_and_what_exceeds_them_is_refused() -> None:
    assert column_stops(3000) == (512, 1024, 2048, 3000)
    assert column_stops(100) == (100,)
    assert [smallest_fit((4, 8), n) for n in (1, 4, 5, 8)] == [4, 4, 8, 8]
    with pytest.raises(UserError, match="9 tokens exceed what was prepared"):
        smallest_fit((4, 8), 9)
    with pytest.raises(UserError, match="'fast' is not a way to compile"):
        parse_compile_mode("fast")


def test_recurrent_targets_are_not_compiled(make_tiny_target: Callable[..., Path]) -> None:
    target = load_target(TargetConfig(model=str(make_tiny_target("qwen3_next"))), "cpu")
    with pytest.raises(UserError, match="recurrent layers"):
        StaticTarget(target, 50, StaticCompiler("graph", CPU))
