"""The report in a real browser: from the file system, without network, light and dark, on a desk and on a phone.

Pictures of it are left in the folder that DRAFTLINE_SCREENSHOTS names, for a careful eye.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from browser_kit import BODY, LOOKS
from draftline.report.charts import Axis, line_chart
from draftline.report.command import write_report
from draftline.report.curves import Curve
from draftline.report.page import render_page
from made_run import evaluation, make_run

# Titles of axes that a chart draws, all charts that have come into view.
AXES = "[...document.querySelectorAll('.chart')].map(c => [...c.querySelectorAll('.xtitle, .ytitle')].length)"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report([make_run(tmp_path_factory.mktemp("runs") / "long", rows=100_000, every=20)])


def opened(browser: Any, report: Path, scheme: str, width: int) -> tuple[Any, list[str]]:
    """The page, and what it asked the network for or complained of."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    trouble: list[str] = []
    page.on("request", lambda r: None if r.url.startswith(("file:", "data:", "blob:")) else trouble.append(r.url))
    page.on("console", lambda m: trouble.append(m.text) if m.type == "error" else None)
    page.on("pageerror", lambda e: trouble.append(str(e)))
    page.goto(report.as_uri())
    return page, trouble


def scroll_through(page: Any) -> None:
    """Down to the end, a screen at a time, as a reader does: what is drawn on sight is drawn."""
    top, height = 0, 1
    while top < height:  # drawing may make the page longer
        page.evaluate(f"scrollTo({{top: {top}, behavior: 'instant'}})")
        page.wait_for_timeout(30)
        height, screen = page.evaluate("[document.documentElement.scrollHeight, innerHeight]")
        top += screen


@pytest.mark.parametrize(("scheme", "width"), LOOKS)
def test_every_chart_is_drawn_with_named_axes_and_nothing_is_fetched(
    browser: Any, report: Path, scheme: str, width: int
) -> None:
    page, trouble = opened(browser, report, scheme, width)
    scroll_through(page)
    page.wait_for_function(f"{AXES}.every(n => n >= 2)", timeout=60_000)
    assert trouble == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width  # nothing sticks out sideways
    colour, ground = page.evaluate(BODY)
    assert (sum(rgb(colour)) < sum(rgb(ground))) == (scheme == "light")
    if folder := os.environ.get("DRAFTLINE_SCREENSHOTS"):
        page.evaluate("scrollTo(0, 0)")
        page.screenshot(path=str(Path(folder) / f"report-{scheme}-{width}.png"), full_page=True)
    page.close()


def test_the_page_is_light_enough_to_scroll(browser: Any, report: Path) -> None:
    page, _ = opened(browser, report, "light", 1280)
    scroll_through(page)
    page.wait_for_function(f"{AXES}.every(n => n >= 2)", timeout=60_000)
    # Browsers stay smooth up to tens of thousands of elements; a chart of every row would have 100,000 a curve.
    assert page.evaluate("document.querySelectorAll('*').length") < 30_000
    page.close()


def test_many_curves_leave_room_to_be_seen_on_a_phone(browser: Any, tmp_path: Path) -> None:
    curve = Curve()
    for step in range(3):
        curve.add(step, float(step))
    chart = line_chart("many", "Many", {f"validation walk tree@{2**n}": curve for n in range(9)}, Axis("tokens"))
    assert chart is not None
    file = tmp_path / "many.html"
    file.write_text(render_page("many", [chart]), encoding="utf-8")
    page, _ = opened(browser, file, "light", 390)
    page.wait_for_function(f"{AXES}.every(n => n >= 2)", timeout=60_000)
    assert page.evaluate("document.querySelector('.chart')._fullLayout._size.h") >= 200  # pixels of the plot itself
    page.close()


def test_on_paper_every_figure_is_unfolded_and_nothing_is_cut_at_the_edge(browser: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    evaluation(run / "evaluation.json")
    page, _ = opened(browser, write_report([run]), "dark", 794)  # A4 at 96 pixels an inch
    page.emulate_media(media="print")
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    page.wait_for_function(f"{AXES}.every(n => n >= 2)", timeout=60_000)
    assert page.evaluate(
        "[document.documentElement.scrollWidth, document.querySelectorAll('details:not([open])').length]"
    ) == [794, 0]
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    page.close()


def rgb(colour: str) -> list[int]:
    """Of `rgb(1, 2, 3)`."""
    return [int(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(",")]
