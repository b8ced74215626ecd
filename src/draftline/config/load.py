"""Read a run's configuration: YAML 1.2 files laid over each other, then `section.key=value` overrides.

A later layer wins key by key. When a layer changes the `kind` of a tagged union (`sync`, `objective.decay`), keys of
lower layers that the new kind does not know are dropped; those it knows are kept. Nothing here imports torch.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from draftline.config.explain import FieldPath, explain, models_of, variants_of
from draftline.config.schema import RunConfig
from draftline.errors import UserError

COMMAND_LINE = "command line"
MOST_FILE_BYTES, MOST_VALUES = 1 << 18, 20_000  # a few lines of YAML can stand for millions of values
MOST_OPENINGS = 500  # of brackets, braces and nested lists: the parser takes the square of their number
# What a resumed run may set anew: where it runs, what it shows and where it writes, never what it trains.
MAY_CHANGE_AT_RESUME = frozenset(
    {"output", "pipeline", "cluster", "validation", "checkpoint", "monitor", "states.path", "target.backend.endpoint"}
)


@dataclass(frozen=True, slots=True)
class Layer:
    """One source of values. `origins` says for each field path where it was written."""

    values: dict[str, Any]
    origins: dict[FieldPath, str] = field(default_factory=dict)


def load_config(files: Sequence[Path], overrides: Sequence[str] = ()) -> RunConfig:
    """Merge files and overrides, later ones winning, and validate.

    Args:
        files: YAML files, lowest layer first. Relative paths inside them are relative to the working directory.
        overrides: `section.key=value`; the value is read as YAML (`[a, b]`, `null`, `{kind: gradient}`). All
            overrides together form one layer; of the same key, the last one wins.

    Raises:
        UserError: unreadable file, bad YAML, unknown key, value outside its bounds, or a broken cross-field rule;
            one line per problem.
    """
    layers = [_default_kinds(RunConfig), *(read_layer(Path(f)) for f in files), parse_overrides(overrides)]
    values: dict[str, Any] = {}
    for layer in layers:
        values = _merge(RunConfig, values, layer.values)

    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise explain(error, RunConfig, values, lambda path: _origin(layers, path)) from None


def _origin(layers: Sequence[Layer], path: FieldPath) -> str | None:
    """Where the field, something inside it, or else the nearest section around it was last set."""
    for depth in range(len(path), 0, -1):
        for layer in reversed(layers):
            inside = [where for place, where in layer.origins.items() if place[:depth] == path[:depth]]
            if inside:
                return layer.origins.get(path[:depth], inside[0])
    return None


def read_layer(path: Path) -> Layer:
    """Read one YAML file. Raises UserError with file and line."""
    try:
        if path.stat().st_size > MOST_FILE_BYTES:
            raise UserError(f"has more than {MOST_FILE_BYTES} bytes", where=str(path), mend="give a configuration file")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError("no such file", where=str(path), mend="check the path given with --config") from None
    except UnicodeDecodeError as error:
        raise UserError(f"is not UTF-8 (byte {error.start})", where=str(path), mend="save it as UTF-8") from None
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", where=str(path)) from None
    document = _parse_yaml(text, str(path))
    if document is None:
        return Layer({})
    if not isinstance(document, Mapping):
        raise UserError("must hold `key: value` lines at its top", where=str(path))
    origins: dict[FieldPath, str] = {}
    values = _plain(document, (), str(path), origins)
    return Layer(values, origins)


def parse_overrides(overrides: Sequence[str]) -> Layer:
    """Read `section.key=value` items into one layer.

    Raises:
        UserError: an item without a key or `=`, or a value that is not YAML.
    """
    values: dict[str, Any] = {}
    origins: dict[FieldPath, str] = {}
    for item in overrides:
        dotted, equals, text = item.partition("=")
        path = tuple(dotted.strip().split("."))
        if not equals or not all(path):
            raise UserError(
                f"`{item}` is not of the form section.key=value",
                where=COMMAND_LINE,
                mend="for example optimizer.learning_rate=1e-4",
            )
        value = _plain(_parse_yaml(text, f"{COMMAND_LINE}: {dotted}"), path, None, origins)
        _put(values, path, value)
        origins[path] = COMMAND_LINE
    return Layer(values, origins)


def dump_config(config: BaseModel) -> str:
    """YAML text that loads back to an equal configuration. Every field is written, defaults too."""
    stream = io.StringIO()
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    yaml.allow_unicode = True
    yaml.width = 4096
    yaml.dump(config.model_dump(mode="json"), stream)
    return stream.getvalue()


def config_differences(
    a: RunConfig, b: RunConfig, may_change: frozenset[str] = MAY_CHANGE_AT_RESUME
) -> list[tuple[str, Any, Any]]:
    """Fields that differ, as (dotted path, value in a, value in b), in schema order.

    Args:
        a: for example the configuration stored in a checkpoint.
        b: for example the one asked for now.
        may_change: dotted paths that are not compared, with everything below them.
    """
    found: list[tuple[str, Any, Any]] = []
    _compare(a.model_dump(mode="json"), b.model_dump(mode="json"), "", may_change, found)
    return found


def _compare(a: Any, b: Any, path: str, may_change: frozenset[str], found: list[tuple[str, Any, Any]]) -> None:
    if path in may_change or a == b:
        return
    if not (isinstance(a, dict) and isinstance(b, dict)):
        found.append((path, a, b))
        return
    if a.get("kind") != b.get("kind"):
        found.append((f"{path}.kind", a.get("kind"), b.get("kind")))
        return
    for key in {**a, **b}:
        _compare(a.get(key), b.get(key), f"{path}.{key}" if path else key, may_change, found)


def _parse_yaml(text: str, where: str) -> Any:
    if sum(map(text.count, ("[", "{", "- -", "? "))) > MOST_OPENINGS:
        raise UserError(f"is nested too deeply (more than {MOST_OPENINGS} openings)", where=where)
    try:
        document = YAML(typ="rt", pure=True).load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{where} line {mark.line + 1}" if mark and not where.startswith(COMMAND_LINE) else where
        problem = (error.problem or error.context or "cannot be parsed").splitlines()[0]
        raise UserError(f"is not valid YAML: {problem}", where=place) from None
    except YAMLError as error:
        raise UserError(f"is not valid YAML: {str(error).splitlines()[0]}", where=where) from None
    except (RecursionError, ValueError) as error:  # nested too deeply; a date or number that cannot be
        raise UserError(f"is not valid YAML: {error}", where=where) from None
    _refuse_bombs(document, where)
    return document


def _refuse_bombs(document: Any, where: str) -> None:
    """Aliases can make a document that is small as text endless as values."""
    waiting, n = [document], 0
    while waiting:
        node = waiting.pop()
        n += 1
        if n > MOST_VALUES:
            raise UserError(f"holds more than {MOST_VALUES} values", where=where, mend="write it without aliases")
        if isinstance(node, Mapping):
            waiting += node.values()
        elif isinstance(node, list | tuple | set):
            waiting += node


def _plain(node: Any, path: FieldPath, file: str | None, origins: dict[FieldPath, str]) -> Any:
    """Built-in types instead of ruamel's; notes file and line of every key on the way."""
    if isinstance(node, Mapping):
        values = {}
        for key, value in node.items():
            if not isinstance(key, str):
                raise UserError(f"key {key!r} is not text", where=".".join(path) or file)
            here = (*path, str(key))
            origins[here] = f"{file} line {_line_of(node, key)}" if file else COMMAND_LINE
            values[str(key)] = _plain(value, here, file, origins)
        return values
    if isinstance(node, (list, tuple)):
        return [_plain(item, path, file, origins) for item in node]
    if node is None or isinstance(node, bool):
        return node
    for kind in (int, float, str):
        if isinstance(node, kind):
            return kind(node)
    return node.isoformat() if hasattr(node, "isoformat") else str(node)


def _line_of(node: Any, key: str) -> int:
    """1-based line of a key. A key that came through an alias has no line of its own: that of its mapping then."""
    positions = node.lc.data or {}
    return int(positions[key][0] if key in positions else node.lc.line) + 1


def _put(values: dict[str, Any], path: FieldPath, value: Any) -> None:
    for name in path[:-1]:
        below = values.get(name)
        if not isinstance(below, dict):
            below = values[name] = {}
        values = below
    values[path[-1]] = value


def _merge(model: type[BaseModel] | None, lower: dict[str, Any], upper: dict[str, Any]) -> dict[str, Any]:
    merged = dict(lower)
    for key, value in upper.items():
        old, schema = merged.get(key), model.model_fields.get(key) if model else None
        if isinstance(value, dict) and isinstance(old, dict) and schema is not None:
            merged[key] = _merge_section(schema, old, value)
        else:
            merged[key] = value
    return merged


def _merge_section(schema: FieldInfo, old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    variants = variants_of(schema)
    if not variants:
        return _merge(next(iter(models_of(schema)), None), old, new)
    tag = str(schema.discriminator)
    kind_before, kind = old.get(tag), new.get(tag, old.get(tag))
    variant = variants.get(str(kind))
    if kind != kind_before:
        kept = variant.model_fields if variant else {}
        old = {k: v for k, v in old.items() if k in kept and k != tag}
    return _merge(variant, old, new)


def _default_kinds(model: type[BaseModel]) -> Layer:
    """The lowest layer: the default kind of each tagged union, so that `sync.every_rows=20` needs no `sync.kind`."""
    values: dict[str, Any] = {}
    for name, schema in model.model_fields.items():
        if variants_of(schema) and isinstance(schema.default, BaseModel):
            tag = str(schema.discriminator)
            values[name] = {tag: getattr(schema.default, tag)}
        elif isinstance(schema.default, BaseModel):
            values[name] = _default_kinds(type(schema.default)).values
    return Layer({name: value for name, value in values.items() if value})
