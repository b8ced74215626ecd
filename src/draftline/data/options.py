"""What `prepare` is asked to do, checked before any work."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from draftline.data.decontaminate import DEFAULT_WORDS
from draftline.errors import UserError
from draftline.limits import MAX_SEED

MAX_WORKERS = 256
_WEIGHTED = re.compile(r"(?P<name>.+)=(?P<weight>[0-9.]+(?:[eE][+-]?[0-9]+)?)")


@dataclass(frozen=True, slots=True)
class PrepareOptions:
    """See `prepare.prepare` for the fields.

    Raises:
        UserError: by `check`.
    """

    max_tokens: int
    turns: str = "all"
    skip_bad_rows: bool = False
    validation_fraction: float = 0.0
    seed: int = 0
    max_prompt_tokens: int | None = None
    min_supervised_tokens: int = 0
    weights: tuple[float, ...] | None = None
    decontaminate: tuple[str, ...] = ()
    decontaminate_words: int = DEFAULT_WORDS
    workers: int = 1

    def check(self, n_sources: int) -> None:
        """Refuse (UserError) what cannot be meant."""
        prompt, weights = self.max_prompt_tokens, self.weights
        rules = [
            ("max_tokens", self.max_tokens, self.max_tokens >= 2, "at least 2"),
            ("turns", repr(self.turns), self.turns in ("all", "last"), "all or last"),
            (
                "validation_fraction",
                self.validation_fraction,
                0 <= self.validation_fraction < 1,
                "at least 0 and below 1",
            ),
            ("seed", self.seed, 0 <= self.seed <= MAX_SEED, f"0 to {MAX_SEED}"),
            ("max_prompt_tokens", prompt, prompt is None or prompt >= 1, "at least 1"),
            ("min_supervised_tokens", self.min_supervised_tokens, self.min_supervised_tokens >= 0, "0 or more"),
            ("workers", self.workers, 1 <= self.workers <= MAX_WORKERS, f"1 to {MAX_WORKERS}"),
        ]
        for name, value, is_good, allowed in rules:
            if not is_good:
                raise UserError(f"{name} is {value}", mend=f"set it to {allowed}")
        if weights is not None and (len(weights) != n_sources or not all(0 < w < float("inf") for w in weights)):
            raise UserError("a mix needs one weight above 0 for each source", mend="write SOURCE=WEIGHT for each")


def weighted_sources(names: Sequence[str]) -> tuple[list[str], tuple[float, ...] | None]:
    """Sources and weights of `SOURCE=WEIGHT` items; the weights are None if no item has one.

    An item that is the name of a file is a source without weight, whatever it looks like.

    Raises:
        UserError: some have a weight and some have none, or a weight is no number.
    """
    sources, weights = [], []
    for name in names:
        found = None if Path(name).exists() else _WEIGHTED.fullmatch(name)
        sources.append(found["name"] if found else name)
        if found:
            weights.append(_weight(found["weight"], name))
    if not weights:
        return sources, None
    if len(weights) != len(sources):
        raise UserError("some sources have a weight and some have none", mend="write SOURCE=WEIGHT for each")
    return sources, tuple(weights)


def _weight(text: str, name: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(f"the weight {text} is no number", where=name, mend="write SOURCE=WEIGHT") from None
