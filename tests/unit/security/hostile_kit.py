"""Files made to hurt their readers: what they are made of, and what a reader must not do when it meets one."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from draftline.errors import DraftlineError

FUZZ = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
odd = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**20), 10**20),
    st.sampled_from([-1, 0, 2**31, 2**63, 10**400, 1e308, float("inf"), float("nan")]),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["../../outside", "/etc/passwd", "\0", "\ud800", "a" * 5000, "round-00000001", "{}"]),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


@st.composite
def spoiled(draw: st.DrawFn, document: Any) -> Any:
    """The document with one to three of its values replaced, removed or doubled, at any depth."""
    document = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 3))):
        place: Any = document
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if isinstance(place[key], dict | list) and place[key] and draw(st.booleans()):
                place = place[key]
                continue
            if isinstance(place, dict) and draw(st.integers(0, 4)) == 0:
                del place[key]
            else:
                place[key] = draw(odd)
            break
    return document


@st.composite
def torn(draw: st.DrawFn, data: bytes) -> bytes:
    """The bytes, cut, flipped or with foreign bytes in between."""
    at = draw(st.integers(0, len(data)))
    kind = draw(st.sampled_from(["cut", "flip", "insert", "deep"]))
    if kind == "cut":
        return data[:at]
    if kind == "flip" and at < len(data):
        return data[:at] + bytes([data[at] ^ draw(st.integers(1, 255))]) + data[at + 1 :]
    if kind == "deep":
        return data[:at] + b'{"a":[' * draw(st.sampled_from([1, 60_000])) + data[at:]
    return data[:at] + draw(st.binary(max_size=40)) + data[at:]


def hostile(document: Any) -> st.SearchStrategy[bytes]:
    """JSON bytes: spoiled values, or torn text."""
    text = json.dumps(document).encode()
    return st.one_of(
        spoiled(document).map(lambda value: json.dumps(value).encode()), torn(text), st.binary(max_size=64)
    )


def tree(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_size for path in sorted(folder.rglob("*"))}


@contextmanager
def put_back(folder: Path) -> Iterator[None]:
    """Whatever one example does to the files of a folder is undone before the next."""
    contents = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    try:
        yield
    finally:
        for path in [path for path in folder.rglob("*") if path.is_file() and path not in contents]:
            path.unlink()
        for path, content in contents.items():
            path.write_bytes(content)


def check_meets(root: Path, read: Callable[[], Any]) -> None:
    """`read` either works or says what is wrong in words; it leaves the files around it alone."""
    before = tree(root)
    try:
        read()
    except DraftlineError as error:
        assert str(error).strip()
    assert tree(root) == before
