"""Write docs/command-line.md from the commands of the app. Run: `python scripts/make_cli_reference.py`.

With `--check` nothing is written; the exit code says whether the page is current.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from typer.models import ArgumentInfo, OptionInfo

from draftline.cli import app

PAGE = Path(__file__).parent.parent / "docs" / "command-line.md"
_NAMES = {int: "whole number", float: "number", str: "text", Path: "path", tuple[Path, Path]: "two paths"}
_INTRO = """\
# Command line

<!-- Written by scripts/make_cli_reference.py from the app; do not edit by hand. -->

`draftline --help` and `draftline COMMAND --help` print the same. An option with "repeat" may be given several times.
`section.key=value` stands for any key of the [configuration](configuration.md).

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | a failure, named by worker and row |
| 2 | bad input, told in one line |
| 130, 143 | stopped by Ctrl-C or SIGTERM, after a checkpoint |
"""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One argument or option of a command, as people see it."""

    names: str
    value: str
    default: str
    help: str
    is_option: bool
    required: bool


def render() -> str:
    """The whole page."""
    parts = [_INTRO]
    for name, function in commands().items():
        parts.extend(_command(name, function))
    return "\n".join(parts).rstrip() + "\n"


def commands() -> dict[str, Callable[..., Any]]:
    """Name -> function, in the order of `draftline --help`."""
    found = {}
    for command in app.registered_commands:
        if command.callback is not None:
            found[command.name or command.callback.__name__.replace("_", "-")] = command.callback
    return found


def _command(name: str, function: Callable[..., Any]) -> Iterator[str]:
    parameters = list(_parameters(function))
    arguments = [p for p in parameters if not p.is_option]
    options = [p for p in parameters if p.is_option]
    words = [name, *(p.names if p.required else f"[{p.names}]" for p in arguments)]
    words += [f"{p.names.split(', ')[0]} {p.value.split(',')[0].upper()}" for p in options if p.required]
    yield f"## draftline {name}\n"
    yield inspect.cleandoc(function.__doc__ or "") + "\n"
    yield f"    draftline {' '.join(words)}{' [OPTIONS]' if len(options) > sum(p.required for p in options) else ''}\n"
    if arguments:
        yield "| argument | what |\n|---|---|"
        yield "\n".join(f"| `{p.names}` | {_cell(p.help)} |" for p in arguments) + "\n"
    if options:
        yield "| option | value | default | what |\n|---|---|---|---|"
        yield "\n".join(f"| `{p.names}` | {p.value} | {p.default} | {_cell(p.help)} |" for p in options) + "\n"


def _parameters(function: Callable[..., Any]) -> Iterator[Parameter]:
    hints = get_type_hints(function, include_extras=True)
    for name, parameter in inspect.signature(function).parameters.items():
        hint = hints[name]
        kind, info = hint, OptionInfo()
        if get_origin(hint) is Annotated:
            kind, *extras = get_args(hint)
            info = next(extra for extra in extras if isinstance(extra, ArgumentInfo | OptionInfo))
        yield _parameter(name, kind, info, parameter.default)


def _parameter(name: str, kind: Any, info: ArgumentInfo | OptionInfo, default: Any) -> Parameter:
    required = default is inspect.Parameter.empty
    repeats, plain = _plain(kind)
    if isinstance(info, ArgumentInfo):
        shown = info.metavar or name.upper() + ("..." if repeats else "")
        return Parameter(shown, "", "", info.help or "", is_option=False, required=required)
    names = ", ".join(sorted(info.param_decls or [f"--{name.replace('_', '-')}"], key=len, reverse=True))
    value = "flag" if plain is bool else ", ".join([_NAMES[plain], *_bounds(info), *(["repeat"] if repeats else [])])
    shown = "required" if required else "" if default in (None, False) else f"`{default}`"
    return Parameter(names, value, shown, info.help or "", is_option=True, required=required)


def _bounds(info: OptionInfo) -> Iterator[str]:
    for sign, bound in ((">=", info.min), ("<=", info.max)):
        if bound is not None:
            yield f"{sign} {bound:g}" if isinstance(bound, float) else f"{sign} {bound}"


def _plain(kind: Any) -> tuple[bool, Any]:
    """(may be given several times, type of one value)."""
    if get_origin(kind) in (Union, types.UnionType):
        kind = next(inner for inner in get_args(kind) if inner is not type(None))
    return (True, get_args(kind)[0]) if get_origin(kind) is list else (False, kind)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> int:
    """Write the page, or compare it."""
    text = render()
    if "--check" in sys.argv[1:]:
        current = PAGE.exists() and PAGE.read_text(encoding="utf-8") == text
        print(f"{PAGE.name} is {'current' if current else 'out of date; run python scripts/make_cli_reference.py'}")
        return 0 if current else 1
    PAGE.write_text(text, encoding="utf-8")
    print(f"wrote {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
