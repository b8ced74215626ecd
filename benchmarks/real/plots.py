"""The plots of the results page: small SVG files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

from tables import MAINS

Figures = dict[str, Any]
SIZE_INCHES = (6.4, 3.6)


def plot_time(parts: Figures, path: Path) -> None:
    """Chain acceptance on GSM8K against training seconds; not drawn before both sides are there."""
    sides = {words: parts[f"main-{name}"] for name, words in MAINS[:2] if f"main-{name}" in parts}
    if len(sides) < 2:
        return
    figure, axes = _axes("training seconds", "chain acceptance length, GSM8K")
    for words, side in sides.items():
        points = [(m["training_s"], m["walked"]) for m in side["marks"]]
        points.append((side["training_s"], side["walked"]["gsm8k"]["chain"]))
        _line(axes, words, points)
    _save(figure, axes, path)


def plot_trees(parts: Figures, path: Path) -> None:
    """Acceptance by the number of drafts in the tree."""
    curves = {words: parts[f"main-{n}"]["curve"] for n, words in MAINS if "curve" in parts.get(f"main-{n}", {})}
    if not curves:
        return
    figure, axes = _axes("drafts in the tree", "acceptance length, GSM8K")
    for words, curve in curves.items():
        points = [(int(m.partition("@")[2]), figures) for m, figures in curve.items() if m != "chain"]
        _line(axes, words, points)
    axes.set_xscale("log", base=2)
    _save(figure, axes, path)


def _axes(across: str, up: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "draftline"  # the same figures give the same file
    figure = Figure(figsize=SIZE_INCHES, layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.grid(alpha=0.3)
    return figure, axes


def _line(axes: Any, words: str, points: list[tuple[float, Figures]]) -> None:
    across = [x for x, _ in points]
    values = [figures["acceptance_length"] for _, figures in points]
    (line,) = axes.plot(across, values, marker="o", label=words)
    bounds = [figures["interval"] for _, figures in points]
    if all(bounds):
        axes.fill_between(across, [b[0] for b in bounds], [b[1] for b in bounds], alpha=0.15, color=line.get_color())


def _save(figure: Any, axes: Any, path: Path) -> None:
    axes.legend()
    figure.savefig(path, format="svg", metadata={"Date": None})
