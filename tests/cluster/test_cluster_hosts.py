"""Hosts with addresses of their own: `draftline train` as users start it, links cut, hosts lost, targets added."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cluster_kit import (
    DEFAULTS,
    LOSSY,
    TWO_ROUNDS,
    check_committed_once,
    committed_rows,
    rows_of,
    samples_of,
    wait_until_whole,
)
from held import Hold
from host_kit import Hosts

from draftline.pipeline.checkpoint import list_checkpoints
from draftline.pipeline.runplan import make_run_plan

STORE = f"--object-store-memory={150 << 20}"
LIMIT_S = 480.0
ONE_EACH = ("pipeline.target_devices=[cpu]", "pipeline.drafter_devices=[cpu]")
pytestmark = pytest.mark.timeout(1200)  # on a busy machine; a free one needs a tenth of it


def draftline(*words):
    return [sys.executable, str(Path(__file__).with_name("held.py")), *words]


def wait_for(run, rows, process):
    deadline = time.monotonic() + LIMIT_S
    while committed_rows(run) < rows:
        assert process.poll() is None, f"ended with {process.returncode} before {rows} rows"
        assert time.monotonic() < deadline, f"{committed_rows(run)} rows of {rows}"
        time.sleep(0.2)


@pytest.fixture
def hosts():
    with Hosts(4) as made:
        made.start_ray(0, "--num-cpus=0", STORE)
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda number: made.start_ray(number, "--num-cpus=3", STORE), (1, 2, 3)))
        yield made


@pytest.fixture
def start(hosts, make_run, tmp_path):
    """`start("key=value", "--resume")`: the run as a process of the head, and its log. Whatever is left is killed."""
    make_run(name="hosts")
    started = []

    def begin(*words):
        log = tmp_path / f"log-{len(started)}.txt"
        command = draftline("train", "-c", str(tmp_path / "hosts.yaml"), *DEFAULTS, *LOSSY, *words)
        with log.open("wb") as output:
            command = hosts.command(0, *command, "--cluster", hosts.head)
            started.append(subprocess.Popen(command, stdout=output, stderr=output, env=hosts.environment))
        return started[-1], log

    yield begin
    for process in started:
        process.kill()
        process.wait()


def test_a_killed_driver_is_resumed_and_hosts_with_addresses_of_their_own_survive_every_loss(
    hosts, start, make_run, samples_of_threads
):
    """The resumed run has more workers. A link is cut, a target, a host, a drafter are killed, a target is added."""
    config = make_run(*LOSSY, name="hosts")
    hold = Hold(config.output)
    run, log = start(*ONE_EACH)
    wait_for(config.output, 15, run)
    run.kill()
    run.wait()
    hold.on()
    before = rows_of(list_checkpoints(config.output)[-1])
    assert before
    run, log = start("--resume")
    wait_for(config.output, len(before) + 4, run)
    hosts.cut(1, 10.0)
    hold.off()
    wait_for(config.output, committed_rows(config.output) + TWO_ROUNDS, run)
    hold.on()
    _one_of(hosts, "ray::HeldTarget").kill()
    hosts.kill(3)
    wait_until_whole(config.output, hold)
    _one_of(hosts, "ray::DrafterActor").kill()
    asked = hosts.command(0, *draftline("scale", str(config.output), "--targets", "1"))
    subprocess.run(asked, check=True, capture_output=True, env=hosts.environment)
    wait_until_whole(config.output, hold)
    hold.off()
    assert run.wait(LIMIT_S) == 0, log.read_text()
    planned = len(make_run_plan(config).rows)
    assert f"ledger: planned {planned} = committed {planned} + set aside 0" in log.read_text()
    assert "Traceback" not in log.read_text() and "target-3 takes part" in log.read_text()
    check_committed_once(config)
    assert samples_of(config) == samples_of_threads


def _one_of(hosts, title):
    return next(process for number in (1, 2) for process in hosts.processes(number, title))
