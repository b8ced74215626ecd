"""Names the situations in which a fault meets a simulated run, so that a test can say that each of them was met."""

from __future__ import annotations

from collections import Counter
from typing import cast

from draftline.pipeline.core.simworkers import At, SimDrafter, SimTarget
from draftline.pipeline.core.simworld import Case, Fault, World

LOSSES = (Fault.TARGET_LOST, Fault.TARGET_RESTARTS)
SITUATIONS = (
    "target lost before its first put",
    "target lost between its puts",
    "target lost after its last put",
    "target lost with a row",
    "two targets lost at once",
    "target lost after another has reported done",
    "drafter lost with a row in hand",
    "drafter lost with an uncommitted round",
    "drafter lost while it averages",
    "drafter lost while another averages",
    "drafter lost after the commit, before it took over",
    "two drafters lost at once",
    "rows come back while all targets are idle",
    "stop before the first lease",
    "stop with rows waiting",
    "stop with a row in hand",
    "stop while averaging",
    "stop after the last lease",
)


class WatchedWorld(World):
    """Counts, for each fault that happens, the situations that it meets."""

    def __init__(self, case: Case, met: Counter[str]) -> None:
        super().__init__(case)
        self.met = met
        self.n_moves = 0
        self.last_loss: tuple[str, int] | None = None

    def check(self) -> None:
        self.n_moves += 1
        super().check()

    def apply(self, fault: Fault, index: int) -> bool:
        found = self._situations(fault, index)
        planned = len(self.core._planned)
        if not super().apply(fault, index):
            return False
        if fault == Fault.DRAFTER_LOST and len(self.core._planned) > planned == 0 and self._all_idle():
            found.append("rows come back while all targets are idle")
        self.met.update(found)
        return True

    def _situations(self, fault: Fault, index: int) -> list[str]:
        if fault in LOSSES:
            return self._target(cast(SimTarget, self.workers[index])) + self._at_once("target")
        if fault is Fault.DRAFTER_LOST:
            drafter = cast(SimDrafter, self.workers[self.case.n_targets + index])
            return [] if drafter.at is At.OVER else self._drafter(drafter) + self._at_once("drafter")
        return self._stop() if fault is Fault.STOP else []

    def _at_once(self, role: str) -> list[str]:
        """Nobody has moved since the last loss of the same role, whose own check is the one move."""
        before, self.last_loss = self.last_loss, (role, self.n_moves)
        return [f"two {role}s lost at once"] if before == (role, self.n_moves - 1) else []

    def _target(self, target: SimTarget) -> list[str]:
        core = self.core
        n_put = core.ledger.produced
        holds = target.at is At.PUT
        nothing_planned = not core._planned and not holds
        return [
            name
            for name, holds_now in {
                "target lost before its first put": n_put == 0,
                "target lost between its puts": n_put > 0 and bool(core._planned),
                "target lost after its last put": n_put > 0 and nothing_planned,
                "target lost with a row": holds,
                "target lost after another has reported done": bool(core._reported - {target.index}),
            }.items()
            if holds_now
        ]

    def _drafter(self, drafter: SimDrafter) -> list[str]:
        core, at = self.core, drafter.at
        averages = at in (At.AVERAGE, At.COMMIT)
        at_meeting = at is At.MEET
        return [
            name
            for name, holds_now in {
                "drafter lost with a row in hand": bool(drafter.hand),
                "drafter lost with an uncommitted round": bool(core.rounds.trained.get(drafter.index)),
                "drafter lost while it averages": averages,
                "drafter lost while another averages": at_meeting and core.rounds.averaging,
                "drafter lost after the commit, before it took over": at_meeting and core.round_id != drafter.round_id,
            }.items()
            if holds_now
        ]

    def _stop(self) -> list[str]:
        core = self.core
        hands = [worker.hand for worker in self.workers if isinstance(worker, SimDrafter)]
        return [
            name
            for name, holds_now in {
                "stop before the first lease": self.n_moves == 0,
                "stop with rows waiting": bool(core.waiting_rows),
                "stop with a row in hand": any(hands),
                "stop while averaging": core.rounds.averaging,
                "stop after the last lease": not core._planned,
            }.items()
            if holds_now
        ]

    def _all_idle(self) -> bool:
        targets = [worker for worker in self.workers if isinstance(worker, SimTarget) and worker.at is not At.OVER]
        return bool(targets) and all(target.at is At.LEASE for target in targets)
