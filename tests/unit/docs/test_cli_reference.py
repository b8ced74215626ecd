"""docs/command-line.md is what the app says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import typer

from draftline.cli import app

ROOT = Path(__file__).parents[3]


def test_the_page_is_current():
    command = [sys.executable, str(ROOT / "scripts" / "make_cli_reference.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_command_of_the_app_has_a_section():
    page = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
    sections = [line.removeprefix("## draftline ") for line in page.splitlines() if line.startswith("## ")]
    assert sections == list(typer.main.get_command(app).commands)
