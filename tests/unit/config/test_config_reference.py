"""The promise of docs/configuration.md: it is what the schema says today."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_configuration_page_is_current() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "make_config_reference.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_page_names_every_leaf_of_the_schema() -> None:
    from draftline.config.explain import known_paths
    from draftline.config.schema import RunConfig

    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    missing = [".".join(p) for p in known_paths(RunConfig) if ".".join(p) not in page]
    assert missing == []
