"""The simulator's workers: step programs that call the core as a target's or a drafter's thread would."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

from draftline.pipeline.core.items import WAIT, Lease, Meeting, RowItem, StopItem, SyncItem

if TYPE_CHECKING:
    from draftline.pipeline.core.simworld import World


class At(IntEnum):
    """Where a worker is in its program."""

    LEASE = 0
    PUT = 1
    REPORT = 2
    JOIN = 3
    WORK = 4
    MEET = 5
    AVERAGE = 6
    COMMIT = 7
    OVER = 8


STUCK = -1  # the worker can only wait


class SimTarget:
    """lease -> put -> ... -> producer_done; may be lost and join again."""

    def __init__(self, index: int) -> None:
        self.index, self.at, self.row_id = index, At.LEASE, -1

    def step(self, world: World, _draw: float) -> int:
        """One step of a target; what it did, or STUCK if it has to wait."""
        core = world.core
        if self.at is At.LEASE:
            answer = core.lease(self.index)
            if answer is WAIT:
                return STUCK
            if isinstance(answer, Lease):
                self.row_id, self.at = answer.row_id, At.PUT
            else:
                world.check_done()
                self.at = At.REPORT
        elif self.at is At.PUT:
            core.put(self.index, self.row_id)
            world.n_puts += 1
            world.n_discarded += world.stopped
            self.at = At.LEASE
        elif self.at is At.REPORT:
            self.report(world)
        else:
            self.at = At.LEASE if core.target_joined(self.index) else At.OVER
        return 0

    def report(self, world: World) -> None:
        """Say once that no row is left to capture."""
        world.core.producer_done(self.index)
        self.at = At.OVER


class SimDrafter:
    """get -> trained -> ... -> arrive -> (average -> commit) -> take the average over -> get; prefetches as it likes.

    Once it has asked for a row and must wait, it does nothing else, as a thread would. One that replaces a lost drafter
    begins by joining.
    """

    def __init__(self, index: int, at: At = At.WORK) -> None:
        self.index, self.at = index, at
        self.hand: list[int] = []
        self.round_id = -1  # >= 0: called to that meeting
        self.asking = False
        self.meeting: Meeting | None = None

    def step(self, world: World, draw: float) -> int:
        """One step of a drafter; what it did, or STUCK if it has to wait. `draw` in 0..1 decides what is open."""
        if self.at is At.WORK:
            return self.work(world, draw)
        if self.at is At.MEET:
            return self.meet(world)
        if self.at is At.JOIN:
            return self.join(world)
        assert self.meeting is not None
        if self.at is At.AVERAGE:
            world.average(self.meeting)
            self.at = At.COMMIT
            return 0
        world.commit(self.index, self.meeting)
        self.at = At.MEET
        return 0

    def can_choose(self, world: World) -> bool:
        """True if it may either train or ask for another row."""
        return bool(
            self.at is At.WORK
            and self.hand
            and self.round_id < 0
            and not self.asking
            and len(self.hand) <= world.case.prefetch_rows
        )

    def work(self, world: World, draw: float) -> int:
        """Train a row in hand, or ask for the next."""
        if self.hand and not self.asking and not (draw < 0.5 and self.can_choose(world)):
            row_id = self.hand.pop(0)
            world.core.trained(self.index, row_id)
            world.train(self.index, row_id)
            return 1
        if self.round_id >= 0:
            world.core.arrive(self.index, self.round_id)
            self.at = At.MEET
            return 2
        answer = world.core.get(self.index)
        if answer is WAIT:
            asked, self.asking = self.asking, bool(self.hand)
            return STUCK if asked or not self.hand else 3
        self.asking = False
        if isinstance(answer, RowItem):
            world.check_row(answer)
            self.hand.append(answer.row_id)
        elif isinstance(answer, SyncItem):
            self.round_id = answer.round_id
        elif isinstance(answer, StopItem):
            world.check_stop(self.index, answer.end)
            self.at = At.OVER
        return 0

    def join(self, world: World) -> int:
        """Ask to take part, then wait for a commit."""
        core = world.core
        if not self.asking:
            self.asking = core.drafter_joined(self.index)
            self.at = At.JOIN if self.asking else At.OVER
        elif core.is_live(self.index):
            self.at, self.asking = At.WORK, False
            world.take_over(self.index)
        elif self.index in core.rounds.joining and not core.failure:
            return STUCK
        else:
            self.at = At.OVER
        return 0

    def meet(self, world: World) -> int:
        """Wait at a meeting, lead it, or go on behind it."""
        core = world.core
        if core.failure:
            self.at = At.OVER
        elif core.round_id != self.round_id:
            world.take_over(self.index)
            self.at, self.round_id = At.WORK, -1
        elif core.leader == self.index:
            self.meeting, self.at = core.begin_average(self.index, self.round_id), At.AVERAGE
        else:
            return STUCK
        return 0
