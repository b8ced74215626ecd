"""A few samples of a prepared folder as text; what is supervised is coloured, or in brackets without colours.

Data may hold anything, also what a terminal would obey: control characters are shown as signs (`visible`).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from draftline.data.choice import chosen_samples
from draftline.data.shards import Sample, TokenDataset

OPEN, CLOSE = "⟦", "⟧"
_SUPERVISED, _PROMPT = "bold green", "dim"
# Control characters but for tab and line feed; those that turn the direction of text around.
_CONTROLS = {*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)} - {0x09, 0x0A}
_SIGNS = {code: chr(0x2400 + code) if code < 0x20 else f"<U+{code:04X}>" for code in _CONTROLS}


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
    data.require_tokenizer(tokenizer)
    console = console or Console(soft_wrap=True, highlight=False)
    colours = console.is_terminal and not console.no_color and console.color_system is not None
    if colours:
        console.print(Text("supervised", style=_SUPERVISED), Text("not supervised", style=_PROMPT))
    else:
        opening, closing = brackets(console.encoding)
        console.print(f"{opening}supervised{closing} not supervised", markup=False)
    for index in chosen_samples(len(data), n_samples, seed):
        sample = data.sample(index)
        console.print(Text(_heading(sample, console.width)))
        console.print(marked_text(tokenizer, sample, colours=colours, marks=brackets(console.encoding)))


def visible(text: str) -> str:
    """`text` with each control character but tab and line feed as a sign that a terminal does nothing at."""
    return text.translate(_SIGNS)


def brackets(encoding: str) -> tuple[str, str]:
    """What stands around supervised text: signs that text seldom holds, plain ones where those cannot be shown."""
    try:
        (OPEN + CLOSE).encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return "[[", "]]"
    return OPEN, CLOSE


def marked_text(tokenizer: Any, sample: Sample, *, colours: bool, marks: tuple[str, str] = (OPEN, CLOSE)) -> Text:
    """The sample's text with its supervised runs marked."""
    text = Text()
    for run, supervised in _runs(tokenizer, sample):
        if colours:
            text.append(run, style=_SUPERVISED if supervised else _PROMPT)
        else:
            text.append(f"{marks[0]}{run}{marks[1]}" if supervised else run)
    return text


def _heading(sample: Sample, width: int) -> str:
    """The sample's name and counts, all of them on any terminal, with a rule behind where there is room."""
    told = f"{visible(sample.sample_id)}: {_counts(sample)} ".replace("\n", "␊")
    return told + "-" * max(3, width - cell_len(told))


def _runs(tokenizer: Any, sample: Sample) -> Iterator[tuple[str, bool]]:
    pairs = zip(sample.input_ids.tolist(), sample.loss_mask.tolist(), strict=True)
    for supervised, run in groupby(pairs, key=lambda pair: pair[1]):
        ids = [token for token, _ in run]
        yield visible(str(tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False))), supervised


def _counts(sample: Sample) -> str:
    cut = ", cut by a length limit" if sample.answer_cut else ""
    label = f", {visible(sample.category)}" if sample.category else ""
    return f"{len(sample.input_ids)} tokens, {int(sample.loss_mask.sum())} supervised{cut}{label}"
