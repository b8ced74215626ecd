"""Drafters of others whose files hold what no drafter holds: one line each, and nothing rounded without a word."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from decoding_kit import tiny_spec
from draftline.drafter.model import Drafter
from draftline.errors import UserError
from draftline.export.check import check_export
from draftline.export.formats import load_drafter_export
from draftline.export.importing import import_checkpoint
from draftline.export.speculators import export_speculators
from draftline.export.speculators_config import Verifier
from draftline.export.zlab import export_zlab
from draftline.pipeline.exporting import evaluation_facts, export_run, import_command


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return export_zlab(Drafter(tiny_spec()), tmp_path / "export")


@pytest.fixture
def speculators(tmp_path: Path) -> Path:
    path = export_speculators(Drafter(tiny_spec()), tmp_path / "spec", Verifier("a/b", ("Qwen3ForCausalLM",)))
    (path / "draftline.json").unlink()
    return path


def edit(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def put(path: Path, **tensors: torch.Tensor) -> None:
    weights = load_file(path / "model.safetensors")
    named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    save_file({**weights, **named}, path / "model.safetensors")


@pytest.mark.parametrize("exact", ["norm__weight", "layers__0__input_layernorm__weight"])
def test_a_file_of_two_dtypes_is_imported_in_the_wider_one_which_is_said(
    path: Path, tmp_path: Path, exact: str
) -> None:
    """The first tensor's dtype must not decide, whichever of the two it is."""
    value = torch.full((16,), 1.0 + 2.0**-20)  # bf16 would make it 1
    put(path, **{exact: value})
    imported = import_checkpoint(path, tmp_path / "mine")
    assert imported.mended == ("weights of bfloat16 and float32 are all kept as float32, which changes none of them",)
    stored, given = load_file(tmp_path / "mine" / "model.safetensors"), load_file(path / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}
    assert all(torch.equal(stored[name], tensor.float()) for name, tensor in given.items())
    assert any(f"{exact.replace('__', '.')} is float32 beside bfloat16" in f.what for f in check_export(path).findings)


def test_a_tensor_in_two_files_is_refused(path: Path) -> None:
    weights = load_file(path / "model.safetensors")
    save_file(weights, path / "a.safetensors")
    save_file({"fc.weight": weights["fc.weight"] + 1}, path / "b.safetensors")
    index = dict.fromkeys(weights, "a.safetensors") | {"fc.weight": "b.safetensors"}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    for read in (load_drafter_export, check_export):
        with pytest.raises(UserError, match=r"fc\.weight is in a\.safetensors and in b\.safetensors"):
            read(path)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.float8_e4m3fn, torch.float64])
@pytest.mark.parametrize("name", ["fc__weight", "norm__weight"])
def test_weights_that_are_no_floats_of_a_drafter_are_one_line(path: Path, dtype: torch.dtype, name: str) -> None:
    old = load_file(path / "model.safetensors")[name.replace("__", ".")]
    put(path, **{name: old.to(dtype)})
    with pytest.raises(UserError, match=f"is {str(dtype).removeprefix('torch.')}, which is no dtype"):
        load_drafter_export(path)
    assert check_export(path).good_for == ()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float32])
def test_flags_of_a_vocabulary_that_are_no_flags_are_one_line(tmp_path: Path, dtype: torch.dtype) -> None:
    drafter = Drafter(tiny_spec(draft_vocabulary=(1, 4)))
    path = export_speculators(drafter, tmp_path / "x", Verifier("a/b"), head_DH=torch.ones(2, 16))
    put(path, t2d=torch.zeros(13).to(dtype))
    with pytest.raises(UserError, match="t2d is"):
        load_drafter_export(path, num_target_layers=4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name_or_path": 5}, "target: Input should be a valid string"),
        ({"name_or_path": ["a"]}, "target: Input should be a valid string"),
        ({"architectures": 5}, "target_architectures: Input should be a valid list"),
        ({"architectures": [5]}, "target_architectures.0: Input should be a valid string"),
    ],
)
def test_a_verifier_of_the_wrong_kind_is_one_line(
    speculators: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    edit(speculators / "config.json", lambda c: c["speculators_config"]["verifier"].update(change))
    with pytest.raises(UserError, match=message):
        import_command(speculators, tmp_path / "mine", target=None)
    check_export(speculators, num_target_layers=4)
    assert not (tmp_path / "mine").exists()


def test_a_target_that_is_no_name_is_refused_by_the_checker(speculators: Path) -> None:
    edit(speculators / "config.json", lambda c: c["speculators_config"]["verifier"].update(name_or_path=5))
    report = check_export(speculators, num_target_layers=4)
    assert any("name_or_path is 5, no name" in finding.what for finding in report.findings)


@pytest.mark.parametrize("value", [5, "x", [1], {"a": 1}])
@pytest.mark.parametrize(
    "place",
    ["architectures", "dflash_config", "layer_types", "rope_parameters", "rope_scaling", "sliding_window", "hidden_act"]
    + [
        "max_window_layers",
        "use_sliding_window",
        "quantization_config",
        "eos_token_id",
        "dtype",
        "is_causal",
        "auto_map",
    ]
    + [f"rope_parameters.{key}" for key in ("rope_theta", "rope_type", "partial_rotary_factor", "factor")]
    + [f"dflash_config.{key}" for key in ("target_layer_ids", "block_size", "causal", "output_multiplier")],
)
def test_every_field_that_is_read_may_hold_anything(path: Path, tmp_path: Path, place: str, value: Any) -> None:
    (path / "draftline.json").unlink()

    def change(config: dict[str, Any]) -> None:
        *outer, key = place.split(".")
        (config[outer[0]] if outer else config)[key] = value

    edit(path / "config.json", change)
    for read in (load_drafter_export, check_export, lambda p: import_checkpoint(p, tmp_path / "mine")):
        try:
            read(path)
        except UserError as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("fact", "value"),
    [
        ("target", 5),
        ("target_architectures", 5),
        ("chat_template_kwargs", "x"),
        ("validation_acceptance", "high"),
        ("evaluation", [5]),
        ("evaluation", [{"prompt_set": "a", "method": "chain", "n_prompts": 3, "acceptance_length": "2"}]),
        ("draft_vocabulary", {"tokens": "many"}),
    ],
)
def test_a_card_that_tells_nonsense_is_one_line(path: Path, tmp_path: Path, fact: str, value: Any) -> None:
    edit(path / "draftline.json", lambda card: card["provenance"].update({fact: value}))
    with pytest.raises(UserError, match=rf"draftline\.json: {fact}"):
        export_run(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_report_that_tells_nonsense_is_one_line(tmp_path: Path) -> None:
    result = {"prompt_set": "a", "method": "chain", "drafter": "x", "n_prompts": 3, "acceptance_length": "2"}
    (tmp_path / "report.json").write_text(json.dumps({"results": [result]}))
    with pytest.raises(UserError, match="acceptance_length: Input should be a valid number"):
        evaluation_facts([tmp_path / "report.json"])


@pytest.mark.parametrize(
    "name", ["/models/My Model", "a/b; rm -rf ~", "a/$(id)", "a/b'c", 'a/"b"', "a/b\nimport: x", "a/b: c"]
)
def test_a_targets_name_is_one_word_of_each_command_and_no_line_of_its_own(
    path: Path, tmp_path: Path, name: str
) -> None:
    edit(path / "draftline.json", lambda card: card["provenance"].update(target=name))
    export_run(path, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    shown = name.replace("\n", " ")
    commands = [shlex.split(line) for line in card.splitlines() if line.startswith("    ")]
    assert len(commands) == 2 and all(shown in words for words in commands)
    assert json.loads(commands[0][commands[0].index("--speculative-config") + 1])["num_speculative_tokens"] == 3
    assert "base_model" not in card and "\nimport: x" not in card


def test_a_map_beside_the_whole_vocabulary_is_refused(speculators: Path, tmp_path: Path) -> None:
    """vLLM would draft other tokens than the head gives."""
    put(speculators, d2t=torch.zeros(13, dtype=torch.int64))
    assert check_export(speculators, num_target_layers=4).good_for == ("vllm",)
    put(speculators, d2t=torch.tensor([1, -1] + [0] * 11))
    assert any("d2t maps draft tokens" in f.what for f in check_export(speculators, num_target_layers=4).findings)
    with pytest.raises(UserError, match="d2t maps draft tokens"):
        import_checkpoint(speculators, tmp_path / "mine", num_target_layers=4)


def test_half_a_character_in_a_name_does_not_stop_the_card(path: Path, tmp_path: Path) -> None:
    edit(path / "draftline.json", lambda card: card["provenance"].update(target="a/\ud800"))
    export_run(path, tmp_path / "out")
    assert "drafter for a/?" in (tmp_path / "out" / "README.md").read_text()
