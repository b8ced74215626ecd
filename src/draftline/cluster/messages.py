"""What passes between workers, queue and driver: small records, no tensors. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from draftline.cluster.refs import Packed, RowContract
from draftline.cluster.turns import Turn
from draftline.pipeline.core import CoreSettings, LedgerState
from draftline.records import PlannedRow

if TYPE_CHECKING:
    from draftline.target.remote.lender import LentNames  # imports torch

Step = tuple[str, tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class QueueSetup:
    """What the queue actor is made of.

    Attributes:
        allowed_failures: captures that may fail in the whole run.
        others as those of `ClusterExchange`.
    """

    plan: list[PlannedRow]
    row_bytes: list[int]
    settings: CoreSettings
    contract: RowContract
    stall_timeout_s: float
    state: LedgerState | None
    spare_slots: int
    checkpoint_every: int
    allowed_failures: int


@dataclass(frozen=True, slots=True)
class Call:
    """Steps that the queue does for a worker, in order; the last one's result is the answer.

    Attributes:
        number: counted by the worker. A call that comes twice, because a link broke, is done once.
    """

    worker: str
    number: int
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Reply:
    """What became of a call: `ok` with its value, `failed` with (origin, reason) of the run's failure, or `gone`: the
    worker takes no part any more."""

    kind: Literal["ok", "failed", "gone"]
    value: Any = None


@dataclass(frozen=True, slots=True)
class SpanRecord:
    """A span measured elsewhere; times are seconds since 1970, because monotonic clocks of two hosts are not alike."""

    activity: str
    what: str
    t0_wall_s: float
    t1_wall_s: float
    facts: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RowReport:
    """A finished row as a drafter reports it; see `TrainedRow`. `sums` is the vector of its StepStats."""

    row_id: int
    tokens: int
    supervised_tokens: int
    sums: tuple[float, ...]
    block_size: int
    learning_rate: float
    gradient_norm: float | None
    skipped: bool


@dataclass(frozen=True, slots=True)
class Batch:
    """What a worker has to tell since it last did.

    Attributes:
        spans: finished.
        done: (rows, tokens) that each `Clock.done` counted, with the time.
        rows: finished by a drafter.
        skipped: other steps that changed nothing, as text.
        lines: plain lines for people.
        failures: tracebacks of errors that were survived.
    """

    worker: str
    spans: tuple[SpanRecord, ...] = ()
    done: tuple[tuple[float, int, int], ...] = ()
    rows: tuple[RowReport, ...] = ()
    skipped: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CheckpointOrder:
    """A checkpoint that the driver is to write.

    Attributes:
        turn: the meeting whose commit it is cut at.
        ledger: exactly what that meeting committed.
        weights, moments, sync: of the leader.
        kept: moments of every member, where they differ.
    """

    turn: Turn
    ledger: dict[str, Any]
    weights: Packed
    moments: Packed | None
    sync: Packed | None
    kept: Mapping[int, Packed | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Scores:
    """Validation scores of a commit: loss, acceptance lengths, and the sums they are from."""

    committed_rows: int
    sums: tuple[float, ...]
    block_size: int
    tree_budgets: tuple[int, ...]
    walk: Any


@dataclass(frozen=True, slots=True)
class Scale:
    """Asked for by `draftline scale`: so many targets more, or fewer."""

    targets: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a worker's loop ended.

    Attributes:
        kind: `ended` by itself; `gone`: the queue takes it for lost; `failed` by an error that names its worker;
            `crashed` by any other.
        sticky: the device cannot be used any more in that process.
    """

    kind: Literal["ended", "gone", "failed", "crashed"]
    origin: str = ""
    reason: str = ""
    trace: str = ""
    sticky: bool = False


@dataclass(frozen=True, slots=True)
class Card:
    """What a worker tells of itself once it is ready, or why it is not.

    Attributes:
        node, host: Ray's id of its host, and the address.
        fingerprint: of the target's weights that it read.
        stop_token_ids: of a target.
        lent: of a target, what its drafters read of its files; None where they have to load it.
        versions: of what runs there; see `HostFacts`.
        lines: plain lines for people.
        error, exit_code: bad input or a failure, as one line.
    """

    node: str
    host: str
    fingerprint: str = ""
    stop_token_ids: tuple[int, ...] = ()
    lent: LentNames | None = None
    lines: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    error: str = ""
    exit_code: int = 0
