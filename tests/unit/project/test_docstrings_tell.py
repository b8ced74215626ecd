"""Public docstrings tell what a caller cannot guess: the shapes of tensors, and the errors that are raised."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[3] / "src" / "draftline"
FILES = sorted(SOURCE.rglob("*.py"))
Function = ast.FunctionDef | ast.AsyncFunctionDef
# `taps_TF` tells its shape by itself. A docstring tells one as [T, H], (T, H), in the letters of a name, or in words;
# or it points to where it stands.
SHAPED_NAME = re.compile(r"\w_[A-Z0-9m]*[A-Z]\w*$")
POINTER = re.compile(r"\b[Ss]ee [`A-Z]")
IN_BRACKETS, IN_A_NAME = r"\[[^\]]+\]|\([A-Z][\w *+/-]*,[^)]*\)", r"\b[a-z]\w*_[A-Z0-9]+\b"
SHAPE = re.compile(rf"{IN_BRACKETS}|{IN_A_NAME}|\b0-dim|\bscalar|\bshapes?\b|{POINTER.pattern}")


def public_functions(
    node: ast.AST, owner: ast.ClassDef | None = None
) -> Iterator[tuple[Function, ast.ClassDef | None]]:
    """Functions, methods and constructors that a caller may use; no commands, whose docstring is a help text."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef) and not child.name.startswith("_"):
            yield from public_functions(child, child)
        elif isinstance(child, Function) and (not child.name.startswith("_") or child.name == "__init__"):
            is_command = any(".command" in ast.unparse(decorator) for decorator in child.decorator_list)
            yield from [] if is_command else [(child, owner)]


def raised(node: ast.AST) -> Iterator[str]:
    """Names of public errors that stand behind a `raise` in the function itself."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function | ast.Lambda | ast.ClassDef):
            continue
        if isinstance(child, ast.Raise) and child.exc is not None:
            error = child.exc.func if isinstance(child.exc, ast.Call) else child.exc
            if isinstance(error, ast.Name) and re.fullmatch(r"[A-Z]\w*Error", error.id):
                yield error.id
        yield from raised(child)


def is_tensor(annotation: ast.expr | None) -> bool:
    return annotation is not None and re.search(r"\bTensor\b", ast.unparse(annotation)) is not None


def untold(tree: ast.AST) -> Iterator[str]:
    """What the docstrings of a module keep to themselves."""
    for function, owner in public_functions(tree):
        name = function.name if owner is None else f"{owner.name}.{function.name}"
        of_class = "" if owner is None else ast.get_docstring(owner) or ""
        own = ast.get_docstring(function) or ""
        text = f"{own}\n{of_class}"
        own = text if function.name == "__init__" else own
        # An AssertionError says that a line cannot be reached.
        for error in sorted(set(raised(function)) - {"AssertionError"}):
            if error not in text and not POINTER.search(own):
                yield f"{name} raises {error}"
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        bare = [a.arg for a in arguments if is_tensor(a.annotation) and not SHAPED_NAME.search(a.arg)]
        if bare and not SHAPE.search(own):
            yield f"{name}: the shape of {', '.join(bare)}"
        if is_tensor(function.returns) and not SHAPE.search(own):
            yield f"{name}: the shape of what it returns"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_docstrings_tell_shapes_and_errors(path):
    assert list(untold(ast.parse(path.read_text(encoding="utf-8")))) == []


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ('def f(a: Tensor):\n    """Takes it."""\n', ["f: the shape of a"]),
        ('def f(a_TH: Tensor):\n    """Takes it."""\n', []),
        ('def f(a: Tensor | None) -> int:\n    """Takes it, [T, H]."""\n', []),
        ('def f(a: Sequence[torch.Tensor]):\n    """Takes `a`, see `g`."""\n', []),
        ('def f() -> Tensor:\n    """Gives it."""\n', ["f: the shape of what it returns"]),
        ('def f() -> Tensor:\n    """Gives hidden_QH."""\n', []),
        ('def f():\n    """Fails."""\n    if 1:\n        raise UserError("x")\n', ["f raises UserError"]),
        ('def f():\n    """Fails.\n\n    Raises:\n        UserError: x.\n    """\n    raise UserError("x")\n', []),
        ('def f():\n    """Fails."""\n    def g():\n        raise UserError("x")\n', []),
        (
            'class C:\n    """C."""\n    def f(self):\n        """Fails."""\n        raise KeyError\n',
            ["C.f raises KeyError"],
        ),
        (
            'class C:\n    """May raise KeyError."""\n    def f(self):\n        """Fails."""\n        raise KeyError\n',
            [],
        ),
    ],
)
def test_what_is_kept_silent_is_found(code: str, found: list[str]):
    assert list(untold(ast.parse(code))) == found
