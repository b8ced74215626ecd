"""A whole run, exported for servers, taken back and trained further; acceptance numbers in its card."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from draftline.config.load import load_config
from draftline.errors import UserError
from draftline.evaluate.command import load_drafter
from draftline.export.formats import load_drafter_export
from draftline.pipeline.coordinator import train
from draftline.pipeline.exporting import export_run
from draftline.pipeline.runplan import make_run_plan
from tiny_run_kit import finished_run, invoke

REPORT = {
    "definition": "tau is defined so",
    "results": [
        {"prompt_set": "all", "method": "plain", "drafter": None, "acceptance_length": 1.0, "n_prompts": 3},
        {
            "prompt_set": "all",
            "method": "chain",
            "drafter": "export",
            "acceptance_length": 2.5,
            "interval": [2.25, 2.75],
        }
        | {"n_prompts": 3},
    ],
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_target_dir: Path, tiny_data: Path) -> Path:
    return finished_run(tmp_path_factory.mktemp("formats"), tiny_target_dir, tiny_data, "max_rows=4")


def test_a_run_goes_to_speculators_and_back_bit_for_bit_and_is_trained_further(tmp_path: Path, run: Path) -> None:
    code, said = invoke("export", run, "--output", tmp_path / "spec", "--format", "speculators", "--dtype", "float32")
    assert code == 0 and "as trained: vllm" in said
    code, said = invoke("import", tmp_path / "spec", "--output", tmp_path / "mine")
    assert code == 0 and "drafter.yaml" in said
    weights = load_drafter(run, "cpu", torch.float32).state_dict()
    taken_back = load_drafter_export(tmp_path / "mine").state_dict()
    assert all(torch.equal(weights[name], taken_back[name]) for name in weights)
    again = load_config([run / "config.yaml", tmp_path / "mine" / "drafter.yaml"], [f"output={tmp_path / 'again'}"])
    plan = make_run_plan(again)
    assert plan.config.drafter.init == "checkpoint"
    assert train(plan).ledger.remaining == 0


def test_a_speculators_folder_without_a_card_starts_a_run_directly(tmp_path: Path, run: Path) -> None:
    """As somebody else's: the layers of the target come from the run's own target."""
    export_run(run, tmp_path / "spec", form="speculators")
    (tmp_path / "spec" / "draftline.json").unlink()
    config = load_config(
        [run / "config.yaml"],
        [f"output={tmp_path / 'again'}", "drafter.init=checkpoint", f"drafter.init_from={tmp_path / 'spec'}"],
    )
    assert train(make_run_plan(config)).ledger.remaining == 0


def test_the_card_tells_target_data_recipe_and_acceptance(tmp_path: Path, run: Path) -> None:
    (tmp_path / "report.json").write_text(json.dumps(REPORT))
    code, _ = invoke("export", run, "-o", tmp_path / "out", "--report", tmp_path / "report.json")
    assert code == 0
    card = (tmp_path / "out" / "README.md").read_text()
    for told in ("tau is defined so", "| all | chain | 2.50 | 2.25 to 2.75 | 3 |", "data: samples | 40"):
        assert told in card
    for told in ("rows trained | 4", "recipe: learning rate | 0.001", "objective: anchors | 16"):
        assert told in card
    provenance = json.loads((tmp_path / "out" / "draftline.json").read_text())["provenance"]
    assert provenance["target_architectures"] == ["Qwen3ForCausalLM"]
    assert provenance["target_is_recurrent"] is False


def test_the_finished_run_leaves_the_same_card(run: Path) -> None:
    card = (run / "export" / "README.md").read_text()
    assert "rows trained | 4" in card and "Not measured yet" in card


def test_an_export_is_converted_and_checked_by_command(tmp_path: Path, run: Path) -> None:
    """The name that the server will use need not mean anything here."""
    code, said = invoke("export", run / "export", "-o", tmp_path / "spec", "--format", "speculators", "--target", "x/y")
    assert code == 0 and "as trained: vllm" in said
    verifier = json.loads((tmp_path / "spec" / "config.json").read_text())["speculators_config"]["verifier"]
    assert verifier == {"name_or_path": "x/y", "architectures": ["Qwen3ForCausalLM"]}
    assert "base_model: x/y" in (tmp_path / "spec" / "README.md").read_text()


def test_check_exits_2_where_a_server_would_serve_otherwise(tmp_path: Path, run: Path) -> None:
    assert invoke("export", "--check", run / "export")[0] == 0
    export_run(run, tmp_path / "spec", form="speculators")
    assert invoke("export", "--check", tmp_path / "spec", "--format", "speculators")[0] == 0
    code, said = invoke("export", "--check", tmp_path / "spec", "--server", "sglang")
    assert code == 2 and "cannot read speculators' format" in said


OTHER_TARGETS = {
    "hidden_size": (32, "hidden size is 64, the target's is 32"),
    "vocab_size": (448, "vocabulary size is 512, the target's is 448"),
    "num_hidden_layers": (3, "number of target layers is 4, the target's is 3"),
}


@pytest.mark.parametrize("changed", OTHER_TARGETS)
def test_another_target_is_refused_by_export_check_and_import_with_both_sides(
    tmp_path: Path, run: Path, tiny_target_dir: Path, changed: str
) -> None:
    value, message = OTHER_TARGETS[changed]
    other = shutil.copytree(tiny_target_dir, tmp_path / "other")
    config = json.loads((other / "config.json").read_text()) | {changed: value, "layer_types": None}
    (other / "config.json").write_text(json.dumps(config))
    for form in ("zlab", "speculators"):
        mine = export_run(run, tmp_path / form, form=form)
        code, said = invoke("export", "--check", mine, "--target", other)
        assert code == 2 and f"refuse  any: the drafter's {message}" in said and "served by none" in said
        assert invoke("export", "--check", mine, "--target", tiny_target_dir)[0] == 0
        for command in (["export", run, "--format", form], ["export", mine, "--format", form], ["import", mine]):
            with pytest.raises(UserError, match=message):
                invoke(*command, "-o", tmp_path / "out", "--target", other)
            assert not (tmp_path / "out").exists()


def test_a_speculators_folder_of_others_taps_layers_that_the_target_must_have(
    tmp_path: Path, run: Path, tiny_target_dir: Path
) -> None:
    path = export_run(run, tmp_path / "spec", form="speculators")
    (path / "draftline.json").unlink()
    config = json.loads((path / "config.json").read_text()) | {"aux_hidden_state_layer_ids": [1, 9]}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"\[1, 9\] for a target of 4 layers: 8 is not a layer"):
        invoke("export", "--check", path, "--target", tiny_target_dir)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["export"], "a run folder is missing"),
        (["export", "RUN"], "--output is missing"),
        (["export", "RUN", "-o", "x", "--format", "gguf"], "'gguf' is no format"),
        (["export", "--check", "RUN", "--server", "ollama"], "'ollama' is no server"),
        (["export", "RUN", "-o", "x", "--report", "RUN/config.yaml"], "cannot be read"),
        (["export", "RUN", "-o", "x", "--server", "vllm"], "--server: is for --check"),
        (["export", "RUN", "-o", "x", "--vocab-data", "y"], "--vocab-data: is for --draft-vocab-size"),
        (["export", "--check", "RUN", "--vocab-data", "y"], "--vocab-data: means nothing with --check"),
        (["export", "--check", "RUN", "--dtype", "fp8"], "--dtype: means nothing with --check"),
        (["export", "RUN", "--check", "RUN"], "RUN: means nothing with --check"),
    ],
)
def test_mistakes_are_one_line(run: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        invoke(*(a.replace("RUN", str(run)) for a in arguments))
