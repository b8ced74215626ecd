"""Recipes shipped with draftline: YAML files, each loaded by a test."""

from __future__ import annotations

from pathlib import Path


def recipe_path(name: str) -> Path:
    """Path of a shipped recipe by its name, for example `demo-cpu`."""
    return Path(__file__).parent / f"{name}.yaml"


def recipe_names() -> list[str]:
    """Names of all shipped recipes."""
    return sorted(p.stem for p in Path(__file__).parent.glob("*.yaml"))
