"""The tables of a report: figures at a glance, evaluations, ledger, data, versions, checkpoints, what happened."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from draftline.data.manifest import DatasetManifest
from draftline.monitor.render import duration, size
from draftline.monitor.verdict import rate
from draftline.report.charts import figure
from draftline.report.source import Evaluation, RunSource
from draftline.report.timeline import Timeline

_MOST_NOTES = 200


@dataclass(frozen=True, slots=True)
class Table:
    """A table of the page: a heading, a header row (empty for a list of facts), rows of text."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def glance(run: RunSource) -> Table:
    """What one wants to know first."""
    snapshot, curves = run.status.snapshot, run.metrics.curves
    validation = curves["validation/acceptance"].last() if "validation/acceptance" in curves else None
    facts = {
        "state": run.status.detail,
        "rows": f"{snapshot.ledger.committed} committed of {snapshot.ledger.planned} planned",
        "time": f"{duration(run.timeline.length_s)} of running in {len(run.timeline.session_starts_s)} session(s)",
        "loss, smoothed": figure(snapshot.loss),
        "acceptance length of training blocks": figure(snapshot.acceptance),
        "acceptance length of validation blocks": figure(validation),
        "acceptance length by decoding": _decoded(run.evaluations) or "not measured: give reports by --evaluation",
        "tokens trained, last session": f"{snapshot.tokens_trained:,}, at the end {rate(snapshot.tokens_per_s)}",
        "waiting, share of each side's time": waiting_shares(run.timeline) or "-",
        "limited by, at the end": snapshot.verdict.sentence,
        "target": run.config.target.model,
    }
    return Table("At a glance", (), tuple(facts.items()))


def waiting_shares(timeline: Timeline) -> str:
    """`targets 8 %, drafters 16 %`: the side that waits less is the one that limits."""
    shares = []
    for role in ("target", "drafter"):
        totals = [timeline.totals(worker) for worker in timeline.seconds if worker.rpartition("-")[0] == role]
        whole = sum(sum(labels.values()) for labels in totals)
        waited = sum(s for labels in totals for label, s in labels.items() if label.startswith("waiting"))
        if whole:
            shares.append(f"{role}s {waited / whole:.0%}".replace("%", " %"))
    return ", ".join(shares)


def _decoded(evaluations: Sequence[Evaluation]) -> str:
    found = [
        f"{r['drafter']} {r['method']} {figure(r['acceptance_length'])}"
        for evaluation in evaluations
        for r in evaluation.results
        if r["prompt_set"] == "all" and r["drafter"] is not None and r["acceptance_length"] is not None
    ]
    return ", ".join(found[:6])


def evaluation_tables(evaluations: Sequence[Evaluation]) -> Iterator[Table]:
    """One table an evaluation: every method on every prompt set, and its comparisons."""
    for evaluation in evaluations:
        sets = {str(result["prompt_set"]) for result in evaluation.results} - {"all"}
        shown = (r for r in evaluation.results if len(sets) != 1 or r["prompt_set"] != "all")  # one set is all there is
        rows = tuple(_method_row(result) for result in shown)
        header: tuple[str, ...] = ("prompt set", "method", "drafter", "prompts", "tau", "95 % interval")
        header += ("tokens/s", "speed-up", "outputs as the target's")
        warnings = evaluation.content.get("warnings") or []
        note = " ".join([str(evaluation.content.get("definition", "")) + ".", *map(str, warnings)])
        yield Table(f"Evaluation: {evaluation.name}", header, rows, note)
        groups = tuple(_group_rows(evaluation))
        if groups:
            header = ("group", "drafter", "method", "prompts", "tau", "95 % interval")
            yield Table(f"Groups of prompts: {evaluation.name}", header, groups)
        compared = tuple(
            tuple(str(c.get(key, "-")) for key in ("method", "a", "b", "n_prompts", "verdict"))
            for c in evaluation.content.get("comparisons") or []
            if isinstance(c, dict)
        )
        if compared:
            yield Table(f"Comparisons: {evaluation.name}", ("method", "A", "B", "prompts", "verdict"), compared)


def _group_rows(evaluation: Evaluation) -> Iterator[tuple[str, ...]]:
    for result in evaluation.results:
        for group in result.get("groups") or []:
            if result["prompt_set"] == "all" and result["drafter"] is not None and isinstance(group, dict):
                tau, spread = figure(group.get("acceptance_length")), _interval(group.get("interval"))
                who = (str(result["drafter"]), str(result["method"]), str(group.get("n_prompts")))
                yield f"{group.get('kind')}: {group.get('name')}", *who, tau, spread


def _method_row(result: dict[str, Any]) -> tuple[str, ...]:
    equality = result.get("equality")
    same = f"{equality.get('equal')} of {result['n_prompts']}" if isinstance(equality, dict) else "-"
    return (
        str(result["prompt_set"]),
        str(result["method"]),
        str(result["drafter"] or "-"),
        str(result["n_prompts"]),
        figure(result["acceptance_length"]),
        _interval(result["interval"]),
        figure(result.get("tokens_per_s")),
        figure(result.get("speedup")),
        same,
    )


def _interval(interval: Any) -> str:
    return f"{figure(interval[0])} to {figure(interval[1])}" if isinstance(interval, list | tuple) else "-"


def fact_tables(run: RunSource) -> Iterator[Table]:
    """Ledger, data, versions, checkpoints, what happened."""
    counts = run.status.snapshot.ledger
    ledger = {
        "planned": str(counts.planned),
        "committed": str(counts.committed),
        "set aside": str(counts.set_aside),
        "in flight": str(counts.trained),
        "remaining": str(counts.remaining),
    }
    note = "Planned = committed + set aside + in flight + remaining, at the last status."
    yield Table("Ledger", (), tuple(ledger.items()), note)
    yield data_table(run.data)
    yield Table("Versions and fingerprints", (), tuple(versions(run).items()))
    if run.checkpoints:
        rows = tuple((name, size(n_bytes)) for name, n_bytes in run.checkpoints)
        yield Table("Checkpoints kept", ("round", "size"), rows)
    notes = run.timeline.notes
    moments = tuple((duration(at), kind, text) for at, kind, text in notes[-_MOST_NOTES:])
    torn = run.timeline.torn_lines + run.metrics.torn_lines
    words = f"{torn} torn or unreadable lines of the logs were passed over." if torn else ""
    yield Table("What happened", ("at", "what", "facts"), moments, words)


def data_table(data: DatasetManifest | str) -> Table:
    """The manifest of the data, or why it is not there."""
    if isinstance(data, str):
        return Table("Data", (), (("not readable now", data),))
    facts = {
        "samples": f"{data.n_samples:,}",
        "tokens": f"{data.n_tokens:,}, supervised {data.n_supervised:,}",
        "rows read": f"{data.in_rows:,}",
        "rejected": ", ".join(f"{why} {n}" for why, n in data.rejected.items()) or "none",
        "longest sample": f"{data.max_tokens} tokens at most; {data.n_answer_cut} answers cut",
        "part": f"{data.part}, validation share {data.validation_fraction:g}, seed {data.seed}",
        "sources": "; ".join(f"{s.name} ({s.in_rows} rows)" for s in data.sources),
        "tokenizer, template": f"{data.tokenizer_fingerprint[:16]}, {data.template_hash[:16]}",
        "fingerprint": data.fingerprint,
    }
    if data.label_check is not None:
        facts["labels that are the target's own"] = f"{data.label_check.share:.1%} of {data.label_check.n_labels}"
    return Table("Data", (), tuple(facts.items()))


def versions(run: RunSource) -> dict[str, str]:
    """What wrote the run, as far as it was recorded."""
    found: dict[str, str] = {}
    for source in (run.identity.get("versions"), *(e.content.get("versions") for e in run.evaluations)):
        if isinstance(source, dict):
            found |= {str(name): str(version) for name, version in source.items() if str(name) not in found}
    prints = run.identity.get("fingerprints")
    if isinstance(prints, dict):
        found |= {f"{name} fingerprint": str(value) for name, value in prints.items()}
    return found or {"not recorded": "the run was started by an earlier version"}
