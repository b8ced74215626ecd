"""The browser of the tests of pages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from browser_kit import BROWSER, launched


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
