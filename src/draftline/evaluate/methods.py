"""Names of decoding methods: plain, lookup, chain, tree@N, adaptive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from draftline.errors import UserError

_MOST_DIGITS = 12
NAMES = "plain, lookup, chain, tree@N, adaptive"


@dataclass(frozen=True, slots=True)
class Method:
    """A way to decode. `budget` is set for a fixed tree only."""

    name: str
    budget: int | None = None

    @property
    def needs_drafter(self) -> bool:
        """False for plain decoding and prompt lookup."""
        return self.name not in ("plain", "lookup")

    @property
    def is_tree(self) -> bool:
        """True for trees of fixed and of adaptive size."""
        return self.budget is not None or self.name == "adaptive"


def parse_methods(names: Sequence[str]) -> list[Method]:
    """Methods in the order given.

    Raises:
        UserError: none, an unknown one, a repeated one, or a tree budget below 1.
    """
    if not names:
        raise UserError("no method was given", where="methods", mend=f"choose from {NAMES}")
    methods = [_parse(name.strip()) for name in names]
    repeated = {method.name for method in methods if methods.count(method) > 1}
    if repeated:
        raise UserError(f"{', '.join(sorted(repeated))} is named twice", where="methods", mend="name each once")
    return methods


def require_drafters(methods: Sequence[Method], n_drafters: int) -> None:
    """Raises UserError for methods without the drafter they need, and for drafters that no method asks."""
    needing = [m.name for m in methods if m.needs_drafter]
    if needing and not n_drafters:
        raise UserError(f"{', '.join(needing)} needs a drafter", where="evaluate", mend="give one, or drop the method")
    if n_drafters and not needing:
        raise UserError(
            "a drafter is given, but no method drafts with it", where="evaluate", mend="add chain or tree@N"
        )


def _parse(name: str) -> Method:
    if name in ("plain", "lookup", "chain", "adaptive"):
        return Method(name)
    kind, _, number = name.partition("@")
    if kind != "tree" or not (number.isascii() and number.isdecimal() and len(number) <= _MOST_DIGITS):
        raise UserError(f"{name[:80]!r} is not a method", where="methods", mend=f"choose from {NAMES}")
    budget = int(number)
    if budget < 1:
        raise UserError("a tree budget of 0 drafts nothing", where=f"method {name}", mend="give at least 1")
    # One name a budget, however it was written: results are filed by it.
    return Method(f"tree@{budget}", budget)
