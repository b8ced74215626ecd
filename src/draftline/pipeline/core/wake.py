"""Who may be able to go on after a lease, a put, a get or a finished row: so that the driver wakes no more than those.

Each question is about the state as it is now. A wrong "yes" costs a wake-up; a wrong "no" would leave a worker asleep
that could go on, so the tests of the thread driver run with few rows and many workers.
"""

from __future__ import annotations

from draftline.pipeline.core.machine import PipelineCore


def slot_is_free(core: PipelineCore) -> bool:
    """A target that asks now gets a row."""
    planned = core._planned
    return bool(planned) and core.admission.fits(core.row_bytes[planned[0]])


def drafters_are_called(core: PipelineCore) -> bool:
    """A drafter that waits for a row may have to go to a meeting instead."""
    handed = core.ledger.handed
    return core.rounds.closing or bool(handed and (handed >= core.rounds.limit or core._nothing_left()))
