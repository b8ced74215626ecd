"""From results.json to docs/results.md and its plots.

    python benchmarks/real/report.py benchmarks/results/real/results.json --docs docs

Tables stand between comment marks in the page; text between the tables is left as it is when the page is there already.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from draftline.errors import DraftlineError, UserError
from store import read_json
from tables import (
    ablation_table,
    answer_table,
    curve_table,
    data_table,
    estimate_table,
    head_to_head,
    long_table,
    loop_table,
    seed_table,
    several_table,
    verdicts,
)

Figures = dict[str, Any]
TIME_PLOT, TREE_PLOT = "results-time.svg", "results-trees.svg"
SECTIONS: tuple[tuple[str, str, Callable[[Figures], list[str]]], ...] = (
    ("promises", "What was asked", verdicts),
    ("head", "Head to head with SpecForge", head_to_head),
    ("walked", "All recipes, all kept prompts", lambda parts: answer_table(parts, "walked")),
    (
        "decoded",
        "The same, decoded for real on the first prompts",
        lambda parts: answer_table(parts, "decoded"),
    ),
    ("trees", "Size of the tree", curve_table),
    ("ablations", "One change at a time", ablation_table),
    ("seeds", "Other seeds", seed_table),
    ("several", "Several drafters at equal total work", several_table),
    ("long", "A long run", long_table),
    ("loops", "Where lookup wins", loop_table),
    ("estimates", "Training-time estimate and real decoding", estimate_table),
    ("data", "Data", data_table),
)


def environment_line(parts: Figures) -> str:
    """Where and with what it was measured."""
    about = [part["environment"] for part in parts.values()]
    first = about[0]
    commits = sorted({str(a["commit"])[:9] for a in about})
    shown = f"{first['device']}, torch {first['torch']}, transformers {first['transformers']}, "
    return shown + f"SpecForge {first['specforge']}, commit {', '.join(commits)}"


def marked(name: str, lines: list[str]) -> str:
    """Lines between the marks of a section."""
    return "\n".join([f"<!-- begin {name} -->", *lines, f"<!-- end {name} -->"])


def fill(page: str, name: str, lines: list[str]) -> str:
    """The page with a section's lines replaced. Raises UserError if the page lacks it."""
    pattern = re.compile(rf"<!-- begin {name} -->.*?<!-- end {name} -->", re.DOTALL)
    if not pattern.search(page):
        raise UserError(f"has no section {name}", where="results.md", mend="put its marks back, or move the page away")
    return pattern.sub(lambda _: marked(name, lines), page)


def new_page(parts: Figures) -> str:
    """A page with every section and no prose."""
    blocks = ["# Results: what the recipe is worth", marked("environment", [environment_line(parts)])]
    for name, title, make in SECTIONS:
        blocks += [f"## {title}", marked(name, make(parts))]
        if name == "head":
            blocks.append(f"![Acceptance against training seconds]({TIME_PLOT})")
        if name == "trees":
            blocks.append(f"![Acceptance by size of the tree]({TREE_PLOT})")
    return "\n\n".join(blocks) + "\n"


def updated_page(page: str, parts: Figures) -> str:
    """An existing page with fresh tables."""
    page = fill(page, "environment", [environment_line(parts)])
    for name, _, make in SECTIONS:
        page = fill(page, name, make(parts))
    return page


def plot(parts: Figures, docs: Path) -> None:
    """Both plots, as far as they were measured. Needs matplotlib."""
    from plots import plot_time, plot_trees

    plot_time(parts, docs / TIME_PLOT)
    plot_trees(parts, docs / TREE_PLOT)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="results.json of run.py")
    parser.add_argument("--docs", type=Path, required=True, help="folder of results.md")
    chosen = parser.parse_args(arguments)
    try:
        write_page(read_json(chosen.results, ("parts",))["parts"], chosen.docs)
    except DraftlineError as error:
        print(f"report: {error}")
        return error.exit_code
    return 0


def write_page(parts: Figures, docs: Path) -> None:
    """The page and its plots, in a folder that exists.

    Raises:
        UserError: the folder or the page is not what it should be, or the first part is missing.
    """
    if "baselines" not in parts:
        raise UserError("the part baselines is missing", where="results", mend="let run.py go on until it is there")
    if not docs.is_dir():
        raise UserError("is no folder", where=str(docs), mend="make it first")
    page = docs / "results.md"
    try:
        text = updated_page(page.read_text(encoding="utf-8"), parts) if page.is_file() else new_page(parts)
    except KeyError as error:
        raise UserError(
            f"lack the figure {error}", where="results", mend="let run.py measure that part again"
        ) from None
    page.write_text(text, encoding="utf-8")
    plot(parts, docs)


if __name__ == "__main__":
    raise SystemExit(main())
