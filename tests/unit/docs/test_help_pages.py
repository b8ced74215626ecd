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


@pytest.mark.parametrize(
    ("module", "message", "page", "explained"),
    [
        ("data/manifest.py", "the data was prepared with tokenizer", "data", "tokenizer knows more tokens"),
        ("decode/buffers.py", "the target mixes sliding windows", "evaluation", "windows of several sizes"),
        ("decode/chain.py", "the drafter is for another target", "evaluation", "the one that the drafter was made for"),
        ("drafter/compile_cache.py", "compiled again after the warm-up", "pipeline", "A compilation after it"),
        ("drafter/spec.py", "is outside the target's vocabulary", "howto-model", "is outside the vocabulary"),
        ("drafter/warm_start.py", "of the target has no", "howto-model", "has no such part"),
        ("evaluate/command.py", "two prompt sets are called", "evaluation", "two files of one name are refused"),
        ("export/quantize.py", "is quantised", "checkpoints-and-export", "## Weights in 8 bits"),
        (
            "export/speculators_config.py",
            "the target's name is not known",
            "checkpoints-and-export",
            "`--target` is the",
        ),
        (
            "export/zlab_config.py",
            "has sliding_attention, but",
            "checkpoints-and-export",
            "sliding layers but no window",
        ),
        ("pipeline/choice.py", "holds no checkpoint", "checkpoints-and-export", "## Training checkpoints"),
        ("pipeline/core/ledger.py", "the ledger cannot be read", "howto-resume", "the ledger cannot be read"),
        ("pipeline/long_rows.py", "the target's context is", "howto-data", "longer than the target's context"),
        ("pipeline/run_folder.py", "a resumed run must be", "howto-resume", "a resumed run must be the same run"),
        ("pipeline/run_folder.py", "is far too large", "howto-resume", "is far too large"),
        ("pipeline/runplan.py", "the data set yields zero rows", "howto-data", "the data set yields zero rows"),
        ("pipeline/runplan.py", "is a token that text uses", "howto-data", "is a token that text uses"),
        ("report/perfetto.py", "holds no span yet", "monitoring", "## Traces"),
        ("target/backend.py", "caps its attention scores", "howto-model", "caps its attention scores"),
        ("target/remote/clients.py", "no file holds these", "states", "Files are found by their token ids"),
        ("target/weights.py", "weight files are missing", "howto-model", "weight files are missing"),
    ],
)
def test_the_page_that_an_error_names_explains_it(module: str, message: str, page: str, explained: str):
    assert message in (PACKAGE / module).read_text(encoding="utf-8")
    assert page_of_module(Path(module)) == page
    assert explained in " ".join((DOCS / f"{page}.md").read_text(encoding="utf-8").split())
