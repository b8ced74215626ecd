"""The doctor looks at machine, devices, target and data, and gives one mend for each thing that is wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftline import doctor as doctor_module
from draftline.config.schema import TargetConfig
from draftline.data.manifest import DatasetFacts
from draftline.data.shards import ShardWriter
from draftline.data.template import tokenizer_fingerprint
from draftline.doctor import (
    DoctorContext,
    Finding,
    check_data,
    check_devices,
    check_environment,
    check_target,
    doctor_command,
    exit_code,
    plain_lines,
    render,
    run_doctor,
)
from draftline.errors import UserError
from draftline.target.weights import weight_files


def write_data(folder: Path, tokenizer: Any, *, supervised: int = 30, cut: int = 1) -> Path:
    """Four samples of 40 tokens."""
    with ShardWriter(folder) as writer:
        for i in range(4):
            mask = [False] * (40 - supervised) + [True] * supervised
            writer.add(f"s{i}", list(range(40)), mask, answer_cut=i < cut)
        writer.finish(
            DatasetFacts(
                tokenizer_fingerprint=tokenizer_fingerprint(tokenizer),
                template_hash="t",
                vocab_size=400,
                max_tokens=64,
                n_answer_cut=cut,
            )
        )
    return folder


def levels(findings: list[Finding]) -> set[str]:
    return {f.level for f in findings}


def test_this_machine_is_fit() -> None:
    findings = list(check_environment(DoctorContext()))
    assert not [f for f in findings if f.level == "fail"]
    text = "\n".join(plain_lines(findings))
    assert all(word in text for word in ("python 3.", "torch 2.", "transformers 5.", "gguf", "CPU cores", "GiB free"))


@pytest.mark.parametrize(
    ("version", "level"), [("5.16.9", "fail"), ("5.17.0", "ok"), ("5.19.3", "ok"), ("5.20", "fail")]
)
def test_an_unsupported_release_fails_with_the_one_to_install(
    monkeypatch: pytest.MonkeyPatch, version: str, level: str
) -> None:
    monkeypatch.setattr(doctor_module, "_installed", lambda name: version if name == "transformers" else "2.13.0+cpu")
    finding = next(f for f in check_environment(DoctorContext()) if "transformers" in f.what)
    assert finding.level == level and (level == "ok" or "5.17 up to below 5.20" in finding.mend)


def test_a_missing_package_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_module, "_installed", lambda name: None)
    assert "torch is not installed" in [f.what for f in check_environment(DoctorContext()) if f.level == "fail"]


def test_the_gguf_reader_is_needed_only_for_a_gguf_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_module.importlib.util, "find_spec", lambda name: None)
    plain = [f for f in check_environment(DoctorContext()) if "gguf" in f.what]
    needed = [f for f in check_environment(DoctorContext(TargetConfig(model="m.gguf"))) if "gguf" in f.what]
    assert [f.level for f in plain] == ["warn"] and [f.level for f in needed] == ["fail"]
    assert needed[0].mend == "pip install 'draftline[gguf]'"


def test_a_device_that_does_not_exist_fails_and_the_other_checks_go_on() -> None:
    findings = run_doctor(DoctorContext(devices=("cuda:99",)))
    failed = [f for f in findings if f.level == "fail"]
    assert len(failed) == 1 and "cuda:99" in failed[0].what and "cpu" in failed[0].mend
    assert any("torch" in f.what for f in findings) and exit_code(findings) == 1


def test_a_busy_gpu_is_a_warning_and_a_free_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_module, "resolve_devices", lambda names: ["cuda:0", "cuda:1", "cuda:0"])
    monkeypatch.setattr(doctor_module, "_cuda_name", lambda device: "GPU")
    free = {"cuda:0": 70 << 30, "cuda:1": 10 << 30}
    monkeypatch.setattr(doctor_module, "device_memory_bytes", lambda device: (free[device], 80 << 30))
    findings = list(check_devices(DoctorContext()))
    assert [f.level for f in findings] == ["ok", "warn"] and "10.0 of 80.0 GiB" in findings[1].what.replace(
        " GiB of", " of"
    )


def test_sound_data_of_the_same_tokenizer_is_ok(tmp_path: Path, tiny_target_dir: Path, tiny_tokenizer: Any) -> None:
    data = write_data(tmp_path / "data", tiny_tokenizer)
    findings = list(check_data(DoctorContext(TargetConfig(model=str(tiny_target_dir)), data)))
    text = "\n".join(f.what for f in findings)
    assert levels(findings) == {"ok"} and exit_code(findings) == 0
    assert "4 samples, 160 tokens" in text and "75% of the tokens" in text and "25% of the answers" in text
    assert "this target's tokenizer" in text


def test_data_hardly_worth_training_on_is_a_warning(tmp_path: Path, tiny_tokenizer: Any) -> None:
    data = write_data(tmp_path / "data", tiny_tokenizer, supervised=1, cut=3)
    warned = [f for f in check_data(DoctorContext(data=data)) if f.level == "warn"]
    assert [("supervised" in f.what, "cut" in f.what) for f in warned] == [(True, False), (False, True)]
    assert all(f.mend for f in warned)


def test_data_of_another_tokenizer_fails(tmp_path: Path, tiny_target_dir: Path, tiny_tokenizer: Any) -> None:
    import copy

    other = copy.deepcopy(tiny_tokenizer)
    other.add_tokens(["draftline"])
    data = write_data(tmp_path / "data", other)
    findings = run_doctor(DoctorContext(TargetConfig(model=str(tiny_target_dir)), data), [("data", check_data)])
    failed = [f for f in findings if f.level == "fail"]
    assert len(failed) == 1 and "tokenizer" in failed[0].what and "prepare" in failed[0].mend


def test_damaged_or_missing_data_fails(tmp_path: Path, tiny_tokenizer: Any) -> None:
    missing = run_doctor(DoctorContext(data=tmp_path / "nowhere"), [("data", check_data)])
    assert [f.level for f in missing] == ["fail"] and "nowhere" in missing[0].what and missing[0].mend
    data = write_data(tmp_path / "data", tiny_tokenizer)
    shard = next(data.glob("*.arrow"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(bytes(content))
    assert exit_code(run_doctor(DoctorContext(data=data), [("data", check_data)])) == 1


def test_a_target_that_cannot_be_read_fails_with_its_mend(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit"}))
    findings = run_doctor(DoctorContext(TargetConfig(model=str(tmp_path))))
    failed = [f for f in findings if f.level == "fail"]
    assert len(failed) == 1 and "not a causal language model" in failed[0].what and failed[0].mend


def test_a_room_adds_a_check_as_a_plain_function() -> None:
    def own(context: DoctorContext) -> Iterator[Finding]:
        yield Finding("warn", f"looked at {context.devices[0]}", "mend it so")
        raise UserError("broken half way", where="own", mend="do this")

    findings = run_doctor(DoctorContext(devices=("cpu",)), [("own", own)])
    assert findings == [
        Finding("warn", "looked at cpu", "mend it so"),
        Finding("fail", "own: own: broken half way", "do this"),
    ]


def test_every_finding_that_is_not_ok_prints_its_mend_once(capsys: pytest.CaptureFixture[str]) -> None:
    findings = [Finding("ok", "fine [1]"), Finding("warn", "so so", "look here"), Finding("fail", "bad", "do that")]
    render(findings, table=False)
    plain = capsys.readouterr().out
    assert "ok    fine [1]" in plain and plain.count("mend:") == 2 and plain.endswith("1 ok, 1 to look at, 1 failed\n")
    render(findings, table=True)
    table = capsys.readouterr().out
    assert table.count("look here") == 1 and table.count("do that") == 1 and "fine [1]" in table


def test_the_command_ends_with_1_only_if_something_failed(
    tmp_path: Path, tiny_target_dir: Path, tiny_tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_data(tmp_path / "data", tiny_tokenizer)
    assert doctor_command(target=str(tiny_target_dir), data=data, devices=["cpu"]) == 0
    assert "hidden size 64" in capsys.readouterr().out
    assert doctor_command(target=None, data=tmp_path / "nowhere", devices=["cpu"]) == 1
    assert "prepare" in capsys.readouterr().out


# ---- weights of the target


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def lose_a_layer(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if ".layers.2." not in name}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def index_of(name: str) -> Any:
    def write(folder: Path) -> None:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))

    return write


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


DAMAGE = {
    "cut off": (cut, "is not a whole safetensors file"),
    "a layer less": (lose_a_layer, "of the model's"),
    "a file less": (index_of("model-2.safetensors"), "1 weight files are missing, first model-2.safetensors"),
    "a file elsewhere": (index_of("../model.safetensors"), "no safetensors file of its folder"),
    "pickled": (pickled, "pickled weights only (pytorch_model.bin)"),
    "none": (lambda folder: (folder / "model.safetensors").unlink(), "holds no model.safetensors"),
}


@pytest.fixture
def target(tiny_target_dir: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_target_dir, tmp_path / "target")


def examine(target: Path) -> list[Finding]:
    context = DoctorContext(target=TargetConfig(model=str(target)), devices=("cpu",))
    return run_doctor(context, [("target", check_target)])


def test_weights_that_are_whole_and_fit_are_told_with_their_size(target: Path) -> None:
    findings = examine(target)
    assert levels(findings) == {"ok"}
    assert "1 weight files" in findings[1].what and "float32 on cpu" in findings[2].what


@pytest.mark.parametrize("what", DAMAGE)
def test_weights_that_cannot_be_used_are_found_without_loading_them(target: Path, what: str) -> None:
    damage, words = DAMAGE[what]
    damage(target)
    failed = [finding for finding in examine(target) if finding.level == "fail"]
    assert len(failed) == 1 and words in failed[0].what and failed[0].mend


def test_weights_that_do_not_fit_are_told_with_the_numbers(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_module, "device_memory_bytes", lambda name: (1000, 2000))
    assert [f.level for f in examine(target)] == ["ok", "ok", "fail"]


def test_a_gguf_file_that_is_cut_off_is_found(tmp_path: Path) -> None:
    from gguf import GGUFWriter

    file = tmp_path / "tiny.gguf"
    writer = GGUFWriter(file, "llama")
    for name in ("a", "b"):
        writer.add_tensor(name, np.ones((64, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    config = TargetConfig(model=str(file))
    assert weight_files(config).n_bytes == file.stat().st_size
    for n_bytes in (file.stat().st_size - 8000, 100, 0):
        file.write_bytes(file.read_bytes()[:n_bytes])
        with pytest.raises(UserError, match=r"gguf.*fetch it again"):
            weight_files(config)
