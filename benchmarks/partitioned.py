"""The old way of feeding drafters, for comparison only: target i feeds drafter i mod D, each drafter has a queue of its
own, and nobody takes a row of a neighbour's. Everything else (plan, ledger, rounds, meetings, stop) is the product's.

A drafter that is lost leaves its queue behind, so a partitioned run does not survive it.
"""

from __future__ import annotations

from collections.abc import Sequence

from draftline.errors import UserError
from draftline.pipeline.core import WAIT, CoreSettings, Lease, LedgerState, PipelineCore, RowItem, RowState, Signal
from draftline.pipeline.core.items import StopItem, SyncItem
from draftline.pipeline.core.waiting import WaitingRows
from draftline.records import PlannedRow


class PartitionedRows(WaitingRows):
    """Waiting rows of all drafters; hands out those of the drafter that asks."""

    def __init__(self, drafter_of_row: dict[int, int]) -> None:
        super().__init__(ordered=False)
        self._drafter_of_row = drafter_of_row
        self.asking = 0

    def take(self, states: Sequence[RowState]) -> int | None:
        del states
        row_id = next((r for r in self.rows if self._drafter_of_row[r] == self.asking), None)
        if row_id is not None:
            del self.rows[row_id]
        return row_id


class PartitionedCore(PipelineCore):
    """PipelineCore whose rows belong to the drafter of the target that leased them; pass it as `core_class`."""

    def __init__(
        self,
        plan: Sequence[PlannedRow],
        row_bytes: Sequence[int],
        settings: CoreSettings,
        state: LedgerState | None = None,
    ) -> None:
        if settings.n_targets < settings.n_drafters:
            raise UserError(
                f"{settings.n_targets} targets cannot feed {settings.n_drafters} drafters one by one",
                where="partitioned scheme",
                mend="use at least as many targets as drafters",
            )
        super().__init__(plan, row_bytes, settings, state)
        self._drafter_of_row: dict[int, int] = {}
        self._queues = PartitionedRows(self._drafter_of_row)
        self._waiting = self._queues

    def lease(self, target: int) -> Lease | Signal:
        drafter = target % self.settings.n_drafters
        admitted = sum(self._drafter_of_row.get(row_id) == drafter for row_id in self.admission.charged)
        if admitted >= self._bound(drafter) and not (self.failure or self.stopping):
            return WAIT
        answer = super().lease(target)
        if isinstance(answer, Lease):
            self._drafter_of_row[answer.row_id] = drafter
        return answer

    def get(self, drafter: int) -> RowItem[None] | SyncItem | StopItem | Signal:
        self._queues.asking = drafter
        return super().get(drafter)

    def _bound(self, drafter: int) -> int:
        """Rows admitted at once for one drafter: its share of `CoreSettings.max_rows`."""
        settings = self.settings
        targets = len(range(drafter, settings.n_targets, settings.n_drafters))
        return targets + 1 + settings.prefetch_rows + settings.queue_depth
