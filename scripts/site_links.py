"""Hook of mkdocs: pages may link to files of the repository beside docs/, which the site does not hold."""

from __future__ import annotations

import re
from typing import Any

_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)#\s]+)\)")


def on_page_markdown(markdown: str, **_facts: Any) -> str:
    """The page with such links turned into text and path: `[result](../x.json)` becomes ``result (`x.json`)``."""
    return _OUTSIDE.sub(r"\1 (`\2`)", markdown)
