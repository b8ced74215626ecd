"""What must be known to repeat an evaluation, and what must be known to trust it."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import transformers

from draftline import __version__
from draftline.config.drafter_spec import DrafterSpec
from draftline.decode.budget import AdaptiveBudget
from draftline.decode.steps import DraftModel
from draftline.evaluate.entries import LOOKUP_BLOCK, LOOKUP_NGRAM, Decoding, Entry
from draftline.evaluate.prompts import EvalPrompt

if TYPE_CHECKING:
    from draftline.target.load import LoadedTarget


def target_facts(target: LoadedTarget) -> dict[str, Any]:
    """What the report tells of the target."""
    return {
        "model": target.config.model,
        "fingerprint": target.fingerprint,
        "dtype": dtype_name(target),
        "device": str(target.device),
        "attention": target.attention,
        "layers": target.num_layers,
        "recurrent": target.has_recurrent_layers,
    }


def drafter_facts(drafter: DraftModel) -> dict[str, Any]:
    """What the report tells of a drafter."""
    facts: dict[str, Any] = {"block_size": drafter.block_size, "taps": list(drafter.taps)}
    spec = getattr(drafter, "spec", None)
    if isinstance(spec, DrafterSpec):
        facts["spec"] = spec.model_dump(mode="json")
    return facts


def settings(
    entries: Sequence[Entry],
    prompt_sets: Mapping[str, Sequence[EvalPrompt]],
    max_new_tokens: int,
    seed: int,
    decoding: Decoding,
) -> dict[str, Any]:
    """What the report tells of how it was measured: limits, seeds, sampling, batch, prompts, cost curves."""
    curves = {
        e.label: {"draft_s": e.budget.curve.draft_s, "points": e.budget.curve.points}
        for e in entries
        if isinstance(e.budget, AdaptiveBudget)
    }
    sampling = decoding.sampling
    return {
        "max_new_tokens": max_new_tokens,
        "seed": seed,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "proposals": sampling.proposals,
        "batch": decoding.batch,
        "compile": decoding.compile,
        "lookup": {"block_size": LOOKUP_BLOCK, "max_ngram": LOOKUP_NGRAM},
        "prompts": {name: len(members) for name, members in prompt_sets.items()},
        "cost_curves": curves,
    }


def versions() -> dict[str, str]:
    """Of draftline, torch, transformers and Python, and the number of threads."""
    return {
        "draftline": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "threads": str(torch.get_num_threads()),
    }


def dtype_name(target: LoadedTarget) -> str:
    """`bfloat16` and so on."""
    return str(target.dtype).removeprefix("torch.")


def mask_token_warnings(outputs: Sequence[Sequence[int]], drafters: Mapping[str, DraftModel]) -> list[str]:
    """A drafter cannot tell its mask token from the same token in the text."""
    found = []
    for name, drafter in drafters.items():
        mask = getattr(drafter, "mask_token_id", None)
        count = sum(list(ids).count(mask) for ids in outputs) if mask is not None else 0
        if count:
            found.append(
                f"drafter {name}: the target wrote its mask token {mask} {count} times; decoding stays exact, but the "
                "drafter cannot tell a mask from that token: choose one that text never uses"
            )
    return found
