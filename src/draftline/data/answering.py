"""The target's side of `regenerate`: batches of prompts in, generated ids out. Imports torch.

Sampling draws from one stream of numbers per prompt, seeded by (seed, prompt id): the token is the one at which the
cumulative probability passes the next number. So a sampled answer does not depend on which prompts share its batch,
as far as the logits themselves do not (padding changes their last bits).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from draftline.data.sampling import Prompt, Sampling, prompt_seed_bytes
from draftline.errors import UserError
from draftline.target.grouped import grouped_attention
from draftline.target.shape_plans import no_shape_plans

if TYPE_CHECKING:
    from draftline.target.load import LoadedTarget


@dataclass(frozen=True, slots=True)
class Answer:
    """Generated ids, the stop token included; `cut` if the length limit came before one."""

    token_ids: list[int]
    cut: bool


class SeededSampler(LogitsProcessor):
    """Leaves one token per prompt standing, drawn from its distribution, so that greedy search picks it.

    Args:
        prompt_length: tokens of the padded prompts.
        numbers: uniform numbers in [0, 1), float64 [prompts, steps].
    """

    def __init__(self, sampling: Sampling, prompt_length: int, numbers: torch.Tensor) -> None:
        self._prompt_length, self._numbers = prompt_length, numbers
        self._warpers: list[Any] = [TemperatureLogitsWarper(sampling.temperature)]
        if sampling.top_k:
            self._warpers.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            self._warpers.append(TopPLogitsWarper(sampling.top_p))

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """scores [prompts, vocab] -> the same with all but the drawn token at -inf."""
        for warp in self._warpers:
            scores = warp(input_ids, scores)
        cumulative = torch.softmax(scores.double(), dim=-1).cumsum(dim=-1)
        step = input_ids.shape[1] - self._prompt_length
        wanted = self._numbers[:, step, None] * cumulative[:, -1:]
        token = (cumulative <= wanted).sum(dim=-1, keepdim=True)
        return torch.full_like(scores, -torch.inf).scatter(1, token, 0.0)


def answer_batch(
    target: LoadedTarget, prompts: Sequence[Prompt], *, max_new_tokens: int, sampling: Sampling
) -> list[Answer]:
    """Let the target answer the prompts, padded on the left to one length.

    A batch that does not fit into the device's memory is halved.

    Raises:
        UserError: not even one prompt fits.
    """
    try:
        return _generate(target, prompts, max_new_tokens, sampling)
    except torch.OutOfMemoryError:
        if len(prompts) == 1:
            raise UserError(
                f"a prompt of {len(prompts[0].input_ids)} tokens does not fit into the memory of {target.device}",
                where=prompts[0].id,
                mend="lower max_new_tokens or max_prompt_tokens",
            ) from None
    middle = len(prompts) // 2
    parts = (prompts[:middle], prompts[middle:])
    return [a for part in parts for a in answer_batch(target, part, max_new_tokens=max_new_tokens, sampling=sampling)]


def batches_of(prompts: Sequence[Prompt], batch_size: int, *, same_length: bool) -> list[list[Prompt]]:
    """Prompts of similar length together; of equal length where another length would disturb an answer."""
    batches: list[list[Prompt]] = []
    for prompt in sorted(prompts, key=lambda prompt: (len(prompt.input_ids), prompt.id)):
        full = not batches or len(batches[-1]) == batch_size
        if full or (same_length and len(batches[-1][0].input_ids) != len(prompt.input_ids)):
            batches.append([])
        batches[-1].append(prompt)
    return batches


@torch.inference_mode()
@no_shape_plans()
def _generate(target: LoadedTarget, prompts: Sequence[Prompt], max_new_tokens: int, sampling: Sampling) -> list[Answer]:
    stops = sorted(target.stop_token_ids)
    pad = stops[0] if stops else 0
    longest = max(len(prompt.input_ids) for prompt in prompts)
    padded = [[pad] * (longest - len(p.input_ids)) + p.input_ids for p in prompts]
    seen = [[0] * (longest - len(p.input_ids)) + [1] * len(p.input_ids) for p in prompts]
    processors = LogitsProcessorList()
    if sampling.temperature > 0:
        numbers = np.stack([_numbers(sampling.seed, prompt.id, max_new_tokens) for prompt in prompts])
        processors.append(SeededSampler(sampling, longest, torch.from_numpy(numbers).to(target.device)))
    on_cpu = target.device.type == "cpu" and target.attention == "sdpa"
    with grouped_attention(target.model, wanted=on_cpu):
        output = target.model.generate(
            torch.tensor(padded, device=target.device),
            attention_mask=torch.tensor(seen, device=target.device),
            generation_config=_plain_generation(max_new_tokens, stops, pad),
            logits_processor=processors,
        )
    return [_until_stop(row[longest:], target.stop_token_ids) for row in output.tolist()]


def _plain_generation(max_new_tokens: int, stops: list[int], pad: int) -> GenerationConfig:
    """The target's bare next-token choice: nothing that its own generation settings would add, such as penalties."""
    return GenerationConfig(
        max_new_tokens=max_new_tokens,
        eos_token_id=stops or None,
        pad_token_id=pad,
        do_sample=False,
        num_beams=1,
        temperature=1.0,
        top_p=1.0,
        top_k=50,  # the value that counts as unset where nothing is sampled
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
        min_length=0,
        use_cache=True,
    )


def _until_stop(ids: list[int], stops: frozenset[int]) -> Answer:
    end = next((i for i, token in enumerate(ids) if token in stops), None)
    return Answer(ids, True) if end is None else Answer(ids[: end + 1], False)


def _numbers(seed: int, name: str, n: int) -> np.ndarray:
    """Uniform numbers in [0, 1) of one prompt, float64 [n]; from raw bits, whose stream numpy promises to keep."""
    raw = np.random.PCG64(int.from_bytes(prompt_seed_bytes(seed, name), "little")).random_raw(n)
    return (raw >> np.uint64(11)) * 2.0**-53
