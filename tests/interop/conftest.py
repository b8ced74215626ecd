"""The browser of the tests of pages, and the order of the files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from browser_kit import BROWSER, launched

LONGEST = ("test_serve_transformers.py", "test_decode_dflash.py", "test_tracker_services.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take minutes begin, so that of two workers none has nothing to do at the end."""
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, headless; a page of its own for each test."""
    if not BROWSER:
        pytest.skip(
            "needs a real browser, which pip cannot install: put chromium or google-chrome on the PATH and run again. "
            "What the pages say and hold is tested without one in tests/unit/report"
        )
    with launched() as browser:
        yield browser
