"""Copies and fingerprints of simulated state, for the search through all schedules of a case."""

from __future__ import annotations

from typing import Any

from draftline.pipeline.core.admission import CoreSettings
from draftline.pipeline.core.items import Failure, Meeting
from draftline.pipeline.core.ledger import RowState
from draftline.pipeline.core.simworkers import At
from draftline.pipeline.core.simworld import Case

SHARED = frozenset({int, bool, type(None), tuple, RowState, At, Meeting, Failure, Case, CoreSettings})


def fork(value: Any) -> Any:
    """A copy of simulated state: mutable containers and objects are copied, frozen ones shared."""
    kind = type(value)
    if kind in SHARED:
        return value
    if kind is set or (kind is list and (not value or type(value[0]) in SHARED)):
        return value.copy()
    if kind is list:
        return [fork(item) for item in value]
    if kind is dict:
        return {key: fork(item) for key, item in value.items()}
    copy = object.__new__(kind)
    copy.__dict__ = {key: item if type(item) in SHARED else fork(item) for key, item in value.__dict__.items()}
    return copy


def fingerprint(value: Any) -> Any:
    """A hashable picture of simulated state: equal pictures behave alike."""
    kind = type(value)
    if kind is Meeting:
        return (value.round_id, value.attempt, value.members)
    if kind is tuple or kind is Case or kind is CoreSettings:  # plan, sizes and settings never change
        return None
    if kind in SHARED:
        return value
    if kind is list:
        return tuple(value) if not value or type(value[0]) in SHARED else tuple(map(fingerprint, value))
    if kind is set:
        return frozenset(value)
    if kind is dict:
        return tuple((key, fingerprint(item)) for key, item in value.items())
    return tuple(map(fingerprint, value.__dict__.values()))
