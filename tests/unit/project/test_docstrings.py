"""Every public module, class, function and method says what it does."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[3] / "src" / "draftline"
FILES = sorted(SOURCE.rglob("*.py"))


def undocumented(node: ast.AST, name: str) -> Iterator[str]:
    """Names below a module or class that lack a docstring. What stands inside a function is nobody's business."""
    if not ast.get_docstring(node):
        yield name
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return
    for child in ast.iter_child_nodes(node):
        is_named = isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if is_named and not child.name.startswith("_"):
            yield from undocumented(child, f"{name}.{child.name}")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_every_public_name_has_a_docstring(path):
    assert list(undocumented(ast.parse(path.read_text(encoding="utf-8")), path.stem)) == []


def test_a_missing_docstring_is_found():
    of_class = 'class B:\n    """B."""\n    def c(self): ...\n    def _d(self): ...\n'
    code = f'"""A."""\n{of_class}def e():\n    """E."""\n    def f(): ...\n'
    assert list(undocumented(ast.parse(code), "a")) == ["a.B.c"]
