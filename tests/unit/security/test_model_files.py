"""What a model folder may hold: no pickle is read and none of its code runs, whether or not it looks harmless."""

from __future__ import annotations

import builtins
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from draftline.config.schema import TargetConfig
from draftline.data.manifest import DatasetFacts
from draftline.data.shards import ShardWriter, TokenDataset
from draftline.errors import UserError
from draftline.target.facts import target_facts
from draftline.target.load import load_target, load_tokenizer
from draftline.target.remote.lender import load_lender


@pytest.fixture
def model(tiny_target_dir: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_target_dir, tmp_path / "model")


@pytest.fixture
def owned(tmp_path: Path) -> Path:
    """The file that hostile code would write."""
    return tmp_path / "owned"


class Hostile:
    """Runs when it is unpickled."""

    def __init__(self, owned: Path) -> None:
        self.code = f"open({str(owned)!r}, 'w').close()"

    def __reduce__(self) -> Any:
        return builtins.exec, (self.code,)


@pytest.mark.parametrize("kind", ["harmless", "hostile"])
def test_pickled_weights_are_refused_in_one_line_and_never_read(model: Path, owned: Path, kind: str):
    weights = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    if kind == "harmless":
        torch.save(weights, model / "pytorch_model.bin")
    else:
        (model / "pytorch_model.bin").write_bytes(pickle.dumps(Hostile(owned)))
    with pytest.raises(UserError, match=r"cannot load the model: .*safetensors") as error:
        load_target(TargetConfig(model=str(model)), "cpu")
    assert "\n" not in str(error.value)
    assert not owned.exists()


def test_code_of_a_model_repository_never_runs_unasked(model: Path, owned: Path):
    """A model type that only the repository's own code knows."""
    code = f"open({str(owned)!r}, 'w').close()\n"
    for name in ("configuration_odd.py", "modeling_odd.py", "tokenization_odd.py"):
        (model / name).write_text(code)
    config = json.loads((model / "config.json").read_text())
    config["model_type"] = "odd"
    config["auto_map"] = {"AutoConfig": "configuration_odd.Odd", "AutoModelForCausalLM": "modeling_odd.Odd"}
    (model / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((model / "tokenizer_config.json").read_text())
    tokenizer["auto_map"] = {"AutoTokenizer": ["tokenization_odd.Odd", None]}
    tokenizer["tokenizer_class"] = "Odd"
    (model / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    target = TargetConfig(model=str(model))
    for read in (target_facts, lambda t: load_target(t, "cpu")):
        with pytest.raises(UserError) as error:
            read(target)
        assert "\n" not in str(error.value)
    try:
        load_tokenizer(target)
    except UserError as error:
        assert "\n" not in str(error)
    assert not owned.exists()


def test_a_data_manifest_cannot_name_files_outside_its_folder(tmp_path: Path):
    folder = tmp_path / "data"
    with ShardWriter(folder) as writer:
        writer.add("a", [5, 6, 7], [False, True, True])
        writer.finish(DatasetFacts(tokenizer_fingerprint="t", template_hash="t", vocab_size=16, max_tokens=16))
    manifest = json.loads((folder / "manifest.json").read_text())
    shard = folder / manifest["shards"][0]["name"]
    shutil.copy(shard, tmp_path / "outside.arrow")
    for name in ("../outside.arrow", str(tmp_path / "outside.arrow"), "..", "", "a" * 300):
        manifest["shards"][0]["name"] = name
        (folder / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(UserError) as error:
            TokenDataset.open(folder)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dtype", "x"),
        ("dtype", [1]),
        ("dtype", 5),
        ("model_type", [1]),
        ("model_type", {"a": 1}),
        ("auto_map", 5),
        ("text_config", 5),
        ("quantization_config", "x"),
        ("hidden_act", "x"),
        ("hidden_size", -1),
        ("head_dim", -1),
        ("vocab_size", -1),
        ("num_attention_heads", 0),
        ("rope_parameters", 5),
        ("eos_token_id", {"a": 1}),
        ("architectures", 5),
    ],
)
def test_a_configuration_of_nonsense_is_one_line_whoever_reads_it(model: Path, key: str, value: Any):
    """A drafter's target may be anybody's too."""
    file, config = model / "config.json", TargetConfig(model=str(model))
    file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))
    readers = (
        target_facts,
        lambda config: load_lender(config, torch.device("cpu")),
        lambda config: load_target(config, "cpu"),
    )
    for read in readers:
        try:
            read(config)
        except UserError as error:
            assert "\n" not in str(error)
