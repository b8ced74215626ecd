"""Readers of states and of others' drafters meet files made to hurt them: one line, nothing written elsewhere."""

from __future__ import annotations

import hashlib
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

import pytest
import torch
from hostile_kit import FUZZ, check_meets, hostile, odd, put_back, spoiled, torn
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from decoding_kit import tiny_spec, tiny_target
from draftline.config.drafter_spec import Dflash2Spec
from draftline.config.sections import VllmBackend
from draftline.drafter.model import Drafter
from draftline.errors import RunFailedError, UserError
from draftline.export.check import check_export
from draftline.export.formats import load_drafter_export
from draftline.export.importing import import_checkpoint
from draftline.export.speculators import export_speculators
from draftline.export.speculators_config import Verifier
from draftline.export.zlab import export_zlab
from draftline.target.cache import SampleStates
from draftline.target.remote.clients import FilesClient, VllmClient
from draftline.target.states.manifest import StatesIdentity
from draftline.target.states.store import StatesReader, StatesWriter
from draftline.target.states.stored_target import load_stored_target, store_target

CPU = torch.device("cpu")


def identity(dtype: str) -> StatesIdentity:
    return StatesIdentity(
        model="m",
        revision=None,
        facts="f",
        fingerprint="p",
        quantization=None,
        backend="local",
        taps=(0, 2),
        final_norm="post",
        hidden_size=4,
        dtype=dtype,
        compute_dtype="float32",
        data="d",
    )


@pytest.fixture(params=["float32", "fp8"])
def states(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Two samples of three tokens."""
    writer = StatesWriter(tmp_path / "states", identity(request.param))
    for sample in range(2):
        writer.add(sample, SampleStates(torch.randn(3, 8), torch.randn(3, 4)))
    writer.close()
    return tmp_path / "states"


def read_all(folder: Path) -> None:
    reader = StatesReader(folder, 2)
    for sample in range(2):
        if reader.has([sample]):
            reader.read(sample, 3)


@FUZZ
@given(data=st.data())
def test_manifests_of_states(tmp_path: Path, states: Path, data: st.DataObject) -> None:
    file = states / "manifest.json"
    with put_back(states):
        file.write_bytes(data.draw(hostile(json.loads(file.read_bytes()))))
        check_meets(tmp_path, lambda: read_all(states))


@FUZZ
@given(data=st.data())
def test_shards_of_states(tmp_path: Path, states: Path, data: st.DataObject) -> None:
    """Torn bytes, and whole files with other tensors, under the size and hash that the manifest tells."""
    shard, manifest = states / "shard-00000.safetensors", states / "manifest.json"
    names = st.sampled_from(["0.taps", "0.scales", "0.final", "1.taps", "x"])
    shapes = st.lists(st.integers(0, 5), max_size=3)
    dtypes = st.sampled_from([torch.float32, torch.bool, torch.int64, torch.float8_e4m3fn])
    tensors = st.dictionaries(names, st.tuples(shapes, dtypes), min_size=1).map(
        lambda found: save({name: torch.zeros(shape).to(dtype) for name, (shape, dtype) in found.items()})
    )
    with put_back(states):
        content = data.draw(st.one_of(torn(shard.read_bytes()), tensors))
        shard.write_bytes(content)
        told = json.loads(manifest.read_bytes())
        told["shards"][0] |= {"n_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        manifest.write_text(json.dumps(told))
        check_meets(tmp_path, lambda: read_all(states))


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    store_target(tiny_target(), tmp_path / "stored")
    return tmp_path / "stored"


@FUZZ
@given(data=st.data())
def test_what_is_stored_of_a_target(tmp_path: Path, stored: Path, data: st.DataObject) -> None:
    facts = next(stored.glob("*.json"))
    weights = next(stored.glob("*.safetensors"))
    with put_back(stored):
        facts.write_bytes(data.draw(hostile(json.loads(facts.read_bytes()))))
        check_meets(tmp_path, lambda: load_stored_target(stored, CPU))
    with put_back(stored):
        weights.write_bytes(data.draw(torn(weights.read_bytes())))
        check_meets(tmp_path, lambda: load_stored_target(stored, CPU))


# ---- drafters of others


SPECS = {
    "dflash": tiny_spec(layer_types=("sliding_attention", "full_attention"), sliding_window=4),
    "dflash2": tiny_spec(
        dflash2=Dflash2Spec(conv_kernel_size=2, conv_group_size=4, selector_rank=2, selector_top_k=3), eos_token_id=3
    ),
    "pruned": tiny_spec(draft_vocabulary=(1, 4, 5, 9)),
}


def export(folder: Path, form: str, kind: str) -> Path:
    drafter = Drafter(SPECS[kind].model_copy(update={"in_block_attention": "bidirectional"}))
    if form == "zlab":
        return export_zlab(drafter, folder / "export", "fp8" if kind == "dflash" else "bfloat16")
    head_DH = torch.randn(4, 16) if kind == "pruned" else None
    return export_speculators(drafter, folder / "export", Verifier("a/b"), head_DH=head_DH)


@pytest.mark.parametrize(
    ("form", "kind"),
    [("zlab", "dflash"), ("zlab", "dflash2"), ("speculators", "dflash2"), ("speculators", "pruned")],
)
@FUZZ
@given(data=st.data())
def test_configurations_of_drafters(tmp_path: Path, form: str, kind: str, data: st.DataObject) -> None:
    """As others write them: without our card."""
    path = tmp_path / "export"
    if not path.exists():
        (export(tmp_path, form, kind) / "draftline.json").unlink()
    file = path / "config.json"
    with put_back(path):
        file.write_bytes(data.draw(hostile(json.loads(file.read_bytes()))))
        check_meets(tmp_path, lambda: load_drafter_export(path, num_target_layers=4))
        check_meets(tmp_path, lambda: check_export(path, num_target_layers=4))


@pytest.mark.parametrize("kind", ["dflash2", "pruned"])
@FUZZ
@given(data=st.data())
def test_weights_of_drafters(tmp_path: Path, kind: str, data: st.DataObject) -> None:
    path = tmp_path / "export"
    if not path.exists():
        export(tmp_path, "speculators", kind)
    file = path / "model.safetensors"
    maps = st.lists(st.integers(-(2**62), 2**62), max_size=6).map(lambda ids: save({"d2t": torch.tensor(ids).long()}))
    with put_back(path):
        file.write_bytes(data.draw(st.one_of(torn(file.read_bytes()), maps)))
        check_meets(tmp_path, lambda: load_drafter_export(path))
        check_meets(tmp_path, lambda: check_export(path))


@FUZZ
@given(data=st.data())
def test_an_import_that_fails_leaves_nothing_behind(tmp_path: Path, data: st.DataObject) -> None:
    path, output = tmp_path / "export", tmp_path / "mine"
    if not path.exists():
        export(tmp_path, "speculators", "dflash2")
    config = json.loads((path / "config.json").read_bytes())
    with put_back(path):
        (path / "config.json").write_text(json.dumps(data.draw(spoiled(config))))
        try:
            import_checkpoint(path, output, num_target_layers=4)
        except UserError as error:
            assert str(error).strip() and not output.exists()
        for file in output.rglob("*"):
            file.unlink()
        if output.exists():
            output.rmdir()
        assert sorted(p.name for p in tmp_path.iterdir()) == ["export"]


# ---- files and answers of a server


TENSORS = {"hidden_states": torch.randn(3, 2, 4), "token_ids": torch.tensor([5, 6, 7])}


@FUZZ
@given(data=st.data())
def test_files_that_speculators_wrote(tmp_path: Path, data: st.DataObject) -> None:
    folder = tmp_path / "hidden"
    folder.mkdir(exist_ok=True)
    ids = st.sampled_from([torch.tensor([5, 6, 7]), torch.tensor(5), torch.tensor([[5.5]]), torch.tensor([])])
    shapes = st.lists(st.integers(0, 4), max_size=4)
    made = st.builds(
        lambda shape, tokens, scale: save(
            {"hidden_states": torch.zeros(shape), "token_ids": tokens, "hidden_states_scales": torch.ones(scale)}
        ),
        st.one_of(shapes, st.just([3, 2, 4])),
        ids,
        shapes,
    )
    (folder / "hs_0.safetensors").write_bytes(data.draw(st.one_of(torn(save(TENSORS)), made)))
    check_meets(tmp_path, lambda: FilesClient(folder).fetch([5, 6, 7]))


class Server(BaseHTTPRequestHandler):
    """Answers with whatever bytes it was given."""

    models: ClassVar[bytes] = b'{"data": [{"id": "m"}]}'
    completion: ClassVar[bytes] = b""

    def _answer(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self) -> None:
        self._answer(self.models)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(self.completion)

    def log_message(self, *_: Any) -> None:
        """Says nothing."""


@pytest.fixture
def backend() -> Any:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{server.server_address[1]}/v1"
    yield VllmBackend(endpoint=address, aux_layer_ids=(1, 2), max_retries=0, timeout_s=5)
    Server.models = b'{"data": [{"id": "m"}]}'
    server.shutdown()
    server.server_close()
    thread.join()


@FUZZ
@given(data=st.data())
def test_answers_of_a_server_delete_nothing_but_the_states_they_are_for(
    tmp_path: Path, backend: VllmBackend, data: st.DataObject
) -> None:
    folder = tmp_path / "shared"
    folder.mkdir(exist_ok=True)
    (tmp_path / "thesis.txt").write_text("mine")
    save_file({"token_ids": torch.tensor([1]), "hidden_states": torch.zeros(1, 2, 4)}, tmp_path / "other.safetensors")
    save_file(TENSORS, folder / "answer.safetensors")
    place = data.draw(
        st.sampled_from([folder / "answer.safetensors", tmp_path / "thesis.txt", tmp_path / "other.safetensors"])
    )
    answer = {
        "choices": [
            {"prompt_token_ids": [5, 6, 7], "token_ids": [3], "logprobs": {"token_logprobs": [-0.5]}, "text": "a"}
        ],
        "kv_transfer_params": {"hidden_states_path": str(place)},
    }
    Server.completion = data.draw(st.one_of(hostile(answer), st.just(json.dumps(answer).encode())))
    client = VllmClient(backend)
    try:
        found = client.fetch([5, 6, 7])
        assert torch.equal(found.hidden_TLH, TENSORS["hidden_states"])
    except RunFailedError as error:
        assert str(error).strip()
    assert (tmp_path / "thesis.txt").read_text() == "mine" and (tmp_path / "other.safetensors").is_file()


@FUZZ
@given(data=st.data())
def test_lists_of_served_models(tmp_path: Path, backend: VllmBackend, data: st.DataObject) -> None:
    Server.models = data.draw(st.one_of(hostile({"data": [{"id": "m"}]}), odd.map(lambda v: json.dumps(v).encode())))
    check_meets(tmp_path, lambda: VllmClient(backend))
