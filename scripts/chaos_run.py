"""The world of `chaos.py`: a tiny target, data and configuration, and the processes that train on them."""

from __future__ import annotations

import importlib.util
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from chaos_checks import BrokenPromiseError

ROOT = Path(__file__).resolve().parents[1]
# Two rows a round, a checkpoint each round, and a drafter whose checkpoint takes about as long as a row.
OVERRIDES = (
    "epochs=4",
    "sync.every_rows=2",
    "checkpoint.every_rounds=1",
    "checkpoint.keep=2",
    "drafter.intermediate_size=1024",
    "monitor.status_every_s=60",
)
DEADLINE_S, MOST_POLL_S = 300.0, 0.5


def load_module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"chaos_{path.parent.name}_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def build_world(folder: Path) -> Path:
    """Writes target, data and configuration as the tests make them; returns the configuration file."""
    tiny = load_module(ROOT / "tests" / "conftest.py")
    runs = load_module(ROOT / "tests" / "integration" / "conftest.py")
    model = tiny.save_tiny_target(folder / "target", "qwen3")
    data = runs.write_dataset(folder / "data")
    config = folder / "run.yaml"
    config.write_text(runs.TINY_YAML.format(output=folder / "run", model=model, data=data), encoding="utf-8")
    return config


def arguments_of(config: Path, run: Path) -> list[str]:
    """What a person would type behind `draftline`: with --resume once the run has begun."""
    resume = ["--resume"] if (run / "config.yaml").exists() else []
    return ["train", "-c", str(config), *OVERRIDES, f"output={run}", *resume]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}


class Fresh:
    """`draftline train` in a new interpreter."""

    def __init__(self, arguments: list[str], log: Path) -> None:
        command = [str(Path(sys.executable).with_name("draftline")), *arguments]
        with log.open("ab") as out:
            self._process = subprocess.Popen(command, stdout=out, stderr=out, env=environment())

    def ends_within(self, seconds: float) -> bool:
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> int:
        """SIGKILL; returns the exit code, which is another one if it ended before."""
        self._process.kill()
        return self._process.wait()

    def wait(self) -> int:
        return self._process.wait()


class Forked:
    """`draftline train` in a child of a `ForkServer`."""

    def __init__(self, server: ForkServer, arguments: list[str], log: Path) -> None:
        self._server = server
        server.send({"arguments": arguments, "log": str(log)})
        self.process_id, self._code = int(server.read()), None

    _code: int | None

    def ends_within(self, seconds: float) -> bool:
        if self._code is None and self._server.has_answer(seconds):
            self._code = int(self._server.read())
        return self._code is not None

    def kill(self) -> int:
        if not self.ends_within(0.0):
            os.kill(self.process_id, 9)
        return self.wait()

    def wait(self) -> int:
        while not self.ends_within(3600.0):
            pass
        assert self._code is not None
        return self._code


Process = Fresh | Forked


class ForkServer:
    """An interpreter with everything imported; see chaos_fork.py. Ends when its standard input is closed."""

    def __init__(self, log: Path) -> None:
        command = [sys.executable, str(Path(__file__).with_name("chaos_fork.py"))]
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=out, env=environment(), bufsize=0
            )
        if self.read() != "ready":
            raise BrokenPromiseError(f"the fork server did not start, see {log}")

    def send(self, command: dict[str, object]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")

    def read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().decode().strip()

    def has_answer(self, seconds: float) -> bool:
        return bool(select.select([self._process.stdout], [], [], seconds)[0])

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def wait_until(process: Process, holds: Callable[[], bool]) -> bool:
    """Looks often, for nothing tells a bystander that a folder appeared; False once the process has ended.

    Time in which this process itself was stopped does not count.
    """
    waited_s, before = 0.0, time.monotonic()
    while not holds():
        if process.ends_within(0.0005):
            return False
        now = time.monotonic()
        waited_s, before = waited_s + min(now - before, MOST_POLL_S), now
        if waited_s > DEADLINE_S:
            process.kill()
            raise BrokenPromiseError(f"nothing happened for {DEADLINE_S:g} s")
    return True
