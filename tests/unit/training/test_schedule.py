"""The learning rate: its course is known and checked at the start."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from draftline.config.schema import OptimizerConfig, ScheduleConfig
from draftline.drafter.schedule import LearningRate, schedule_factor
from draftline.errors import UserError


@pytest.mark.parametrize(
    ("kind", "points"),
    [
        ("constant", {0.05: 0.5, 0.1: 1.0, 0.5: 1.0, 1.0: 1.0}),
        ("linear", {0.05: 0.5, 0.1: 1.0, 0.55: 0.6, 1.0: 0.2}),
        ("cosine", {0.05: 0.5, 0.1: 1.0, 0.55: 0.6, 1.0: 0.2}),
        ("wsd", {0.05: 0.5, 0.1: 1.0, 0.75: 1.0, 0.875: 0.6, 1.0: 0.2}),
    ],
)
def test_shapes(kind, points):
    schedule = ScheduleConfig(kind=kind, warmup_fraction=0.1, decay_fraction=0.25, final_factor=0.2)
    for progress, factor in points.items():
        assert schedule_factor(schedule, progress) == pytest.approx(factor), progress


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "wsd"])
def test_no_row_is_trained_with_a_rate_of_zero(kind):
    rate = LearningRate(OptimizerConfig(schedule=ScheduleConfig(kind=kind)), 50)
    assert all(rate.at(row) > 0 for row in range(50))


def test_wsd_that_does_not_fit_is_refused_before_the_run():
    with pytest.raises(ValidationError, match="warmup_fraction"):
        ScheduleConfig(kind="wsd", warmup_fraction=0.9, decay_fraction=0.2)


def test_a_schedule_that_never_leaves_zero_is_refused():
    schedule = ScheduleConfig.model_construct(
        kind="constant", warmup_fraction=1e12, decay_fraction=0.2, final_factor=0.0
    )
    config = OptimizerConfig().model_copy(update={"schedule": schedule, "learning_rate": 1e-320})
    with pytest.raises(UserError, match="learning rate"):
        LearningRate(config, 3)
