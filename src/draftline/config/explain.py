"""Turn pydantic's errors into lines for people: where the value came from, the dotted field, what is allowed, the mend.

Also the small walk over the schema that loading and explaining share.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from draftline.errors import UserError

FieldPath = tuple[str, ...]
OriginOf = Callable[[FieldPath], str | None]
MAX_LINES = 5

# pydantic error type -> wording with its context values. Everything else keeps pydantic's own sentence.
_LIMITS = {
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be above {gt}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be below {lt}",
    "too_short": "needs at least {min_length} entries",
    "too_long": "takes at most {max_length} entries",
}
_KINDS = {
    "int": "must be a whole number",
    "float": "must be a number",
    "finite": "must be a finite number",
    "bool": "must be true or false",
    "string": "must be text",
    "path": "must be a path (text)",
    "tuple": "must be a list, for example [a, b]",
    "list": "must be a list, for example [a, b]",
    "model": "must be a section of `key: value` lines",
    "dict": "must be a section of `key: value` lines",
}


def models_of(field: FieldInfo) -> list[type[BaseModel]]:
    """The sections a field may hold (several for a tagged union, none for a plain value)."""
    annotation = field.annotation
    candidates = get_args(annotation) if get_origin(annotation) is not None else (annotation,)
    return [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]


def variants_of(field: FieldInfo) -> dict[str, type[BaseModel]]:
    """Tag value -> section, for a tagged union; empty for every other field."""
    if not isinstance(field.discriminator, str):
        return {}
    return {tag: m for m in models_of(field) for tag in _literal_values(m.model_fields[field.discriminator])}


def _literal_values(field: FieldInfo) -> tuple[str, ...]:
    return get_args(field.annotation) if get_origin(field.annotation) is Literal else ()


def known_paths(model: type[BaseModel], prefix: FieldPath = ()) -> Iterator[FieldPath]:
    """Every field path of the schema, sections included."""
    for name, field in model.model_fields.items():
        yield (*prefix, name)
        for part in models_of(field):
            yield from known_paths(part, (*prefix, name))


def explain(error: ValidationError, model: type[BaseModel], values: Mapping[str, Any], origin: OriginOf) -> UserError:
    """One line per problem, at most `MAX_LINES`.

    Args:
        error: what pydantic found.
        model: the schema that was validated against.
        values: the merged input, to tell a section's chosen kind.
        origin: where a field was set (`run.yaml line 3`, `the command line`), None if nowhere.
    """
    problems = error.errors(include_url=False)
    lines = [str(_explain_one(p, model, values, origin)) for p in problems]
    lines = list(dict.fromkeys(lines))
    if len(lines) > MAX_LINES:
        lines = [*lines[:MAX_LINES], f"and {len(lines) - MAX_LINES} more problems"]
    return UserError("\n".join(lines))


def _explain_one(problem: Any, model: type[BaseModel], values: Mapping[str, Any], origin: OriginOf) -> UserError:
    path, section = _resolve(problem["loc"], model)
    dotted = ".".join(path) or "configuration"
    source = origin(path)
    where = f"{source}: {dotted}" if source else dotted
    kind, context = problem["type"], problem.get("ctx", {})
    if kind == "extra_forbidden":
        return UserError("unknown key", where=where, mend=_nearest(path, section, model, values))
    if kind == "missing" and path and path[-1].isdigit():
        return UserError("has too few entries", where=where.removesuffix(f".{path[-1]}"))
    if kind == "missing":
        return UserError("is required and not set", where=where, mend=f"set it in a file or as {dotted}=VALUE")
    if kind == "value_error":
        return _cross_field(str(context["error"]), path, source)
    return UserError(_allowed(kind, context, problem), where=where)


def _cross_field(message: str, path: FieldPath, source: str | None) -> UserError:
    """A rule over several fields words itself; only the file and the section are put in front."""
    section = ".".join(path)
    prefix = None if not section or message.startswith(section) else section
    return UserError(message, where=": ".join(p for p in (source, prefix) if p) or None)


def _allowed(kind: str, context: Mapping[str, Any], problem: Mapping[str, Any]) -> str:
    got = f"not {_short(problem['input'])}"
    if kind in _LIMITS:
        wording = _LIMITS[kind].format(**context)
        return wording if kind.startswith("too_") else f"{wording}, {got}"
    if kind in ("union_tag_invalid", "literal_error"):
        allowed = context.get("expected_tags") or context.get("expected")
        value = context.get("tag", problem["input"])
        return f"must be one of {str(allowed).replace(' or ', ', ')}, not {_short(value)}"
    if kind == "union_tag_not_found":
        return "needs a `kind`"
    wording = _KINDS.get(kind.split("_")[0], str(problem["msg"]))
    return f"{wording}, {got}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _resolve(loc: Sequence[int | str], model: type[BaseModel]) -> tuple[FieldPath, type[BaseModel] | None]:
    """Strip from pydantic's location the tags of unions; also give the section the last key stands in."""
    path: list[str] = []
    section: type[BaseModel] | None = model
    parts = [str(p) for p in loc]
    while parts:
        name = parts.pop(0)
        path.append(name)
        field = section.model_fields.get(name) if section else None
        if field is None or not parts:
            break
        variants = variants_of(field)
        if variants and parts[0] in variants:
            section = variants[parts.pop(0)]
        else:
            section = next(iter(models_of(field)), None)
    return (*path, *parts), section


def _nearest(
    path: FieldPath, section: type[BaseModel] | None, model: type[BaseModel], values: Mapping[str, Any]
) -> str:
    """The mend for an unknown key: the nearest name in its section, else the same name elsewhere, else all names."""
    names = list(section.model_fields) if section else []
    close = difflib.get_close_matches(path[-1], names, n=1, cutoff=0.6)
    if close:
        return f"did you mean {'.'.join((*path[:-1], close[0]))}?"
    elsewhere = {".".join(p): p[-1] for p in known_paths(model)}
    if ".".join(path) in elsewhere:
        return f"it does not go with {'.'.join((*path[:-1], 'kind'))}={_kind_of(path[:-1], values)}; set another kind"
    wanted = difflib.get_close_matches(path[-1], list(elsewhere.values()), n=1, cutoff=0.75)
    places = [dotted for dotted, name in elsewhere.items() if name in wanted]
    if places:
        return f"did you mean {' or '.join(places[:3])}?"
    return f"known here: {', '.join(names)}" if names else "this field has no keys"


def _kind_of(path: FieldPath, values: Mapping[str, Any]) -> Any:
    node: Any = values
    for name in path:
        node = node.get(name, {})
    return node.get("kind")
