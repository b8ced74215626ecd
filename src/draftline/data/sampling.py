"""How answers are drawn, and what is asked: shared by the in-process way and by servers. Imports no torch."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen. Temperature 0 is greedy; top_p 1 and top_k 0 keep all tokens."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt to be answered: its id, and its token ids."""

    id: str
    input_ids: list[int]


def prompt_seed_bytes(seed: int, name: str) -> bytes:
    """16 bytes that depend on nothing but the run's seed and the prompt's id."""
    return hashlib.sha256(f"draftline sampling {seed} {name}".encode()).digest()[:16]
