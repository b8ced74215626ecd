"""Plain decoding: one target forward a token. The reference for output and speed of all other methods."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch

from draftline.decode.generation import Generation
from draftline.decode.sampling import GREEDY, Sampler, Sampling
from draftline.decode.steps import Session, Steps, Task, extended, prefilled, recorder_for, run_steps
from draftline.decode.target_session import TargetSession

if TYPE_CHECKING:
    from draftline.target.load import LoadedTarget


def plain_steps(session: Session, task: Task, *, record_top2: bool = False) -> Steps:
    """Token by token; see `plain_generate`."""
    recorder = recorder_for(session, task, block_size=1)
    sampler = Sampler(task.sampling, session.target.device)
    best: list[torch.Tensor] = []
    logits_V, _ = yield from prefilled(task.prompt_ids)
    token_1 = sampler.pick(logits_V[None])
    recorder.begin(int(token_1))
    while True:
        if record_top2:
            best.append(logits_V.float().topk(2).values)
        if recorder.done:
            break
        logits_NV, _ = yield from extended(token_1)
        session.commit(1)
        logits_V = logits_NV[-1]
        token_1 = sampler.pick(logits_V[None])
        recorder.commit([int(token_1)], drafted=0, slots=1)
    top2 = [(first, first - second) for first, second in torch.stack(best).tolist()] if record_top2 else None
    return recorder.finish(n_forwards=session.n_forwards, n_replays=session.n_replays, top2=top2)


def plain_generate(
    target: LoadedTarget,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    stop_token_ids: Collection[int] | None = None,
    sampling: Sampling = GREEDY,
    record_top2: bool = False,
) -> Generation:
    """Decodes token by token with a key/value cache.

    Args:
        target: the frozen model.
        prompt_ids: at least one token.
        max_new_tokens: most new tokens, the prefill's included.
        stop_token_ids: None takes the target's own.
        sampling: rule for the next token.
        record_top2: also record each token's best logit and its lead over the second best.
    """
    session = TargetSession(target)
    task = Task(prompt_ids, max_new_tokens, stop_token_ids, sampling)
    return run_steps(session, plain_steps(session, task, record_top2=record_top2))
