"""An evaluation as tables on the terminal.

Names of drafters, categories, prompts and files are the user's: they are printed as they are, never read as markup.
"""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from draftline.evaluate.report import ALL_SETS, Comparison, EvalReport, MethodResult


def print_report(report: EvalReport, console: Console | None = None) -> None:
    """Results, then groups, comparisons and warnings."""
    console = console or Console()
    sets = list(dict.fromkeys(r.prompt_set for r in report.results))
    # With a single set, its results and those over all sets are the same.
    shown = [ALL_SETS] if len(sets) == 2 else sets
    for name in shown:
        console.print(_result_table([r for r in report.results if r.prompt_set == name], name))
    for line in _notes(report):
        console.print(Text(line, style="dim"))
    if report.tree_rounds:
        console.print(_tree_table(report))
        for found in report.tree_rounds:
            console.print(Text(found.promise, style="dim"))
    groups = _group_table([r for r in report.results if r.prompt_set == ALL_SETS])
    if groups is not None:
        console.print(groups)
    for comparison in report.comparisons:
        console.print(Text(comparison_line(comparison)))
    for warning in report.warnings:
        console.print(Text(f"warning: {warning}", style="yellow"))


def comparison_line(c: Comparison) -> str:
    """For example `chain: after better than before? +0.31 [+0.25, +0.37] over 24 prompts: after is better`."""
    text = (
        f"{c.method}: {c.b} against {c.a}: {c.difference:+.3f} [{c.interval[0]:+.3f}, {c.interval[1]:+.3f}] "
        f"over {c.n_prompts} prompts: {c.verdict}"
    )
    if c.n_prompts < c.least_prompts:
        text += f"; nothing is called better on fewer than {c.least_prompts} prompts"
    elif c.verdict == "undecided" and c.prompts_needed is not None:
        text += f"; about {c.prompts_needed} prompts would decide a difference of this size"
    return text if c.note is None else f"{text} ({c.note})"


def _notes(report: EvalReport) -> list[str]:
    notes = [f"{report.definition}; equal: outputs that are the plain ones"]
    for name, facts in report.drafters.items():
        if "checkpoint" in facts:
            notes.append(f"{name}: {facts['checkpoint']} of {facts['path']}")
    timed = max((r.timed_prompts for r in report.results if r.prompt_set == ALL_SETS), default=0)
    if report.settings["batch"] > 1:
        notes.append(
            f"decoded {report.settings['batch']} prompts at a time; tok/s and speed-up are of {timed} prompts decoded "
            "once more one at a time"
        )
    if report.settings["compile"] != "off":
        notes.append(f"rounds of one prompt at a time in static shapes, compile {report.settings['compile']}")
    return notes


def _tree_table(report: EvalReport) -> Table:
    table = _empty_table("trees on the chain's own rounds")
    for column in ("drafter", "method"):
        table.add_column(column, no_wrap=True)
    for column in ("rounds", "chain tau", "tree tau", "gain", "holds the chain", "no less then"):
        table.add_column(column, justify="right")
    for found in report.tree_rounds:
        chain, tree = found.chain_tokens / found.rounds, found.tree_tokens / found.rounds
        _add_row(
            table,
            found.drafter,
            found.method,
            str(found.rounds),
            f"{chain:.2f}",
            f"{tree:.2f}",
            f"{tree / chain - 1:+.1%}",
            str(found.rounds_with_chain),
            str(found.rounds_not_below_chain),
        )
    return table


def _empty_table(title: str) -> Table:
    return Table(title=Text(title), box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)


def _add_row(table: Table, *cells: str) -> None:
    table.add_row(*(Text(cell) for cell in cells))


def _result_table(results: list[MethodResult], name: str) -> Table:
    title = "acceptance length" if name == ALL_SETS else f"acceptance length, {name}"
    table = _empty_table(f"{title} ({results[0].n_prompts} prompts)")
    for column in ("drafter", "method"):
        table.add_column(column, no_wrap=True)
    for column in ("tau", "95 %", "fwd/tok", "full", "tok/s", "speed-up", "equal"):
        table.add_column(column, justify="right", no_wrap=True)
    for result in results:
        _add_row(
            table,
            result.drafter or "",
            result.method + (" replayed" if result.replayed else ""),
            _number(result.acceptance_length, ".2f"),
            _interval(result.interval),
            _number(result.forwards_per_token, ".2f"),
            _number(result.full_block_share, ".0%"),
            _number(result.tokens_per_s, ".1f"),
            _number(result.speedup, ".2f"),
            _equality(result),
        )
    return table


def _group_table(results: list[MethodResult]) -> Table | None:
    results = [r for r in results if r.method != "plain"]
    kinds = {(g.kind, g.name): g.n_prompts for r in results for g in r.groups}
    # A kind with a single group says nothing that the table above does not.
    counts = {kind: sum(k == kind for k, _ in kinds) for kind, _ in kinds}
    rows = [(key, n) for key, n in kinds.items() if counts[key[0]] > 1]
    if not rows:
        return None
    table = _empty_table("acceptance length by group")
    table.add_column("group")
    table.add_column("prompts", justify="right")
    for result in results:
        table.add_column(Text(f"{result.drafter or ''} {result.method}".strip()), justify="right")
    for (kind, name), n_prompts in rows:
        cells = [
            next((_number(g.acceptance_length, ".2f") for g in r.groups if (g.kind, g.name) == (kind, name)), "")
            for r in results
        ]
        _add_row(table, f"{kind}: {name}", str(n_prompts), *cells)
    return table


def _equality(result: MethodResult) -> str:
    equality = result.equality
    if equality is None or result.method == "plain":
        return ""
    text = f"{equality.equal}/{result.n_prompts}"
    if equality.near_ties:
        text += f" +{len(equality.near_ties)} ties"
    return text + (f", {len(equality.divergences)} DIVERGE" if equality.divergences else "")


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _interval(value: tuple[float, float] | None) -> str:
    return "" if value is None else f"{value[0]:.2f}-{value[1]:.2f}"
