"""Several runs side by side: the same curve of each in one chart, their ends, and where their configurations differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from draftline.config.load import config_differences
from draftline.monitor.render import duration
from draftline.report.charts import Axis, Chart, figure, line_chart
from draftline.report.curves import Curve
from draftline.report.figures import TERMS
from draftline.report.source import RunSource
from draftline.report.tables import Table, waiting_shares

_PLAIN: Mapping[str, tuple[str, str]] = {
    "train/loss": ("Loss", "loss"),
    "validation/loss": ("Validation loss", "loss"),
    "train/acceptance": ("Acceptance length of training blocks", "tokens per target forward"),
    "validation/acceptance": ("Acceptance length of validation blocks", "tokens per target forward"),
    "train/tokens_per_s": ("Throughput", "tokens per second"),
    "train/learning_rate": ("Learning rate", "learning rate"),
    "train/grad_norm": ("Gradient norm", "norm"),
}


def names_of(runs: Sequence[RunSource]) -> list[str]:
    """A name for each run: its folder's, with the folders above it as far as needed to tell them apart."""
    for depth in range(1, 6):
        names = ["/".join(run.path.resolve().parts[-depth:]) for run in runs]
        if len(set(names)) == len(names):
            return names
    return [f"{run.name} ({number})" for number, run in enumerate(runs, start=1)]


def compared_charts(runs: Mapping[str, RunSource]) -> list[Chart]:
    """One chart a curve that any run has."""
    plain = {**_PLAIN, **{f"train/{term}": (f"Loss term {term}", "loss") for term in TERMS}}
    more = {name for run in runs.values() for name in run.metrics.curves if name.startswith("validation/acceptance_")}
    plain |= {name: (_words(name), "tokens per target forward") for name in sorted(more, key=_by_number)}
    found = []
    for name, (title, axis) in plain.items():
        curves = {run: source.metrics.curves.get(name, Curve()) for run, source in runs.items()}
        if any(value for curve in curves.values() for _, value in curve.points()):
            found.append(line_chart(name.replace("/", "-"), title, curves, Axis(axis)))
    charts = [chart for chart in found if chart is not None]
    for chart in charts:
        chart.layout["showlegend"] = True  # of one run alone too: whose it is
    return charts


def _words(name: str) -> str:
    """`validation/acceptance_walk_tree_16` -> `Acceptance length of validation, walk tree@16`."""
    rest = name.removeprefix("validation/acceptance_").replace("tree_", "tree@").replace("_", " ")
    return f"Acceptance length of validation, {rest}"


def _by_number(name: str) -> tuple[str, int]:
    kind, _, number = name.rpartition("_")
    return (kind, int(number)) if number.isdigit() else (name, -1)


def compared_tables(runs: Mapping[str, RunSource]) -> list[Table]:
    """Ends side by side, evaluations side by side, and the fields of the configurations that differ."""
    sources = list(runs.values())
    ends: dict[str, list[str]] = {
        "state": [run.status.detail for run in sources],
        "rows committed of planned": [_rows(run) for run in sources],
        "running": [duration(run.timeline.length_s) for run in sources],
        "waiting, share of each side's time": [waiting_shares(run.timeline) or "-" for run in sources],
        **{_with_unit(*words): [_end(run, name) for run in sources] for name, words in _PLAIN.items()},
        **_decoded(sources),
    }
    first, *others = sources
    fields = {
        path: None for other in others for path, _, _ in config_differences(first.config, other.config, frozenset())
    }
    rows = tuple((path, *(_value(run, path) for run in sources)) for path in fields)
    note = "" if rows else "They are the same."
    return [
        Table(
            "How they ended", ("", *runs), tuple((name, *cells) for name, cells in ends.items() if set(cells) != {"-"})
        ),
        Table("Configurations differ in", ("field", *runs), rows, note),
    ]


def _with_unit(title: str, axis: str) -> str:
    return f"{title}, {axis}" if " per " in axis else title


def _rows(run: RunSource) -> str:
    counts = run.status.snapshot.ledger
    return f"{counts.committed} of {counts.planned}"


def _end(run: RunSource, name: str) -> str:
    curve = run.metrics.curves.get(name)
    return figure(curve.last() if curve else None)


def _decoded(runs: Sequence[RunSource]) -> dict[str, list[str]]:
    """Acceptance length by decoding, of each (drafter, method) that any run's evaluations hold."""
    found: dict[str, list[str]] = {}
    for number, run in enumerate(runs):
        for evaluation in run.evaluations:
            for result in evaluation.results:
                if result["prompt_set"] == "all" and result["drafter"] is not None:
                    key = f"{result['drafter']} {result['method']}, decoded"
                    found.setdefault(key, ["-"] * len(runs))[number] = figure(result["acceptance_length"])
    return found


def _value(run: RunSource, path: str) -> str:
    value: object = run.config.model_dump(mode="json")
    for part in path.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return "-" if value is None else str(value)
