"""Reading of a .gguf file once where transformers reads it again for configuration, tokenizer and weights.

Each reading walks over the tokenizer's 50,000 words and as many merges in Python, and transformers makes the map of
tensor names anew for every module: together more than half of the time that a small model takes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch


@contextmanager
def read_gguf_once() -> Iterator[None]:
    """Inside, `gguf` reads each file once and makes each map of names once. Process-wide: for one thread at a time."""
    import gguf

    readers: dict[str, Any] = {}
    read: Callable[..., Any] = gguf.GGUFReader

    def reader(path: Any, *arguments: Any) -> Any:
        key = repr((str(path), arguments))
        if key not in readers:
            readers[key] = read(path, *arguments)
        return readers[key]

    with (
        patch.object(gguf, "GGUFReader", reader),
        patch.object(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map)),
    ):
        yield
