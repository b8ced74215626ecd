"""The recipes: the plain one, the DDTree one, and one change at a time from the plain one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from draftline.config.schema import (
    Decay,
    DPaceDecay,
    DrafterConfig,
    ExponentialDecay,
    FeatureNoise,
    ObjectiveConfig,
    OptimizerConfig,
    SlidingWindowConfig,
)
from settings import Settings

GAMMA_7 = ExponentialDecay(gamma=7.0)
GAMMA_15 = ExponentialDecay(gamma=15.0)
QUIET = FeatureNoise()
UNIFORM = FeatureNoise(kind="uniform", scale=0.05)
GAUSSIAN = FeatureNoise(kind="gaussian", scale=0.05)


@dataclass(frozen=True, slots=True)
class Variant:
    """A recipe. Blocks and anchors as on a GPU; a tiny run divides them.

    Attributes:
        change: what differs from the plain recipe, in words.
        group: changes of one group exclude one another.
        window: slide on all layers but the last.
        rate_factor: on the tuned learning rate.
    """

    name: str
    change: str = ""
    group: str = ""
    block_size: int = 16
    anchors: int = 512
    decay: Decay = GAMMA_7
    kl_weight: float = 0.0
    cap_weight: float = 0.0
    noise: FeatureNoise = QUIET
    window: bool = False
    init: Literal["random", "target_layers"] = "random"
    optimizer: Literal["adamw", "muon"] = "adamw"
    rate_factor: float = 1.0
    seed: int = 0

    def drafter(self, settings: Settings) -> DrafterConfig:
        """The drafter section."""
        sliding = None
        if self.window:
            layers = tuple(range(settings.num_layers - 1))
            sliding = SlidingWindowConfig(window_tokens=settings.window_tokens, layers=layers)
        return DrafterConfig(
            num_layers=settings.num_layers,
            block_size=self.block_size // settings.block_divisor,
            mask_token_id=settings.mask_token_id,
            sliding=sliding,
            init=self.init,
        )

    def objective(self, settings: Settings) -> ObjectiveConfig:
        """The objective section."""
        return ObjectiveConfig(
            anchors=self.anchors // settings.anchor_divisor,
            decay=self.decay,
            kl_weight=self.kl_weight,
            cap_weight=self.cap_weight,
            feature_noise=self.noise,
            head_chunk_positions=settings.head_chunk_positions,
        )

    def optimizer_config(self, learning_rate: float) -> OptimizerConfig:
        """The optimizer's section, at `rate_factor` times a tuned rate."""
        return OptimizerConfig(kind=self.optimizer, learning_rate=learning_rate * self.rate_factor)

    def as_figures(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "name": self.name,
            "change": self.change,
            "group": self.group,
            "block_size": self.block_size,
            "anchors": self.anchors,
            "decay": self.decay.model_dump(),
            "kl_weight": self.kl_weight,
            "cap_weight": self.cap_weight,
            "noise": self.noise.model_dump(),
            "window": self.window,
            "init": self.init,
            "optimizer": self.optimizer,
            "rate_factor": self.rate_factor,
            "seed": self.seed,
        }


PLAIN = Variant("plain")
DDTREE = Variant(
    "ddtree",
    "block 32, 1024 anchors, gamma 10, KL 0.15, CAP 0.1, uniform noise, sliding window",
    block_size=32,
    anchors=1024,
    decay=ExponentialDecay(gamma=10.0),
    kl_weight=0.15,
    cap_weight=0.1,
    noise=UNIFORM,
    window=True,
)


def _gamma(gamma: float) -> Variant:
    decay = ExponentialDecay(gamma=gamma)
    return replace(PLAIN, name=f"gamma-{gamma:g}", change=f"gamma {gamma:g}", group="decay", decay=decay)


# In the order in which they are run while time is left: what the two recipes disagree on first.
ABLATIONS = (
    PLAIN,
    replace(PLAIN, name="init-target", change="starts from target layers", group="init", init="target_layers"),
    replace(PLAIN, name="muon", change="Muon on matrices", group="optimizer", optimizer="muon"),
    replace(PLAIN, name="kl-0.15", change="KL 0.15", group="kl", kl_weight=0.15),
    replace(PLAIN, name="cap-0.1", change="CAP 0.1", group="cap", cap_weight=0.1),
    replace(PLAIN, name="noise-uniform", change="uniform noise 0.05", group="noise", noise=UNIFORM),
    replace(PLAIN, name="window", change="sliding window on all layers but the last", group="window", window=True),
    replace(PLAIN, name="dpace", change="D-PACE", group="decay", decay=DPaceDecay()),
    replace(PLAIN, name="block-32", change="block 32", group="block", block_size=32),
    replace(PLAIN, name="block-32-gamma-15", change="block 32, gamma 15", group="block", block_size=32, decay=GAMMA_15),
    _gamma(4),
    _gamma(10),
    _gamma(15),
    replace(PLAIN, name="kl-0.5", change="KL 0.5", group="kl", kl_weight=0.5),
    replace(PLAIN, name="anchors-1024", change="1024 anchors", group="anchors", anchors=1024),
    replace(PLAIN, name="anchors-256", change="256 anchors", group="anchors", anchors=256),
    replace(PLAIN, name="muon-x2", change="Muon, twice the rate", group="optimizer", optimizer="muon", rate_factor=2.0),
    replace(PLAIN, name="rate-x2", change="twice the learning rate", group="optimizer", rate_factor=2.0),
    replace(PLAIN, name="rate-x0.5", change="half the learning rate", group="optimizer", rate_factor=0.5),
    replace(PLAIN, name="noise-gaussian", change="gaussian noise 0.05", group="noise", noise=GAUSSIAN),
)
_FIELDS = {
    "block": ("block_size", "decay"),
    "decay": ("decay",),
    "kl": ("kl_weight",),
    "cap": ("cap_weight",),
    "noise": ("noise",),
    "window": ("window",),
    "anchors": ("anchors",),
    "optimizer": ("optimizer", "rate_factor"),
    "init": ("init",),
}


def combine(scores: dict[str, float], *, least_gain: float) -> Variant:
    """The plain recipe with the best change of each group, where that helped.

    Args:
        scores: what is to be large, by name of ablation; `plain` among them.
        least_gain: relative gain over `plain` from which a change counts.
    """
    found, taken = replace(PLAIN, name="recommended"), []
    by_name = {variant.name: variant for variant in ABLATIONS}
    ranked = sorted((name for name in scores if name != "plain"), key=lambda name: -scores[name])
    settled: set[str] = set()
    for name in ranked:
        variant = by_name[name]
        fields = _FIELDS[variant.group]
        if scores[name] < scores["plain"] * (1 + least_gain) or settled & {variant.group, *fields}:
            continue
        settled |= {variant.group, *fields}
        taken.append(variant.change)
        found = replace(found, **{field: getattr(variant, field) for field in fields})
    return replace(found, change=", ".join(taken) or "none")
