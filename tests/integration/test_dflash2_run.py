"""A DFlash drafter goes on as a DFlash2 one, from its export to decoding; exports that are pruned or in 8 bits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftline.config.schema import TargetConfig
from draftline.data.shards import TokenDataset
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
from draftline.pipeline.exporting import export_run
from draftline.pipeline.pruning import data_of_run, head_rows, prune_spec
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


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_selector_that_is_not_trained_is_not_decayed_either(make_run, tiny_target_dir, kind):
    decay = (f"optimizer.kind={kind}", "optimizer.weight_decay=0.5", "drafter.kind=dflash2", SIZES, "max_rows=3")
    names = [f"candidate_selector.{name}" for name in ("predecessor_codebook", "hidden_projection.weight")]
    for weight, stays in ((0, True), (1, False)):
        plan = make_run_plan(make_run(*decay, f"objective.selector.weight={weight}", name=f"weight-{weight}"))
        before = initial_weights(plan.config, plan.spec, load_target(TargetConfig(model=str(tiny_target_dir)), "cpu"))
        train(plan)
        after = read_checkpoint(latest_checkpoint(plan.config.output)[0]).weights
        assert [torch.equal(before[name], after[name]) for name in names] == [stays, stays]
        assert before[names[0]].any() and not torch.equal(before["fc.weight"], after["fc.weight"])


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
    assert "the others are those of the lowest ids" not in said
    assert kept is not None and len(kept) == 150 and set(target.facts.eos_token_ids) <= set(kept)
    again = invoke("export", tmp_path / "x", "-o", tmp_path / "y", "--format", "speculators")
    assert again[0] == 0 and load_drafter_export(tmp_path / "y").spec.draft_vocabulary == kept
    code, _ = invoke("export", tmp_path / "x", "-o", tmp_path / "z")
    assert code == 0 and load_drafter_export(tmp_path / "z").spec.draft_vocabulary is None
    with pytest.raises(UserError, match="z-lab's class drafts from the whole vocabulary"):
        invoke("export", first, "-o", tmp_path / "w", "--draft-vocab-size", 150)
    assert "draft vocabulary: tokens | 150" in (tmp_path / "x" / "README.md").read_text()
    assert "draft vocabulary" not in (tmp_path / "z" / "README.md").read_text()
    with pytest.raises(UserError, match="600 is not between"):
        invoke("export", first, "-o", tmp_path / "w", "--draft-vocab-size", 600)
    with pytest.raises(UserError, match="give them with --vocab-data"):
        invoke("export", tmp_path / "z", "-o", tmp_path / "w", "--draft-vocab-size", 150)


def test_the_targets_end_tokens_are_kept_where_the_drafters_file_names_none(
    tmp_path, first, tiny_target_dir, make_data
):
    """As speculators writes it; the data hold no end token either."""
    foreign = export_run(first, tmp_path / "foreign", form="speculators")
    (foreign / "draftline.json").unlink()
    config = json.loads((foreign / "config.json").read_text())
    config["transformer_layer_config"] |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    (foreign / "config.json").write_text(json.dumps(config))
    options = ("--format", "speculators", "--draft-vocab-size", 20, "--vocab-data", make_data(tmp_path / "data"))
    code, said = invoke("export", foreign, "-o", tmp_path / "x", *options, "--target", tiny_target_dir)
    target = load_target(TargetConfig(model=str(tiny_target_dir)), "cpu")
    kept = load_drafter_export(tmp_path / "x").spec.draft_vocabulary
    assert code == 0 and kept is not None and target.stop_token_ids <= set(kept)
    assert "names no end-of-text token" in said
    said = invoke("export", "--check", tmp_path / "x", "--target", tiny_target_dir)[1]
    assert "end-of-text" not in said


def test_a_vocabulary_larger_than_what_the_data_use_is_filled_up_and_said(tmp_path, first, make_data):
    few = make_data(tmp_path / "few", n_samples=2)
    dataset = TokenDataset.open(few)
    counted = {int(t) for i in range(2) for t in dataset.sample(i).input_ids[dataset.sample(i).loss_mask]}
    options = ("--format", "speculators", "--draft-vocab-size", 150, "--vocab-data", few)
    code, said = invoke("export", first, "-o", tmp_path / "x", *options)
    assert code == 0 and f"the data use {len(counted | {2})} of its 150 tokens" in said  # 2 ends text
    kept = load_drafter_export(tmp_path / "x").spec.draft_vocabulary
    assert kept is not None and counted < set(kept) and len(kept) == 150


@pytest.mark.parametrize(
    ("rows", "message"),
    [(448, "vocabulary size is 512, the target's is 448"), (None, r"has shape \[300, 64\], .* makes it \[512, 64\]")],
)
def test_rows_of_another_targets_head_are_refused(tmp_path, first, tiny_target_dir, rows, message):
    """Its configuration says so, or its weights are not those of its configuration."""
    other = shutil.copytree(tiny_target_dir, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | ({} if rows is None else {"vocab_size": rows})))
    weights = load_file(other / "model.safetensors")
    save_file(weights | {"lm_head.weight": torch.ones(300, 64)}, other / "model.safetensors", metadata={"format": "pt"})
    spec, _ = prune_spec(load_drafter_export(first / "export").spec, 150, data_of_run(first))
    with pytest.raises(UserError, match=message):
        head_rows(spec, TargetConfig(model=str(other)))


def test_the_head_is_read_at_the_revision_that_was_trained_on(tmp_path, first, tiny_target_dir, monkeypatch):
    run, seen = shutil.copytree(first, tmp_path / "run"), []
    config = (run / "config.yaml").read_text()
    assert "revision: null" in config
    (run / "config.yaml").write_text(config.replace("revision: null", "revision: v7"))
    monkeypatch.setattr(
        "draftline.pipeline.exporting.head_rows", lambda spec, target: seen.append(target) or head_rows(spec, target)
    )
    mine = export_run(run, tmp_path / "x", form="speculators", vocabulary=(150, None))
    export_run(mine, tmp_path / "y", form="speculators")
    same = shutil.copytree(tiny_target_dir, tmp_path / "same")
    export_run(mine, tmp_path / "z", form="speculators", target=str(same))
    assert [(target.model, target.revision) for target in seen] == [
        (str(tiny_target_dir), "v7"),
        (str(tiny_target_dir), "v7"),
        (str(same), None),
    ]


def test_an_end_token_outside_the_vocabulary_is_one_line(first):
    spec = load_drafter_export(first / "export").spec.model_copy(update={"eos_token_id": [2, 512]})
    with pytest.raises(UserError, match="end-of-text token 512 is outside the drafter's vocabulary of 512"):
        prune_spec(spec, 150, data_of_run(first))


def test_a_run_is_exported_in_8_bits(tmp_path, first):
    code, _ = invoke("export", first, "-o", tmp_path / "x", "--dtype", "fp8")
    assert code == 0
    assert "quantization_config" in json.loads((tmp_path / "x" / "config.json").read_text())
    assert load_drafter_export(tmp_path / "x").fc.weight.dtype == torch.bfloat16
    with pytest.raises(UserError, match="use one of bfloat16, float32, fp8"):
        invoke("export", first, "-o", tmp_path / "y", "--dtype", "int4")
