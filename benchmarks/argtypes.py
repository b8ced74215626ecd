"""Types of command-line arguments that all benchmarks share. A wrong value is one line and exit code 2. No torch."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path


def whole(least: int) -> Callable[[str], int]:
    """A whole number of at least `least`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return value

    return parse


def positive(text: str) -> float:
    """A number above 0."""
    value = _number(text)
    if value is None or value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def not_negative(text: str) -> float:
    """A number of at least 0."""
    value = _number(text)
    if value is None or value < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return value


def _number(text: str) -> float | None:
    """None for what is no finite number."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def json_file(text: str) -> Path:
    """A file to write, in a folder that exists: an hour of measuring must not end in a missing folder."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}; make it first")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a folder; name a file in it")
    return path


def wholes(text: str) -> tuple[int, ...]:
    """Whole numbers above 0, separated by commas."""
    return tuple(map(whole(1), text.split(",")))


def one_of(known: tuple[str, ...]) -> Callable[[str], tuple[str, ...]]:
    """Names out of `known`, separated by commas, at least one."""

    def parse(text: str) -> tuple[str, ...]:
        names = tuple(filter(None, text.split(",")))
        unknown = [name for name in names if name not in known]
        if unknown or not names:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown) or 'nothing'} is not among {', '.join(known)}")
        return names

    return parse
