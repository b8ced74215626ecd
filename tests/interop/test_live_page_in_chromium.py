"""The live page in a real browser: it follows a run without reload, light and dark, wide and narrow.

Pictures of it are left in the folder that DRAFTLINE_SCREENSHOTS names, for a careful eye.
"""

from __future__ import annotations

import io
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, DIMMED_MONOKAI
from rich.text import Text

from browser_kit import BODY, LOOKS
from draftline.config.schema import MonitorConfig
from draftline.live.server import make_app, open_socket
from draftline.monitor.history import queue_lines
from draftline.monitor.metrics import TrainingStats
from draftline.monitor.run import METRICS_FILE, RunMonitor
from draftline.monitor.status import GpuGauge, LedgerCounts, QueueGauge
from draftline.monitor.watch import read_status, render_status

# Words of charts that stand outside their picture, or on one another.
CUT = """() => [...document.querySelectorAll('.chart')].flatMap(chart => {
  const box = chart.getBoundingClientRect();
  const texts = [...chart.querySelectorAll('text')].filter(t => t.textContent.trim() && t.getClientRects().length)
    .map(t => [t.textContent, t.getBoundingClientRect()]);
  const outside = texts.filter(([, r]) => r.left < box.left - 1 || r.right > box.right + 1 || r.top < box.top - 1
    || r.bottom > box.bottom + 1).map(([words]) => [chart.id, 'outside', words]);
  const over = texts.flatMap(([a, r], i) => texts.slice(i + 1).filter(([, q]) => Math.min(r.right, q.right)
    - Math.max(r.left, q.left) > 2 && Math.min(r.bottom, q.bottom) - Math.max(r.top, q.top) > 3)
    .map(([b]) => [chart.id, 'over', a, b]));
  return [...outside, ...over];
})"""
COLOURS = {"light": ["rgb(27, 31, 36)", "rgb(255, 255, 255)"], "dark": ["rgb(230, 230, 230)", "rgb(20, 23, 28)"]}


class Moving:
    """A clock that goes on, and further when it is moved."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


CLOCK = Moving()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunMonitor]:
    """A run in progress that has trained a row."""
    (tmp_path / "run").mkdir()
    with RunMonitor(tmp_path / "run", MonitorConfig(status_every_s=0.2), show=False, clock=CLOCK) as monitor:
        train(monitor, 1)
        yield monitor


GPUS = (
    GpuGauge(device="cuda:0", busy_share=0.97, memory_used_bytes=61 << 30, memory_total_bytes=80 << 30),
    GpuGauge(device="cuda:1", memory_used_bytes=12 << 30, memory_total_bytes=80 << 30),
)


def crowd(monitor: RunMonitor) -> None:
    """Three targets, two drafters and two GPUs, one worker of which is dead, and a queue that fills."""
    for rows in range(2, 12):
        train(monitor, rows, ("target-0", "drafter-0", "target-1", "target-2", "drafter-1"))
        queue = {"queue/rows": float(rows % 5), "queue/bytes": (rows % 5) * 5e6}
        gpus = {"gpu/cuda_0/busy_share": 0.9, "gpu/cuda_1/busy_share": 0.1 * (rows % 3)}
        memory = {"gpu/cuda_0/memory_bytes": 61e9, "gpu/cuda_1/memory_bytes": 1e9 * rows}
        waiting = {f"waiting/{name}": 0.1 * (rows % 4) for name in ("target-0", "target-1", "drafter-0", "drafter-1")}
        could = {"capacity/targets_tokens_per_s": 41e3, "capacity/drafters_tokens_per_s": 58e3}
        monitor.log(
            rows, {"train/loss": 8.0 / rows, "train/tokens_per_s": 40e3, **queue, **gpus, **memory, **waiting, **could}
        )
    monitor.metrics.worker("target-2").end("RuntimeError: CUDA error: an illegal memory access was encountered")
    monitor.metrics.watch(gpus=lambda: GPUS)


def train(monitor: RunMonitor, rows: int, names: tuple[str, ...] = ("target-0", "drafter-0")) -> None:
    CLOCK.ahead_s += 4.0
    now = CLOCK()
    for number, name in enumerate(names):
        clock = monitor.metrics.worker(name)
        waited_s = 0.5 + 0.4 * number
        clock.past("waiting", "a row" if name.startswith("drafter") else "a free slot", now - 4, now - 4 + waited_s, {})
        clock.past("working", f"row {rows}", now - 4 + waited_s, now, {"tokens": 1000})
        clock.done(rows=1, tokens=1000)
    monitor.metrics.watch(
        ledger=lambda: LedgerCounts(planned=100, committed=rows), queue=lambda: QueueGauge(rows=2, bytes=5 << 20)
    )
    monitor.metrics.record_training(TrainingStats(1, 1000, 500, 8.0 / rows, 1.0, {"ce": (8.0 / rows, 1.0)}, 1.0, 1.0))


@pytest.fixture
def address(run: RunMonitor, tmp_path: Path) -> Iterator[str]:
    import uvicorn

    with open_socket("127.0.0.1", 0) as listener:
        app = make_app(tmp_path / "run")
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        server.should_exit = True
        thread.join()


def shot(page: Any, name: str) -> None:
    folder = os.environ.get("DRAFTLINE_SCREENSHOTS")
    if folder:
        page.screenshot(path=str(Path(folder) / f"live-{name}.png"), full_page=True)


def test_the_page_follows_a_run_without_reload(run: RunMonitor, address: str, browser: Any) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.goto(address)
    page.evaluate("window.same = true")
    page.get_by_text("1 of 100").wait_for()
    page.locator("#chart-loss .main-svg").first.wait_for()
    train(run, 2)
    page.get_by_text("2 of 100").wait_for(timeout=15_000)
    assert page.evaluate("window.same") is True
    assert "drafter-0" in page.inner_text("#workers") and page.is_hidden("#gpus-part")
    run.end("closed")
    run.close()
    page.get_by_text("finished at").wait_for(timeout=15_000)
    assert errors == []


def test_it_reads_well_light_and_dark_wide_and_narrow(run: RunMonitor, address: str, browser: Any) -> None:
    crowd(run)
    for scheme, width in LOOKS:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page = context.new_page()
        page.goto(address)
        page.locator("#chart-timeline .main-svg").first.wait_for()
        page.get_by_text("target-2 is dead").wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate(BODY) == COLOURS[scheme]
        for axis, words in (("x", "rows trained"), ("y", "loss")):
            assert page.locator(f"#chart-loss .{axis}title").first.text_content() == words
        assert "cuda:1 ? 12.0 GiB of 80.0 GiB" in " ".join(page.inner_text("#gpus").split())
        assert page.evaluate(CUT) == []
        shot(page, f"{scheme}-{width}")
        context.close()


def test_a_server_that_is_gone_is_told(run: RunMonitor, address: str, browser: Any) -> None:
    page = browser.new_page()
    page.goto(address)
    page.get_by_text("1 of 100").wait_for()
    lost = page.locator("#lost")
    assert lost.is_hidden()
    page.route("**/api/*", lambda route: route.abort())
    page.get_by_text("No news from draftline watch since").wait_for(timeout=15_000)
    assert "No news from draftline watch since" in lost.inner_text()
    page.unroute("**/api/*")
    lost.wait_for(state="hidden", timeout=25_000)
    assert lost.is_hidden()


@pytest.mark.parametrize("columns", [40, 120])
@pytest.mark.parametrize(("scheme", "theme"), [("light", DEFAULT_TERMINAL_THEME), ("dark", DIMMED_MONOKAI)])
def test_the_terminal_shows_every_word_inside_its_window(
    run: RunMonitor, tmp_path: Path, browser: Any, columns: int, scheme: str, theme: Any
) -> None:
    crowd(run)
    run.end("failed", "target-2: CUDA error: an illegal memory access was encountered")
    run.close()
    console = Console(record=True, width=columns, force_terminal=True, file=io.StringIO())
    history = queue_lines(tmp_path / "run" / METRICS_FILE, columns)
    console.print(Text(render_status(read_status(tmp_path / "run"), columns, history)))
    page = browser.new_page(viewport={"width": 1500, "height": 500})
    page.set_content(console.export_svg(title="draftline watch", theme=theme), wait_until="domcontentloaded")
    outside = page.evaluate(
        "() => { const box = document.querySelector('svg').getBoundingClientRect();"
        " const right = t => t.getBoundingClientRect().right;"
        " return [...document.querySelectorAll('text')].filter(t => right(t) > box.right).length }"
    )
    assert outside == 0
    shown = (page.text_content("svg") or "").replace("\xa0", " ")
    assert all(word in shown for word in ("drafter-0", "cuda:1", "illegal memory access", "queue over"))
    shot(page, f"terminal-{scheme}-{columns}")
