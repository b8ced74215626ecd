"""Promises of `draftline watch --web`: what it tells, whom it lets in, that it only reads, and what it refuses."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from draftline.errors import UserError
from draftline.live import server as server_module
from draftline.live.server import Fresh, make_app, open_socket, serve
from draftline.live.state import run_charts, run_state
from made_run import make_run

TOKEN = "a-token"


class Answer:
    def __init__(self, messages: list[dict[str, Any]]) -> None:
        self.status = messages[0]["status"]
        self.headers = {k.decode(): v.decode() for k, v in messages[0]["headers"]}
        self.body = b"".join(m.get("body", b"") for m in messages[1:])


def ask(app: Any, path: str, *, method: str = "GET", host: str = "127.0.0.1:80", **headers: str) -> Answer:
    """One request, as a server would hand it to the application."""
    sent: list[dict[str, Any]] = []
    path, _, query = path.partition("?")

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()  # whoever asked neither sends more nor goes away
        raise AssertionError

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http"}
    scope |= {"path": path, "raw_path": path.encode(), "query_string": query.encode(), "root_path": ""}
    given = {"host": host, **headers}
    scope |= {"headers": [(k.encode(), v.encode()) for k, v in given.items()], "client": ("127.0.0.1", 1)}
    asyncio.run(app(scope | {"server": ("127.0.0.1", 80)}, receive, send))
    return Answer(sent)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("live") / "run")


def test_the_page_and_all_that_it_names_are_served_from_here_alone(run: Path) -> None:
    app = make_app(run)
    page = ask(app, "/")
    assert page.status == 200 and page.headers["content-type"].startswith("text/html")
    for name in ("live.js", "live.css", "page.css", "plotly.js"):
        assert f'"{name}"' in page.body.decode() and ask(app, f"/{name}").status == 200
    assert b"http" not in page.body
    for header in ("content-security-policy", "x-content-type-options", "referrer-policy"):
        assert header in page.headers
    assert page.headers["content-security-policy"].startswith("default-src 'self'")


def test_the_state_is_told_in_figures_and_words(run: Path) -> None:
    state = json.loads(ask(make_app(run), "/api/state").body)
    assert state["state"] == "closed" and state["detail"].startswith("finished at ")
    assert dict(state["figures"])["rows trained"] == "40 of 40"
    assert state["workers"] == state["gpus"] == []


def test_every_chart_has_axes_with_names_and_a_text_alternative(run: Path) -> None:
    charts = json.loads(ask(make_app(run), "/api/charts").body)["charts"]
    assert {"loss", "acceptance", "throughput", "timeline"} <= {chart["key"] for chart in charts}
    for chart in charts:
        assert chart["alt"] and chart["title"]
        axes = [axis for name, axis in chart["layout"].items() if name.startswith(("xaxis", "yaxis"))]
        assert axes and chart["layout"]["xaxis"]["title"]["text"]
        assert chart["key"] == "timeline" or all(axis["title"]["text"] for axis in axes)


def test_queue_waiting_and_gpus_are_drawn_with_their_units(tmp_path: Path) -> None:
    figures = {"queue/bytes": 3 << 20, "waiting/drafter-0": 0.25, "gpu/cuda_0/busy_share": 0.5}
    figures |= {"gpu/cuda_0/memory_bytes": 3 << 30}
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 4, "wall": 1.0, **figures}))
    charts = {chart["key"]: chart for chart in run_charts(tmp_path)["charts"]}
    traces = {key: (chart["traces"][0], chart["layout"]["yaxis"]["title"]["text"]) for key, chart in charts.items()}
    assert {key: (trace["name"], trace["y"], unit) for key, (trace, unit) in traces.items()} == {
        "queue-bytes": ("in the queue", [3.0], "MiB"),
        "waiting": ("drafter-0", [0.25], "share of time"),
        "gpu-busy": ("cuda:0", [0.5], "share of time"),
        "gpu-memory": ("cuda:0", [3.0], "GiB"),
    }


def test_a_run_that_is_half_written_newer_or_gone_is_told_in_the_page(tmp_path: Path) -> None:
    app = make_app(tmp_path)
    assert "holds no status.json" in json.loads(ask(app, "/api/state").body)["error"]
    (tmp_path / "status.json").write_text('{"schema_version": 1, "proc')
    assert "is not whole" in run_state(tmp_path)["error"]
    (tmp_path / "status.json").write_text('{"schema_version": 99}')
    assert "is of version 99" in run_state(tmp_path)["error"]
    assert run_charts(tmp_path) == {"charts": [], "note": "holds no metrics.jsonl"}
    assert run_charts(tmp_path / "gone")["charts"] == []


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_nothing_can_be_changed(run: Path, method: str) -> None:
    before = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
    app = make_app(run)
    assert {ask(app, path, method=method).status for path in ("/", "/api/state", "/api/charts")} == {405}
    assert ask(app, "/../status.json").status == ask(app, "/status.json").status == 404
    assert {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()} == before


def test_without_the_token_nothing_is_told(run: Path) -> None:
    app = make_app(run, token=TOKEN, cookie="c")
    for path in ("/", "/api/state", "/plotly.js", "/api/state?token=wrong", "/api/state?token=%ff"):
        answer = ask(app, path, host="run.example")
        assert answer.status == 401 and b"draftline watch" in answer.body
    assert ask(app, "/api/state", host="x", cookie="c=wrong").status == 401
    assert ask(app, "/api/state", host="x", authorization="Bearer wrong").status == 401


def test_the_token_goes_from_the_address_into_a_cookie(run: Path) -> None:
    app = make_app(run, token=TOKEN, cookie="c")
    answer = ask(app, f"/?token={TOKEN}", host="run.example")
    assert (answer.status, answer.headers["location"]) == (303, "/")
    assert "HttpOnly" in answer.headers["set-cookie"] and answer.headers["set-cookie"].startswith(f"c={TOKEN};")
    assert ask(app, "/api/state", host="run.example", cookie=f"c={TOKEN}").status == 200
    assert ask(app, "/api/state", host="run.example", authorization=f"Bearer {TOKEN}").status == 200


def test_another_name_for_this_machine_is_not_answered_without_a_token(run: Path) -> None:
    app = make_app(run)
    assert ask(app, "/api/state", host="evil.example").status == 400
    assert ask(app, "/api/state", host="localhost:8765").status == 200


def test_a_port_in_use_is_one_line_with_the_mend(run: Path) -> None:
    with open_socket("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"127.0.0.1:{port}: cannot be listened on: the port is in use; choose"):
            serve(run, port=port)
    with pytest.raises(UserError, match="cannot be listened on"):
        open_socket("192.0.2.1", 0)


def test_what_is_no_run_is_refused_before_anything_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "create_server", lambda *a, **k: pytest.fail("it listens"))
    with pytest.raises(UserError, match=r"holds no status\.json"):
        serve(tmp_path)


def test_a_missing_package_is_named_with_its_extra(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module.importlib.util, "find_spec", lambda name: None if name == "uvicorn" else name)
    with pytest.raises(UserError, match=r"the page needs uvicorn; pip install 'draftline\[web\]'"):
        serve(run)


@pytest.mark.parametrize(("host", "has_token"), [("127.0.0.1", False), ("0.0.0.0", True)])
def test_a_token_is_asked_for_exactly_when_others_can_reach_it(
    run: Path, monkeypatch: pytest.MonkeyPatch, host: str, has_token: bool
) -> None:
    import uvicorn

    said: list[str] = []
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets: said.append(sockets[0].getsockname()[0]))
    serve(run, host=host, port=0, say=said.append)
    opened = socket.gethostname() if host == "0.0.0.0" else host  # an address that others can open
    assert said[0].startswith(f"http://{opened}:") and said[1] == host
    assert ("?token=" in said[0]) == has_token


def test_many_pages_read_the_files_once_and_long_reading_makes_it_rarer() -> None:
    now, made = [0.0], []

    def make() -> int:
        made.append(now[0])
        now[0] += 3.0
        return len(made)

    fresh = Fresh(make, 1.0, clock=lambda: now[0])
    assert [fresh.get() for _ in range(3)] == [b"1", b"1", b"1"]
    now[0] = 3.0 + 3.0 / 0.05 - 0.1
    assert fresh.get() == b"1"
    now[0] += 0.2
    assert fresh.get() == b"2" and len(made) == 2


def test_the_page_needs_no_torch(run: Path) -> None:
    import subprocess

    code = (
        "import sys; from pathlib import Path; from draftline.live.server import make_app\n"
        f"from draftline.live.state import run_state; make_app(Path({str(run)!r})); run_state(Path({str(run)!r}))\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
