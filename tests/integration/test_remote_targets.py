"""Targets that run elsewhere: a server that extracts states (a fake with vLLM's protocol), and captured files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftline.config.schema import RunConfig, TargetConfig
from draftline.config.sections import VllmBackend
from draftline.data.shards import TokenDataset
from draftline.errors import RunFailedError, UserError
from draftline.pipeline.capturing import capture_states
from draftline.pipeline.checkpoint import latest_checkpoint, read_checkpoint
from draftline.pipeline.coordinator import train
from draftline.pipeline.runplan import make_run_plan
from draftline.target.conventions import capture_order
from draftline.target.load import LoadedTarget, load_target
from draftline.target.remote.capture import RemoteCapture
from draftline.target.remote.clients import FilesClient, StatesClient, VllmClient
from draftline.target.remote.lender import is_lent_by_name, lent_names, load_lender, read_lent
from draftline.target.selftest import self_test
from fake_vllm import FakeVllm, captured_layers, serve

AUX_IDS = (1, 3, 4)  # our taps 0 and 2, and the state after the last of 4 layers
TEACHER = "objective.kl_weight=0.5"
SHORT = ("max_rows=3",)


@pytest.fixture(scope="module")
def tiny_target_dir(make_tiny_target: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny target with a final norm that is not all ones, as in any trained model: twice is not once."""
    folder = shutil.copytree(make_tiny_target("qwen3"), tmp_path_factory.mktemp("normed") / "target")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.linspace(0.2, 3.0, 64)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> LoadedTarget:
    return load_target(TargetConfig(model=str(tiny_target_dir)), "cpu")


@pytest.fixture
def fake(target: LoadedTarget, tmp_path: Path) -> FakeVllm:
    (tmp_path / "shared").mkdir()
    return FakeVllm(target, AUX_IDS, tmp_path / "shared")


@pytest.fixture
def endpoint(fake: FakeVllm) -> Iterator[str]:
    with serve(fake) as address:
        yield address


def vllm(endpoint: str, **changes: Any) -> VllmBackend:
    return VllmBackend(endpoint=endpoint, aux_layer_ids=AUX_IDS, **{"max_retries": 0, **changes})


def served(endpoint: str) -> list[str]:
    return [
        "target.backend.kind=vllm",
        f"target.backend.endpoint={endpoint}",
        f"target.backend.aux_layer_ids={list(AUX_IDS)}",
        "target.backend.max_retries=0",
    ]


@pytest.fixture
def written(target: LoadedTarget, tiny_data: Path, tmp_path: Path) -> Path:
    """The tiny data set as speculators' offline generation would leave it."""
    dataset, folder = TokenDataset.open(tiny_data), tmp_path / "hidden_states"
    folder.mkdir()
    for number in range(dataset.manifest.n_samples):
        ids = dataset.sample(number).input_ids.tolist()
        hidden_TLH, _ = captured_layers(target, ids, AUX_IDS)
        payload = {"hidden_states": hidden_TLH.contiguous(), "token_ids": torch.tensor(ids)}
        save_file(payload, folder / f"hs_{number}.safetensors")
    return folder


def remote(client: StatesClient, target: LoadedTarget, **options: Any) -> RemoteCapture:
    lender = load_lender(target.config, torch.device("cpu"))
    return RemoteCapture(client, lender, capture_order(AUX_IDS, (0, 2), 4), want_final=True, concurrent=2, **options)


def weights_of(config: RunConfig) -> dict[str, torch.Tensor]:
    return read_checkpoint(latest_checkpoint(config.output)[0]).weights


def close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.allclose(a[name], b[name], rtol=1e-3, atol=1e-4) for name in a)


@pytest.mark.parametrize("kind", ["qwen3", "llama_tied", "qwen3_next"])
def test_what_is_borrowed_is_read_without_the_layers(make_tiny_target, kind: str) -> None:
    config = TargetConfig(model=str(make_tiny_target(kind)))
    whole, lender = load_target(config, "cpu"), load_lender(config, torch.device("cpu"))
    assert torch.equal(lender.embedding.weight_VH, whole.embedding.weight_VH)
    assert torch.equal(lender.head.weight_VH, whole.head.weight_VH)
    assert lender.stop_token_ids == whole.stop_token_ids
    hidden = torch.randn(3, whole.hidden_size)
    assert lender.final_norm is not None and whole.final_norm is not None
    assert torch.equal(lender.final_norm(hidden), whole.final_norm(hidden))
    lent = lent_names(whole)
    assert lent is not None
    by_name = read_lent(config, whole.facts, lent, torch.device("cpu"))
    assert torch.equal(by_name.embedding.weight_VH, lender.embedding.weight_VH)
    assert torch.equal(by_name.head.weight_VH, lender.head.weight_VH) and by_name.head.bias_V is None
    assert (by_name.embedding.scale, by_name.head.multiplier) == (lender.embedding.scale, lender.head.multiplier)
    assert by_name.stop_token_ids == whole.stop_token_ids
    with pytest.raises(
        UserError, match="its embedding or head is not the one of the loaded target; put the same files"
    ):
        read_lent(config, whole.facts, replace(lent, digest="another"), torch.device("cpu"))
    for name in ("target.gguf", "TARGET.GGUF"):  # its files hold other numbers than the weights
        assert not is_lent_by_name(TargetConfig(model=name))


def test_a_target_whose_files_use_other_names_lends_nothing_by_name(make_tiny_target, tmp_path: Path) -> None:
    """transformers renames some weights as it loads them; drafters then load the target to read what they borrow."""
    folder = shutil.copytree(make_tiny_target("qwen3"), tmp_path / "renamed")
    tensors = load_file(folder / "model.safetensors")
    save_file({k.replace("model.", "old_"): v for k, v in tensors.items()}, folder / "model.safetensors")
    target = load_target(TargetConfig(model=str(make_tiny_target("qwen3"))), "cpu")
    assert lent_names(target) is not None
    assert lent_names(replace(target, config=TargetConfig(model=str(folder)))) is None


def test_a_missing_head_is_tied_only_where_the_configuration_says_so(make_tiny_target, tmp_path) -> None:
    untied = shutil.copytree(make_tiny_target("qwen3"), tmp_path / "untied")
    weights = load_file(untied / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, untied / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"holds no lm_head\.weight, and its configuration does not tie"):
        load_lender(TargetConfig(model=str(untied)), torch.device("cpu"))
    config = json.loads((untied / "config.json").read_text()) | {"tie_word_embeddings": True}
    (untied / "config.json").write_text(json.dumps(config))
    lender = load_lender(TargetConfig(model=str(untied)), torch.device("cpu"))
    assert lender.head.weight_VH is lender.embedding.weight_VH


def test_served_states_pass_the_self_test_of_every_backend(fake, endpoint, target) -> None:
    """Taps against the model's own, one by one; the last state after its final norm; samples do not see each other."""
    client = VllmClient(vllm(endpoint))
    report = self_test(target, (0, 2), make_capture=lambda *_: remote(client, target))
    assert max(report.tap_errors.values()) < 1e-5
    assert report.final_error < 1e-5


def test_a_run_on_a_server_gives_the_weights_of_a_run_here(make_run, fake, endpoint) -> None:
    here = make_run(TEACHER, *SHORT, name="here")
    there = make_run(TEACHER, *SHORT, *served(endpoint), name="there")
    train(make_run_plan(here))
    train(make_run_plan(there))
    assert close(weights_of(here), weights_of(there))
    assert list(fake.folder.iterdir()) == []  # what was read is deleted


def test_states_of_a_server_are_captured_once_and_trained_without_it(make_run, fake, target, tmp_path) -> None:
    states = (TEACHER, *SHORT, f"states.path={tmp_path / 'states'}")
    with serve(fake) as address:
        capture_states(make_run(*states, *served(address), name="capture"), say=lambda _: None)
    offline = make_run(*states, *served("http://127.0.0.1:1/v1"), "states.mode=offline", name="offline")
    assert train(make_run_plan(offline)).ledger.remaining == 0
    here = make_run(TEACHER, *SHORT, name="here")
    train(make_run_plan(here))
    assert close(weights_of(here), weights_of(offline))


def test_files_of_speculators_train_like_the_target_itself(make_run, written) -> None:
    files = ("target.backend.kind=files", f"target.backend.path={written}", "target.backend.aux_layer_ids=[1,3,4]")
    here, there = make_run(TEACHER, *SHORT, name="here"), make_run(TEACHER, *SHORT, *files, name="there")
    train(make_run_plan(here))
    train(make_run_plan(there))
    assert close(weights_of(here), weights_of(there))


def test_files_pass_the_self_test_of_every_backend(tmp_path, target) -> None:
    """Of probes written on demand, since files cannot be asked for more."""

    class Writing:
        origin = "files"

        def fetch(self, token_ids: Any) -> Any:
            hidden_TLH, _ = captured_layers(target, token_ids, AUX_IDS)
            payload = {"hidden_states": hidden_TLH.contiguous(), "token_ids": torch.tensor(list(token_ids))}
            folder = tmp_path / str(hash(tuple(token_ids)))
            folder.mkdir(exist_ok=True)
            save_file(payload, folder / "hs_0.safetensors")
            return FilesClient(folder).fetch(token_ids)

    assert self_test(target, (0, 2), make_capture=lambda *_: remote(Writing(), target)).final_error < 1e-5


def test_fp8_files_are_expanded(tmp_path, target) -> None:
    ids = list(range(3, 20))
    hidden_TLH, _ = captured_layers(target, ids, AUX_IDS)
    scales = hidden_TLH.abs().amax(dim=(1, 2), keepdim=True) / 448
    payload = {"hidden_states": (hidden_TLH / scales).to(torch.float8_e4m3fn), "hidden_states_scales": scales}
    save_file({**payload, "token_ids": torch.tensor(ids)}, tmp_path / "hs_7.safetensors")
    got = FilesClient(tmp_path).fetch(ids).hidden_TLH
    assert float((got - hidden_TLH).norm() / hidden_TLH.norm()) < 0.05
    del payload["hidden_states_scales"]  # its numbers alone are the states times something
    save_file({**payload, "token_ids": torch.tensor(ids)}, tmp_path / "hs_7.safetensors")
    with pytest.raises(RunFailedError, match=r"states in torch\.float8_e4m3fn without hidden_states_scales"):
        FilesClient(tmp_path).fetch(ids)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("other tokens", "answered for other tokens"),
        ("prefix cache", "is its prefix cache off"),
        ("post norm", "its final norm was applied"),
        ("early", "the last captured layer is another"),
        ("nan", "layer 0 is not finite"),
        ("lost file", "is that folder shared"),
        ("busy", "1 tries: HTTPError"),
    ],
)
def test_a_server_at_fault_is_refused_by_name_before_the_first_row(make_run, fake, endpoint, fault, message) -> None:
    fake.fault = fault
    with pytest.raises(RunFailedError, match=message):
        train(make_run_plan(make_run(TEACHER, *served(endpoint))))


def test_a_request_that_fails_is_repeated(fake, endpoint, monkeypatch) -> None:
    monkeypatch.setattr("draftline.target.remote.clients._BACKOFF_S", 0.0)
    fake.fail_first = 2
    assert VllmClient(vllm(endpoint, max_retries=2)).fetch([5, 6, 7]).hidden_TLH.shape == (3, 3, 64)


def test_no_server_is_one_line() -> None:
    with pytest.raises(UserError, match=r"127\.0\.0\.1:1/v1: does not answer"):
        VllmClient(vllm("http://127.0.0.1:1/v1"))


def test_a_missing_package_is_one_line(monkeypatch, endpoint) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"draftline\[capture\]"):
        VllmClient(vllm(endpoint))


@pytest.mark.parametrize(
    ("aux_ids", "message"),
    [
        ((1, 2, 4), r"lacks \[3\], the taps \[2\] in its counting"),
        ((1, 3, 3), "must be different ids"),
        ((1, 3, 5), r"ids of 0\.\.4"),
        ((1, 3), "lacks 4, the state after the last layer"),
    ],
)
def test_layers_that_are_not_what_the_drafter_taps_are_refused(make_run, tmp_path, aux_ids, message) -> None:
    files = ("target.backend.kind=files", f"target.backend.path={tmp_path}")
    run = make_run(TEACHER, *files, f"target.backend.aux_layer_ids={list(aux_ids)}")
    with pytest.raises(UserError, match=message):
        train(make_run_plan(run))


def test_another_number_of_layers_than_named_is_refused(make_run, written) -> None:
    files = ("target.backend.kind=files", f"target.backend.path={written}", "target.backend.aux_layer_ids=[1,3]")
    with pytest.raises(UserError, match=r"names 2 layers, .* gives 3"):
        train(make_run_plan(make_run(*files)))


def test_files_of_other_data_fail_by_name(make_run, tmp_path, target) -> None:
    hidden_TLH, _ = captured_layers(target, [9, 8, 7], AUX_IDS)
    payload = {"hidden_states": hidden_TLH.contiguous(), "token_ids": torch.tensor([9, 8, 7])}
    save_file(payload, tmp_path / "hs_0.safetensors")
    files = ("target.backend.kind=files", f"target.backend.path={tmp_path}", "target.backend.aux_layer_ids=[1,3,4]")
    with pytest.raises(RunFailedError, match="no file holds these"):
        train(make_run_plan(make_run(*files)))


def test_a_folder_without_such_files_is_one_line(tmp_path) -> None:
    with pytest.raises(UserError, match="holds no hs_"):
        FilesClient(tmp_path)
    (tmp_path / "hs_0.safetensors").write_bytes(b"no")
    with pytest.raises(UserError, match="broken file"):
        FilesClient(tmp_path)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["drafter.init=target_layers"], "target.backend vllm does not load"),
        (["target.quantization=int8"], "set target.quantization: null"),
    ],
)
def test_settings_that_need_the_target_here_are_refused(make_run: Callable[..., RunConfig], overrides, message) -> None:
    with pytest.raises(UserError, match=message):
        make_run(*served("http://127.0.0.1:1/v1"), *overrides)
