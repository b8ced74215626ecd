"""Plain decoding: one target forward a token. The reference for output and speed of all other methods."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch

from draftline.decode.generation import Generation, Leaders
from draftline.decode.sampling import GREEDY, Sampler, Sampling
from draftline.decode.steps import Session, Steps, Task, Tokens, extended, prefilled, recorder_for, run_steps
from draftline.decode.target_session import TargetSession

if TYPE_CHECKING:
    from draftline.target.load import LoadedTarget


# Tokens recorded at each place: as many as could come out best by rounding alone.
N_LEADERS = 16


def plain_steps(session: Session, task: Task, *, record_leaders: bool = False) -> Steps:
    """Token by token; see `plain_generate`."""
    recorder = recorder_for(session, task, block_size=1)
    sampler = Sampler(task.sampling, session.target.device)
    best: list[tuple[torch.Tensor, torch.Tensor]] = []
    greedy = task.sampling.is_greedy
    logits_V, _ = yield from prefilled(task.prompt_ids)
    token = int(sampler.pick(logits_V[None]))
    recorder.begin(token)
    while True:
        if record_leaders:
            leading = logits_V.float().topk(min(N_LEADERS, logits_V.shape[0]))
            best.append((leading.values, leading.indices))
        if recorder.done:
            break
        found = yield from extended(Tokens([token]), greedy=greedy)
        session.commit(1)
        logits_V = found.logits_NV[-1]
        token = found.own[-1] if greedy else int(sampler.pick(logits_V[None]))
        recorder.commit([token], drafted=0, slots=1)
    leaders = _leaders(best) if record_leaders else None
    return recorder.finish(n_forwards=session.n_forwards, n_replays=session.n_replays, leaders=leaders)


def _leaders(best: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[Leaders]:
    """On the host, with one wait for the device each for logits and tokens."""
    logits, tokens = (torch.stack(column).tolist() for column in zip(*best, strict=True))
    return [Leaders(tuple(ids), tuple(values)) for ids, values in zip(tokens, logits, strict=True)]


def plain_generate(
    target: LoadedTarget,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    stop_token_ids: Collection[int] | None = None,
    sampling: Sampling = GREEDY,
    record_leaders: bool = False,
) -> Generation:
    """Decodes token by token with a key/value cache.

    Args:
        target: the frozen model.
        prompt_ids: at least one token.
        max_new_tokens: most new tokens, the prefill's included.
        stop_token_ids: None takes the target's own.
        sampling: rule for the next token.
        record_leaders: also record the target's best tokens at each place.
    """
    session = TargetSession(target)
    task = Task(prompt_ids, max_new_tokens, stop_token_ids, sampling)
    return run_steps(session, plain_steps(session, task, record_leaders=record_leaders))
