"""Promises of the documentation: its links lead somewhere, and the files and keys it names exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from draftline.config.explain import known_paths
from draftline.config.schema import RunConfig

ROOT = Path(__file__).parents[3]
PAGES = sorted((ROOT / "docs").glob("*.md"))
SECTIONS = tuple(RunConfig.model_fields)
PACKAGE = ROOT / "src" / "draftline"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_to_pages(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_every_page_is_reached_from_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert [p.name for p in PAGES if p.name != "index.md" and f"({p.name})" not in index] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_source_files_that_are_named_exist(page: Path) -> None:
    named = re.findall(r"`([\w./-]+\.py)`", page.read_text(encoding="utf-8"))
    assert [name for name in named if not ((ROOT / name).exists() or (PACKAGE / name).exists())] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_configuration_keys_that_are_named_exist(page: Path) -> None:
    known = {".".join(p) for p in known_paths(RunConfig)}
    pattern = rf"`((?:{'|'.join(SECTIONS)})\.[a-z_.]+?)(?:=[^`]*|: [^`]*)?`"
    named = re.findall(pattern, page.read_text(encoding="utf-8"))
    files = {f"{p.parent.name}.{p.stem}" for p in PACKAGE.rglob("*.py")}
    assert [
        key for key in named if key not in known and not key.endswith((".json", ".yaml")) and key not in files
    ] == []
