"""Promises of the configuration loader: layering, overrides, one clear line per mistake, no torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftline.config.load import config_differences, dump_config, load_config
from draftline.config.schema import GradientSync, OuterSync, RunConfig
from draftline.errors import UserError
from draftline.limits import MAX_SEED

BASE = """\
output: runs/a
target: {model: some/model}
data: {path: prepared}
drafter: {mask_token_id: 7}
"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write(tmp_path / "base.yaml", BASE)


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def failure(files: list[Path], overrides: list[str] | None = None) -> str:
    with pytest.raises(UserError) as caught:
        load_config(files, overrides or [])
    return str(caught.value)


def test_defaults_fill_what_no_layer_sets(base: Path) -> None:
    config = load_config([base])
    assert config.target.model == "some/model"
    assert config.sync.kind == "average"


def test_yaml_1_2_numbers_and_words(tmp_path: Path, base: Path) -> None:
    top = write(tmp_path / "top.yaml", "optimizer: {learning_rate: 1e-4}\ntarget: {model: no, revision: off}\n")
    config = load_config([base, top])
    assert config.optimizer.learning_rate == 1e-4
    assert (config.target.model, config.target.revision) == ("no", "off")


def test_later_files_win_key_by_key(tmp_path: Path, base: Path) -> None:
    middle = write(tmp_path / "middle.yaml", "optimizer: {learning_rate: 0.5, clip_norm: 2.0}\nseed: 3\n")
    top = write(tmp_path / "top.yaml", "optimizer: {learning_rate: 0.25}\n")
    config = load_config([base, middle, top])
    assert (config.optimizer.learning_rate, config.optimizer.clip_norm, config.seed) == (0.25, 2.0, 3)


def test_overrides_win_over_files_and_are_read_as_yaml(base: Path) -> None:
    config = load_config(
        [base],
        [
            "pipeline.target_devices=[cuda:0, cuda:1]",
            "optimizer.clip_norm=null",
            "optimizer.eps=1e-9",
            "seed=1",
            "seed=2",
        ],
    )
    assert config.pipeline.target_devices == ("cuda:0", "cuda:1")
    assert config.optimizer.clip_norm is None
    assert (config.optimizer.eps, config.seed) == (1e-9, 2)


def test_an_override_can_give_or_clear_a_whole_section(base: Path) -> None:
    config = load_config([base], ["drafter.sliding={window_tokens: 128, layers: [0, 1]}"])
    assert config.drafter.sliding is not None and config.drafter.sliding.layers == (0, 1)
    assert load_config([base], ["drafter.sliding.layers=[0]", "drafter.sliding=null"]).drafter.sliding is None


def test_switching_kind_drops_the_other_kinds_keys(tmp_path: Path, base: Path) -> None:
    top = write(tmp_path / "top.yaml", "sync: {kind: average, every_rows: 20, moments: reset}\n")
    assert load_config([base, top], ["sync.kind=gradient"]).sync == GradientSync()


def test_switching_kind_keeps_the_keys_that_both_kinds_know(tmp_path: Path, base: Path) -> None:
    top = write(tmp_path / "top.yaml", "sync: {kind: average, every_rows: 20, moments: reset}\n")
    assert load_config([base, top], ["sync.kind=outer"]).sync == OuterSync(every_rows=20)


def test_keys_given_beside_the_new_kind_are_kept_whatever_their_order(base: Path) -> None:
    expected = OuterSync(every_rows=5)
    assert load_config([base], ["sync.every_rows=5", "sync.kind=outer"]).sync == expected
    assert load_config([base], ["sync.kind=outer", "sync.every_rows=5"]).sync == expected


def test_a_key_of_the_default_kind_needs_no_kind(base: Path) -> None:
    config = load_config([base], ["objective.decay.alpha=0.3", "sync.every_rows=4"])
    assert config.objective.decay.model_dump() == {"kind": "dpace", "alpha": 0.3}


def test_a_plain_kind_field_is_not_a_union_and_drops_nothing(tmp_path: Path, base: Path) -> None:
    top = write(tmp_path / "top.yaml", "optimizer: {schedule: {kind: wsd, warmup_fraction: 0.5}}\n")
    config = load_config([base, top], ["optimizer.schedule.kind=linear"])
    assert config.optimizer.schedule.warmup_fraction == 0.5


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("seed: 1\nseed: 2\n", "base.yaml line 2: is not valid YAML: found duplicate key"),
        ("seed: [1\n", "is not valid YAML"),
        ("- 1\n", "must hold `key: value` lines"),
        ("1: 2\n", "key 1 is not text"),
    ],
)
def test_bad_yaml_names_the_file(tmp_path: Path, text: str, expected: str) -> None:
    message = failure([write(tmp_path / "base.yaml", text)])
    assert expected in message and "base.yaml" in message
    assert "\n" not in message


def test_unreadable_files_are_refused_in_one_line(tmp_path: Path) -> None:
    assert "no such file" in failure([tmp_path / "absent.yaml"])
    assert "cannot be read" in failure([tmp_path])
    (tmp_path / "latin.yaml").write_bytes("output: gr\xfcn\n".encode("latin-1"))
    assert "is not UTF-8" in failure([tmp_path / "latin.yaml"])


def test_an_empty_file_is_an_empty_layer(tmp_path: Path, base: Path) -> None:
    assert load_config([base, write(tmp_path / "empty.yaml", "# nothing\n")]) == load_config([base])


def test_unknown_key_names_file_line_and_nearest_name(tmp_path: Path, base: Path) -> None:
    top = write(tmp_path / "top.yaml", "seed: 1\noptimizer:\n  learning_rat: 1e-4\n")
    message = failure([base, top])
    assert message == f"{top} line 3: optimizer.learning_rat: unknown key; did you mean optimizer.learning_rate?"


@pytest.mark.parametrize(
    ("override", "mend"),
    [
        ("optimiser.learning_rate=1", "did you mean optimizer?"),
        ("learning_rate=1", "did you mean optimizer.learning_rate?"),
        ("objective.schedule.kind=wsd", "did you mean optimizer.schedule?"),
        ("checkpoint.zzz=1", "known here: every_rounds, keep"),
    ],
)
def test_unknown_override_suggests_the_right_place(base: Path, override: str, mend: str) -> None:
    message = failure([base], [override])
    assert message.startswith("command line: ") and message.endswith(mend)


def test_a_key_of_another_kind_says_so(base: Path) -> None:
    message = failure([base], ["sync.kind=gradient", "sync.every_rows=3"])
    assert "sync.every_rows: unknown key; it does not go with sync.kind=gradient" in message


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("epochs=0", "command line: epochs: must be at least 1, not 0"),
        ("seed=abc", "command line: seed: must be a whole number, not 'abc'"),
        ("pipeline.target_devices=cpu", "must be a list, for example [a, b], not 'cpu'"),
        ("pipeline.target_devices=[]", "needs at least 1 entries"),
        ("sync.kind=foo", "sync: must be one of 'average', 'copy', 'gradient', 'outer', not 'foo'"),
        ("objective.labels=x", "objective.labels: must be one of 'data', 'target', not 'x'"),
        ("optimizer.betas=[0.9]", "optimizer.betas: has too few entries"),
        ("optimizer=3", "optimizer: must be a section"),
        ("drafter.taps=[1, x]", "drafter.taps.1: must be a whole number"),
        ("output=null", "output: must be a path"),
        ("validation.tree_budgets=[64, 16]", "validation.tree_budgets [64, 16] must rise, between 1 and 4096"),
        ("validation.tree_budgets=[0, 16]", "validation.tree_budgets [0, 16] must rise, between 1 and 4096"),
        ("validation.best_by=tree@8", "best_by is 'tree@8'; what is scored: chain, tree@16, tree@64, tree@256"),
        ("seed=-1", "seed: must be at least 0, not -1"),
        (f"seed={2**64}", f"seed: must be at most {MAX_SEED}, not {2**64}"),
        ("seed", "is not of the form section.key=value"),
        ("=3", "is not of the form section.key=value"),
        ("seed=[1", "command line: seed: is not valid YAML"),
    ],
)
def test_a_bad_value_is_one_line_that_says_what_is_allowed(base: Path, override: str, expected: str) -> None:
    message = failure([base], [override])
    assert expected in message
    assert "\n" not in message


def test_a_rule_over_several_fields_names_them_and_its_source(base: Path) -> None:
    message = failure([base], ["drafter.sliding={layers: [9]}"])
    assert message.startswith("command line: drafter.sliding.layers [9] are outside the drafter's 5 layers")


def test_several_problems_are_a_line_each_up_to_a_few(base: Path) -> None:
    bad = ["epochs=0", "seed=-1", "max_rows=0", "optimizer.eps=0", "data.row_tokens=1", "checkpoint.keep=0", "sync=3"]
    lines = failure([base], bad).splitlines()
    assert len(lines) == 6
    assert lines[-1] == "and 2 more problems"


def test_missing_required_fields_are_named() -> None:
    lines = failure([]).splitlines()
    assert [line.split(":")[0] for line in lines] == ["output", "target", "data", "drafter"]


def test_a_dump_loads_back_equal(tmp_path: Path, base: Path) -> None:
    config = load_config([base], ["sync.kind=outer", "drafter.sliding={layers: [0]}", "optimizer.eps=1e-9"])
    assert load_config([write(tmp_path / "dump.yaml", dump_config(config))]) == config


@settings(max_examples=25, deadline=None)
@given(
    model=st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), min_size=1),
    learning_rate=st.floats(min_value=1e-12, max_value=10, allow_nan=False),
    clip=st.none() | st.floats(min_value=1e-6, max_value=1e6),
    devices=st.lists(st.sampled_from(["cpu", "cuda:0", "auto"]), min_size=1, max_size=4),
)
def test_any_configuration_survives_the_round_trip(
    tmp_path_factory: pytest.TempPathFactory,
    model: str,
    learning_rate: float,
    clip: float | None,
    devices: list[str],
) -> None:
    config = RunConfig.model_validate(
        {
            "output": "o",
            "target": {"model": model},
            "data": {"path": "d"},
            "drafter": {"mask_token_id": 1},
            "optimizer": {"learning_rate": learning_rate, "clip_norm": clip},
            "pipeline": {"target_devices": devices},
        }
    )
    path = tmp_path_factory.mktemp("round") / "c.yaml"
    assert load_config([write(path, dump_config(config))]) == config


def test_differences_name_path_and_both_values(base: Path) -> None:
    a = load_config([base])
    b = load_config([base], ["optimizer.learning_rate=0.5", "drafter.block_size=8"])
    assert config_differences(a, b) == [("drafter.block_size", 16, 8), ("optimizer.learning_rate", 6e-4, 0.5)]


def test_a_changed_kind_is_one_difference(base: Path) -> None:
    a, b = load_config([base]), load_config([base], ["sync.kind=gradient"])
    assert config_differences(a, b) == [("sync.kind", "average", "gradient")]


def test_where_a_run_is_and_what_it_runs_on_may_change_at_resume(base: Path) -> None:
    a = load_config([base])
    b = load_config([base], ["output=other", "pipeline.drafter_devices=[cpu, cpu]", "monitor.status_every_s=1"])
    assert config_differences(a, b) == []
    assert len(config_differences(a, b, may_change=frozenset())) == 3


def test_configuration_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, draftline.config.load, draftline.config.schema, draftline.monitor.run, draftline.monitor.watch\n"
        "sys.exit(', '.join(m for m in ('torch', 'transformers') if m in sys.modules) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
