"""Tree decoding: a round drafts one block, grows a tree from its marginals and verifies it in one target forward.

The draft call is that of the chain. The target's own token behind each node (argmax, or a draw of the request's rule)
decides which child is followed, so the output is the target's at any temperature. The tree is built from the drafter's
probabilities at temperature 1, whatever the request's.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import psutil
import torch

from draftline.decode.budget import BudgetRule
from draftline.decode.chain import DraftModel
from draftline.decode.generation import Generation, Recorder, check_context, device_clock
from draftline.decode.linear import RoundContext
from draftline.decode.sampling import GREEDY, Sampler, Sampling
from draftline.decode.target_session import TargetSession, TreeLayout
from draftline.decode.tree import DraftTree, top_marginals
from draftline.errors import UserError

if TYPE_CHECKING:
    from draftline.target.load import LoadedTarget


@torch.inference_mode()
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
    check_context(target, len(prompt_ids), max_new_tokens)
    stops = target.stop_token_ids if stop_token_ids is None else stop_token_ids
    recorder = Recorder(prompt_ids, max_new_tokens, stops, drafter.block_size, device_clock(target.device))
    sampler, session = Sampler(sampling, target.device), TargetSession(target, drafter.taps)
    session.refuse_tree()
    drafter.start()
    logits_V, taps_SF = session.prefill(prompt_ids)
    recorder.begin(int(sampler.pick(logits_V[None])))
    while not recorder.done:
        slots = recorder.slots
        logits_DV = drafter.block_logits(RoundContext(recorder.tokens, taps_SF, slots))
        tree = budget.grow(top_marginals(logits_DV, budget.largest))
        ids_N, layout = tree_inputs(tree, recorder.tokens[-1], target.device)
        logits_NV, taps_NF = session.extend(ids_N, layout)
        own: list[int] = sampler.pick(logits_NV).tolist()
        path = tree.walk(own)
        new_tokens = [*(tree.nodes[node - 1].token for node in path[1:]), own[path[-1]]]
        produced = recorder.commit(new_tokens, drafted=slots - 1, slots=slots, nodes=len(tree))
        session.commit_path(path[:produced])
        # The drafter's context is the text: features in path order, not in the order the nodes were found.
        taps_SF = None if taps_NF is None else taps_NF[path[:produced]]
    return recorder.finish(n_forwards=session.n_forwards, n_replays=session.n_replays)


def check_tree_memory(target: LoadedTarget, budget: int, context_tokens: int) -> None:
    """Raises UserError if verifying a tree of `budget` drafts cannot fit beside what is loaded.

    Counted are the logits of all nodes (as computed, and in fp32 twice for sampling) and the ancestor mask.
    """
    nodes, size = budget + 1, target.dtype.itemsize
    needed_bytes = nodes * (target.vocab_size * (size + 8) + (context_tokens + nodes) * size)
    if target.device.type == "cuda":
        free_bytes = torch.cuda.mem_get_info(target.device)[0]
    else:
        free_bytes = psutil.virtual_memory().available
    if needed_bytes > free_bytes:
        raise UserError(
            f"a tree of {budget} drafts needs {needed_bytes / 2**30:.1f} GiB, {free_bytes / 2**30:.1f} are free",
            where="decode",
            mend=f"a budget up to {max(1, budget * free_bytes // needed_bytes)} fits",
        )


def tree_inputs(tree: DraftTree, root: int, device: torch.device | str) -> tuple[torch.Tensor, TreeLayout]:
    """Token ids [N] (root first) and layout of the target forward that verifies `tree`."""
    ids_N = torch.tensor([root, *(node.token for node in tree.nodes)], dtype=torch.long, device=device)
    depths_N = torch.tensor(tree.depths(), dtype=torch.long, device=device)
    return ids_N, TreeLayout(depths_N, torch.from_numpy(tree.visible()).to(device))
