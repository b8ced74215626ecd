"""Running `regenerate` against fake servers."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import data_kit as kit
from fake_server import MODEL, FakeServer

from draftline.config.schema import TargetConfig
from draftline.data.regenerate import regenerate
from draftline.data.regenerate_job import RegenerateReport
from draftline.data.servers.options import Backoff, ServerOptions

FAST = Backoff(0.01, 0.05)


def prompts(folder: Path, n: int, **more: Any) -> Path:
    """Prompts `hello 0.`, `hello 1.`, ... with ids p0, p1, ..."""
    folder.mkdir(exist_ok=True)
    return kit.write_lines(folder / "prompts.jsonl", [{"id": f"p{i}", "prompt": text(i), **more} for i in range(n)])


def text(i: int) -> str:
    return f"hello {i}."


def options(*servers: FakeServer, **changes: Any) -> ServerOptions:
    given = {"model": MODEL, "concurrency": 4, "timeout_s": 20.0, "backoff": FAST, "patience_s": 20.0} | changes
    return ServerOptions(tuple(server.url for server in servers), **given)


def run(source: Path, target: TargetConfig, servers: ServerOptions, **more: Any) -> RegenerateReport:
    given = {"max_new_tokens": 24, "device": "cpu"} | more
    return regenerate(str(source), source.parent / "a.jsonl", target=target, servers=servers, **given)


def rows(source: Path) -> list[dict[str, Any]]:
    path = source.parent / "a.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def rejects(source: Path) -> dict[str, str]:
    path = source.parent / "a.rejected.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    return {row["id"]: row["reason"] for row in map(json.loads, lines)}


def manifest(source: Path) -> dict[str, Any]:
    content = json.loads((source.parent / "a.manifest.json").read_text())
    assert isinstance(content, dict)
    return content


def exactly_once(source: Path, report: RegenerateReport, n: int) -> bool:
    """Every prompt is in exactly one of the two files, once."""
    ids = [row["id"] for row in rows(source)] + list(rejects(source))
    return (
        Counter(ids) == Counter(f"p{i}" for i in range(n))
        and report.in_rows == n == report.out_rows + report.rejected
        and report.out_rows == len(rows(source))
    )
