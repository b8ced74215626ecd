"""What a look at the exchange tells."""

from __future__ import annotations

from dataclasses import dataclass

from draftline.pipeline.core import CaptureCounts, LedgerCounts


@dataclass(frozen=True, slots=True)
class ExchangeStats:
    """A look at the exchange.

    Attributes:
        waiting_rows, waiting_bytes: captured and in nobody's hands.
        admitted_rows, admitted_bytes, max_rows, max_bytes: slots charged, and their bounds.
        waiting_for: worker name -> what it waits for now; only workers that wait.
        waiting_for_s: worker name -> seconds it has been waiting for that.
        waited_s: worker name -> seconds spent waiting since the start, the present wait included.
        busy: worker name -> what it declared to be busy with.
        round_id, handed_rows: the open round and the rows handed out in it.
        ledger, captures: the identities.
    """

    waiting_rows: int
    waiting_bytes: int
    admitted_rows: int
    admitted_bytes: int
    max_rows: int
    max_bytes: int | None
    waiting_for: dict[str, str]
    waiting_for_s: dict[str, float]
    waited_s: dict[str, float]
    busy: dict[str, str]
    round_id: int
    handed_rows: int
    ledger: LedgerCounts
    captures: CaptureCounts
