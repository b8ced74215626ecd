"""The page itself: one HTML file that holds its style, its script, the library that draws, and all figures."""

from __future__ import annotations

import html
import importlib.util
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from draftline import __version__
from draftline.errors import UserError
from draftline.report.charts import Chart
from draftline.report.tables import Table

_FOOT = "Charts are drawn by plotly, which is part of this file: drag to enlarge, double-click to go back."
_LIBRARY = Path("package_data") / "plotly.min.js"


@dataclass(frozen=True, slots=True)
class Text:
    """A long text of the page, folded away."""

    title: str
    content: str


Part = Chart | Table | Text


def require_plotly() -> Path:
    """The script of plotly, which draws the charts in the reader's browser.

    Raises:
        UserError: plotly is not installed.
    """
    spec = importlib.util.find_spec("plotly")
    mend = "pip install 'draftline[report]'"
    if spec is None or spec.origin is None:
        raise UserError("a report needs plotly", mend=mend)
    script = Path(spec.origin).parent / _LIBRARY
    if not script.is_file():
        raise UserError("plotly lacks its script", where=str(script), mend=mend)
    return script


def render_page(title: str, parts: Sequence[Part]) -> str:
    """The whole file as text. Nothing in it is fetched from anywhere."""
    charts = [part for part in parts if isinstance(part, Chart)]
    data = [{"key": c.key, "traces": c.traces, "layout": c.layout, "height": c.height} for c in charts]
    own = files("draftline.report")
    script = require_plotly().read_text(encoding="utf-8")
    links = "".join(f'<a href="#part-{i}">{_text(part.title)}</a> ' for i, part in enumerate(parts))
    body = "\n".join(_part(i, part) for i, part in enumerate(parts))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{_text(title)}</title>
<style>
{own.joinpath("page.css").read_text(encoding="utf-8")}</style>
</head>
<body>
<main>
<header><h1>{_text(title)}</h1><button id="theme" type="button">light / dark</button></header>
<nav aria-label="parts of this page">{links}</nav>
{body}
<footer>Written by draftline {_text(__version__)}. {_FOOT}</footer>
</main>
<script type="application/json" id="charts">{_json(data)}</script>
<script>{script}</script>
<script>
{own.joinpath("page.js").read_text(encoding="utf-8")}</script>
</body>
</html>
"""


def _part(number: int, part: Part) -> str:
    kind = "long" if isinstance(part, Text) else "part"
    inner = _chart(part) if isinstance(part, Chart) else _table(part) if isinstance(part, Table) else _long(part)
    return f'<section id="part-{number}" class="{kind}"><h2>{_text(part.title)}</h2>\n{inner}</section>'


def _chart(chart: Chart) -> str:
    figures = _grid(chart.header, chart.rows)
    return (
        f"{_paragraph(chart.note)}"
        f'<div class="chart" id="chart-{chart.key}" role="img" aria-label="{_text(chart.title)}. {_text(chart.alt)}" '
        f'style="min-height:{chart.height}px"></div>\n'
        f"<details><summary>In figures</summary><p>{_text(chart.alt)}</p>{figures}</details>\n"
    )


def _table(table: Table) -> str:
    if not table.rows:
        return f"{_paragraph(table.note)}<p>Nothing.</p>"
    return f"{_paragraph(table.note)}{_grid(table.header, table.rows)}"


def _long(text: Text) -> str:
    return f"<details><summary>Show</summary><pre>{_text(text.content)}</pre></details>\n"


def _grid(header: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; the first cell of each row is its heading."""
    top = "".join(f'<th scope="col">{_text(cell)}</th>' for cell in header)
    head = f"<thead><tr>{top}</tr></thead>" if top else ""
    body = "\n".join(
        f'<tr><th scope="row">{_text(row[0])}</th>' + "".join(f"<td>{_text(cell)}</td>" for cell in row[1:]) + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table>{head}<tbody>\n{body}\n</tbody></table></div>\n'


def _paragraph(text: str) -> str:
    return f"<p>{_text(text)}</p>\n" if text.strip(". ") else ""


def _text(text: str) -> str:
    return html.escape(str(text), quote=True)


def _json(data: object) -> str:
    """JSON that cannot end the script element it stands in."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
