"""A DFlash drafter goes on as a DFlash2 one, from its export to decoding; exports that are pruned or in 8 bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from draftline.config.schema import TargetConfig
from draftline.decode.budget import FixedBudget
from draftline.decode.chain import BoundDrafter, chain_generate
from draftline.decode.plain import plain_generate
from draftline.decode.tree_generate import tree_generate
from draftline.drafter.convolution import is_added
from draftline.errors import UserError
from draftline.export.check import check_export
from draftline.export.formats import load_drafter_export
from draftline.pipeline.checkpoint import latest_checkpoint, read_checkpoint
from draftline.pipeline.coordinator import train
from draftline.pipeline.runplan import make_run_plan
from draftline.pipeline.workers import initial_weights
from draftline.target.load import load_target
from tiny_run_kit import finished_run, invoke

SIZES = "drafter.dflash2={conv_group_size: 8, selector_rank: 4, selector_top_k: 6}"


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory, tiny_target_dir: Path, tiny_data: Path) -> Path:
    """A finished DFlash run."""
    return finished_run(tmp_path_factory.mktemp("first"), tiny_target_dir, tiny_data, "max_rows=3")


def test_a_dflash_export_goes_on_as_dflash2_is_resumed_exported_and_decodes_without_loss(make_run, first, tiny_data):
    overrides = (
        "drafter.kind=dflash2",
        SIZES,
        f"drafter.init_from={first / 'export'}",
        f"data.validation_path={tiny_data}",
        "pipeline.drafter_devices=[cpu, cpu]",
        "objective.selector.warmup_rows=2",
        "sync.every_rows=2",
        "max_rows=6",
    )
    config = make_run(*overrides, name="second")
    plan = make_run_plan(config)
    target = load_target(TargetConfig(model=config.target.model), "cpu")
    weights = initial_weights(plan.config, plan.spec, target)
    started = load_drafter_export(first / "export").state_dict()
    assert {name for name in weights if name not in started} == {name for name in weights if is_added(name)}
    assert all(torch.equal(weights[name], value.float()) for name, value in started.items())
    report = train(plan)
    assert report.ledger.remaining == 0
    trained = read_checkpoint(latest_checkpoint(config.output)[0]).weights
    learned = [name for name in weights if is_added(name) and not torch.equal(weights[name], trained[name])]
    assert {"candidate_selector.successor_codebook", "layers.0.mlp_conv.base_kernel"} <= set(learned)
    assert report.export is not None
    assert check_export(report.export).good_for == ("dflash", "vllm", "sglang")
    bound = BoundDrafter(load_drafter_export(report.export, dtype=torch.float32), target)
    prompt, options = [3, 9, 27, 81], {"max_new_tokens": 12, "stop_token_ids": ()}
    plain = plain_generate(target, prompt, **options).output_ids
    assert chain_generate(target, bound, prompt, **options).output_ids == plain
    assert tree_generate(target, bound, prompt, budget=FixedBudget(9), **options).output_ids == plain


def test_a_dflash2_drafter_is_not_taken_for_a_dflash_one(make_run, first):
    config = make_run("drafter.kind=dflash2", SIZES, "max_rows=3", name="second")
    export = train(make_run_plan(config)).export
    with pytest.raises(UserError, match="dflash2"):
        make_run_plan(make_run(f"drafter.init_from={export}", name="third"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((SIZES,), "drafter.dflash2 is for drafter.kind dflash2"),
        (("objective.selector.weight=2",), "objective.selector is for drafter.kind dflash2"),
        (("drafter.kind=dflash2", "objective.labels=target"), "objective.labels target is not possible"),
        (("drafter.kind=dflash2", "drafter.dflash2={conv_group_size: 7}"), "not a multiple of conv_group_size 7"),
    ],
)
def test_settings_that_do_not_belong_together_are_one_line(make_run, overrides, message):
    with pytest.raises(UserError, match=message):
        make_run_plan(make_run(*overrides))


def test_a_run_is_exported_with_a_pruned_vocabulary_of_its_datas_commonest_tokens(tmp_path, first, tiny_target_dir):
    code, said = invoke("export", first, "-o", tmp_path / "x", "--format", "speculators", "--draft-vocab-size", 150)
    assert code == 0 and "drafts 150 of 512 tokens" in said
    drafter = load_drafter_export(tmp_path / "x")
    kept = drafter.spec.draft_vocabulary
    target = load_target(TargetConfig(model=str(tiny_target_dir)), "cpu")
    assert kept is not None and len(kept) == 150 and set(target.facts.eos_token_ids) <= set(kept)
    again = invoke("export", tmp_path / "x", "-o", tmp_path / "y", "--format", "speculators")
    assert again[0] == 0 and load_drafter_export(tmp_path / "y").spec.draft_vocabulary == kept
    code, _ = invoke("export", tmp_path / "x", "-o", tmp_path / "z")
    assert code == 0 and load_drafter_export(tmp_path / "z").spec.draft_vocabulary is None
    with pytest.raises(UserError, match="z-lab's class drafts from the whole vocabulary"):
        invoke("export", first, "-o", tmp_path / "w", "--draft-vocab-size", 150)
    with pytest.raises(UserError, match="600 is not between"):
        invoke("export", first, "-o", tmp_path / "w", "--draft-vocab-size", 600)
    with pytest.raises(UserError, match="give them with --vocab-data"):
        invoke("export", tmp_path / "z", "-o", tmp_path / "w", "--draft-vocab-size", 150)


def test_a_run_is_exported_in_8_bits(tmp_path, first):
    code, _ = invoke("export", first, "-o", tmp_path / "x", "--dtype", "fp8")
    assert code == 0
    assert "quantization_config" in json.loads((tmp_path / "x" / "config.json").read_text())
    assert load_drafter_export(tmp_path / "x").fc.weight.dtype == torch.bfloat16
    with pytest.raises(UserError, match="use one of bfloat16, float32, fp8"):
        invoke("export", first, "-o", tmp_path / "y", "--dtype", "int4")
