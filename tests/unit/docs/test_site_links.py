"""The site's hook: links that leave docs/ become text, all others stay."""

from __future__ import annotations

import runpy
from pathlib import Path

HOOK = Path(__file__).parents[3] / "scripts" / "site_links.py"


def test_links_out_of_the_docs_become_text_and_a_path():
    rewrite = runpy.run_path(str(HOOK))["on_page_markdown"]
    text = "see [a result](../benchmarks/x.json), [a page](pipeline.md#part) and [the web](https://example.org/../y)"
    assert rewrite(text, page=None) == (
        "see a result (`benchmarks/x.json`), [a page](pipeline.md#part) and [the web](https://example.org/../y)"
    )
