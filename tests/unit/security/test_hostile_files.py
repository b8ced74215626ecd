"""Every reader of a file meets files made to hurt it: one line for the user, never a traceback, a hang or a write."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from draftline.config.drafter_spec import DrafterSpec
from draftline.config.load import load_config
from draftline.data import conversations as conversations_module
from draftline.data import messages as messages_module
from draftline.data.answer_log import AnswerLog
from draftline.data.conversations import Tally, read_conversations
from draftline.data.manifest import DatasetFacts, read_manifest
from draftline.data.shards import ShardWriter, TokenDataset
from draftline.doctor import DoctorContext, check_run, run_doctor
from draftline.drafter.model import Drafter
from draftline.errors import DraftlineError, UserError
from draftline.export.zlab import export_zlab, load_export, read_spec
from draftline.monitor.events import read_events
from draftline.monitor.run import RunMonitor
from draftline.monitor.watch import read_status, render_status
from draftline.pipeline.checkpoint import (
    Checkpoint,
    CheckpointError,
    latest_checkpoint,
    read_checkpoint,
    write_checkpoint,
)
from draftline.pipeline.core.ledger import LedgerState
from draftline.pipeline.exporting import drafter_of_run
from draftline.pipeline.run_folder import read_identity

FUZZ = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
SPEC = DrafterSpec(
    hidden_size=8,
    intermediate_size=8,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    vocab_size=16,
    rms_norm_eps=1e-6,
    rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    max_position_embeddings=32,
    block_size=4,
    mask_token_id=15,
    taps=(0,),
    num_target_layers=4,
    layer_types=("full_attention",),
)
RUN_YAML = """
output: run
target: {model: m}
data: {path: d, row_tokens: 64}
drafter: {num_layers: 2, block_size: 4, taps: [0, 2], mask_token_id: 500}
objective: {decay: {kind: exponential, gamma: 4}}
sync: {kind: average, every_rows: 3}
"""
CONVERSATION = {
    "id": "a",
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": "yes", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
    ],
    "tools": [{"name": "f"}],
    "answer_token_ids": [1, 2],
}
odd = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**20), 10**20),
    st.sampled_from([-1, 0, 2**31, 2**63, 10**400, 1e308, float("inf"), float("nan")]),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["../../outside", "/etc/passwd", "\0", "\ud800", "a" * 5000, "round-00000001", "{}"]),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


@st.composite
def spoiled(draw: st.DrawFn, document: Any) -> Any:
    """The document with one to three of its values replaced, removed or doubled, at any depth."""
    document = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 3))):
        place: Any = document
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if isinstance(place[key], dict | list) and place[key] and draw(st.booleans()):
                place = place[key]
                continue
            if isinstance(place, dict) and draw(st.integers(0, 4)) == 0:
                del place[key]
            else:
                place[key] = draw(odd)
            break
    return document


@st.composite
def torn(draw: st.DrawFn, data: bytes) -> bytes:
    """The bytes, cut, flipped or with foreign bytes in between."""
    at = draw(st.integers(0, len(data)))
    kind = draw(st.sampled_from(["cut", "flip", "insert", "deep"]))
    if kind == "cut":
        return data[:at]
    if kind == "flip" and at < len(data):
        return data[:at] + bytes([data[at] ^ draw(st.integers(1, 255))]) + data[at + 1 :]
    if kind == "deep":
        return data[:at] + b'{"a":[' * draw(st.sampled_from([1, 60_000])) + data[at:]
    return data[:at] + draw(st.binary(max_size=40)) + data[at:]


def hostile(document: Any) -> st.SearchStrategy[bytes]:
    """JSON bytes: spoiled values, or torn text."""
    text = json.dumps(document).encode()
    return st.one_of(
        spoiled(document).map(lambda value: json.dumps(value).encode()), torn(text), st.binary(max_size=64)
    )


def tree(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_size for path in sorted(folder.rglob("*"))}


@contextmanager
def put_back(folder: Path) -> Iterator[None]:
    """Whatever one example does to the files of a folder is undone before the next."""
    contents = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    try:
        yield
    finally:
        for path in [path for path in folder.rglob("*") if path.is_file() and path not in contents]:
            path.unlink()
        for path, content in contents.items():
            path.write_bytes(content)


def check_meets(root: Path, read: Callable[[], Any]) -> None:
    """`read` either works or says what is wrong in words; it leaves the files around it alone."""
    before = tree(root)
    try:
        read()
    except DraftlineError as error:
        assert str(error).strip()
    assert tree(root) == before


# ---- data


@FUZZ
@given(data=hostile(CONVERSATION), skip=st.booleans())
def test_conversation_lines(tmp_path: Path, data: bytes, skip: bool):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(data + b"\n" + json.dumps(CONVERSATION).encode())
    check_meets(tmp_path, lambda: list(read_conversations([str(file)], Tally(skip_bad_rows=skip))))


@FUZZ
@given(data=st.data())
def test_parquet_files(tmp_path: Path, data: st.DataObject):
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"prompt": ["a", "b"], "response": ["c", "d"]}), file)
    file.write_bytes(data.draw(torn(file.read_bytes())))
    check_meets(tmp_path, lambda: list(read_conversations([str(file)], Tally(skip_bad_rows=True))))


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    with ShardWriter(tmp_path / "data") as writer:
        for i in range(3):
            writer.add(f"s{i}", list(range(5 + i)), [False, *[True] * (4 + i)])
        writer.finish(DatasetFacts(tokenizer_fingerprint="t", template_hash="t", vocab_size=16, max_tokens=16))
    return tmp_path / "data"


@FUZZ
@given(data=st.data())
def test_data_manifests(tmp_path: Path, dataset: Path, data: st.DataObject):
    file = dataset / "manifest.json"
    with put_back(dataset):
        file.write_bytes(data.draw(hostile(json.loads(file.read_bytes()))))
        check_meets(tmp_path, lambda: TokenDataset.open(dataset))


@FUZZ
@given(data=st.data())
def test_shards_whose_hash_is_right(tmp_path: Path, dataset: Path, data: st.DataObject):
    """Whoever makes a hostile shard also writes its hash into the manifest."""
    manifest, shard = dataset / "manifest.json", dataset / "shard-00000.arrow"

    def read() -> None:
        opened = TokenDataset.open(dataset)
        for i in range(len(opened)):
            opened.sample(i)

    with put_back(dataset):
        spoilt = data.draw(torn(shard.read_bytes()))
        content = json.loads(manifest.read_bytes())
        content["shards"][0] |= {"n_bytes": len(spoilt), "sha256": hashlib.sha256(spoilt).hexdigest()}
        shard.write_bytes(spoilt)
        manifest.write_text(json.dumps(content))
        check_meets(tmp_path, read)


@FUZZ
@given(line=hostile({"id": "a", "answer_cut": False, "messages": []}), manifest=st.data())
def test_answer_logs(tmp_path: Path, line: bytes, manifest: st.DataObject):
    settings_now = {"target": "t", "seed": 1}
    output = tmp_path / "answers.jsonl"
    for path in tmp_path.iterdir():
        path.unlink()
    with AnswerLog(output) as log:
        log.settle(settings_now)
        log.append([{"id": "x", "answer_cut": True}], [("y", "why")])
    output.write_bytes(output.read_bytes() + line + b"\n")
    log.manifest_path.write_bytes(manifest.draw(hostile(json.loads(log.manifest_path.read_bytes()))))
    try:
        with AnswerLog(output) as again:
            again.settle(settings_now)
    except UserError as error:
        assert "\n" not in str(error)
    assert {path.parent for path in tmp_path.rglob("*")} == {tmp_path}


# ---- checkpoints and run folders


@pytest.fixture(scope="module")
def state() -> dict[str, Any]:
    ledger = LedgerState(planned=4, committed=((0, 2),), set_aside=((3, 4),), rounds=2, in_flight=1).to_json()
    return {"round_id": 1, "ledger": ledger, "spec": SPEC.model_dump(mode="json"), "fingerprints": {"data": "d"}}


@pytest.fixture
def run(tmp_path: Path, state: dict[str, Any]) -> Path:
    """A run folder with two checkpoints, a status and an event log."""
    folder = tmp_path / "run"
    weights = dict(Drafter(SPEC).state_dict())
    for round_id in (0, 1):
        write_checkpoint(folder, round_id, Checkpoint(state, weights, [{"m": torch.ones(2)}], {}), keep=2)
    (folder / "config.yaml").write_text(RUN_YAML)
    (folder / "run.json").write_text(json.dumps({"fingerprints": {"data": "d", "target": "t"}}))
    with RunMonitor(folder, load_config([folder / "config.yaml"]).monitor, show=False) as monitor:
        clock = monitor.metrics.worker("target-0")
        with clock.span("working", "row 1"):
            clock.done(rows=1, tokens=5)
    return folder


def reseal(folder: Path) -> None:
    """The manifest with the sizes and hashes of what lies there now, as whoever spoilt it would write it."""
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        for path in sorted(folder.iterdir())
        if path.name != "manifest.json"
    }
    (folder / "manifest.json").write_text(json.dumps({"schema_version": 1, "files": files}))


@FUZZ
@given(data=st.data())
def test_checkpoint_manifests(tmp_path: Path, run: Path, data: st.DataObject):
    folder = run / "checkpoints" / "round-00000001"
    file = folder / "manifest.json"
    with put_back(run):
        file.write_bytes(data.draw(hostile(json.loads(file.read_bytes()))))
        check_meets(tmp_path, lambda: read_checkpoint(folder))
        found = latest_checkpoint(run)
        assert found is not None and all("\n" not in line for line in found[1])


@FUZZ
@given(data=st.data())
def test_checkpoint_states_whose_hash_is_right(tmp_path: Path, run: Path, state: dict[str, Any], data: st.DataObject):
    folder = run / "checkpoints" / "round-00000001"

    def read() -> None:
        LedgerState.from_json(read_checkpoint(folder).state["ledger"])

    with put_back(run):
        (folder / "state.json").write_bytes(data.draw(hostile(state)))
        reseal(folder)
        check_meets(tmp_path, read)
        check_meets(tmp_path, lambda: drafter_of_run(run))
        check_meets(tmp_path, lambda: run_doctor(DoctorContext(run=run), [("run", check_run)]))


@FUZZ
@given(data=st.data())
def test_checkpoint_weights_whose_hash_is_right(tmp_path: Path, run: Path, data: st.DataObject):
    folder = run / "checkpoints" / "round-00000001"
    file = folder / "weights.safetensors"
    other = save({"fc.weight": torch.ones(2, 3)})
    with put_back(run):
        file.write_bytes(data.draw(st.one_of(torn(file.read_bytes()), torn(other), st.just(other))))
        reseal(folder)
        check_meets(tmp_path, lambda: read_checkpoint(folder))
        check_meets(tmp_path, lambda: drafter_of_run(run))


READERS: dict[str, Callable[[Path], Any]] = {
    "run.json": read_identity,
    "status.json": lambda run: render_status(read_status(run), 100),
    "events.jsonl": lambda run: read_events(run / "events.jsonl"),
    "checkpoints/latest.json": latest_checkpoint,
}


@pytest.mark.parametrize("name", READERS)
@FUZZ
@given(data=st.data())
def test_files_of_a_run(tmp_path: Path, run: Path, name: str, data: st.DataObject):
    file = run / name
    lines = [json.loads(line) for line in file.read_bytes().splitlines()]
    with put_back(run):
        spoilt = [data.draw(hostile(line)) if data.draw(st.booleans()) else json.dumps(line).encode() for line in lines]
        file.write_bytes(b"\n".join(spoilt))
        check_meets(tmp_path, lambda: READERS[name](run))
        check_meets(tmp_path, lambda: run_doctor(DoctorContext(run=run), [("run", check_run)]))


# ---- configurations and exports


@FUZZ
@given(data=st.one_of(torn(RUN_YAML.encode()), st.binary(max_size=80), st.text(max_size=80).map(str.encode)))
def test_run_configurations(tmp_path: Path, data: bytes):
    file = tmp_path / "run.yaml"
    file.write_bytes(data)
    check_meets(tmp_path, lambda: load_config([file]))


def test_a_yaml_bomb_and_a_deep_yaml_are_one_line(tmp_path: Path):
    file = tmp_path / "run.yaml"
    bomb = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40))
    deep = ("seed: " + "[" * 200_000, "{a: " * 50_000, "- " * 5000, "\n".join(" " * i + "a:" for i in range(700)))
    for text in (bomb, *deep, "a: &a {b: *a}", "output: !!python/object/apply:os.system [ls]"):
        file.write_text(text)
        with pytest.raises(UserError) as error:
            load_config([file])
        assert len(str(error.value)) < 5000


@pytest.fixture
def export(tmp_path: Path) -> Path:
    return export_zlab(Drafter(SPEC), tmp_path / "export")


@pytest.mark.parametrize("name", ["config.json", "draftline.json"])
@FUZZ
@given(data=st.data())
def test_export_descriptions(tmp_path: Path, export: Path, name: str, data: st.DataObject):
    file = export / name
    with put_back(export):
        file.write_bytes(data.draw(hostile(json.loads(file.read_bytes()))))
        check_meets(tmp_path, lambda: read_spec(export))
        check_meets(tmp_path, lambda: load_export(export))


@FUZZ
@given(data=st.data())
def test_export_weights(tmp_path: Path, export: Path, data: st.DataObject):
    file, index = export / "model.safetensors", export / "model.safetensors.index.json"
    with put_back(export):
        file.write_bytes(data.draw(torn(file.read_bytes())))
        check_meets(tmp_path, lambda: load_export(export))
    with put_back(export):
        index.write_bytes(data.draw(hostile({"weight_map": {"fc.weight": "model.safetensors"}})))
        check_meets(tmp_path, lambda: load_export(export))


# ---- sizes


def test_a_line_of_ten_gigabytes_is_never_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The limit is lowered instead of the line being made longer; what is read at once stays below it."""
    monkeypatch.setattr(conversations_module, "MAX_LINE_BYTES", 1000)
    file = tmp_path / "rows.jsonl"
    row = json.dumps({"prompt": "a", "response": "b"})
    file.write_text(row + "\n" + "x" * 1_000_000 + "\n" + row + "\n")
    tally = Tally(skip_bad_rows=True)
    assert [row.line for row in read_conversations([str(file)], tally)] == [1, 3]
    assert tally.rejected == {"line too long": 1}
    with pytest.raises(UserError, match=r"rows.jsonl:2: the line is longer than 1000 bytes"):
        list(read_conversations([str(file)], Tally(skip_bad_rows=False)))


def test_a_conversation_of_ten_million_turns_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(messages_module, "MAX_MESSAGES", 10)
    file = tmp_path / "rows.jsonl"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    file.write_text("".join(json.dumps({"messages": turns * n}) + "\n" for n in (5, 6)))
    with pytest.raises(UserError, match=r"rows.jsonl:2: 12 messages, at most 10 are read"):
        list(read_conversations([str(file)], Tally(skip_bad_rows=False)))


@pytest.mark.parametrize("opening", ["[", '{"a":', '[{"messages":['])
def test_deep_json_is_one_line_everywhere(tmp_path: Path, opening: str):
    deep = opening * 200_000
    (tmp_path / "rows.jsonl").write_text(" " + deep)
    (tmp_path / "manifest.json").write_text(deep)
    (tmp_path / "config.json").write_text(deep)
    (tmp_path / "status.json").write_text(deep)
    (tmp_path / "events.jsonl").write_text(deep)
    for read in (
        lambda: list(read_conversations([str(tmp_path / "rows.jsonl")], Tally(skip_bad_rows=False))),
        lambda: read_manifest(tmp_path),
        lambda: read_spec(tmp_path),
        lambda: read_status(tmp_path),
        lambda: read_checkpoint(tmp_path),
    ):
        with pytest.raises((UserError, CheckpointError)) as error:
            read()
        assert "\n" not in str(error.value) and len(str(error.value)) < 500
    assert read_events(tmp_path / "events.jsonl").torn_lines == 1
