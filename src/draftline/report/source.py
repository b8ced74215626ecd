"""Everything that a report tells of a run, read from its folder; nothing is written there but the report itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftline.config.load import load_config
from draftline.config.schema import RunConfig
from draftline.data.manifest import DatasetManifest, read_manifest
from draftline.errors import UserError
from draftline.monitor.run import EVENTS_FILE
from draftline.monitor.watch import RunStatus, read_status
from draftline.report.curves import Metrics, read_metrics
from draftline.report.timeline import Timeline, read_timeline

EVALUATION_VERSION = 3
_MOST_JSON_BYTES = 64 << 20
_RESULT_KEYS = ("prompt_set", "method", "drafter", "n_prompts", "acceptance_length", "interval")


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A report of `draftline eval --output`, as plain data."""

    name: str
    content: dict[str, Any]

    @property
    def results(self) -> list[dict[str, Any]]:
        """One entry a method and prompt set."""
        return list(self.content["results"])


@dataclass(frozen=True, slots=True)
class RunSource:
    """A run folder as read.

    Attributes:
        name: the folder's own name.
        identity: contents of `run.json`; empty where that cannot be read.
        data: manifest of the data, or why it cannot be read any more.
        checkpoints: (name, bytes) of each checkpoint folder, oldest first.
        failures: `failures.log`, if there is one.
    """

    path: Path
    name: str
    config: RunConfig
    status: RunStatus
    metrics: Metrics
    timeline: Timeline
    identity: dict[str, Any]
    data: DatasetManifest | str
    checkpoints: list[tuple[str, int]]
    evaluations: list[Evaluation]
    failures: str


def read_run(path: Path, evaluations: Sequence[Path] = ()) -> RunSource:
    """Read a run folder, of a run in progress or finished.

    Args:
        evaluations: reports of `draftline eval --output`; those named `evaluation*.json` in the folder are found.

    Raises:
        UserError: no run folder, half-written, without a trained row, or written by a newer version.
    """
    status = read_status(path)
    if not (path / "config.yaml").is_file():
        raise UserError("holds no config.yaml", where=str(path), mend="give the output folder of `draftline train`")
    config = load_config([path / "config.yaml"])
    metrics = read_metrics(path / "metrics.jsonl")
    found = [*sorted(path.glob("evaluation*.json")), *evaluations]
    return RunSource(
        path=path,
        name=path.resolve().name,
        config=config,
        status=status,
        metrics=metrics,
        timeline=read_timeline(path / EVENTS_FILE),
        identity=_identity(path / "run.json"),
        data=_manifest(config.data.path),
        checkpoints=_checkpoints(path / "checkpoints"),
        evaluations=[_evaluation(file) for file in dict.fromkeys(found)],
        failures=_text(path / "failures.log"),
    )


def _manifest(path: Path) -> DatasetManifest | str:
    """Data may have moved since; that is told, and no reason to write no report."""
    try:
        return read_manifest(path)
    except UserError as error:
        return str(error)


def _identity(path: Path) -> dict[str, Any]:
    try:
        content = _json(path)
    except UserError:
        return {}
    return content if isinstance(content, dict) else {}


def _checkpoints(root: Path) -> list[tuple[str, int]]:
    if not root.is_dir():
        return []
    folders = sorted(p for p in root.iterdir() if p.is_dir() and p.name.startswith("round-"))
    return [(p.name, sum(f.stat().st_size for f in p.iterdir() if f.is_file())) for p in folders]


def _evaluation(path: Path) -> Evaluation:
    content = _json(path)
    mend = "give a report of `draftline eval --output`"
    version = content.get("schema_version") if isinstance(content, dict) else None
    if isinstance(version, int) and version > EVALUATION_VERSION:
        what = f"evaluation of version {version}; this draftline reads up to {EVALUATION_VERSION}"
        raise UserError(what, where=str(path), mend="use the draftline that wrote it, or a newer one")
    results = content.get("results") if isinstance(content, dict) else None
    if not isinstance(results, list) or not all(_is_result(r) for r in results):
        raise UserError("is no evaluation report", where=str(path), mend=mend)
    return Evaluation(path.stem, content)


def _is_result(result: Any) -> bool:
    return isinstance(result, dict) and all(key in result for key in _RESULT_KEYS)


def _json(path: Path) -> Any:
    try:
        if path.stat().st_size > _MOST_JSON_BYTES:
            raise UserError("is far too large", where=str(path))
        return json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"cannot be read ({error.strerror})", where=str(path)) from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"is not JSON ({str(error)[:100]})", where=str(path)) from None


def _text(path: Path) -> str:
    """The last part of a log; empty without one."""
    if not path.is_file():
        return ""
    return path.read_bytes()[-20_000:].decode("utf-8", "replace")
