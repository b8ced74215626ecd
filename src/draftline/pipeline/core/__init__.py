"""The pure core of the pipeline: one state machine without threads, clocks, tensors or torch."""

from draftline.pipeline.core.admission import CoreSettings
from draftline.pipeline.core.items import (
    DONE,
    WAIT,
    End,
    Failure,
    Lease,
    Meeting,
    ProtocolError,
    RowItem,
    Signal,
    StopItem,
    SyncItem,
    Worker,
    drafter_worker,
    target_worker,
)
from draftline.pipeline.core.ledger import CaptureCounts, LedgerCounts, LedgerState, RowState
from draftline.pipeline.core.machine import PipelineCore

__all__ = [
    "DONE",
    "WAIT",
    "CaptureCounts",
    "CoreSettings",
    "End",
    "Failure",
    "Lease",
    "LedgerCounts",
    "LedgerState",
    "Meeting",
    "PipelineCore",
    "ProtocolError",
    "RowItem",
    "RowState",
    "Signal",
    "StopItem",
    "SyncItem",
    "Worker",
    "drafter_worker",
    "target_worker",
]
