"""Plots of an evaluation: tree size against gain, acceptance by block position, acceptance by prompt length.

matplotlib draws them; it comes with the extra `plots` and is imported when a plot is asked for.
"""

from __future__ import annotations

import html
import importlib.util
import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftline import __version__
from draftline.data.storage import write_text_atomic
from draftline.errors import UserError
from draftline.evaluate.stats import first_length

if TYPE_CHECKING:
    from draftline.evaluate.report import EvalReport, MethodResult

KINDS = (".svg", ".png", ".html")
_ALL_SETS = "all"
_PNG_DPI = 150


def require_plots(path: Path) -> None:
    """Raises UserError if plots cannot be written to such a file, or matplotlib is missing."""
    if path.suffix.lower() not in KINDS:
        raise UserError(
            f"plots cannot be written as {path.suffix or 'a file without ending'}",
            where=str(path),
            mend=f"use {', '.join(KINDS)}",
        )
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("plots need matplotlib", where="--plot", mend="pip install 'draftline[plots]'")


def write_plots(report: EvalReport, path: Path) -> None:
    """Draws what the report holds and writes one file, replaced as a whole.

    Raises:
        UserError: see `require_plots`; nothing in the report can be drawn.
    """
    require_plots(path)
    panels = [draw for draw, has in _panels(report) if has]
    if not panels:
        raise UserError("there is nothing to plot", where=str(path), mend="evaluate a drafter: chain, or some tree@N")
    figure = _figure(report, panels)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix.lower() == ".png":
        temporary = path.with_name(f".{path.name}.tmp")
        figure.savefig(temporary, format="png", dpi=_PNG_DPI)
        temporary.replace(path)
        return
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    svg = text.getvalue()
    write_text_atomic(path, svg if path.suffix.lower() == ".svg" else _page(report, svg))


def _panels(report: EvalReport) -> list[tuple[Callable[[Any, EvalReport], None], bool]]:
    drafted = [r for r in _results(report) if r.drafter is not None]
    lengths = {g.name for r in drafted for g in r.groups if g.kind == "prompt length"}
    return [
        (_draw_budgets, any(_budget(r) is not None for r in drafted)),
        (_draw_speedups, any(r.speedup is not None and r.method != "plain" for r in _results(report))),
        (_draw_positions, any(sum(r.drafted_by_position) for r in drafted)),
        (_draw_lengths, bool(lengths)),
    ]


def _figure(report: EvalReport, panels: list[Callable[[Any, EvalReport], None]]) -> Any:
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    # A figure of its own, not pyplot: no window system, no state that outlives it.
    rows = (len(panels) + 1) // 2
    figure = Figure(figsize=(12 if len(panels) > 1 else 6.5, 4.2 * rows), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.subplots(rows, min(2, len(panels)), squeeze=False).flatten()
    for axis, draw in zip(axes, panels, strict=False):
        draw(axis, report)
        axis.grid(alpha=0.3)
        axis.legend(fontsize="small")
    for unused in axes[len(panels) :]:
        unused.set_visible(False)
    figure.suptitle(_title(report), fontsize="medium")
    return figure


def _title(report: EvalReport) -> str:
    prompts = sum(report.settings["prompts"].values())
    target = report.target
    return (
        f"{Path(str(target['model'])).name}, {target['dtype']} on {target['device']}: {prompts} prompts, "
        f"{report.settings['max_new_tokens']} new tokens, temperature {report.settings['temperature']:g}"
    )


def _results(report: EvalReport) -> list[MethodResult]:
    return [r for r in report.results if r.prompt_set == _ALL_SETS]


def _budget(result: MethodResult) -> int | None:
    kind, _, number = result.method.partition("@")
    return int(number) if kind == "tree" else None


def _draw_budgets(axis: Any, report: EvalReport) -> None:
    """Acceptance length by tree size, the chain as a line of its own."""
    drafters = dict.fromkeys(r.drafter for r in _results(report) if r.drafter is not None)
    for number, name in enumerate(drafters):
        trees = sorted((_budget(r) or 0, r) for r in _results(report) if r.drafter == name and _budget(r) is not None)
        points = [(budget, r.acceptance_length, r.interval) for budget, r in trees if r.acceptance_length is not None]
        _errorbar(axis, points, f"{name} trees", number)
        for result in _results(report):
            if result.drafter == name and result.method in ("chain", "adaptive") and result.acceptance_length:
                style = "--" if result.method == "chain" else ":"
                axis.axhline(
                    result.acceptance_length, linestyle=style, color=f"C{number}", label=f"{name} {result.method}"
                )
    axis.set_xscale("log", base=2)
    axis.set_xlabel("tree size (drafts a round)")
    axis.set_ylabel("acceptance length (tokens a target forward)")
    axis.set_title("tree size against acceptance")


def _draw_speedups(axis: Any, report: EvalReport) -> None:
    """Speed-up over plain decoding of each method, in the order of the report."""
    shown = [r for r in _results(report) if r.speedup is not None and r.method != "plain"]
    for number, result in enumerate(shown):
        assert result.speedup is not None
        low, high = result.speedup_interval or (result.speedup, result.speedup)
        spread = [[max(0.0, result.speedup - low)], [max(0.0, high - result.speedup)]]
        axis.bar(number, result.speedup, yerr=spread, color=f"C{number % 10}", capsize=3)
    axis.axhline(1.0, color="black", linewidth=0.8, label="plain decoding")
    labels = [f"{r.drafter or ''} {r.method}".strip() for r in shown]
    axis.set_xticks(range(len(shown)), labels, rotation=45, ha="right", fontsize="small")
    axis.set_ylabel("speed-up over plain decoding (times)")
    axis.set_title(f"wall-clock speed-up ({shown[0].timed_prompts} prompts, one at a time)")


def _draw_positions(axis: Any, report: EvalReport) -> None:
    """Share of blocks whose draft of a slot was accepted."""
    for result in _results(report):
        if result.drafter is None or not sum(result.drafted_by_position):
            continue
        counts = list(zip(result.accepted_by_position, result.drafted_by_position, strict=True))
        slots = [slot for slot, (_, drafted) in enumerate(counts, start=1) if drafted]
        shares = [100 * accepted / drafted for accepted, drafted in counts if drafted]
        axis.plot(slots, shares, marker="o", label=f"{result.drafter} {result.method}")
    axis.set_xlabel("position in the block (slot; depth of a tree)")
    axis.set_ylabel("accepted (% of the rounds that drafted it)")
    axis.set_ylim(bottom=0)
    axis.set_title("acceptance by position")


def _draw_lengths(axis: Any, report: EvalReport) -> None:
    """Acceptance length by length of the prompt."""
    ranges = dict.fromkeys(
        group.name for result in _results(report) for group in result.groups if group.kind == "prompt length"
    )
    order = sorted(ranges, key=first_length)
    for number, result in enumerate(r for r in _results(report) if r.drafter is not None):
        found = {g.name: g for g in result.groups if g.kind == "prompt length" and g.acceptance_length is not None}
        points = [(order.index(name), group.acceptance_length, group.interval) for name, group in found.items()]
        _errorbar(axis, sorted(points), f"{result.drafter} {result.method}", number)
    axis.set_xticks(range(len(order)), order)
    axis.set_xlabel("prompt length (tokens)")
    axis.set_ylabel("acceptance length (tokens a target forward)")
    axis.set_title("acceptance by prompt length")


def _errorbar(axis: Any, points: list[Any], label: str, number: int) -> None:
    """Points (x, y, interval or None) joined by a line."""
    if not points:
        return
    xs, ys = [p[0] for p in points], [p[1] for p in points]
    below = [max(0.0, y - (interval[0] if interval else y)) for _, y, interval in points]
    above = [max(0.0, (interval[1] if interval else y) - y) for _, y, interval in points]
    axis.errorbar(xs, ys, yerr=[below, above], marker="o", capsize=3, color=f"C{number % 10}", label=label)


def _page(report: EvalReport, svg: str) -> str:
    """One page without scripts or anything to be fetched."""
    title = html.escape(_title(report))
    drawing = svg[svg.index("<svg") :]
    facts = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title></head>\n<body>\n'
        f"<h1>{title}</h1>\n<p>{html.escape(report.definition)}. Bars are 95 % intervals by prompt.</p>\n{drawing}\n"
        f"<p>draftline {html.escape(__version__)}; {html.escape(facts)}</p>\n</body></html>\n"
    )
