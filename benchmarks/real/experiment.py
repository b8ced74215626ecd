"""Which parts there are, in which order, and what each may cost."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch

from argtypes import positive
from draftline.errors import DraftlineError
from lab import Lab
from measure import environment
from parts import ablation, baselines, best_of, dev_scores, long_run, main_run, make_trainer, tune, with_seed
from prompts import PromptFiles
from settings import TINY, Settings
from several import pipeline_run, replicas
from store import Store
from tables import MAINS
from variants import ABLATIONS, DDTREE, PLAIN, Variant, combine

Figures = dict[str, Any]
# Seconds beside the training itself, on an H200, on the safe side: warm-up of a new shape, walks, decoding.
NEW_SHAPE_S, WALK_S, DECODE_S = 25.0, 7.0, 40.0
SEEDS = (1, 2)
# Kinds of synchronisation, and drafters.
REPLICAS = (("average", 1), *((k, d) for d in (2, 3) for k in ("average", "often", "copy", "gradient")))
LEAST_GAIN = 0.01


def known_parts() -> list[str]:
    """Names of all parts that a run may have."""
    changes = [variant.name for variant in ABLATIONS]
    mains = [name for name, _ in MAINS]
    seeds = [f"seed{seed}-{name}" for seed in (0, *SEEDS) for name in (*changes, "ddtree", "recommended")]
    syncs = [f"sync-{kind}-{drafters}" for kind, drafters in REPLICAS]
    return [
        "answers",
        "baselines",
        *(f"tune-{side}" for side in mains[:2]),
        *(f"main-{side}" for side in mains),
        *(f"ablation-{name}" for name in changes),
        *seeds,
        "pipeline",
        *syncs,
        "long-recommended",
    ]


def part_names(text: str) -> tuple[str, ...]:
    """`--parts`: beginnings of known names; none: all."""
    starts = tuple(filter(None, text.split(",")))
    unknown = [start for start in starts if not any(name.startswith(start) for name in known_parts())]
    if unknown:
        raise argparse.ArgumentTypeError(f"no part begins with {', '.join(unknown)}; known: {', '.join(known_parts())}")
    return starts


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, required=True, help="SmolLM2-135M-Instruct: a folder or a .gguf file")
    parser.add_argument("--gsm8k", type=Path, required=True, help="JSON lines of prompts")
    parser.add_argument("--arena", type=Path, required=True, help="JSON lines of prompts")
    parser.add_argument("--output", type=Path, required=True, help="folder for parts and everything made on the way")
    parser.add_argument("--merged", type=Path, default=None, help="all parts in one file; default OUTPUT/results.json")
    parser.add_argument("--answers", type=Path, default=None, help="default OUTPUT/answers.jsonl.gz")
    parser.add_argument("--budget-s", type=positive, default=1500.0, help="no part starts that would end later")
    parser.add_argument(
        "--parts", type=part_names, default=(), help="only parts whose names begin with one of these, comma-separated"
    )
    parser.add_argument(
        "--recommend-early", action="store_true", help="choose a recipe from those ablations that there are"
    )
    parser.add_argument("--tiny", action="store_true", help="the same code with tiny sizes, for a CPU")
    return parser.parse_args(arguments)


class Experiment:
    """Runs what is left to run.

    Args:
        only: beginnings of part names; empty: all.
        recommend_early: do not wait for all ablations, and leave time for the recipe that is chosen.
    """

    def __init__(self, lab: Lab, store: Store, only: tuple[str, ...], *, recommend_early: bool) -> None:
        self._lab, self._store, self._only = lab, store, only
        self._least_ablations = 2 if recommend_early else len(ABLATIONS)
        self._settings = lab.settings
        wanted = recommend_early and store.find("main-recommended") is None
        self._reserve_s = self._main_cost_s() + NEW_SHAPE_S if wanted else 0.0
        self._shapes: set[tuple[int, int]] = set()

    def run(self) -> None:
        """All parts, the most valuable first."""
        if self._part("answers", self._lab.answer, 90.0, needed=True) is None:
            return
        self._part("baselines", lambda: baselines(self._lab), 45.0, needed=True)
        rates = {side: self._tuned(side) for side in ("draftline", "specforge")}
        ours = rates["draftline"]
        if ours is None:
            return
        if rates["specforge"] is not None:
            self._main_side("specforge", rates["specforge"])
        self._main_side("draftline", ours)
        self._main_recipe(DDTREE, ours)
        scored = self._ablations(ours)
        recommended = self._recommend(scored)
        if recommended is not None:
            self._main_recipe(recommended, ours)
        self._seeds(scored, recommended, ours)
        self._several(scored, ours)
        if recommended is not None:
            cost_s = self._settings.long_s + self._shape_s(recommended) + 150.0 + DECODE_S
            self._part("long-recommended", lambda: long_run(self._lab, recommended, ours), cost_s)

    def _tuned(self, side: str) -> float | None:
        tries = len(self._settings.rates) * (self._settings.tune_s + 3.0)
        found = self._part(f"tune-{side}", lambda: tune(self._lab, side), tries + NEW_SHAPE_S)
        return None if found is None else float(found["learning_rate"])

    def _main_side(self, side: str, rate: float) -> None:
        trees = side == "draftline"
        cost_s = self._settings.main_s + 7.0 * len(self._settings.marks) + 2 * WALK_S + (DECODE_S if trees else 20.0)

        def measure() -> Figures:
            trainer = make_trainer(self._lab, side, rate)
            return main_run(self._lab, trainer, rate, at_marks=True, trees=trees) | {"side": side}

        self._part(f"main-{side}", measure, cost_s)

    def _main_recipe(self, variant: Variant, rate: float) -> None:
        cost_s = self._main_cost_s() + self._shape_s(variant)

        def measure() -> Figures:
            trainer = self._lab.trainer(variant, rate)
            found = main_run(self._lab, trainer, trainer.peak_rate, at_marks=False, trees=True)
            return found | {"variant": variant.as_figures()}

        self._part(f"main-{variant.name}", measure, cost_s)

    def _main_cost_s(self) -> float:
        return self._settings.main_s + 3 * WALK_S + DECODE_S

    def _ablations(self, rate: float) -> dict[str, Figures]:
        found = {}
        for variant in ABLATIONS:
            figures = self._ablation(f"ablation-{variant.name}", variant, rate, self._reserve_s)
            if figures is not None:
                found[variant.name] = figures
        return found

    def _ablation(self, name: str, variant: Variant, rate: float, reserve_s: float = 0.0) -> Figures | None:
        seconds = self._settings.ablation_s
        cost_s = seconds + WALK_S + self._shape_s(variant) + reserve_s
        return self._part(name, lambda: ablation(self._lab, variant, rate, seconds), cost_s)

    def _shape_s(self, variant: Variant) -> float:
        """A shape that this process has not compiled yet costs more."""
        shape = (variant.block_size, variant.anchors)
        known = shape in self._shapes or shape == (PLAIN.block_size, PLAIN.anchors)
        self._shapes.add(shape)
        return 2.0 if known else NEW_SHAPE_S

    def _recommend(self, scored: dict[str, Figures]) -> Variant | None:
        """The best of each group on `dev`, by the tree; once enough changes were measured."""
        if len(scored) < self._least_ablations or "plain" not in scored:
            return None
        tree = f"tree@{self._settings.budget}"
        return combine(dev_scores(scored, tree), least_gain=LEAST_GAIN)

    def _seeds(self, scored: dict[str, Figures], recommended: Variant | None, rate: float) -> None:
        """Both recipes, the recommended one and the best single changes, with further seeds.

        Not before enough changes were measured: which are the best is not known earlier.
        """
        if len(scored) < self._least_ablations or "plain" not in scored:
            return
        tree = f"tree@{self._settings.budget}"
        by_name = {variant.name: variant for variant in ABLATIONS}
        names = ["plain", *best_of(dev_scores(scored, tree), 2, without=("plain",))]
        names += [n for n in best_of(dev_scores(scored, "chain"), 1, without=("plain",)) if n not in names]
        chosen = [*(by_name[name] for name in names), DDTREE, *([recommended] if recommended else [])]
        for variant in chosen:
            for seed in (0, *SEEDS):
                if f"ablation-{variant.name}" in self._done() and seed == 0:
                    continue
                self._ablation(f"seed{seed}-{variant.name}", with_seed(variant, seed), rate)

    def _done(self) -> set[str]:
        return {path.stem for path in (self._store.folder / "parts").glob("*.json")}

    def _several(self, scored: dict[str, Figures], rate: float) -> None:
        """Drafters at equal total work, and the pipeline: as many rows as the plain ablation trained."""
        if "plain" not in scored:
            return
        n_rows, cost_s = int(scored["plain"]["steps"]), self._settings.ablation_s + WALK_S
        self._part("pipeline", lambda: pipeline_run(self._lab, rate, n_rows), 2 * cost_s)
        for kind, drafters in REPLICAS:
            self._replicas(kind, drafters, rate, n_rows, cost_s + 2.0 * drafters)

    def _replicas(self, kind: str, drafters: int, rate: float, n_rows: int, cost_s: float) -> None:
        self._part(f"sync-{kind}-{drafters}", lambda: replicas(self._lab, kind, drafters, rate, n_rows), cost_s)

    def _part(self, name: str, measure: Any, cost_s: float, *, needed: bool = False) -> Figures | None:
        if self._only and not name.startswith(self._only):
            return self._store.find(name)
        return self._store.part(name, measure, cost_s=0.0 if self._lab.settings is TINY else cost_s, needed=needed)


def make_lab(chosen: argparse.Namespace) -> Lab:
    if not chosen.tiny and not torch.cuda.is_available():
        raise SystemExit("there is no GPU here; --tiny runs on the CPU")
    device = torch.device("cpu" if chosen.tiny else "cuda:0")
    answers = chosen.answers or chosen.output / "answers.jsonl.gz"
    files = PromptFiles(chosen.gsm8k, chosen.arena, chosen.output / "work", answers)
    return Lab(TINY if chosen.tiny else Settings(), chosen.target, files, device)


def main(arguments: list[str] | None = None) -> int:
    begin = time.monotonic()
    chosen = parse_arguments(arguments)
    lab = make_lab(chosen)
    store = Store(
        folder=chosen.output,
        merged=chosen.merged or chosen.output / "results.json",
        until_s=begin + chosen.budget_s,
        environment=environment(lab.device) | _packages(),
        settings=lab.settings.as_figures(),
    )
    try:
        store.restore()
        Experiment(lab, store, chosen.parts, recommend_early=chosen.recommend_early).run()
    except DraftlineError as error:
        print(f"real: {error}")
        return error.exit_code
    store.merge()
    print(f"{time.monotonic() - begin:.0f} s; left for another call: {', '.join(store.left) or 'nothing'}")
    if store.failed:
        print(f"failed: {', '.join(store.failed)}")
    return 1 if store.failed else 0


def _packages() -> dict[str, str]:
    """Versions beside those of `measure.environment`."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ("transformers", "specforge"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found
