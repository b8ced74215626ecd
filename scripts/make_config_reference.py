"""Write docs/configuration.md from the configuration schema. Run: `python scripts/make_config_reference.py`.

With `--check` nothing is written; the exit code says whether the page is current.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from draftline.config.explain import models_of, variants_of
from draftline.config.load import MAY_CHANGE_AT_RESUME
from draftline.config.schema import RunConfig

PAGE = Path(__file__).parent.parent / "docs" / "configuration.md"
_NAMES = {int: "whole number", float: "number", str: "text", bool: "true / false", Path: "path"}
_BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
_INTRO = """\
# Configuration

<!-- Written by scripts/make_config_reference.py from the schema; do not edit by hand. -->

A run is configured by YAML files and `section.key=value` overrides:

    draftline train -c base.yaml -c mine.yaml optimizer.learning_rate=1e-4 sync.kind=gradient

- Files are YAML 1.2: `1e-4` is a number, `no` and `off` are words, a key given twice is an error.
- Later files win over earlier ones, overrides win over files, key by key. Lists are replaced whole.
- The value of an override is read as YAML: `[cuda:0, cuda:1]`, `null`, `{{kind: outer, every_rows: 20}}`.
- Changing the `kind` of a section drops what lower layers set for the other kind; keys that both kinds know are kept.
- Unknown keys are errors and name the nearest known key. Rules over several fields are checked before any weight loads.
- Each run writes what it resolved to `config.yaml` in its folder; `draftline train --dry-run` prints it.
- A resumed run must have the same configuration. Only these sections and fields may change: {may_change}.

Units are in the names: `_s` seconds, `_bytes`, `_tokens`, `_rows`. "required" means that there is no default.
"""


def render() -> str:
    """The whole page."""
    may_change = ", ".join(f"`{name}`" for name in sorted(MAY_CHANGE_AT_RESUME))
    parts = [_INTRO.format(may_change=may_change), "## Run\n", _summary(RunConfig), _table(RunConfig, "")]
    for name, field in RunConfig.model_fields.items():
        parts += _section(name, field, level=2)
    return "\n".join(parts).rstrip() + "\n"


def _section(path: str, field: FieldInfo, level: int) -> Iterator[str]:
    """Headings and tables of a section, its kinds, and the sections inside it."""
    variants = variants_of(field)
    heading = "#" * level
    if variants:
        default = getattr(field.default, str(field.discriminator), None)
        yield f"{heading} {path}\n"
        yield f"One of several kinds; `{path}.kind` is `{default}` unless set.\n"
    for tag, model in (variants or dict.fromkeys([""], next(iter(models_of(field)), None))).items():
        if model is None:
            continue
        yield f"{heading}# {path}: {tag}\n" if variants else f"{heading} {path}\n"
        yield _summary(model)
        table = _table(model, path)
        if table:
            yield table
        for name, inner in model.model_fields.items():
            yield from _section(f"{path}.{name}", inner, level + 1)


def _summary(model: type[BaseModel]) -> str:
    return " ".join((model.__doc__ or "").split()) + "\n"


def _table(model: type[BaseModel], path: str) -> str:
    rows = [_row(name, field, path) for name, field in model.model_fields.items() if not models_of(field)]
    return "\n".join(["| key | value | default | what |", "|---|---|---|---|", *rows]) + "\n" if rows else ""


def _row(name: str, field: FieldInfo, path: str) -> str:
    key = f"{path}.{name}" if path else name
    default = "required" if field.is_required() else f"`{_show(field.get_default(call_default_factory=True))}`"
    cells = (f"`{key}`", _type_of(field), default, field.description or "")
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _type_of(field: FieldInfo) -> str:
    bounds = [
        f"{sign} {_show(value)}"
        for m in field.metadata
        for b, sign in _BOUNDS.items()
        if (value := getattr(m, b, None)) is not None
    ]
    return ", ".join([_type_name(field.annotation), *bounds])


def _type_name(annotation: Any) -> str:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " / ".join(f"`{value}`" for value in inner)
    if origin in (Union, types.UnionType):
        return " or ".join("null" if a is type(None) else _type_name(a) for a in inner)
    if origin is tuple:
        items = [a for a in inner if a is not Ellipsis]
        count = "" if Ellipsis in inner else f"{len(items)} "
        return f"list of {count}{_type_name(items[0])}"
    if origin is dict:
        return "mapping"
    return _NAMES.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _show(value: Any) -> str:
    if value is None or value == {}:
        return "null" if value is None else "{}"
    if isinstance(value, tuple):
        return f"[{', '.join(map(_show, value))}]"
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def main() -> int:
    """Write the page, or compare it."""
    text = render()
    if "--check" in sys.argv[1:]:
        current = PAGE.exists() and PAGE.read_text(encoding="utf-8") == text
        print(f"{PAGE.name} is {'current' if current else 'out of date; run python scripts/make_config_reference.py'}")
        return 0 if current else 1
    PAGE.write_text(text, encoding="utf-8")
    print(f"wrote {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
