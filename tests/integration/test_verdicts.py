"""The verdict of a real run: each trouble is set up on purpose in the pipeline itself, and named while it lasts.

What is slow waits until the other side waits for it, and then as long as the other side takes for a row just now, so
that a busy machine changes nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from draftline.data.shards import TokenDataset
from draftline.drafter.loop import DrafterTrainLoop
from draftline.drafter.step import DrafterStep
from draftline.errors import RunFailedError
from draftline.monitor import verdict as verdict_module
from draftline.monitor.metrics import RunMetrics
from draftline.monitor.status import Verdict, WorkerStatus
from draftline.monitor.watch import read_status
from draftline.pipeline import coordinator as coordinator_module
from draftline.pipeline.coordinator import train
from draftline.pipeline.core import WAIT, PipelineCore
from draftline.pipeline.reporting import RunReporter
from draftline.pipeline.runplan import make_run_plan
from draftline.target.capture import TargetCapture

ONE_ROUND = ("sync.every_rows=50", "epochs=3")
STALL = ("pipeline.stall_timeout_s=1.0", "monitor.status_every_s=0.05")


class Observed:
    """The metrics of the newest run, and all verdicts that were reached on it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        self.metrics: list[RunMetrics] = []
        self.verdicts: list[Verdict] = []
        self._took: dict[str, list[float]] = {"target": [], "drafter": []}
        self._time(TargetCapture, "capture", "target")
        self._time(DrafterTrainLoop, "_train", "drafter")
        begin, look = RunMetrics.__init__, RunMetrics.snapshot
        self._look = look

        def remember(metrics: RunMetrics, **options: Any) -> None:
            begin(metrics, **options, stall_after_s=0.2)
            self.metrics.append(metrics)

        def judge(metrics: RunMetrics) -> Any:
            snapshot = look(metrics)
            self.verdicts.append(snapshot.verdict)
            return snapshot

        monkeypatch.setattr(RunMetrics, "__init__", remember)
        monkeypatch.setattr(RunMetrics, "snapshot", judge)

    def hold(self, place: type, method: str, until: Callable[[str], bool], *, steps: float, than: str) -> None:
        """In worker threads the method goes on once `until(worker)` is true, and `steps` rows of the other side later.

        So whoever waits does so for a time that is long compared with what work takes on this machine just now.
        """
        original = getattr(place, method)

        def held(this: Any, *arguments: Any) -> Any:
            worker, give_up_s = threading.current_thread().name, time.monotonic() + 20
            if worker.startswith(("target-", "drafter-")):
                while not until(worker) and time.monotonic() < give_up_s:
                    time.sleep(0.002)
                time.sleep(steps * (self._took[than] or [0.01])[-1])
            return original(this, *arguments)

        self._patch.setattr(place, method, held)

    def all_wait(self, side: str) -> bool:
        """Each worker of the side waits, or has ended."""
        workers = [w for w in self.workers() if w.role == side]
        return all(w.activity == "waiting" or w.state != "running" for w in workers)

    def workers(self) -> tuple[WorkerStatus, ...]:
        """As the run's metrics tell them now."""
        return self._look(self.metrics[-1]).workers

    def _time(self, place: type, method: str, side: str) -> None:
        original = getattr(place, method)

        def timed(this: Any, *arguments: Any) -> Any:
            begin = time.monotonic()
            try:
                return original(this, *arguments)
            finally:
                self._took[side].append(time.monotonic() - begin)

        self._patch.setattr(place, method, timed)

    def after(self, rows: int, config: Any) -> Verdict:
        """The verdict when so many rows have been trained."""
        found: list[Verdict] = []
        original = RunReporter.row_trained

        def count(reporter: RunReporter, report: Any) -> None:
            original(reporter, report)
            if sum(reporter.rows_by_drafter) >= rows and not found:
                found.append(self.metrics[-1].snapshot().verdict)

        self._patch.setattr(RunReporter, "row_trained", count)
        train(make_run_plan(config))
        return found[0]

    def of(self, cause: str) -> list[str]:
        """Sentences of the verdicts with this cause."""
        return [verdict.sentence for verdict in self.verdicts if verdict.cause == cause]


@pytest.fixture
def observed(monkeypatch: pytest.MonkeyPatch) -> Observed:
    return Observed(monkeypatch)


def test_slow_data_loading_is_the_verdict_while_samples_come_slowly(make_run, observed: Observed) -> None:
    observed.hold(TokenDataset, "sample", lambda _: observed.all_wait("drafter"), steps=1.0, than="drafter")
    verdict = observed.after(6, make_run("max_rows=7", *ONE_ROUND))
    assert verdict.cause == "slow_data" and "the targets wait for samples" in verdict.sentence


def test_starved_drafters_are_the_verdict_with_the_split_that_would_feed_them(make_run, observed: Observed) -> None:
    observed.hold(TargetCapture, "capture", lambda _: observed.all_wait("drafter"), steps=4.0, than="drafter")
    config = make_run("max_rows=8", "pipeline.drafter_devices=[cpu,cpu,cpu]", *ONE_ROUND)
    verdict = observed.after(7, config)
    assert verdict.cause == "starved_drafters" and verdict.split == (3, 1)
    assert "1 target can deliver" in verdict.sentence and "of 4 workers 3:1" in verdict.sentence


def test_the_slow_one_of_three_targets_is_the_verdict(make_run, observed: Observed) -> None:
    began: list[int] = []

    def until(worker: str) -> bool:
        """Drafters wait; target-1 takes a row while the others capture ten, or what is left."""
        if worker != "target-1":
            return observed.all_wait("drafter")
        rows = {w.name: w.rows for w in observed.workers() if w.role == "target"}
        others = rows["target-0"] + rows["target-2"]
        if not began:
            began.append(others)
        done = others >= min(began[0] + 10, 17 - 1 - rows["target-1"])
        if done:
            began.clear()
        return done

    observed.hold(TargetCapture, "capture", until, steps=1.0, than="drafter")
    verdict = observed.after(16, make_run("max_rows=17", "pipeline.target_devices=[cpu,cpu,cpu]", *ONE_ROUND))
    assert verdict.cause == "slow_target" and "target-1 delivers" in verdict.sentence


def test_targets_that_wait_for_slow_drafters_are_the_verdict(make_run, observed: Observed) -> None:
    observed.hold(DrafterStep, "forward_backward", lambda _: observed.all_wait("target"), steps=3.0, than="target")
    verdict = observed.after(9, make_run("max_rows=16", "pipeline.target_devices=[cpu,cpu]", *ONE_ROUND))
    assert verdict.cause == "drafter_bound" and verdict.split == (1, 2)


def test_a_dead_worker_is_the_verdict_while_the_others_go_on(make_run, observed: Observed, monkeypatch) -> None:
    original, died = DrafterStep.forward_backward, []

    def die_once(step: DrafterStep, row: Any) -> Any:
        if row.row_id >= 3 and not died:
            died.append(row.row_id)
            raise torch.OutOfMemoryError("CUDA out of memory\nadvice\nmore advice")
        return original(step, row)

    monkeypatch.setattr(DrafterStep, "forward_backward", die_once)
    verdict = observed.after(10, make_run("max_rows=12", "pipeline.drafter_devices=[cpu,cpu]"))
    dead = f"drafter-{0 if 'drafter-0' in verdict.sentence else 1}"
    assert verdict.cause == "dead_worker"
    assert verdict.sentence == f"{dead} is dead (OutOfMemoryError: CUDA out of memory); 1 drafter carries on"


def test_a_run_that_failed_names_the_worker_that_failed_and_none_that_was_woken_by_it(
    make_run, observed: Observed, monkeypatch
) -> None:
    def die(step: DrafterStep, row: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(DrafterStep, "forward_backward", die)
    config = make_run("pipeline.target_devices=[cpu,cpu]")
    with pytest.raises(RunFailedError, match="drafter-0"):
        train(make_run_plan(config))
    status = read_status(config.output)
    assert status.state == "failed"
    sentence = "drafter-0 is dead (OutOfMemoryError: CUDA out of memory); no drafter is left"
    assert status.snapshot.verdict.sentence == sentence


def test_a_queue_that_nobody_takes_from_is_the_verdict_with_what_it_holds(make_run, observed, monkeypatch) -> None:
    original = PipelineCore.get

    def never(core: PipelineCore, drafter: int) -> Any:
        return WAIT if core.ledger.handed >= 2 else original(core, drafter)

    monkeypatch.setattr(PipelineCore, "get", never)
    with pytest.raises(RunFailedError, match="no progress"):
        train(make_run_plan(make_run(*ONE_ROUND, *STALL)))
    both = "target-0 waits for a free slot, drafter-0 waits for a row; the queue holds 5 rows"
    assert any(both in sentence for sentence in observed.of("stalled"))


def test_data_that_never_comes_is_the_verdict_with_who_waits_for_it(make_run, observed, monkeypatch) -> None:
    original, asked = TokenDataset.sample, []

    def hang(dataset: TokenDataset, index: int) -> Any:
        asked.append(index)
        if len(asked) == 12:
            time.sleep(1.3)
        return original(dataset, index)

    monkeypatch.setattr(TokenDataset, "sample", hang)
    with pytest.raises(RunFailedError, match="no progress"):
        train(make_run_plan(make_run(*ONE_ROUND, *STALL)))
    assert "target-0 waits for samples, drafter-0 waits for a row" in observed.of("stalled")[-1]


def test_a_first_row_that_never_ends_is_told_by_name(make_run, observed, monkeypatch) -> None:
    original = TargetCapture.capture

    def hang(capture: TargetCapture, planned: Any, samples: Any) -> Any:
        if threading.current_thread().name == "target-0" and planned.row_id == 0:
            time.sleep(0.5)
        return original(capture, planned, samples)

    monkeypatch.setattr(TargetCapture, "capture", hang)
    train(make_run_plan(make_run("max_rows=3", "monitor.status_every_s=0.05")))
    told = [sentence for sentence in observed.of("starting") if "target-0 has been working row 0 for" in sentence]
    assert told


def test_a_long_compile_is_the_verdict_while_it_lasts(make_run, observed, monkeypatch) -> None:
    found: list[Verdict] = []

    def compile_long(drafters: Any) -> None:
        time.sleep(0.1)
        found.append(observed.metrics[-1].snapshot().verdict)

    monkeypatch.setattr(verdict_module, "LONG_COMPILE_S", 0.05)
    monkeypatch.setattr(coordinator_module, "warm_drafters", compile_long)
    train(make_run_plan(make_run("max_rows=2")))
    assert found[0].cause == "compiling" and "coordinator has been compiling all drafters" in found[0].sentence
