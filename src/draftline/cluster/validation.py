"""Validation rows on a cluster: captured once by one target, kept in the object store, scored by whoever leads."""

from __future__ import annotations

from dataclasses import replace

from draftline.cluster.buffers import as_bytes, layout_of, read_parts, ref_to, row_from, row_tensors
from draftline.cluster.refs import ObjectPlace, RowRef
from draftline.cluster.transport import Store
from draftline.data.shards import TokenDataset
from draftline.pipeline.runplan import RunPlan, validation_rows
from draftline.records import HiddenStateRow
from draftline.target.loop import Capture, map_tensors


def stored_rows(plan: RunPlan, capture: Capture, store: Store) -> list[RowRef]:
    """Captures all validation rows and stores them."""
    path = plan.config.data.validation_path
    if path is None:
        return []
    dataset = TokenDataset.open(path)
    found = []
    for planned in validation_rows(dataset, plan.config):
        row = capture.capture(planned, [dataset.sample(i) for i in planned.samples])
        tensors = row_tensors(map_tensors(row, lambda t: t.to("cpu")))
        ref = store.put([as_bytes(t).numpy() for t in tensors.values()])
        found.append(ref_to(row, layout_of(tensors), ObjectPlace(ref), "validation"))
    return found


def kept_rows(rows: list[RowRef], store: Store) -> list[RowRef]:
    """The same rows, owned by the process that calls this: they outlive the target that captured them."""
    kept = []
    for row in rows:
        assert isinstance(row.place, ObjectPlace)
        kept.append(replace(row, place=ObjectPlace(store.put(list(store.get(row.place.ref))))))
    return kept


def fetched_rows(rows: list[RowRef], store: Store) -> list[HiddenStateRow]:
    """The rows themselves, as views of the object store."""
    found = []
    for row in rows:
        assert isinstance(row.place, ObjectPlace)
        found.append(row_from(row, read_parts(row.layout, store.get(row.place.ref))))
    return found
