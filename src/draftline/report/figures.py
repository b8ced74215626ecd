"""Which charts a report shows: curves of training, the timeline of the workers, acceptance by budget."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from draftline.monitor.render import duration
from draftline.report.charts import Axis, Chart, figure, line_chart, xy_chart
from draftline.report.curves import Curve, Metrics
from draftline.report.source import Evaluation, RunSource
from draftline.report.timeline import Timeline

TERMS = ("ce", "kl", "tv", "reverse_kl", "cap")
# Order and colour of what a worker does: work first, then what holds it up.
_ACTIVITIES = ("working", "averaging", "checkpointing", "validating", "compiling", "starting")
_NAME_SHARE = 0.32  # of a band's height, for the worker's name above it
_LOG_FROM = 50.0
_LENGTH = Axis("tokens per target forward")


def run_charts(run: RunSource) -> list[Chart]:
    """The charts of one run, in reading order; what has no figures is left out."""
    decoded = [budget_chart(run.metrics, run.evaluations), position_chart(run.evaluations)]
    found = [*curve_charts(run.metrics), timeline_chart(run.timeline), *decoded]
    return [chart for chart in found if chart is not None]


def curve_charts(metrics: Metrics) -> Iterator[Chart | None]:
    """Curves over rows trained."""
    yield line_chart(
        "loss",
        "Loss",
        losses(metrics),
        Axis("loss"),
        note="Smoothed over recent rows as in the status line; terms are dotted and stand without their weights.",
        dotted=[name.replace("_", " ") for name in TERMS],
    )
    yield line_chart(
        "acceptance",
        "Acceptance length, estimated",
        lengths(metrics),
        _LENGTH,
        note="Of training blocks "
        "and, where there is validation data, at its anchors and along its answers. Real decoding is under evaluation.",
    )
    yield from recall_charts(metrics)
    yield line_chart(
        "rate", "Learning rate", _some(metrics, {"learning rate": "train/learning_rate"}), Axis("learning rate")
    )
    yield line_chart("norm", "Gradient norm", _some(metrics, {"norm before clipping": "train/grad_norm"}), Axis("norm"))
    speeds = throughput(metrics)
    note = (
        "Trained by wall clock, and what each side could do: tokens per second of working time. The lower side limits."
    )
    yield line_chart("throughput", "Throughput", speeds, _speed_axis(speeds), note=note)
    yield line_chart("queue", "Rows waiting for a drafter", _some(metrics, {"queue": "queue/rows"}), Axis("rows"))


def losses(metrics: Metrics) -> dict[str, Curve]:
    """The loss, its terms that are not zero throughout, and the validation loss."""
    curves = _some(metrics, {"loss": "train/loss", "validation": "validation/loss"})
    terms = _some(metrics, {name.replace("_", " "): f"train/{name}" for name in TERMS})
    return curves | {name: curve for name, curve in terms.items() if any(v for _, v in curve.points())}


def lengths(metrics: Metrics) -> dict[str, Curve]:
    """Estimated acceptance lengths: training blocks, validation chain, trees and walks."""
    curves = _some(metrics, {"training blocks": "train/acceptance", "validation chain": "validation/acceptance"})
    for name, curve in metrics.named("validation/acceptance_").items():
        curves[f"validation {name.replace('tree_', 'tree@').replace('_', ' ')}"] = curve
    return curves


def throughput(metrics: Metrics) -> dict[str, Curve]:
    """Tokens per second: trained, supervised, and what targets and drafters could do."""
    names = {"trained": "train/tokens_per_s", "supervised": "train/supervised_tokens_per_s"}
    sides = {f"{side} could": f"capacity/{side}_tokens_per_s" for side in ("targets", "drafters")}
    return _some(metrics, names | sides)


def _speed_axis(curves: dict[str, Curve]) -> Axis:
    """Logarithmic where the curves would lie too far apart to be read together."""
    values = [value for curve in curves.values() for _, value in curve.points() if value > 0]
    far = bool(values) and max(values) > _LOG_FROM * min(values)
    return Axis("tokens per second", {"type": "log", "dtick": 1} if far else {"rangemode": "tozero"})


def recall_charts(metrics: Metrics) -> Iterator[Chart | None]:
    """recall@k by position at the end, and recall@1 of each position over the run."""
    for kind in ("validation", "train"):
        found: dict[int, dict[int, Curve]] = {}
        for name, curve in metrics.named(f"{kind}/recall_").items():
            if match := re.fullmatch(r"(\d+)/slot_(\d+)", name):
                found.setdefault(int(match[1]), {})[int(match[2])] = curve
        if not found:
            continue
        ends = {
            f"recall@{k}": [(float(slot), end) for slot, c in sorted(found[k].items()) if (end := c.last()) is not None]
            for k in sorted(found)
        }
        axes = Axis("position in the block", {"dtick": 1}), Axis("share of slots", {"range": [0, 1]})
        note = "Share of supervised slots whose label is among the drafter's k likeliest tokens, at the end."
        yield xy_chart(f"recall-{kind}", f"Recall by position, {kind}", ends, axes, note)
        slots = {f"position {slot}": curve for slot, curve in sorted(found[min(found)].items())}
        title = f"Recall@{min(found)} of each position, {kind}"
        yield line_chart(f"recall-curves-{kind}", title, slots, Axis("share of slots", {"range": [0, 1]}), most=300)


def timeline_chart(timeline: Timeline) -> Chart | None:
    """A band for each worker: shares of time by what it did, bin by bin."""
    workers = sorted((w for w in timeline.seconds if w != "coordinator"), key=_by_role)
    if not workers:
        return None
    labels = _labels(timeline)
    unit, per_unit = ("hours", 3600.0) if timeline.length_s > 7200 else ("minutes", 60.0)
    centres = [float(f"{(i + 0.5) * timeline.bin_s / per_unit:.6g}") for i in range(timeline.n_bins)]
    lowest = {"anchor": f"y{len(workers)}" if len(workers) > 1 else "y"}
    layout: dict[str, Any] = {"xaxis": Axis(f"{unit} of running", lowest).spec(), "hovermode": "closest"}
    layout["annotations"] = []
    traces: list[dict[str, Any]] = []
    for row, worker in enumerate(workers):
        top = 1 - row / len(workers) - _NAME_SHARE / len(workers)
        layout[f"yaxis{row + 1 if row else ''}"] = _band_axis(1 - (row + 1) / len(workers), top)
        layout["annotations"].append(_name_of_band(worker, top))
        shown = {trace["name"] for trace in traces}
        bands = {label: bins for label in labels if (bins := timeline.seconds[worker].get(label)) is not None}
        for label, bins in bands.items():
            shares = [round(seconds / timeline.bin_s, 3) for seconds in bins[: timeline.n_bins]]
            trace = _band(worker, label, labels.index(label)) | {"x": centres, "y": shares}
            traces.append(trace | {"yaxis": f"y{row + 1 if row else ''}", "showlegend": label not in shown})
    rows = tuple((w, *(duration(timeline.totals(w).get(label, 0.0)) for label in labels)) for w in workers)
    return Chart(
        key="timeline",
        title="What each worker did",
        alt="; ".join(f"{worker}: {_shares(timeline, worker)}" for worker in workers),
        traces=traces,
        layout=layout,
        header=("worker", *labels),
        rows=rows,
        note="A band a worker; its colours are shares of time. A target that waits for a free slot is faster than the "
        "drafters; a drafter that waits for a row is faster than the targets. Pauses between sessions are left out.",
        height=130 + 64 * len(workers),
    )


def _band_axis(low: float, high: float) -> dict[str, Any]:
    title = {"text": "share", "standoff": 4, "font": {"size": 11}}  # as long a word as a band is high
    plain = {"title": title, "showticklabels": False, "showgrid": False, "fixedrange": True}
    return {"domain": [max(0.0, low), high], "range": [0, 1], **plain}


def _name_of_band(worker: str, y: float) -> dict[str, Any]:
    where = {"xref": "paper", "yref": "paper", "x": 0, "y": y, "xanchor": "left", "yanchor": "bottom"}
    return {"text": worker, "showarrow": False, **where}


def _band(worker: str, label: str, number: int) -> dict[str, Any]:
    look = {"type": "scatter", "mode": "lines", "line": {"width": 0, "shape": "hvh"}, "hoveron": "fills"}
    return {**look, "stackgroup": worker, "name": label, "legendgroup": label, "meta": {"c": number, "fill": True}}


def budget_chart(metrics: Metrics, evaluations: Sequence[Evaluation]) -> Chart | None:
    """Acceptance length by the number of drafts in a tree, from validation and from real decoding."""
    series: dict[str, list[tuple[float, float]]] = {}
    for words, prefix in (("validation, at anchors", "tree_"), ("validation, walk", "walk_tree_")):
        for name, curve in metrics.named(f"validation/acceptance_{prefix}").items():
            if name.isdigit() and (end := curve.last()) is not None:
                series.setdefault(words, []).append((float(name), end))
    for evaluation in evaluations:
        for result in evaluation.results:
            kind, _, budget = str(result["method"]).partition("@")
            if kind == "tree" and budget.isdigit() and result["prompt_set"] == "all" and result["acceptance_length"]:
                words = f"{evaluation.name}: {result['drafter']}, decoded"
                series.setdefault(words, []).append((float(budget), float(result["acceptance_length"])))
    series = {name: sorted(points) for name, points in series.items()}
    budgets = sorted({budget for points in series.values() for budget, _ in points})
    ticks = {"tickvals": budgets, "ticktext": [f"{budget:g}" for budget in budgets]}
    axes = Axis("drafts in a tree", {"type": "log", **ticks}), _LENGTH
    return xy_chart("budget", "Acceptance length by budget", series, axes)


def position_chart(evaluations: Sequence[Evaluation]) -> Chart | None:
    """Share of rounds whose draft of a position was accepted, by real decoding."""
    series: dict[str, list[tuple[float, float]]] = {}
    for evaluation in evaluations:
        for result in evaluation.results:
            drafted, accepted = result.get("drafted_by_position") or [], result.get("accepted_by_position") or []
            if result["prompt_set"] != "all" or result["drafter"] is None or len(drafted) != len(accepted):
                continue
            counts = enumerate(zip(accepted, drafted, strict=True), start=1)
            points = [(float(slot), kept / tried) for slot, (kept, tried) in counts if tried]
            series[f"{evaluation.name}: {result['drafter']} {result['method']}"] = points
    axes = Axis("position in the block (depth of a tree)", {"dtick": 1}), Axis("share accepted", {"range": [0, 1]})
    note = "Of the rounds that drafted this position; a position counts only if all before it were accepted."
    return xy_chart("positions", "Accepted by position, decoded", series, axes, note)


def _labels(timeline: Timeline) -> list[str]:
    known = {label for labels in timeline.seconds.values() for label in labels}
    waits = sorted(label for label in known if label.startswith("waiting"))
    return [*(a for a in _ACTIVITIES if a in known), *waits, *sorted(known - set(_ACTIVITIES) - set(waits))]


def _shares(timeline: Timeline, worker: str) -> str:
    totals = timeline.totals(worker)
    whole = sum(totals.values()) or 1.0
    return ", ".join(f"{label} {figure(100 * seconds / whole)} %" for label, seconds in list(totals.items())[:4])


def _by_role(worker: str) -> tuple[bool, str, int]:
    role, _, number = worker.rpartition("-")
    return role != "target", role, int(number) if number.isdigit() else 0


def _some(metrics: Metrics, names: dict[str, str]) -> dict[str, Curve]:
    return {words: metrics.curves[name] for words, name in names.items() if name in metrics.curves}
