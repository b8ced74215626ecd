"""One chart: what plotly draws, what is said in its place where it cannot be seen, and its figures as a table.

Charts are plain dictionaries in plotly's own form; colours are numbers of a palette, so that the page can follow the
reader's light or dark theme.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from draftline.report.curves import Curve, thin

_TABLE_ROWS = 16


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart of the page.

    Attributes:
        key: its name in the page.
        title: heading.
        note: one or two sentences on how to read it.
        alt: the text alternative: what it shows, in figures.
        traces, layout: in plotly's form.
        header, rows: its figures, thinned.
        height: in pixels.
    """

    key: str
    title: str
    alt: str
    traces: list[dict[str, Any]]
    layout: dict[str, Any]
    header: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    note: str = ""
    height: int = 360


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis: its words, and what else plotly should know of it."""

    title: str
    more: Mapping[str, Any] = field(default_factory=dict)

    def spec(self) -> dict[str, Any]:
        """In plotly's form."""
        return {"title": {"text": self.title}, "automargin": True, **self.more}


ROWS = Axis("rows trained", {"rangemode": "tozero"})


def line_chart(
    key: str,
    title: str,
    curves: Mapping[str, Curve],
    y: Axis,
    *,
    note: str = "",
    most: int = 1200,
    dotted: Collection[str] = (),
) -> Chart | None:
    """Curves over rows trained, at most `most` points each; None without any point.

    Curves in `dotted` let those show that they may cover. A curve without a point keeps its colour free.
    """
    colours = {name: number for number, name in enumerate(curves)}
    curves = {name: curve for name, curve in curves.items() if curve.points()}
    if not curves:
        return None
    traces = []
    for name, curve in curves.items():
        steps, values = thin(curve, most)
        mode = "lines+markers" if len(set(steps)) <= 40 else "lines"  # many points of one row are no line to be seen
        trace = {"type": "scatter", "mode": mode, "name": name, "x": steps, "y": values, "meta": {"c": colours[name]}}
        traces.append(trace | ({"line": {"dash": "dot"}} if name in dotted else {}))
    header, rows = _table(curves)
    return Chart(
        key=key,
        title=title,
        alt="; ".join(f"{name}: {words(curve)}" for name, curve in curves.items()),
        traces=traces,
        layout={"xaxis": ROWS.spec(), "yaxis": y.spec(), "hovermode": "x unified"},
        header=header,
        rows=rows,
        note=note,
    )


def xy_chart(
    key: str, title: str, series: Mapping[str, Sequence[tuple[float, float]]], axes: tuple[Axis, Axis], note: str = ""
) -> Chart | None:
    """Points (x, y) joined by lines, a few a series; None without any."""
    series = {name: points for name, points in series.items() if points}
    if not series:
        return None
    traces: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": name,
            "x": [x for x, _ in points],
            "y": [float(f"{y:.6g}") for _, y in points],
            "meta": {"c": number},
        }
        for number, (name, points) in enumerate(series.items())
    ]
    places = sorted({x for points in series.values() for x, _ in points})
    known = {name: dict(points) for name, points in series.items()}
    rows = tuple((f"{x:g}", *(figure(known[name].get(x)) for name in series)) for x in places)
    alt = "; ".join(f"{name}: " + ", ".join(f"{figure(y)} at {x:g}" for x, y in p[:8]) for name, p in series.items())
    layout = {"xaxis": axes[0].spec(), "yaxis": axes[1].spec()}
    return Chart(key, title, alt, traces, layout, (axes[0].title, *series), rows, note)


def words(curve: Curve) -> str:
    """`7.2 at row 4, 2.43 at row 472, lowest 2.4, highest 7.2`."""
    points = curve.points()
    (first, start), (last, end) = points[0], points[-1]
    values = [value for _, value in points]
    if len(points) == 1:
        return f"{figure(start)} at row {first}"
    ends = f"{figure(start)} at row {first}, {figure(end)} at row {last}"
    return f"{ends}, lowest {figure(min(values))}, highest {figure(max(values))}"


def figure(value: float | None) -> str:
    """A number for people: four significant digits, thousands grouped; a dash where there is none."""
    if value is None:
        return "-"
    if value and abs(value) < 1e-3:
        return f"{value:.2e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _table(curves: Mapping[str, Curve]) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Figures at a few rows of the longest curve; a curve that has none just there shows its last before it."""
    longest = max(curves.values(), key=lambda curve: len(curve.points())).points()
    count = min(_TABLE_ROWS, len(longest))
    places = [longest[round(i * (len(longest) - 1) / max(1, count - 1))][0] for i in range(count)]
    rows = []
    for place in dict.fromkeys(places):
        cells = [next((v for s, v in reversed(c.points()) if s <= place), None) for c in curves.values()]
        rows.append((str(place), *(figure(value) for value in cells)))
    return ("rows trained", *curves), tuple(rows)
