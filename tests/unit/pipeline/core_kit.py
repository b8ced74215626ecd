"""A small core, and the calls of its workers in short."""

from __future__ import annotations

from draftline.pipeline.core import CoreSettings, Lease, PipelineCore, RowItem, SyncItem
from draftline.records import PlannedRow

ROW_BYTES = 10


def make_plan(n: int) -> list[PlannedRow]:
    return [PlannedRow(i, i // 4, (2 * i, 2 * i + 1), 8, 4) for i in range(n)]


def make_core(n_rows=4, n_targets=1, n_drafters=1, rows_per_drafter=2, state=None, **rules) -> PipelineCore:
    rules.setdefault("prefetch_rows", 0)
    sizes = CoreSettings(n_targets, n_drafters, rows_per_drafter, **rules)
    return PipelineCore(make_plan(n_rows), [ROW_BYTES] * n_rows, sizes, state)


def capture(core: PipelineCore, n: int = 1, target: int = 0) -> list[int]:
    rows = []
    for _ in range(n):
        lease = core.lease(target)
        assert isinstance(lease, Lease)
        core.put(target, lease.row_id)
        rows.append(lease.row_id)
    return rows


def train_one(core: PipelineCore, drafter: int = 0) -> int:
    item = core.get(drafter)
    assert isinstance(item, RowItem), item
    core.trained(drafter, item.row_id)
    return item.row_id


def commit_round(core: PipelineCore, *drafters: int):
    for drafter in drafters:
        assert core.get(drafter) == SyncItem(core.round_id)
        core.arrive(drafter, core.round_id)
    assert core.leader == drafters[-1]
    meeting = core.begin_average(drafters[-1], core.round_id)
    return core.commit(drafters[-1], core.round_id, meeting.attempt)
