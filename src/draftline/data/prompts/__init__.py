"""The project's own prompts, and how prompts are split into a training and a held-out part."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

BUILTIN_SOURCE = "builtin"


def builtin_prompts() -> Path:
    """JSON lines of about 250 short English prompts, one user turn each, written for draftline."""
    with as_file(files(__package__) / "general.jsonl") as path:
        return path


def hold_out(ids: Iterable[str], n: int, seed: int = 0) -> frozenset[str]:
    """Choose `n` of the ids, by a hash of seed and id: alike everywhere, and for most ids also when others come or go.

    Raises:
        ValueError: fewer than `n` different ids.
    """
    ranked = sorted(set(ids), key=lambda name: hashlib.sha256(f"hold out {seed} {name}".encode()).digest())
    if n > len(ranked):
        raise ValueError(f"cannot hold out {n} of {len(ranked)} ids")
    return frozenset(ranked[:n])


def split_prompts(path: Path, *, held_out: int, seed: int = 0) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Split a file of prompts by conversation into (training, held out), each in the file's order.

    Rows come back as `id`, `messages` and, where given, `category` and `tools`.

    Raises:
        UserError: a bad row, or a source without rows.
        ValueError: fewer rows than `held_out`.
    """
    from draftline.data.conversations import Tally, read_conversations

    rows = list(read_conversations([str(path)], Tally(skip_bad_rows=False)))
    chosen = hold_out((row.id for row in rows), held_out, seed)
    parts: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ([], [])
    for row in rows:
        record = {"id": row.id, "category": row.category, "messages": row.messages, "tools": row.tools}
        parts[row.id in chosen].append({key: value for key, value in record.items() if value})
    return parts
