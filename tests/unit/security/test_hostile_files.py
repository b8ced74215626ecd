"""Every reader of a run, a configuration or an export meets files made to hurt it: one line, never a traceback."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile_kit import FUZZ, check_meets, hostile, put_back, torn
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from draftline.config.drafter_spec import DrafterSpec
from draftline.config.load import load_config
from draftline.data.conversations import Tally, read_conversations
from draftline.data.manifest import read_manifest
from draftline.doctor import DoctorContext, check_run, run_doctor
from draftline.drafter.model import Drafter
from draftline.errors import UserError
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


# ---- depth


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
