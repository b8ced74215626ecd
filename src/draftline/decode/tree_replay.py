"""Trees scored along a text that the target has already written greedily, without verifying them in the target.

Exact for greedy decoding: the tokens that a tree verification would choose are those of the text. It works for every
target, also those with recurrent layers, for which a tree cannot be verified in one forward. It says nothing of time.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch

from draftline.decode.budget import BudgetRule
from draftline.decode.generation import Generation, Recorder
from draftline.decode.path_tree import block_marginals
from draftline.decode.steps import DraftModel, RoundContext
from draftline.decode.target_session import TargetSession
from draftline.target.shape_plans import no_shape_plans

if TYPE_CHECKING:
    from draftline.target.load import LoadedTarget


@torch.inference_mode()
@no_shape_plans()
def tree_replay(
    target: LoadedTarget,
    drafter: DraftModel,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    *,
    budget: BudgetRule,
    max_new_tokens: int,
    stop_token_ids: Collection[int] | None = None,
) -> Generation:
    """The rounds that tree decoding would take to write `output_ids`.

    Args:
        output_ids: the target's greedy output for the same limit and stop tokens; other arguments as in
            `tree_generate`.

    Returns:
        A Generation whose `target_forwards` are the rounds that would have been, and whose times are 0.
    """
    stops = target.stop_token_ids if stop_token_ids is None else stop_token_ids
    recorder = Recorder(prompt_ids, max_new_tokens, stops, drafter.block_size, clock=lambda: 0.0)
    text = [*prompt_ids, *output_ids]
    _, taps_TF = TargetSession(target, drafter.taps).prefill(text)
    drafter.start()
    recorder.begin(output_ids[0])
    rounds = seen = 0
    while not recorder.done and recorder.start + 1 < len(text):
        start, slots = recorder.start, recorder.slots
        new_taps_SF = None if taps_TF is None else taps_TF[seen:start]
        draft = drafter.block_logits(RoundContext(recorder.tokens, new_taps_SF, slots))
        seen, rounds = start, rounds + 1
        tree = budget.grow(block_marginals(draft, budget.largest))
        accepted = tree.walk_text(text[start + 1 :])
        new_tokens = text[start + 1 : start + 2 + accepted]
        recorder.commit(new_tokens, drafted=slots - 1, slots=slots, nodes=len(tree), accepted=accepted)
    return recorder.finish(n_forwards=rounds, n_replays=0)
