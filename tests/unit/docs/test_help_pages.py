"""Errors name the page that explains them, and that page exists."""

from __future__ import annotations

from pathlib import Path

import pytest

import draftline
from draftline import cli, help_pages
from draftline.errors import UserError
from draftline.help_pages import page_of, page_of_module

DOCS = Path(__file__).parents[3] / "docs"
PACKAGE = Path(draftline.__file__).parent


def test_every_module_that_raises_has_a_page_or_serves_all_rooms():
    names = set(help_pages._PAGES)
    for module in PACKAGE.rglob("*.py"):
        inside = module.relative_to(PACKAGE)
        if inside.name == "__init__.py" or inside.parts[0] in ("recipes", "help_pages.py"):
            continue
        page = page_of_module(inside)
        assert page is not None or any(inside.as_posix().startswith(n) and help_pages._PAGES[n] is None for n in names)
        assert page is None or (DOCS / f"{page}.md").is_file(), f"{inside}: no page {page}"


@pytest.mark.parametrize(
    ("module", "page"),
    [
        ("data/chat.py", "data"),
        ("data/servers/answering.py", "servers"),
        ("pipeline/plan_report.py", "planning"),
        ("pipeline/threads.py", "pipeline"),
        ("cli_eval.py", None),
        ("nowhere.py", None),
    ],
)
def test_the_longest_beginning_decides(module: str, page: str | None):
    assert page_of_module(Path(module)) == page


def test_an_error_of_a_command_is_one_line_that_ends_with_its_page(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("sys.argv", ["draftline", "train", "-c", str(tmp_path / "none.yaml")])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    line = capsys.readouterr().err.strip()
    assert ended.value.code == 2 and len(line.splitlines()) == 1
    assert line.endswith("none.yaml: no such file; check the path given with --config [docs/configuration.md]")


def test_an_error_from_elsewhere_names_no_page():
    with pytest.raises(UserError) as raised:
        raise UserError("mine")
    assert page_of(raised.value) is None
