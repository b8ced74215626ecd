"""Tree decoding: a round drafts one block, grows a tree from its marginals and verifies it in one target forward.

The draft call is that of the chain. The target's own token behind each node (argmax, or a draw of the request's rule)
decides which child is followed, so the output is the target's at any temperature. The tree is built from the drafter's
probabilities at temperature 1, whatever the request's.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch

from draftline.decode.budget import BudgetRule
from draftline.decode.generation import Generation
from draftline.decode.memory import free_bytes
from draftline.decode.reduce import TreeMarginals
from draftline.decode.sampling import GREEDY, Sampler, Sampling
from draftline.decode.steps import (
    Draft,
    DraftModel,
    RoundContext,
    Session,
    Steps,
    Task,
    Tokens,
    TreeLayout,
    extended,
    prefilled,
    recorder_for,
    run_steps,
)
from draftline.decode.target_session import TargetSession
from draftline.decode.tree import DraftTree
from draftline.errors import UserError

if TYPE_CHECKING:
    from draftline.target.load import LoadedTarget


def tree_steps(session: Session, drafter: DraftModel, task: Task, budget: BudgetRule) -> Steps:
    """Decodes with a tree of drafts a round. The session must tap the drafter's layers."""
    session.refuse_tree()
    recorder, sampler = recorder_for(session, task, drafter.block_size), Sampler(task.sampling, session.target.device)
    greedy, reduction = task.sampling.is_greedy, TreeMarginals(budget.largest)
    drafter.start()
    logits_V, taps_SF = yield from prefilled(task.prompt_ids)
    recorder.begin(int(sampler.pick(logits_V[None])))
    while not recorder.done:
        slots = recorder.slots
        tree = budget.grow((yield Draft(drafter, RoundContext(recorder.tokens, taps_SF, slots), reduction)))
        tokens, layout = tree_inputs(tree, recorder.tokens[-1])
        found = yield from extended(tokens, layout, greedy=greedy)
        own = found.own if greedy else sampler.pick(found.logits_NV).tolist()
        path = tree.walk(own)
        new_tokens = [*(tree.nodes[node - 1].token for node in path[1:]), own[path[-1]]]
        produced = recorder.commit(new_tokens, drafted=slots - 1, slots=slots, nodes=len(tree))
        session.commit_path(path[:produced])
        # The drafter's context is the text: features in path order, not in the order the nodes were found.
        taps_SF = None if found.taps_NF is None else _rows(found.taps_NF, path[:produced])
    return recorder.finish(n_forwards=session.n_forwards, n_replays=session.n_replays)


def tree_generate(
    target: LoadedTarget,
    drafter: DraftModel,
    prompt_ids: Sequence[int],
    *,
    budget: BudgetRule,
    max_new_tokens: int,
    stop_token_ids: Collection[int] | None = None,
    sampling: Sampling = GREEDY,
) -> Generation:
    """Decodes with a tree of drafts a round.

    Args:
        budget: `FixedBudget(n)` or `AdaptiveBudget(curve)`; other arguments as in `chain_generate`.

    Raises:
        UserError: a target with recurrent layers or an attention backend without arbitrary masks.
    """
    session = TargetSession(target, drafter.taps)
    task = Task(prompt_ids, max_new_tokens, stop_token_ids, sampling)
    return run_steps(session, tree_steps(session, drafter, task, budget))


def check_tree_memory(target: LoadedTarget, budget: int, context_tokens: int, *, rows: int = 1) -> None:
    """Raises UserError if verifying trees of `budget` drafts, of `rows` prompts at once, cannot fit beside the rest.

    Counted are the logits of all nodes (as computed, and in fp32 twice for sampling) and the ancestor mask.
    """
    nodes, size = budget + 1, target.dtype.itemsize
    needed_bytes = rows * nodes * (target.vocab_size * (size + 8) + (context_tokens + nodes) * size)
    free = free_bytes(target.device)
    if needed_bytes > free:
        raise UserError(
            f"a tree of {budget} drafts needs {needed_bytes / 2**30:.1f} GiB, {free / 2**30:.1f} are free",
            where="decode",
            mend=f"a budget up to {max(1, budget * free // needed_bytes)} fits",
        )


def tree_inputs(tree: DraftTree, root: int) -> tuple[Tokens, TreeLayout]:
    """Tokens (root first) and layout of the target forward that verifies `tree`."""
    layout = TreeLayout(torch.tensor(tree.depths(), dtype=torch.long), torch.from_numpy(tree.visible()))
    return Tokens([root, *(node.token for node in tree.nodes)]), layout


def _rows(x_NF: torch.Tensor, path: Sequence[int]) -> torch.Tensor:
    """Rows of the path, without an index on the device: that would be waited for."""
    if list(path) == list(range(len(path))):
        return x_NF[: len(path)]
    return torch.stack([x_NF[node] for node in path])
