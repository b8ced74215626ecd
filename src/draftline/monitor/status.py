"""What is known about a run at one moment, as frozen records: shown live, kept in `status.json`, read by watch."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import BaseModel, ConfigDict

SCHEMA_VERSION = 1
Role = Literal["target", "drafter", "other"]
WorkerState = Literal["running", "ended", "failed"]
Cause = Literal[
    "starting",
    "compiling",
    "dead_worker",
    "stuck_worker",
    "stalled",
    "slow_data",
    "slow_target",
    "starved_drafters",
    "drafter_bound",
    "overhead",
    "balanced",
    "ended",
]


class Wait(StrEnum):
    """What a worker waits for; pass it as `what` of a `waiting` span. Verdicts are reached from these."""

    SLOT = "a free slot"
    ROW = "a row"
    SAMPLES = "samples"
    MEETING = "the other drafters"
    END = "the end"


class Record(BaseModel):
    """Frozen, and strict about its fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ProcessInfo(Record):
    """The process that runs it; `start_wall_s` tells it from a later one with the same pid."""

    pid: int
    start_wall_s: float
    host: str


class RunEnd(Record):
    """How it ended. `closed`: all planned rows are done; `stopped`: asked for; `failed`: see the reason."""

    outcome: Literal["closed", "stopped", "failed"]
    reason: str = ""
    wall_s: float


class Verdict(Record):
    """Why the run is as fast as it is.

    Attributes:
        cause: one word for programs and tests.
        sentence: the same for people, with the mend.
        split: (targets, drafters) of the same number of workers that would do most; None if unknown.
    """

    cause: Cause
    sentence: str
    split: tuple[int, int] | None = None


class Capacities(Record):
    """Workers of both sides and what they could do: tokens per second of working time, summed over a side's workers."""

    targets: int
    drafters: int
    target_tokens_per_s: float | None = None
    drafter_tokens_per_s: float | None = None
    data_tokens_per_s: float | None = None


class WorkerStatus(Record):
    """One worker.

    Attributes:
        activity, what, since_s: what it does now and for how long; `activity` None between spans.
        shares: activity -> share of the recent window, the open span counted.
        wait_shares: what was waited for -> share of the recent window.
        seconds, wait_seconds: activity, and what was waited for -> seconds in the whole session.
        tokens_per_s: recent tokens per second of working time; None before its first row.
        row_s: recent working seconds of a row.
    """

    name: str
    role: Role
    state: WorkerState = "running"
    reason: str = ""
    activity: str | None = None
    what: str = ""
    since_s: float = 0.0
    shares: dict[str, float] = {}
    wait_shares: dict[str, float] = {}
    seconds: dict[str, float] = {}
    wait_seconds: dict[str, float] = {}
    rows: int = 0
    tokens: int = 0
    tokens_per_s: float | None = None
    row_s: float | None = None


class QueueGauge(Record):
    """Rows waiting between targets and drafters, with their bounds (None: unbounded)."""

    rows: int = 0
    bytes: int = 0
    max_rows: int | None = None
    max_bytes: int | None = None


class GpuGauge(Record):
    """A GPU of the run, by torch's name. `busy_share` of the last moment, 0 to 1; None: cannot be told."""

    device: str
    busy_share: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None


class LedgerCounts(Record):
    """Rows of the plan. `trained` are done but not yet committed."""

    planned: int = 0
    committed: int = 0
    set_aside: int = 0
    trained: int = 0

    @property
    def remaining(self) -> int:
        """Rows that nobody has trained yet."""
        return max(0, self.planned - self.committed - self.set_aside - self.trained)


class StatusSnapshot(Record):
    """A run at one moment. Losses and acceptance are smoothed over recent rows; rates are of the recent window.

    Attributes:
        acceptance: estimate of the acceptance length from training blocks: 1 + mean accepted draft tokens.
        validation_acceptance: of the chain, over whole blocks at the fixed anchors; the newest.
        validation_trees: the same of trees, `tree@16` and so on.
        validation_walk: tokens per round along the walked samples, of `chain` and trees.
        tokens_per_s, supervised_tokens_per_s: trained, by wall clock.
        nonfinite_updates: training statistics that were NaN or infinite, left out of the smoothing.
    """

    schema_version: int = SCHEMA_VERSION
    elapsed_s: float
    time_left_s: float | None = None
    ledger: LedgerCounts = LedgerCounts()
    queue: QueueGauge | None = None
    loss: float | None = None
    terms: dict[str, float] = {}
    acceptance: float | None = None
    validation_loss: float | None = None
    validation_acceptance: float | None = None
    validation_trees: dict[str, float] = {}
    validation_walk: dict[str, float] = {}
    learning_rate: float | None = None
    grad_norm: float | None = None
    rows_trained: int = 0
    tokens_trained: int = 0
    tokens_per_s: float | None = None
    supervised_tokens_per_s: float | None = None
    nonfinite_updates: int = 0
    capacities: Capacities
    workers: tuple[WorkerStatus, ...] = ()
    gpus: tuple[GpuGauge, ...] = ()
    verdict: Verdict


class StatusFile(Record):
    """Contents of `status.json`. `end` is None while the run goes on, and for ever if it was killed."""

    schema_version: int = SCHEMA_VERSION
    process: ProcessInfo
    written_wall_s: float
    end: RunEnd | None = None
    snapshot: StatusSnapshot
