"""Each shipped recipe loads, and holds what its name promises."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftline.config.drafter_spec import default_taps
from draftline.config.load import load_config
from draftline.recipes import recipe_names, recipe_path


@pytest.mark.parametrize("name", recipe_names())
def test_it_loads(name):
    config = load_config([recipe_path(name)])
    assert config.drafter.mask_token_id > 0
    assert (Path(__file__).parents[3] / "recipes" / f"{name}.yaml").samefile(recipe_path(name))


def test_the_big_run_is_the_ddtree_recipe():
    config = load_config([recipe_path("qwen3.6-27b-ddtree-8gpu")])
    objective, drafter = config.objective, config.drafter
    assert (drafter.block_size, objective.anchors, objective.decay.gamma) == (32, 1024, 10)
    assert (objective.kl_weight, objective.cap_weight, objective.feature_noise.kind) == (0.15, 0.1, "uniform")
    assert drafter.sliding.layers == (0, 1, 2, 3) and drafter.sliding.in_block == "zlab"
    assert len(config.pipeline.target_devices) == 5 and len(config.pipeline.drafter_devices) == 3
    assert config.sync.kind == "average" and config.sync.every_rows == 50
    assert drafter.taps == default_taps(64, 5)


def test_the_baseline_differs_where_it_says():
    config = load_config([recipe_path("qwen3.6-27b-baseline-8gpu")])
    assert config.objective.decay.gamma == 4 and config.objective.feature_noise.kind == "gaussian"
    assert config.objective.kl_weight == config.objective.cap_weight == 0


def test_the_papers_recipe():
    config = load_config([recipe_path("qwen3-8b-dflash")])
    assert config.drafter.taps == default_taps(36, 5)
    assert (config.drafter.block_size, config.objective.anchors, config.data.row_tokens) == (16, 512, 3072)
    assert (config.optimizer.learning_rate, config.optimizer.schedule.warmup_fraction, config.epochs) == (6e-4, 0.04, 6)
