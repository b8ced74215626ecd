"""Finds the command lines of README and docs: those in blocks, and those inside a sentence."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
WITH_COMMANDS = [page for page in PAGES if page.name != "command-line.md"]  # that page is made from the app
GPU_MARK = "<!-- needs a GPU -->"


@dataclass(frozen=True)
class Command:
    """One command line: where it stands, its words, and whether its block is marked as needing a GPU."""

    page: str
    words: tuple[str, ...]
    marked: bool

    @property
    def text(self) -> str:
        return " ".join(self.words)


def blocks(text: str) -> Iterator[tuple[bool, list[str]]]:
    """(marked, lines) of each fenced or indented block."""
    last, mark, fenced = "", False, False
    lines: list[str] = []
    for line in [*text.splitlines(), "the end"]:
        is_fence = line.lstrip().startswith("```")
        if fenced and not is_fence:
            lines.append(line)
        elif not fenced and line.startswith("    ") and (lines or not last):
            lines.append(line[4:])
        elif not (lines and not line.strip() and not fenced):
            if lines:
                yield mark, lines
                lines = []
            fenced = is_fence and not fenced
        if not lines and line.strip() and not is_fence:
            mark = line.strip() == GPU_MARK
        last = line.strip()


def command_lines(lines: list[str]) -> Iterator[tuple[str, ...]]:
    """Words of each `draftline` or `make` line; lines that end in a backslash go on, wide gaps begin a remark."""
    for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        line = line.strip()
        if re.match(r"(\.venv/bin/)?(draftline|make)\s", line):
            plain = re.sub(r"\[(--[^\]]*)\]", r"\1", line)  # an option that may be left out is an option
            words = shlex.split(re.split(r"\s{3,}(?!-)", plain)[0], comments=True)
            yield (Path(words[0]).name, *words[1:])


def commands_in_blocks() -> list[Command]:
    return [
        Command(page.name, words, marked)
        for page in WITH_COMMANDS
        for marked, lines in blocks(page.read_text(encoding="utf-8"))
        for words in command_lines(lines)
    ]


def commands_in_sentences() -> list[Command]:
    found = []
    for page in WITH_COMMANDS:
        for code in re.findall(r"`((?:draftline|make) [a-z][^`\n]*)`", page.read_text(encoding="utf-8")):
            found.append(Command(page.name, tuple(code.split()), False))
    return found
