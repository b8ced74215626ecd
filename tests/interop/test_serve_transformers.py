"""Regeneration through a real server, transformers' `serve` with SmolLM2; server and client are killed on the way."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from draftline.config.schema import TargetConfig
from draftline.data.prepare import prepare
from draftline.data.regenerate import RegenerateReport, regenerate
from draftline.data.servers.options import ServerOptions
from draftline.data.shards import TokenDataset
from draftline.target.unpack import unpack_target

pytestmark = [pytest.mark.interop, pytest.mark.timeout(600)]

N, MAX_NEW = 16, 8
WORDS = ("Name a river.", "Count to five.", "What is a cat?", "Say hello in French.", "Why is the sky blue?", "2 + 2?")


@pytest.fixture(scope="module")
def smollm2_folder(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """SmolLM2 as a plain folder, which a server can load."""
    return unpack_target(TargetConfig(model=str(smollm2_gguf)), tmp_path_factory.mktemp("smollm2")).model


class Serving:
    """`transformers serve` as a process on one port."""

    def __init__(self, model: str, home: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._model, self._home = model, home
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [Path(sys.executable).with_name("transformers"), "serve", self._model, "--port", str(self.port)]
        environment = {**os.environ, "HF_HOME": str(self._home), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        with (self._home / "serve.log").open("ab") as log:
            self._process = subprocess.Popen(
                [*command, "--host", "127.0.0.1", "--device", "cpu", "--dtype", "float32"],
                env=environment,
                stdout=log,
                stderr=log,
            )

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def answers_to_a_connection(self) -> bool:
        assert self._process is not None and self._process.poll() is None, (self._home / "serve.log").read_text()
        with socket.socket() as one:
            return one.connect_ex(("127.0.0.1", self.port)) == 0


@pytest.fixture
def serving(smollm2_folder: str, tmp_path: Path) -> Iterator[Serving]:
    home = tmp_path / "home"
    (home / "hub").mkdir(parents=True)  # it lists its cache, and fails where there is none
    server = Serving(smollm2_folder, home)
    server.start()
    try:
        wait_for(server.answers_to_a_connection)
        yield server
    finally:
        server.kill()


def wait_for(condition: Callable[[], bool], child: subprocess.Popen[bytes] | None = None) -> None:
    end = time.monotonic() + 200
    while not condition():
        assert time.monotonic() < end, "it took too long"
        assert child is None or child.poll() is None, "the client ended too early"
        time.sleep(0.05)


def client(source: Path, output: Path, target: str, url: str) -> subprocess.Popen[bytes]:
    given = ["regenerate", source, "-o", output, "--target", target, "--server", url, "--max-new-tokens", MAX_NEW]
    code = "from draftline.cli import main; main()"
    return subprocess.Popen([sys.executable, "-c", code, *map(str, (*given, "--concurrency", 3, "--tries", 20))])


def answers(output: Path) -> int:
    return output.read_bytes().count(b"\n") if output.is_file() else 0


def finished(source: Path, output: Path, target: str, url: str) -> RegenerateReport:
    options = ServerOptions((url,), concurrency=3, kind="transformers")
    return regenerate(
        str(source), output, target=TargetConfig(model=target), device="cpu", max_new_tokens=MAX_NEW, servers=options
    )


def test_every_prompt_is_answered_once_though_server_and_client_are_killed(
    serving: Serving, smollm2_folder: str, tmp_path: Path
) -> None:
    source, output = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    rows = [{"id": f"p{i}", "prompt": f"{WORDS[i % len(WORDS)]} ({i})"} for i in range(N)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    child = client(source, output, smollm2_folder, serving.url)
    try:
        wait_for(lambda: answers(output) >= 3, child)
        serving.kill()
        before = answers(output)
        serving.start()
        wait_for(lambda: answers(output) >= before + 6, child)  # the very same client went on
    finally:
        child.kill()
        child.wait()
    kept = output.read_bytes()
    report = finished(source, output, smollm2_folder, serving.url)
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert output.read_bytes().startswith(kept) and report.resumed_rows == kept.count(b"\n")
    assert Counter(line["id"] for line in lines) == Counter(row["id"] for row in rows)
    assert (report.in_rows, report.out_rows, report.rejected) == (N, N, 0)
    assert report.n_answer_cut == sum(line["answer_cut"] for line in lines) > 0
    _agrees_with_the_target_itself(source, smollm2_folder, tmp_path, lines)


def _agrees_with_the_target_itself(source: Path, target: str, tmp_path: Path, lines: list[dict[str, Any]]) -> None:
    """Greedy answers are the ones that the target gives in this process, and `prepare` learns exactly their ids."""
    own = tmp_path / "own.jsonl"
    options: dict[str, Any] = {"target": TargetConfig(model=target), "device": "cpu", "max_new_tokens": MAX_NEW}
    regenerate(str(source), own, batch_size=1, limit=4, **options)
    served = {line["id"]: line for line in lines}
    prepare([str(tmp_path / "answers.jsonl")], tmp_path / "data", target=options["target"], max_tokens=200)
    data = TokenDataset.open(tmp_path / "data")
    learned = {sample.sample_id: sample for sample in map(data.sample, range(len(data)))}
    for row in map(json.loads, own.read_text().splitlines()):
        other = served[row["id"]]
        assert other["messages"][-1]["content"].strip() == row["messages"][-1]["content"].strip()
        assert other["answer_tokens"] == len(row["answer_token_ids"])
        if other["retokenized"] == "same length":
            sample = learned[row["id"]]
            assert sample.input_ids[sample.loss_mask].tolist() == row["answer_token_ids"]
    assert sum(line["retokenized"] == "same length" for line in lines) > N // 2
