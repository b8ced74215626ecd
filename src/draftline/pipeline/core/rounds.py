"""Rounds: who is called to the meeting, who has arrived, who leads, and what each trained since the last one."""

from __future__ import annotations

from collections.abc import Iterable

from draftline.pipeline.core.items import Meeting, ProtocolError
from draftline.pipeline.core.ledger import Ledger, RowState


class Rounds:
    """The open round and its meeting. A call out of turn raises ProtocolError.

    A round is closing from the first call to its meeting until its commit, whatever happens in between: a drafter that
    was called would otherwise wait for others who go on training.

    `sealed` is False while the last committed meeting was begun without knowing that it is the last one (rows were set
    aside or a stop was asked for after it): one more meeting, empty if need be, then ends the run.
    """

    def __init__(self, drafters: Iterable[int], rows_per_drafter: int, round_id: int) -> None:
        self.round_id = round_id
        self.rows_per_drafter = rows_per_drafter
        self.live = set(drafters)
        self.joining: set[int] = set()  # drafters that take part from the next commit on
        self.known = set(self.live)  # numbers are not used again
        self.n_drafters = len(self.live)  # how many there may be at once
        self.closing = False
        self.called: set[int] = set()
        self.arrived: set[int] = set()
        self.leader: int | None = None
        self.attempt = 0
        self.averaging = self.announced_last = False
        self.sealed = True
        self.trained: dict[int, list[int]] = {d: [] for d in self.live}

    @property
    def limit(self) -> int:
        """Rows that this round hands out; it follows the drafters that are left."""
        return self.rows_per_drafter * len(self.live)

    def call(self, drafter: int) -> int:
        """Call a drafter to the meeting; returns the round."""
        self.closing = True
        self.called.add(drafter)
        return self.round_id

    def arrive(self, drafter: int, round_id: int) -> None:
        """A drafter is at the meeting. Raises ProtocolError if it was not called or is there already."""
        if round_id != self.round_id or drafter not in self.called or drafter in self.arrived:
            raise ProtocolError(f"drafter-{drafter} was not called to a meeting of round {round_id}, or is there")
        self.arrived.add(drafter)
        self._elect(drafter)

    def begin(self, drafter: int, round_id: int) -> None:
        """The leader starts averaging, or starts again after a death."""
        if round_id != self.round_id or drafter != self.leader or self.averaging:
            raise ProtocolError(f"drafter-{drafter} does not lead the meeting of round {round_id}")
        self.averaging = True
        self.attempt += 1

    def finish(self, drafter: int, round_id: int, attempt: int) -> bool:
        """The leader has averaged. False if somebody left meanwhile: the average holds rows that went back."""
        if round_id != self.round_id or drafter != self.leader:
            raise ProtocolError(f"drafter-{drafter} does not lead the meeting of round {round_id}")
        return self.averaging and attempt == self.attempt

    def meeting(self, leader: int, ledger: Ledger, *, stopping: bool) -> Meeting:
        """The meeting of this round, for whoever is live now."""
        members = tuple(sorted(self.live))
        committed = ledger.counts[RowState.COMMITTED] + sum(len(self.trained[d]) for d in members)
        return Meeting(
            round_id=self.round_id,
            attempt=self.attempt,
            members=members,
            leader=leader,
            rows={d: tuple(ledger.plan[row_id] for row_id in self.trained[d]) for d in members},
            committed_rows=committed,
            is_last=stopping or committed + ledger.counts[RowState.SET_ASIDE] == len(ledger.plan),
        )

    def join(self, drafter: int) -> None:
        """A new drafter waits for the next commit.

        Raises:
            ProtocolError: its number was used before, or there are as many drafters as the bounds were made for.
        """
        if drafter in self.known:
            raise ProtocolError(f"drafter-{drafter} is here or was lost; a new drafter needs a new number")
        if len(self.live) + len(self.joining) >= self.n_drafters:
            raise ProtocolError(f"drafter-{drafter} is one too many: the bounds are for {self.n_drafters}")
        self.known.add(drafter)
        self.joining.add(drafter)

    def close(self, *, admits: bool = False) -> None:
        """The round is committed: open the next one. `admits`: with those who wait to join it."""
        self.live |= self.joining if admits else set()
        self.joining.clear()
        self.round_id += 1
        self.sealed = self.announced_last
        self.closing = self.averaging = False
        self.called.clear()
        self.arrived.clear()
        self.leader = None
        self.attempt = 0
        self.trained = {d: [] for d in self.live}

    def leave(self, drafter: int) -> list[int]:
        """A drafter is lost: returns the rows it trained in this round. An averaging under way has to be repeated."""
        self.live.remove(drafter)
        self.called.discard(drafter)
        self.arrived.discard(drafter)
        self.averaging = False
        if self.leader == drafter:
            self.leader = None
        if self.arrived:
            self._elect(min(self.arrived))
        return self.trained.pop(drafter)

    def _elect(self, candidate: int) -> None:
        if self.leader is None and self.arrived == self.live:
            self.leader = candidate
