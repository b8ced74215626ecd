"""Promises of what people see: every figure on the line, 40 columns, no colours, no UTF-8, logs and terminals."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
from monitor_fakes import FakeClock, spend, work
from rich.console import Console

from draftline.monitor.console import StatusDisplay, is_live, make_console, progress
from draftline.monitor.metrics import RunMetrics, TrainingStats
from draftline.monitor.render import duration, gpu_lines, printable, size, status_line, status_lines, worker_lines
from draftline.monitor.status import GpuGauge, LedgerCounts, QueueGauge, StatusSnapshot, Wait
from draftline.monitor.verdict import rate


@pytest.fixture
def snapshot(clock: FakeClock) -> StatusSnapshot:
    metrics = RunMetrics(clock=clock)
    metrics.watch(
        queue=lambda: QueueGauge(rows=2, bytes=3 * 2**20, max_rows=4),
        ledger=lambda: LedgerCounts(planned=50, committed=10, trained=2),
    )
    target, drafter = metrics.worker("target-0"), metrics.worker("drafter-0")
    for _ in range(5):
        work(clock, target, 3, tokens=6000)
        spend(clock, target, "waiting", 1, Wait.SLOT)
        work(clock, drafter, 2, tokens=6000)
    stats = TrainingStats(1, 6000, 10, 9.0, 2.0, acceptance_sum=1, acceptance_blocks=4, learning_rate=1e-4)
    metrics.record_training(stats)
    return metrics.snapshot()


def ascii_stream() -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict")


def text_of(stream: io.TextIOWrapper) -> str:
    stream.flush()
    assert isinstance(stream.buffer, io.BytesIO)
    return stream.buffer.getvalue().decode()


def test_the_status_line_shows_what_validation_found_and_nothing_before_it(snapshot: StatusSnapshot) -> None:
    assert "val" not in status_line(snapshot) and "walk" not in status_line(snapshot)
    chain = snapshot.model_copy(update={"validation_acceptance": 2.312})
    assert "acc 1.25 | val acc 2.31 | " in status_line(chain)
    everything = chain.model_copy(
        update={
            "validation_trees": {"tree@16": 2.8, "tree@64": 3.0},
            "validation_walk": {"chain": 2.2, "tree@16": 2.6, "tree@64": 2.9},
        }
    )
    line = status_line(everything)
    assert "val acc 2.31 | tree@16 2.80 tree@64 3.00 | walk 2.20 tree@16 2.60 tree@64 2.90 | " in line


def test_the_status_line_holds_every_figure(snapshot: StatusSnapshot) -> None:
    line = status_line(snapshot)
    for part in (
        "12/50 rows",
        "loss 4.500",
        "acc 1.25",
        "1.2 ktok/s",
        "can: data ? tok/s, targets 2.0 ktok/s, drafters 3.0 ktok/s",
        "queue 2/4 rows 3.0 MiB",
        "wait t0 17% d0 0%",
        "left 3m18s",
    ):
        assert part in line
    assert "\n" not in line and line.isascii()


def test_unknown_figures_are_question_marks(clock: FakeClock) -> None:
    line = status_line(RunMetrics(clock=clock).snapshot())
    can = "can: data ? tok/s, targets ? tok/s, drafters ? tok/s"
    assert line == f"0 rows | loss ? | acc ? | ? tok/s | {can} | left ?"


def letters(text: str) -> str:
    return "".join(text.replace("|", "").split())


@pytest.mark.parametrize("width", [20, 40, 80, 100, 120, 200])
def test_nothing_is_wider_than_the_terminal_and_nothing_is_lost(snapshot: StatusSnapshot, width: int) -> None:
    """Every letter of every worker and GPU is there, of words longer than a line too."""
    shares = {"working": 0.5, "waiting": 0.2, "averaging": 0.1, "checkpointing": 0.1, "validating": 0.1}
    reason = "RuntimeError: CUDA error at /a/very/long/path/without/any/space/in/it/that/is/longer/than/forty.cu"
    busy = snapshot.workers[0].model_copy(update={"shares": shares})
    failed = snapshot.workers[1].model_copy(update={"state": "failed", "reason": reason})
    gpu = GpuGauge(device="cuda:0", busy_share=0.97, memory_used_bytes=61 << 30, memory_total_bytes=80 << 30)
    crowded = snapshot.model_copy(update={"workers": (busy, failed), "gpus": (gpu,)})
    lines = status_lines(crowded, width)
    assert max(map(len, lines)) <= width
    seen = letters("".join(lines))
    assert seen.startswith(letters(status_line(crowded) + crowded.verdict.sentence))
    for words in (reason, "checkpointing 10% validating 10%", *gpu_lines([gpu])):
        assert letters(words) in seen


def test_a_display_in_place_shows_each_worker_and_a_log_stays_one_line(snapshot: StatusSnapshot) -> None:
    lines = status_lines(snapshot, 120)
    assert [line[:9] for line in lines if line[:9] in ("target-0 ", "drafter-0")] == ["target-0 ", "drafter-0"]
    verdict, worker = (next(i for i, line in enumerate(lines) if line.startswith(w)) for w in ("targets ", "target-0"))
    assert verdict < worker  # a low terminal cuts the end
    assert "target-0" not in status_line(snapshot)


def test_workers_stand_in_one_table_or_each_in_lines_of_its_own_never_mixed(snapshot: StatusSnapshot) -> None:
    target, drafter = snapshot.workers
    busy = drafter.model_copy(update={"shares": {"working": 0.69, "checkpointing": 0.15, "averaging": 0.05}})
    table = worker_lines((target, busy), 120)
    assert len(table) == 2 and table[0].index("idle") == table[1].index("idle")
    lines = worker_lines((target, busy), len(table[1]) - 1)
    assert [line[:10] for line in lines if line[0] != " "] == ["target-0: ", "drafter-0:"] and len(lines) >= 4


def test_what_a_terminal_would_obey_is_shown_as_a_sign() -> None:
    assert printable("a\x1b[31mb\x07\rc\nd\x9b", "utf-8") == "a?[31mb??c\nd?"


def test_rates_read_well() -> None:
    rates = (None, 0.4, 999.4, 999.6, 41_234, 99_960, 999_600, 52_000_000, 3e9)
    expected = "? 0 999 1.0k 41.2k 100k 1.0M 52.0M 3.0G"
    assert [rate(r).replace("tok/s", "").replace(" ", "") for r in rates] == expected.split()


def test_a_log_gets_plain_lines_every_so_often(snapshot: StatusSnapshot, clock: FakeClock) -> None:
    stream = ascii_stream()
    display = StatusDisplay(make_console(stream), every_s=10, clock=clock)
    display.start()
    for _ in range(25):
        clock.move(1)
        display.show(snapshot)
    lines = text_of(stream).splitlines()
    assert [line for line in lines if line.startswith("12/50")] == [status_line(snapshot)] * 2
    assert lines.count(snapshot.verdict.sentence) == 1
    assert "\x1b" not in "".join(lines)
    display.close(snapshot)
    assert text_of(stream).splitlines()[-1] == status_line(snapshot)


def test_a_narrow_ascii_terminal_is_drawn_in_place(snapshot: StatusSnapshot) -> None:
    stream = ascii_stream()
    console = Console(file=stream, force_terminal=True, width=40, color_system=None, legacy_windows=False)
    assert is_live(console)
    display = StatusDisplay(console, every_s=10)
    odd = snapshot.model_copy(update={"verdict": snapshot.verdict.model_copy(update={"sentence": "größer → 日本"})})
    display.start()
    display.show(odd)
    display.close(odd)
    text = text_of(stream)
    assert "12/50 rows | loss 4.500 | acc 1.25" in text
    assert "gr??er ? ??" in text


def test_progress_in_a_log_speaks_every_few_seconds(clock: FakeClock) -> None:
    stream = ascii_stream()

    def items() -> Iterator[int]:
        for i in range(6):
            clock.move(2)
            yield i

    seen = list(progress(items(), "answering", 6, console=make_console(stream), clock=clock))
    assert seen == list(range(6))
    assert text_of(stream).splitlines() == ["answering: 3/6, 6s left", "answering: 6 done in 12s"]


def test_quick_progress_says_nothing_in_a_log(clock: FakeClock) -> None:
    stream = ascii_stream()
    assert list(progress([1, 2], "x", console=make_console(stream), clock=clock)) == [1, 2]
    assert text_of(stream) == ""


def test_progress_on_an_ascii_terminal_passes_everything_through() -> None:
    stream = ascii_stream()
    console = Console(file=stream, force_terminal=True, width=40, color_system=None, legacy_windows=False)
    assert list(progress(range(3), "größer", console=console)) == [0, 1, 2]
    assert "gr??er" in text_of(stream) and "3/3" in text_of(stream)


def test_durations_and_sizes_read_well() -> None:
    assert [duration(s) for s in (None, 9.6, 65, 3720, 90000)] == ["?", "10s", "1m05s", "1h02m", "1d01h"]
    assert [size(n) for n in (12, 2048, 3 * 2**30)] == ["12 B", "2.0 KiB", "3.0 GiB"]
