"""The configuration of a run: frozen pydantic models without torch.

Field descriptions are the reference documentation. Units are in the names: `_s` seconds, `_bytes`, `_tokens`, `_rows`.
Rules that join several fields are checked here, before any weight is loaded, and name the fields and the mend.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from draftline.config.cluster import ClusterConfig
from draftline.config.dflash2 import Dflash2Config, SelectorObjective
from draftline.config.drafter_spec import InBlockAttention, WindowOrigin
from draftline.config.sections import Section, StatesConfig, TargetConfig
from draftline.limits import MAX_SEED


class DataConfig(Section):
    """What is trained on."""

    path: Path = Field(description="Folder written by `draftline prepare`.")
    validation_path: Path | None = Field(default=None, description="Prepared folder scored at syncs; null: none.")
    row_tokens: int = Field(default=4096, ge=8, description="Most tokens of a row (one queue item, one micro-step).")


class SlidingWindowConfig(Section):
    """Sliding-window attention in the drafter."""

    window_tokens: int = Field(default=2048, ge=1, description="Window W in tokens.")
    layers: tuple[int, ...] = Field(description="0-based drafter layers that slide.")
    in_block: InBlockAttention = Field(default="zlab", description="Attention inside a block; see docs/objective.md.")
    origin: WindowOrigin = Field(default="query", description="What the window is measured from.")


class DrafterConfig(Section):
    """The model in training: a drafter in z-lab's checkpoint format. Null sizes are taken from the target."""

    kind: Literal["dflash", "dflash2"] = Field(
        default="dflash", description="dflash2: with convolutions inside a block and a candidate selector."
    )
    dflash2: Dflash2Config | None = Field(default=None, description="Of kind dflash2; null: its defaults.")
    num_layers: int = Field(default=5, ge=1, le=1024, description="Decoder layers of the drafter.")
    block_size: int = Field(
        default=16, ge=2, le=4096, description="Slots of a block: the anchor token and B-1 mask tokens."
    )
    mask_token_id: int = Field(ge=0, description="An embedding row of the target that text never uses.")
    num_taps: int | None = Field(default=None, ge=1, description="Taps by z-lab's rule; null: num_layers.")
    taps: tuple[int, ...] | None = Field(
        default=None, description="Explicit 0-based target layers; overrides num_taps."
    )
    intermediate_size: int | None = Field(default=None, ge=1, le=1 << 24, description="null: as the target.")
    num_heads: int | None = Field(default=None, ge=1, le=1 << 24, description="null: as the target.")
    num_kv_heads: int | None = Field(default=None, ge=1, le=1 << 24, description="null: as the target.")
    head_dim: int | None = Field(default=None, ge=2, le=1 << 24, description="null: as the target.")
    sliding: SlidingWindowConfig | None = Field(default=None, description="null: full attention in all layers.")
    init: Literal["random", "target_layers", "checkpoint"] = Field(
        default="random", description="Start from random weights, layers of the target itself, or init_from."
    )
    init_layers: tuple[int, ...] | None = Field(
        default=None, description="Target layers for `target_layers`, one a drafter layer; null: the target's last."
    )
    init_from: Path | None = Field(
        default=None, description="Export of any format to start from (warm start); overrides init."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.init_layers is not None and len(self.init_layers) != self.num_layers:
            raise ValueError(
                f"drafter.init_layers names {len(self.init_layers)} layers for {self.num_layers} drafter layers"
            )
        if self.dflash2 is not None and self.kind != "dflash2":
            raise ValueError(f"drafter.dflash2 is for drafter.kind dflash2, drafter.kind is {self.kind}")
        if self.init == "checkpoint" and self.init_from is None:
            raise ValueError("drafter.init checkpoint needs drafter.init_from, the folder of an export")
        if self.sliding is not None:
            bad = [i for i in self.sliding.layers if not 0 <= i < self.num_layers]
            if bad:
                raise ValueError(
                    f"drafter.sliding.layers {bad} are outside the drafter's {self.num_layers} layers "
                    f"(0..{self.num_layers - 1})"
                )
        return self


class ExponentialDecay(Section):
    """w_k = exp(-(k - 1) / gamma) for slot k >= 1."""

    kind: Literal["exponential"] = "exponential"
    gamma: float = Field(default=7.0, gt=0, description="7/5/4 for block 16/10/8 in the DFlash paper; 10 for DDTree.")


class DPaceDecay(Section):
    """D-PACE weights (arXiv 2605.18810): each slot weighted by the chance that decoding reaches it, detached."""

    kind: Literal["dpace"] = "dpace"
    alpha: float = Field(default=0.5, ge=0, le=1, description="Floor of a slot's chance; 0: the bare chance.")


class NoDecay(Section):
    """All slots alike."""

    kind: Literal["none"] = "none"


Decay = Annotated[ExponentialDecay | DPaceDecay | NoDecay, Field(discriminator="kind")]


class FeatureNoise(Section):
    """Noise added to captured tap features, in training only."""

    kind: Literal["none", "uniform", "gaussian"] = "none"
    scale: float = Field(default=0.05, ge=0, description="Half-width of uniform noise, standard deviation of gaussian.")


class ObjectiveConfig(Section):
    """What is minimised.

    L = (1 - kl_weight) CE + kl_weight KL + tv_weight TV + reverse_kl_weight RKL + cap_weight CAP.
    """

    anchors: int = Field(default=512, ge=1, description="Anchor slots; see anchors_per.")
    anchors_per: Literal["row", "conversation"] = Field(
        default="row",
        description="row: a sample gets its share of `anchors` by length; conversation: up to `anchors` each.",
    )
    decay: Decay = DPaceDecay()
    labels: Literal["data", "target"] = Field(default="data", description="The data's token or the target's argmax.")
    kl_weight: float = Field(default=0.0, ge=0, le=1, description="Share of forward KL in the CE/KL blend.")
    kl_temperature: float = Field(default=1.0, gt=0, description="Softens teacher and draft in the forward KL.")
    teacher_top_k: int | None = Field(default=None, ge=1, description="Keep the teacher's k best tokens; null: all.")
    tv_weight: float = Field(default=0.0, ge=0, description="Weight of the total variation distance.")
    reverse_kl_weight: float = Field(default=0.0, ge=0, description="Weight of the reverse KL.")
    cap_weight: float = Field(default=0.0, ge=0, description="Confidence loss on correct slots (CAP).")
    cap_temperature: float = Field(default=1.0, gt=0, description="Softens the draft in CAP.")
    selector: SelectorObjective = SelectorObjective()
    feature_noise: FeatureNoise = FeatureNoise()
    token_noise_prob: float = Field(default=0.0, ge=0, le=1, description="Chance that an anchor token is replaced.")
    head: Literal["fused", "checkpointed"] = Field(
        default="fused", description="fused: gradient formed in the forward."
    )
    head_chunk_positions: int = Field(default=2048, ge=1, description="Positions whose logits live at once.")
    head_dtype: Literal["compute", "fp8"] = Field(
        default="compute", description="fp8: the head's products in fp8 in training (GPUs of capability 8.9 and up)."
    )
    mlp_dtype: Literal["compute", "fp8"] = Field(
        default="compute", description="fp8: two of three products of the drafter's MLPs in fp8 in training, as above."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.head_dtype == "fp8" and self.head != "fused":
            raise ValueError("objective.head_dtype fp8 needs objective.head fused; set one of them otherwise")
        return self

    @property
    def needs_fp8(self) -> bool:
        """True if a product of the training step runs in fp8."""
        return "fp8" in (self.head_dtype, self.mlp_dtype)

    @property
    def needs_teacher(self) -> bool:
        """True if the target's final hidden state must be captured."""
        return self.labels == "target" or any((self.kl_weight, self.tv_weight, self.reverse_kl_weight))


class ScheduleConfig(Section):
    """Learning-rate factor over the run; the clock is planned rows (see pipeline)."""

    kind: Literal["constant", "cosine", "linear", "wsd"] = "cosine"
    warmup_fraction: float = Field(default=0.04, ge=0, le=1, description="Share of the run that warms up from 0.")
    decay_fraction: float = Field(default=0.2, gt=0, le=1, description="wsd only: share of the run that decays.")
    final_factor: float = Field(default=0.0, ge=0, le=1, description="Factor at the end of the run.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.kind == "wsd" and self.warmup_fraction + self.decay_fraction > 1:
            raise ValueError("optimizer.schedule: warmup_fraction + decay_fraction is over 1; lower one of them")
        return self


class OptimizerConfig(Section):
    """AdamW on fp32 masters, or Muon for matrices and AdamW for the rest."""

    kind: Literal["adamw", "muon"] = Field(
        default="adamw", description="muon: for matrices, its step scaled to AdamW's size; AdamW for all else."
    )
    learning_rate: float = Field(default=6e-4, gt=0, description="Peak; the schedule gives its course.")
    betas: tuple[float, float] = (0.9, 0.95)
    muon_momentum: float = Field(default=0.95, ge=0, lt=1, description="Of muon; betas are AdamW's.")
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0, description="Norm weights are not decayed.")
    clip_norm: float | None = Field(default=1.0, gt=0, description="Largest gradient norm; null: no clipping.")
    accumulate_rows: int = Field(default=1, ge=1, description="Rows of one optimizer step of one drafter.")
    schedule: ScheduleConfig = ScheduleConfig()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optimizer.betas {list(self.betas)} must be at least 0 and below 1")
        return self


class PipelineConfig(Section):
    """Workers, devices and bounds. Workers may share a device; `cpu` is a device too."""

    target_devices: tuple[str, ...] = Field(
        default=("auto",),
        min_length=1,
        max_length=64,
        description="One target each: [cuda:0, cuda:1], [cpu, cpu]; one over two devices: [cuda:0+cuda:1].",
    )
    drafter_devices: tuple[str, ...] = Field(
        default=("auto",), min_length=1, max_length=64, description="One drafter each."
    )
    hs_queue_depth: int = Field(default=2, ge=1, description="Waiting rows per drafter.")
    prefetch_rows: int = Field(default=1, ge=0, description="Rows a drafter takes before its step in hand is done.")
    queue_bytes: int | None = Field(
        default=None, ge=1, description="Bound on all admitted rows; null: rows alone bind."
    )
    ordered: bool = Field(default=False, description="Hand rows out in plan order, for repeatable runs.")
    hold_on: Literal["source", "host"] = Field(default="source", description="Where waiting rows stay.")
    state_cache_bytes: int = Field(
        default=0,
        ge=0,
        description="Host memory for captured states, so that later epochs need no target forward; 0: none.",
    )
    max_set_aside: int = Field(default=0, ge=0, description="Samples that may be set aside before the run fails.")
    max_restarts: int = Field(default=2, ge=0, description="Restarts of failed workers in the whole run.")
    max_skipped_steps: int = Field(default=10, ge=0, description="Non-finite steps skipped before the run fails.")
    stall_timeout_s: float = Field(default=600.0, gt=0, description="No progress for so long fails the run by name.")
    compile: bool = Field(default=False, description="torch.compile the drafter's layers (GPU).")
    cuda_graphs: bool = Field(
        default=False,
        description="Replay the drafter's layers from CUDA graphs (GPU): for drafters that the host slows.",
    )


class AverageSync(Section):
    """Local SGD: fp32 masters averaged, weighted by the supervised tokens each drafter trained in the round."""

    kind: Literal["average"] = "average"
    every_rows: int = Field(default=50, ge=1, description="Rows per drafter between two averagings.")
    moments: Literal["keep", "average", "reset"] = Field(default="average", description="AdamW moments at a sync.")


class CopySync(Section):
    """Drafter 0's weights copied to all (the old way, for comparison)."""

    kind: Literal["copy"] = "copy"
    every_rows: int = Field(default=100, ge=1, description="Rows per drafter between two copies.")


class GradientSync(Section):
    """Gradients summed over drafters at each optimizer step: equals one drafter with the joint batch."""

    kind: Literal["gradient"] = "gradient"


class OuterSync(Section):
    """Averaging with an outer Nesterov step on the averaged change (DiLoCo)."""

    kind: Literal["outer"] = "outer"
    every_rows: int = Field(default=50, ge=1, description="Rows per drafter between two averagings.")
    outer_learning_rate: float = Field(default=0.7, gt=0, description="Step of the outer Nesterov optimizer.")
    outer_momentum: float = Field(default=0.9, ge=0, lt=1, description="Its momentum.")


SyncConfig = Annotated[AverageSync | CopySync | GradientSync | OuterSync, Field(discriminator="kind")]


class ValidationConfig(Section):
    """How the rows of `data.validation_path` are scored, before each checkpoint; see docs/evaluation.md."""

    tree_budgets: tuple[int, ...] = Field(
        default=(16, 64, 256), description="Drafts of the trees scored beside the chain; []: none."
    )
    walk_samples: int = Field(
        default=4, ge=0, description="Samples along which decoding's own rounds are walked each time; 0: none."
    )
    best_by: str = Field(
        default="chain",
        description="Acceptance length that `best/` is chosen by: chain, or tree@N with N in tree_budgets.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        budgets = list(self.tree_budgets)
        if budgets != sorted(set(budgets)) or (budgets and not 1 <= budgets[0] <= budgets[-1] <= 4096):
            raise ValueError(f"validation.tree_budgets {budgets} must rise, between 1 and 4096")
        allowed = ["chain", *(f"tree@{n}" for n in budgets)]
        if self.best_by not in allowed:
            raise ValueError(f"validation.best_by is '{self.best_by}'; what is scored: {', '.join(allowed)}")
        return self


class CheckpointConfig(Section):
    """Training checkpoints, cut at commits."""

    every_rounds: int = Field(default=1, ge=1, description="Rounds between two checkpoints.")
    keep: int = Field(default=2, ge=1, description="Checkpoints kept.")


class MonitorConfig(Section):
    """Live status and logs."""

    status_every_s: float = Field(default=10.0, gt=0, description="Seconds between plain status lines in a log.")
    trackers: tuple[Literal["tensorboard", "wandb", "trackio", "mlflow"], ...] = Field(
        default=(), description="Beside metrics.jsonl; extras `trackers` (TensorBoard), `wandb`, `trackio`, `mlflow`."
    )
    project: str = Field(default="draftline", min_length=1, description="Under which services file the run.")


class RunConfig(Section):
    """A whole training run. `output` holds the resolved configuration, logs, checkpoints and exports."""

    output: Path = Field(description="Folder of the run.")
    seed: int = Field(default=0, ge=0, le=MAX_SEED, description="Of the plan, the first weights and every draw.")
    epochs: int = Field(default=1, ge=1, le=10_000, description="Passes over the data.")
    max_rows: int | None = Field(default=None, ge=1, description="Train only the plan's first rows.")
    target: TargetConfig
    data: DataConfig
    drafter: DrafterConfig
    objective: ObjectiveConfig = ObjectiveConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    pipeline: PipelineConfig = PipelineConfig()
    sync: SyncConfig = AverageSync()
    validation: ValidationConfig = ValidationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    monitor: MonitorConfig = MonitorConfig()
    states: StatesConfig = StatesConfig()
    cluster: ClusterConfig = ClusterConfig()

    @model_validator(mode="after")
    def _check_selector(self) -> Self:
        if self.drafter.kind == "dflash2" and self.objective.labels == "target":
            raise ValueError(
                "objective.labels target is not possible with drafter.kind dflash2, whose selector learns from the "
                "data's tokens; set objective.labels: data"
            )
        if self.drafter.kind != "dflash2" and self.objective.selector != SelectorObjective():
            raise ValueError(
                f"objective.selector is for drafter.kind dflash2, drafter.kind is {self.drafter.kind}; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _check_states(self) -> Self:
        if self.states.mode != "online" and self.pipeline.state_cache_bytes:
            raise ValueError(
                f"pipeline.state_cache_bytes keeps states in memory, states.mode {self.states.mode} on disk; "
                "set pipeline.state_cache_bytes: 0"
            )
        if self.target.backend.kind != "local" and self.drafter.init == "target_layers":
            raise ValueError(
                "drafter.init target_layers needs the target's layers, which target.backend "
                f"{self.target.backend.kind} does not load; use drafter.init random or checkpoint"
            )
        if self.states.mode == "offline" and self.drafter.init == "target_layers" and self.drafter.init_from is None:
            raise ValueError(
                "drafter.init target_layers needs the target's layers, which states.mode offline does not load; "
                "use drafter.init random or checkpoint, or states.mode cache"
            )
        return self
