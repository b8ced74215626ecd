"""What the queue answers to workers that ask for a row to capture, or for their part in a meeting. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from draftline.pipeline.core import Lease, Meeting


@dataclass(frozen=True, slots=True)
class Turn:
    """What a member of a meeting does next.

    Attributes:
        meeting: with `attempt` counted over deaths and broken links (the core's counts deaths alone), and without its
            rows: each member knows its own, and those of hundreds of members are much to send.
        committed: True: take over what was reduced last. False: reduce now, in the group of this attempt.
        is_due: a checkpoint is to be written after the commit.
        joined: drafters that take part from this commit on and have to be given the weights by the leader.
    """

    meeting: Meeting
    committed: bool
    is_due: bool = False
    joined: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SlotLease:
    """A lease with the slot of shared memory that the row may be written to."""

    lease: Lease
    slot: int
