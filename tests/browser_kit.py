"""A real browser for the pages that draftline makes, and the looks in which they are looked at."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
LOOKS = [("light", 1280), ("dark", 1280), ("light", 390), ("dark", 390)]
# Colours of text and ground.
BODY = "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"


@contextmanager
def launched() -> Iterator[Any]:
    """Chromium, headless; BROWSER must be there."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()
