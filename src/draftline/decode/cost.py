"""Measures what a round costs with trees of several sizes, for the adaptive budget: all that a round does, growing the
tree and walking it included, for that costs more with every node.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from draftline.decode.budget import AdaptiveBudget, CostCurve
from draftline.decode.generation import device_clock
from draftline.decode.path_tree import PathMarginals, block_marginals
from draftline.decode.steps import Drafted, DraftModel, RoundContext, SoloSession
from draftline.decode.target_session import TargetSession
from draftline.decode.tree import DraftTree, Marginals
from draftline.decode.tree_generate import tree_inputs
from draftline.drafter.selector import PathScores
from draftline.target.shape_plans import no_shape_plans

if TYPE_CHECKING:
    from draftline.target.load import LoadedTarget

# Sizes of trees on each kind of device: a CPU is bound by arithmetic long before a GPU is.
CPU_BUDGETS = (0, 1, 3, 7, 15, 31, 63)
GPU_BUDGETS = (0, 1, 7, 15, 31, 63, 127, 255, 511)


def default_budgets(device: torch.device) -> tuple[int, ...]:
    """Drafts of the trees that are timed on this kind of device."""
    return CPU_BUDGETS if device.type == "cpu" else GPU_BUDGETS


@torch.inference_mode()
@no_shape_plans()
def measure_cost_curve(
    target: LoadedTarget,
    drafter: DraftModel,
    prompt_ids: Sequence[int],
    *,
    budgets: Sequence[int] | None = None,
    repeats: int = 3,
    session: SoloSession | None = None,
) -> CostCurve:
    """Times whole rounds behind `prompt_ids`: drafting apart, growing and verifying trees by their size.

    Args:
        prompt_ids: a text of typical length: the cost depends on it. A block's room below the target's context is kept.
        budgets: drafts of the trees to time, rising from 0; None takes the device's default.
        repeats: the median of so many timings counts, after one that does not.
        session: an empty one that taps the drafter's layers; None opens the usual kind.
    """
    budgets = default_budgets(target.device) if budgets is None else budgets
    clock = device_clock(target.device)
    session = TargetSession(target, drafter.taps) if session is None else session
    session.refuse_tree()
    limit = getattr(target.text_config, "max_position_embeddings", None) or len(prompt_ids) + drafter.block_size
    prompt_ids = prompt_ids[: max(1, limit - drafter.block_size)]
    _, taps_SF = session.prefill(prompt_ids)
    drafter.start()
    tokens, slots = [*prompt_ids, prompt_ids[-1]], drafter.block_size
    drafted = drafter.block_logits(RoundContext(tokens, taps_SF, slots))
    no_taps_SF = None if taps_SF is None else taps_SF[:0]

    def draft() -> None:
        block_marginals(drafter.block_logits(RoundContext(tokens, no_taps_SF, slots)), budgets[-1])

    # Near-uniform marginals fill any budget; what the tokens are does not matter to the time.
    marginals = block_marginals(_near_uniform(drafted), budgets[-1])
    measured = []
    for nodes in budgets:

        def verify(nodes: int = nodes) -> None:
            tree = _grown(marginals, nodes, budgets)
            own, layout = tree_inputs(tree, tokens[-1])
            logits_NV, _ = session.extend(own.on(target.device), layout)
            tree.walk(logits_NV.argmax(dim=-1).tolist())
            session.commit(0)

        measured.append((nodes, _median_s(verify, clock, repeats)))
        if len(_grown(marginals, nodes, budgets)) < nodes:
            break
    return CostCurve.fit(_median_s(draft, clock, repeats), measured)


def _grown(marginals: Marginals | PathMarginals, nodes: int, budgets: Sequence[int]) -> DraftTree:
    """Grown by the adaptive rule itself, which looks a cost up at each node: a flat one here, so that none stops it."""
    if nodes == 0:
        return DraftTree()
    return AdaptiveBudget(CostCurve(1.0, tuple((n, 1.0) for n in budgets if n <= nodes))).grow(marginals)


def _near_uniform(drafted: Drafted) -> Drafted:
    if isinstance(drafted, PathScores):
        return replace(drafted, scores_AKCC=drafted.scores_AKCC * 1e-3)
    return drafted * 1e-3


def _median_s(action: Callable[[], None], clock: Callable[[], float], repeats: int) -> float:
    times = []
    for _ in range(repeats + 1):
        started = clock()
        action()
        times.append(clock() - started)
    return statistics.median(times[1:])
