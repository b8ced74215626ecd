"""A few samples of a prepared folder as text; what is supervised is coloured, or in brackets without colours."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from draftline.data.choice import chosen_samples
from draftline.data.shards import Sample, TokenDataset
from draftline.data.template import tokenizer_fingerprint

OPEN, CLOSE = "⟦", "⟧"
_SUPERVISED, _PROMPT = "bold green", "dim"


def preview(path: Path, tokenizer: Any, *, n_samples: int, seed: int = 0, console: Console | None = None) -> None:
    """Print a seeded choice of samples: their text, and which of it is supervised.

    Args:
        path: prepared folder.
        tokenizer: the one that the data was prepared with.
        n_samples: how many; all if there are fewer.

    Raises:
        UserError: no such data, or another tokenizer.
    """
    data = TokenDataset.open(path)
    data.require_tokenizer(tokenizer_fingerprint(tokenizer))
    console = console or Console(soft_wrap=True, highlight=False)
    colours = console.is_terminal and not console.no_color and console.color_system is not None
    if colours:
        console.print(Text("supervised", style=_SUPERVISED), Text("not supervised", style=_PROMPT))
    else:
        console.print(f"{OPEN}supervised{CLOSE} not supervised", markup=False)
    for index in chosen_samples(len(data), n_samples, seed):
        sample = data.sample(index)
        console.rule(Text(f"{sample.sample_id}: {_counts(sample)}"), characters="-", align="left")
        console.print(marked_text(tokenizer, sample, colours=colours))


def marked_text(tokenizer: Any, sample: Sample, *, colours: bool) -> Text:
    """The sample's text with its supervised runs marked."""
    text = Text()
    for run, supervised in _runs(tokenizer, sample):
        if colours:
            text.append(run, style=_SUPERVISED if supervised else _PROMPT)
        else:
            text.append(f"{OPEN}{run}{CLOSE}" if supervised else run)
    return text


def _runs(tokenizer: Any, sample: Sample) -> Iterator[tuple[str, bool]]:
    pairs = zip(sample.input_ids.tolist(), sample.loss_mask.tolist(), strict=True)
    for supervised, run in groupby(pairs, key=lambda pair: pair[1]):
        ids = [token for token, _ in run]
        yield str(tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False)), supervised


def _counts(sample: Sample) -> str:
    cut = ", cut by a length limit" if sample.answer_cut else ""
    label = f", {sample.category}" if sample.category else ""
    return f"{len(sample.input_ids)} tokens, {int(sample.loss_mask.sum())} supervised{cut}{label}"
