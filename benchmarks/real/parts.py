"""The parts of the experiment: each measures one thing and gives its figures as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from draftline.config.drafter_spec import DrafterSpec
from lab import Lab
from peer import PeerTrainer
from scoring import set_block
from settings import KEPT_SETS
from training import Course, OurTrainer, Snapshot, Trainer, first_weights, train_for
from variants import PLAIN, Variant

Figures = dict[str, Any]
ABLATION_SETS = ("gsm8k", "dev")


def baselines(lab: Lab) -> Figures:
    """Prompt lookup on every kept set, walked on all prompts and decoded for real on the first. Plain is 1."""
    walked = {name: {"lookup": lab.scorer.walk_lookup(name)} for name in KEPT_SETS}
    decoded = {name: {"lookup": f} for name, f in lab.scorer.decode_lookup(_limits(lab)).items()}
    return {"walked": walked, "decoded": decoded, "data": lab.describe()}


def _limits(lab: Lab) -> dict[str, int]:
    """Prompts of each set that are decoded for real."""
    settings = lab.settings
    return {name: settings.decode_prompts if name == "gsm8k" else settings.other_prompts for name in KEPT_SETS}


def make_trainer(lab: Lab, side: str, peak_rate: float) -> Trainer:
    """The plain recipe on one side: `draftline` or `specforge`."""
    if side == "draftline":
        return lab.trainer(PLAIN, peak_rate)
    first = first_weights(lab.plain_spec, PLAIN, lab.target)
    return PeerTrainer(lab.target, lab.padded, lab.plain_spec, first, lab.settings)


def tune(lab: Lab, side: str) -> Figures:
    """The learning rate of one side: a few seconds each, the best chain on `dev` wins."""
    settings, tries = lab.settings, []
    for rate in settings.rates:
        trainer = make_trainer(lab, side, rate)
        course = train_for(trainer, settings.tune_s, rate, lab.device)
        walked = lab.scorer.walk(trainer.spec, course.snapshots[-1].weights, ["dev"])
        tau = walked["dev"]["chain"]["acceptance_length"]
        tries.append({"learning_rate": rate, "dev_chain": tau} | course.as_figures())
        print(f"  {side} at {rate:g}: chain {tau:.3f} on dev, {course.steps} steps", flush=True)
        del trainer
        lab.free()
    best = max(tries, key=lambda found: found["dev_chain"])
    return {"side": side, "tries": tries, "learning_rate": best["learning_rate"]}


def main_run(lab: Lab, trainer: Trainer, peak_rate: float, *, at_marks: bool, trees: bool) -> Figures:
    """A long training: acceptance at its marks, and everything at its end.

    Args:
        at_marks: decode for real at each mark, too.
        trees: decode trees for real, and walk those of all budgets.
    """
    settings = lab.settings
    course = train_for(trainer, settings.main_s, peak_rate, lab.device, settings.marks)
    spec = trainer.spec
    marks = [_mark(lab, spec, snapshot, decode=at_marks) for snapshot in course.snapshots[:-1]]
    end = course.snapshots[-1].weights
    found: Figures = {"learning_rate": peak_rate, "block_size": spec.block_size, "marks": marks}
    found |= course.as_figures()
    found["walked"] = lab.scorer.walk(spec, end, [*KEPT_SETS, "dev"], (settings.budget,))
    found["estimate"] = lab.scorer.estimate(spec, end, "gsm8k", (settings.budget,))
    found["decoded"] = decode_all(lab, spec, course, (None, settings.budget) if trees else (None,))
    if trees:
        curve = lab.scorer.walk(spec, end, ["gsm8k"], settings.curve_budgets, settings.curve_prompts)
        found["curve"] = curve["gsm8k"]
    print(f"  {_line(found)}", flush=True)
    lab.free()
    return found


def long_run(lab: Lab, variant: Variant, peak_rate: float) -> Figures:
    """A recipe for minutes, with further drawn answers: what bounds the short runs, time and data or the recipe."""
    settings, rows = lab.settings, [*lab.rows["train"], *lab.more_rows]
    trainer = OurTrainer(lab.target, rows, variant, settings, peak_rate)
    course = train_for(trainer, settings.long_s, trainer.peak_rate, lab.device, settings.long_marks)
    spec, budgets = trainer.spec, (settings.budget,)
    found: Figures = {"variant": variant.as_figures(), "learning_rate": trainer.peak_rate, "rows": len(rows)}
    found |= course.as_figures()
    found["marks"] = [
        {"training_s": s.training_s, "steps": s.steps, "walked": lab.scorer.walk(spec, s.weights, KEPT_SETS, budgets)}
        for s in course.snapshots
    ]
    found["walked"] = found["marks"][-1]["walked"]
    found["lookup"] = {name: lab.scorer.walk_lookup(name) for name in KEPT_SETS}
    found["decoded"] = decode_all(lab, spec, course, (None, settings.budget))
    print(f"  {_line(found)}", flush=True)
    lab.free()
    return found


def decode_all(lab: Lab, spec: DrafterSpec, course: Course, budgets: Sequence[int | None]) -> Figures:
    """Real decoding of the export on the first prompts of each kept set; budget None is the chain."""
    drafter = lab.scorer.exported(spec, course.snapshots[-1].weights)
    found: Figures = {name: {} for name in KEPT_SETS}
    for budget in budgets:
        for name, figures in lab.scorer.decode(drafter, _limits(lab), budget, walk_again=True).items():
            found[name]["chain" if budget is None else f"tree@{budget}"] = figures
    return found


def _mark(lab: Lab, spec: DrafterSpec, snapshot: Snapshot, *, decode: bool) -> Figures:
    found: Figures = {"training_s": snapshot.training_s, "steps": snapshot.steps}
    found["walked"] = lab.scorer.walk(spec, snapshot.weights, ["gsm8k"])["gsm8k"]["chain"]
    if decode:
        drafter = lab.scorer.exported(spec, snapshot.weights)
        found["decoded"] = lab.scorer.decode(drafter, {"gsm8k": lab.settings.mark_prompts})["gsm8k"]
    return found


def ablation(lab: Lab, variant: Variant, peak_rate: float, seconds: float) -> Figures:
    """A recipe for so many seconds; one of larger blocks drafts small ones, too."""
    trainer = lab.trainer(variant, peak_rate)
    course = train_for(trainer, seconds, trainer.peak_rate, lab.device)
    weights, budgets = course.snapshots[-1].weights, (lab.settings.budget,)
    found: Figures = {"variant": variant.as_figures(), "learning_rate": trainer.peak_rate} | course.as_figures()
    found["walked"] = lab.scorer.walk(trainer.spec, weights, ABLATION_SETS, budgets)
    found["estimate"] = lab.scorer.estimate(trainer.spec, weights, "gsm8k", budgets)
    if variant.block_size != PLAIN.block_size:
        other = set_block(trainer.spec, lab.plain_spec.block_size)
        found["at_other_block"] = {"block_size": other.block_size} | lab.scorer.walk(other, weights, ["gsm8k"], budgets)
    print(f"  {_line(found)}", flush=True)
    del trainer
    lab.free()
    return found


def with_seed(variant: Variant, seed: int) -> Variant:
    """The recipe from other first weights, with other anchors, noise and order."""
    return replace(variant, seed=seed)


def _line(found: Figures) -> str:
    """Acceptance lengths on GSM8K, for people who watch."""
    methods = found["walked"]["gsm8k"]
    shown = ", ".join(f"{name} {figures['acceptance_length']:.3f}" for name, figures in methods.items())
    return f"gsm8k, walked: {shown}; {found['steps']} steps of {found['step_s'] * 1e3:.1f} ms"


def dev_scores(parts: dict[str, Figures], method: str) -> dict[str, float]:
    """Acceptance length on `dev` of each ablation, by name of its recipe."""
    return {f["variant"]["name"]: f["walked"]["dev"][method]["acceptance_length"] for f in parts.values()}


def best_of(scores: dict[str, float], count: int, without: Sequence[str] = ()) -> list[str]:
    """Names of the largest scores."""
    names = [name for name in scores if name not in without]
    return sorted(names, key=lambda name: -scores[name])[:count]
