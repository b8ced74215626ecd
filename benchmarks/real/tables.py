"""Tables of the results page, from the merged figures alone. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from draftline.evaluate.stats import Difference, PromptCounts, paired_difference, pooled

Figures = dict[str, Any]
Rows = Iterable[Sequence[str]]
MAINS = (
    ("specforge", "plain recipe, SpecForge 0.2.0"),
    ("draftline", "plain recipe"),
    ("ddtree", "DDTree recipe"),
    ("recommended", "recommended recipe"),
)
SETS = ("gsm8k", "arena", "general")
SYNCS = {
    "average": "average every 50 rows",
    "often": "average every 10 rows",
    "copy": "copy every 100 rows",
    "gradient": "one gradient a step",
}


def table(head: Sequence[str], rows: Rows) -> list[str]:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def tau(figures: Figures | None) -> str:
    """`3.21 (3.10-3.32)`; empty if there is nothing."""
    if not figures or figures["acceptance_length"] is None:
        return ""
    value, bounds = figures["acceptance_length"], figures["interval"]
    return f"{value:.2f}" + (f" ({bounds[0]:.2f}-{bounds[1]:.2f})" if bounds else "")


def counts_of(figures: Figures) -> list[PromptCounts]:
    """Counts of each prompt."""
    return [PromptCounts(t, r) for t, r in zip(figures["tokens"], figures["rounds"], strict=True)]


def difference(before: Figures, after: Figures) -> Difference | None:
    """Paired by prompt."""
    return paired_difference(counts_of(before), counts_of(after))


def gain(before: Figures, after: Figures) -> str:
    """Relative change with its interval: `+3.1 % (+1.2 to +5.0)`."""
    found, base = difference(before, after), before["acceptance_length"]
    if found is None or not base:
        return ""
    value, low, high = (100 * x / base for x in (found.value, found.low, found.high))
    return f"{value:+.1f} % ({low:+.1f} to {high:+.1f})"


def data_table(parts: Figures) -> list[str]:
    """Samples by role."""
    samples = parts["baselines"]["data"]["samples"]
    rows = [
        [role, str(f["samples"]), f"{f['tokens']:,}", f"{f['supervised_tokens']:,}", str(f["cut"])]
        for role, f in samples.items()
    ]
    return table(["set", "prompts", "tokens", "of them the target's", "answers cut by the limit"], rows)


def head_to_head(parts: Figures) -> list[str]:
    """Acceptance against training seconds for both sides."""
    sides = [parts.get("main-draftline"), parts.get("main-specforge")]
    if not all(sides):
        return ["Not measured yet."]
    ours, peer = ([*_marks(side)] for side in sides if side)
    rows = []
    for mine, its in zip(ours, peer, strict=True):
        ratio = mine["walked"]["acceptance_length"] / its["walked"]["acceptance_length"]
        line = [f"{mine['training_s']:.1f}", str(mine["steps"]), str(its["steps"])]
        line += [tau(mine["walked"]), tau(its["walked"]), f"{ratio:.2f}"]
        rows.append([*line, tau(mine.get("decoded")), tau(its.get("decoded"))])
    head = ["training s", "our steps", "its steps", "ours, walked", "SpecForge, walked", "ratio"]
    return [*table([*head, "ours, decoded", "SpecForge, decoded"], rows), "", *costs(parts)]


def costs(parts: Figures) -> list[str]:
    """What is not training: capture for both, warm-up of each, and the learning rates that were chosen."""
    seconds = parts["baselines"]["data"]["seconds"]
    rows = []
    for side in ("draftline", "specforge"):
        main, tuned = parts.get(f"main-{side}"), parts.get(f"tune-{side}")
        if main is None or tuned is None:
            continue
        first_s = max(t["warm_s"] for t in tuned["tries"])
        rates = ", ".join(f"{t['learning_rate']:g}: {t['dev_chain']:.2f}" for t in tuned["tries"])
        line = [side, f"{main['step_s'] * 1e3:.1f}", f"{first_s:.1f}", f"{seconds.get('capture', 0):.1f}"]
        rows.append([*line, f"{main['training_s'] + first_s + seconds.get('capture', 0):.1f}", rates])
    head = ["side", "ms a step", "compile s", "capture s", "all s", "rates tried: chain on dev"]
    return table(head, rows)


def _marks(side: Figures) -> list[Figures]:
    """The marks of a main run, its end among them."""
    end = {"training_s": side["training_s"], "steps": side["steps"], "walked": side["walked"]["gsm8k"]["chain"]}
    return [*side["marks"], end | {"decoded": side["decoded"]["gsm8k"]["chain"]}]


def answer_table(parts: Figures, kind: str) -> list[str]:
    """Every main run on every kept set, `walked` (all prompts) or `decoded` (the first ones, for real)."""
    rows = [["prompt lookup", *(tau(parts["baselines"][kind][name]["lookup"]) for name in SETS)]]
    for name, words in MAINS:
        main = parts.get(f"main-{name}")
        if main is None:
            continue
        for method in main[kind]["gsm8k"]:
            cells = [tau(main[kind][s].get(method)) for s in SETS]
            rows.append([f"{words}, block {main['block_size']}: {method}", *cells])
    return table(["", *SETS], rows)


def curve_table(parts: Figures) -> list[str]:
    """Acceptance by the size of the tree."""
    found = {words: parts[f"main-{n}"]["curve"] for n, words in MAINS if "curve" in parts.get(f"main-{n}", {})}
    if not found:
        return ["Not measured yet."]
    methods = list(next(iter(found.values())))
    return table(["", *methods], [[words, *(tau(curve[m]) for m in methods)] for words, curve in found.items()])


def ablation_table(parts: Figures) -> list[str]:
    """One change at a time against the plain recipe at equal seconds, paired by prompt."""
    plain = parts.get("ablation-plain")
    if plain is None:
        return ["Not measured yet."]
    base = plain["walked"]["gsm8k"]
    tree = next(name for name in base if name != "chain")
    rows = [["plain recipe", str(plain["steps"]), tau(base["chain"]), "", tau(base[tree]), ""]]
    for name, part in parts.items():
        if not name.startswith("ablation-") or part is plain:
            continue
        for words, own in _forms(part):
            line = [words, str(part["steps"]), tau(own["chain"]), gain(base["chain"], own["chain"])]
            rows.append([*line, tau(own[tree]), gain(base[tree], own[tree])])
    return table(["change", "steps", "chain", "against plain", tree, "against plain"], rows)


def _forms(part: Figures) -> list[tuple[str, Figures]]:
    """A recipe as trained, and with its smaller blocks."""
    change, forms = part["variant"]["change"], [("", part["walked"]["gsm8k"])]
    other = part.get("at_other_block")
    if other is not None:
        forms.append((f", drafting {other['block_size']}", other["gsm8k"]))
    return [(change + words, figures) for words, figures in forms]


def seed_table(parts: Figures) -> list[str]:
    """The same recipes from other seeds."""
    found: dict[str, list[Figures]] = {}
    for name, part in parts.items():
        if name.startswith(("seed", "ablation-")):
            found.setdefault(part["variant"]["name"], []).append(part)
    rows = []
    for name, members in found.items():
        if len(members) < 2:
            continue
        methods = list(members[0]["walked"]["gsm8k"])
        cells = []
        for method in methods:
            values = [m["walked"]["gsm8k"][method]["acceptance_length"] for m in members]
            cells.append(f"{', '.join(f'{v:.2f}' for v in values)} (mean {sum(values) / len(values):.3f})")
        rows.append([name, *cells])
    return table(["recipe", "chain", "tree"], rows) if rows else ["Not measured yet."]


def several_table(parts: Figures) -> list[str]:
    """Drafters and synchronisation at equal total work."""
    rows = []
    for part in (p for n, p in parts.items() if n.startswith("sync-")):
        cells = [tau(figures) for figures in part["walked"]["gsm8k"].values()]
        line = [str(part["drafters"]), SYNCS[part["sync"]], str(part["rows"]), str(part["meetings"])]
        rows.append([*line, f"{part['training_s']:.1f}", *cells])
    head = ["drafters", "sync", "rows in all", "meetings", "s on one GPU", "chain", "tree"]
    return table(head, rows) if rows else ["Not measured yet."]


def long_table(parts: Figures) -> list[str]:
    """The long run at its marks."""
    part = parts.get("long-recommended")
    if part is None:
        return ["Not measured yet."]
    methods = list(part["walked"]["gsm8k"])
    rows = [
        [f"{m['training_s']:.0f}", str(m["steps"]), *(tau(m["walked"][s][method]) for s in SETS for method in methods)]
        for m in part["marks"]
    ]
    return table(["training s", "steps", *(f"{s}, {method}" for s in SETS for method in methods)], rows)


def loop_table(parts: Figures) -> list[str]:
    """Chain and lookup where the target repeats itself and where it does not: lookup above 3 tells a loop."""
    part = parts.get("long-recommended") or parts.get("main-recommended")
    if part is None:
        return ["Not measured yet."]
    rows = []
    for name in SETS:
        chains = counts_of(part["walked"][name]["chain"])
        copied = counts_of(lookups(parts, part)[name])
        loops = [one.tokens > 3 * one.rounds for one in copied]
        for words, wanted in (("repeats", True), ("others", False)):
            sides = ([c for c, loop in zip(side, loops, strict=True) if loop is wanted] for side in (copied, chains))
            rows.append([name, words, str(loops.count(wanted)), *map(_pooled, sides)])
    return table(["set", "answers", "prompts", "lookup", "chain"], rows)


def _pooled(counts: Sequence[PromptCounts]) -> str:
    rounds = sum(c.rounds for c in counts)
    return f"{sum(c.tokens for c in counts) / rounds:.2f}" if rounds else ""


@dataclass(frozen=True)
class Estimate:
    """Acceptance lengths of one method on the prompts that were decoded.

    Attributes:
        walked: along the answers that the target gave before, which are other texts where bf16 broke a tie differently.
        along_it: along the decoded texts; None where that was not measured.
    """

    run: str
    method: str
    walked: float
    along_it: float | None
    decoded: float

    @property
    def off(self) -> float:
        """Relative difference of decoding and the walk along the kept answers."""
        return self.walked / self.decoded - 1

    @property
    def off_along_it(self) -> float | None:
        """Relative error of the walk along the decoded texts."""
        return self.along_it / self.decoded - 1 if self.along_it else None

    def cells(self) -> list[str]:
        """A row of the table."""
        walks = ((self.walked, self.off), (self.along_it, self.off_along_it))
        shown = [cell for value, off in walks for cell in (_text(value, ".3f"), _text(off, "+z.1%"))]
        return [self.run, self.method, f"{self.decoded:.3f}", *shown]


def _text(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form).replace("%", " %")


def estimates(parts: Figures) -> tuple[list[Estimate], list[Estimate]]:
    """Of all runs whose export was decoded for real: for each set, and over all decoded prompts of a run."""
    runs = [*((f"main-{name}", words) for name, words in MAINS), ("long-recommended", "long run")]
    by_set, by_run = [], []
    for part_name, words in runs:
        part = parts.get(part_name, {})
        decoded = part.get("decoded", {})
        for method in dict.fromkeys(m for methods in decoded.values() for m in methods):
            members = {name: (part["walked"][name][method], own[method]) for name, own in decoded.items()}
            by_set += [_estimate(f"{words}, {name}", method, [member]) for name, member in members.items()]
            by_run.append(_estimate(f"{words}, all", method, list(members.values())))
    return by_set, by_run


def _estimate(run: str, method: str, members: Sequence[tuple[Figures, Figures]]) -> Estimate:
    """Of sets that were (walked, decoded); the first prompts of each are the decoded ones."""
    walked = [c for kept, real in members for c in counts_of(kept)[: real["prompts"]]]
    decoded = [c for _, real in members for c in counts_of(real)]
    along: float | None = None
    if all(real.get("walked_along_it") for _, real in members):
        tokens = [sum(real["tokens"]) for _, real in members]
        along = sum(tokens) / sum(n / real["walked_along_it"] for n, (_, real) in zip(tokens, members, strict=True))
    return Estimate(run, method, pooled(walked) or 0.0, along, pooled(decoded) or float("nan"))


def estimate_table(parts: Figures) -> list[str]:
    """Training-time acceptance beside real decoding."""
    head = ["", "method", "decoded", "walk of kept answers", "off", "walk of decoded texts", "off"]
    by_set, by_run = estimates(parts)
    return table(head, [e.cells() for e in (*by_run, *by_set)])


def verdicts(parts: Figures) -> list[str]:
    """Each promise of the experiment, with its figure."""
    lines = []
    ours, peer = parts.get("main-draftline"), parts.get("main-specforge")
    if ours and peer:
        a, b = ours["walked"]["gsm8k"]["chain"], peer["walked"]["gsm8k"]["chain"]
        ratio = a["acceptance_length"] / b["acceptance_length"]
        lines.append(f"- Chain against the SpecForge loop at equal training seconds: {ratio:.3f} times (asked: 1.15).")
    mains = (parts.get(f"main-{name}") for name, _ in reversed(MAINS))
    last = parts.get("long-recommended") or next((main for main in mains if main), None)
    if last is not None:
        lines += _verdicts_of_last(last, lookups(parts, last))
    return [*lines, *_estimate_verdicts(*estimates(parts)), *_time_verdict(parts)] or ["Not measured yet."]


def lookups(parts: Figures, part: Figures) -> Figures:
    """Prompt lookup along the answers that a part was walked along, by set."""
    walked: Figures = parts["baselines"]["walked"]
    return part.get("lookup") or {name: methods["lookup"] for name, methods in walked.items()}


def _verdicts_of_last(last: Figures, lookup: Figures) -> list[str]:
    methods = last["walked"]["gsm8k"]
    chain, tree = methods["chain"], next((f for m, f in methods.items() if m != "chain"), None)
    lines = [f"- Chain on GSM8K: {tau(chain)} (asked: 3.5)."]
    if tree is not None:
        lines.append(f"- Tree over the chain of the same drafter: {gain(chain, tree)} (asked: +15 %).")
    pairs = {name: (_value(last["walked"][name]["chain"]), _value(lookup[name])) for name in SETS}
    beaten = sum(chain > copied for chain, copied in pairs.values())
    words = ", ".join(f"{name} {chain:.2f} to {copied:.2f}" for name, (chain, copied) in pairs.items())
    return [*lines, f"- Chain above prompt lookup on {beaten} of {len(SETS)} sets (asked: all): {words}."]


def _estimate_verdicts(by_set: Sequence[Estimate], by_run: Sequence[Estimate]) -> list[str]:
    lines = []
    for found, words, end in ((by_run, "all decoded prompts of a run", " (asked: 5 %)"), (by_set, "one set", "")):
        if not found:
            continue
        kept = 100 * max(abs(e.off) for e in found)
        line = f"- Walk and real decoding, {words}: {kept:.1f} % apart at most along the answers kept before{end}"
        exact = [abs(e.off_along_it) for e in found if e.off_along_it is not None]
        lines.append(line + (f"; along the decoded texts {100 * max(exact):.1f} %." if exact else "."))
    return lines


def _time_verdict(parts: Figures) -> list[str]:
    """What it took from nothing; the long run counts apart."""
    seconds = {name: part["part_s"] for name, part in parts.items() if "part_s" in part}
    long_s = seconds.pop("long-recommended", 0.0)
    if parts.get("answers", {}).get("from") != "the target":  # answers that were kept from an earlier run
        return []
    more = f"; the long run {long_s:.0f} s more" if long_s else ""
    return [f"- {len(seconds)} parts from nothing in {sum(seconds.values()):.0f} s (asked: 1500){more}."]


def _value(figures: Figures) -> float:
    return float(figures["acceptance_length"])
