"""Prompt sets: the questions a target is asked in an evaluation, as token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftline.data.chat import prompt_ids
from draftline.data.conversations import Tally, read_conversations
from draftline.data.messages import BadRowError, prompt_part
from draftline.data.prompts import BUILTIN_SOURCE, builtin_prompts
from draftline.data.template import ChatTemplate, TemplateRefusedError
from draftline.errors import UserError


@dataclass(frozen=True, slots=True)
class EvalPrompt:
    """One prompt.

    Attributes:
        prompt_id: unique in its set.
        input_ids: what the target is served, generation prompt included.
        category, language: labels of the file, for results by group.
    """

    prompt_id: str
    input_ids: tuple[int, ...]
    category: str | None = None
    language: str | None = None


def load_prompt_set(
    source: str | Path,
    tokenizer: Any,
    *,
    limit: int | None = None,
    tally: Tally | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[EvalPrompt]:
    """Reads conversations; a last assistant turn is dropped, and what is before it is asked again.

    Args:
        source: JSONL or Parquet file of conversations or prompts, or `builtin`.
        tokenizer: the target's, with its chat template.
        limit: only the first so many.
        tally: counts rows, and says whether bad ones are left out; None refuses them.
        template_kwargs: passed to the chat template, as when the data was prepared.

    Raises:
        UserError: no usable row, or a bad one.
    """
    path = builtin_prompts() if str(source) == BUILTIN_SOURCE else Path(source)
    template = ChatTemplate(tokenizer, template_kwargs=template_kwargs)
    tally = Tally(skip_bad_rows=False) if tally is None else tally
    prompts: list[EvalPrompt] = []
    for row in read_conversations([str(path)], tally):
        try:
            ids = prompt_ids(template, prompt_part(row.messages), row.tools)
        except (BadRowError, TemplateRefusedError) as error:
            tally.reject(getattr(error, "reason", "template"), str(error), f"{path}:{row.line}")
            continue
        prompts.append(EvalPrompt(row.id, tuple(ids), row.category, row.language))
        if len(prompts) == limit:
            break  # what stands behind is not looked at
    if not prompts:
        raise UserError("holds no usable prompt", where=str(path), mend="give at least one")
    return prompts


def check_prompts(prompts: Mapping[str, Sequence[EvalPrompt]], *, vocab_size: int) -> None:
    """Raises UserError for an empty suite, or ids that are outside the target's vocabulary."""
    if not prompts:
        raise UserError("no prompt set was given", where="evaluate", mend="give at least one")
    for name, members in prompts.items():
        if not members:
            raise UserError("the prompt set is empty", where=name, mend="give at least one prompt")
        for prompt in members:
            if not prompt.input_ids:
                raise UserError("the prompt has no token", where=f"{name}, {prompt.prompt_id}", mend="drop it")
            if max(prompt.input_ids) >= vocab_size:
                raise UserError(
                    f"token {max(prompt.input_ids)} is outside the target's vocabulary of {vocab_size}",
                    where=f"{name}, {prompt.prompt_id}",
                    mend="use the target's own tokenizer",
                )
