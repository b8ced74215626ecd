"""Every test that docs/faults.md names exists, and every entry names one or says why not."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|\n ").split(" | ")]
    for line in PAGE.splitlines()
    if re.match(r"\| [A-G]\d+ ", line)
]


def names_of_tests() -> set[str]:
    return {
        node.name
        for path in (ROOT / "tests").rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
    }


def test_the_tests_it_names_exist():
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    assert len(named) > 130
    assert sorted(named - names_of_tests()) == []


def test_each_entry_is_covered_or_says_why_not():
    assert len(ROWS) > 90
    assert len({row[0] for row in ROWS}) == len(ROWS)
    assert [row[0] for row in ROWS if len(row) != 4 or not ("`test_" in row[3] or "not covered: " in row[3])] == []


def test_each_entry_names_its_public_thread():
    assert [row[0] for row in ROWS if not re.search(r"[\w./-]+(#\d+| \(commit)", row[1])] == []
