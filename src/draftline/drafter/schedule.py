"""The learning rate as a function of the run's one clock: planned rows already handed out. No torch.

Its whole course is checked before a run starts, so that a bad schedule fails in the first second and not at 80 %.
"""

from __future__ import annotations

import math

from draftline.config.schema import OptimizerConfig, ScheduleConfig
from draftline.errors import UserError


def schedule_factor(schedule: ScheduleConfig, progress: float) -> float:
    """Factor on the peak learning rate at `progress`, the share of planned rows done, in [0, 1]."""
    warmup = schedule.warmup_fraction
    if progress < warmup:
        return progress / warmup
    final = schedule.final_factor
    if schedule.kind == "constant":
        return 1.0
    if schedule.kind == "wsd":
        start = 1.0 - schedule.decay_fraction
        if progress <= start:
            return 1.0
        return 1.0 - (1.0 - final) * min(1.0, (progress - start) / schedule.decay_fraction)
    along = min(1.0, (progress - warmup) / (1.0 - warmup)) if warmup < 1.0 else 1.0
    if schedule.kind == "linear":
        return 1.0 - (1.0 - final) * along
    return final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * along))


class LearningRate:
    """Learning rate at a clock reading, in rows.

    Args:
        config: optimizer section.
        planned_rows: length of the plan.

    Raises:
        UserError: a factor outside [0, 1], or a schedule that never leaves 0.
    """

    def __init__(self, config: OptimizerConfig, planned_rows: int) -> None:
        self._peak, self._schedule, self._planned = config.learning_rate, config.schedule, planned_rows
        course = [self.at(clock) for clock in range(planned_rows)]
        bad = next((c for c, lr in enumerate(course) if not 0.0 <= lr <= self._peak * (1 + 1e-9)), None)
        if bad is not None:
            raise UserError(
                f"the learning rate at row {bad} would be {course[bad]}",
                where="optimizer.schedule",
                mend="check warmup_fraction, decay_fraction and final_factor",
            )
        if course and max(course) == 0.0:
            raise UserError(
                "the learning rate would be 0 in the whole run",
                where="optimizer.schedule",
                mend="lower warmup_fraction or train more rows",
            )

    def at(self, clock_rows: int) -> float:
        """Learning rate for the row that is number `clock_rows` (from 0): the middle of its share of the run, so
        that neither the first nor the last row is trained with a rate of exactly 0."""
        return self._peak * schedule_factor(self._schedule, (clock_rows + 0.5) / max(1, self._planned))
