"""Whether a model continues a text by several tokens at once as it does by one.

Code of recurrent layers may be written for a prompt or for one more token, and start from an empty state otherwise. A
block of drafts verified by such code would not be judged by the text before it.

Shape letters: N tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch

_PROMPT, _BLOCK = 16, 6
# Both forms round differently, in 16 bits by some percent of the logits' spread. A lost state is no rounding.
_MOST_DIFFERENCE = 0.25


@torch.inference_mode()
def carries_state(model: Any, vocab_size: int, device: torch.device) -> bool:
    """True if a block behind a prompt has the logits that its tokens have one by one."""
    ids_N = torch.linspace(1, vocab_size - 1, _PROMPT + _BLOCK, device=device).long()
    one_by_one_NV = _behind_prompt(model, ids_N, 1)
    difference_NV = _behind_prompt(model, ids_N, _BLOCK) - one_by_one_NV
    spread_NV = one_by_one_NV - one_by_one_NV.mean(dim=-1, keepdim=True)
    return bool(difference_NV.norm() <= _MOST_DIFFERENCE * spread_NV.norm())


def _behind_prompt(model: Any, ids_N: torch.Tensor, size: int) -> torch.Tensor:
    """Logits [_BLOCK, V] of the tokens behind the prompt, `size` a forward."""
    from transformers import DynamicCache

    cache, found, start = DynamicCache(config=model.config), [], 0
    for chunk_N in (ids_N[:_PROMPT], *ids_N[_PROMPT:].split(size)):
        positions_N = torch.arange(start, start + len(chunk_N), device=ids_N.device)
        output = model(input_ids=chunk_N[None], position_ids=positions_N[None], past_key_values=cache, use_cache=True)
        found.append(output.logits[0].float())
        start += len(chunk_N)
    return torch.cat(found[1:])
