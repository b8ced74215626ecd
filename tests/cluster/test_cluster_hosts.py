"""Hosts with addresses of their own: `draftline train` as users start it, links cut, hosts lost, targets added."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import held
import psutil
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
ROOM, SMALL = ("--num-cpus=3", STORE), ("--num-cpus=1", STORE)
A_DRAFTER = '--resources={"drafters": 1}'
TARGET, DRAFTER = "ray::HeldTarget", "ray::DrafterActor"
COMMAND = Path(sys.executable).with_name("draftline")
LIMIT_S = 480.0
ONE_EACH = ("pipeline.target_devices=[cpu]", "pipeline.drafter_devices=[cpu]")
pytestmark = pytest.mark.timeout(1200)  # on a busy machine; a free one needs a tenth of it


def wait_for(run, rows, process):
    deadline = time.monotonic() + LIMIT_S
    while committed_rows(run) < rows:
        assert process.poll() is None, f"ended with {process.returncode} before {rows} rows"
        assert time.monotonic() < deadline, f"{committed_rows(run)} rows of {rows}"
        time.sleep(0.2)


@pytest.fixture
def hosts():
    """Three, of which Ray runs on the head alone."""
    with Hosts(3) as made:
        made.start_ray(0, *ROOM, A_DRAFTER)
        yield made


@pytest.fixture
def start(hosts, make_run, tmp_path):
    """`start("key=value", "--resume")`: the run as a process of the head, and its log. Whatever is left is killed."""
    make_run(name="hosts")
    started = []

    def begin(*words):
        log = tmp_path / f"log-{len(started)}.txt"
        command = [
            sys.executable,
            held.__file__,
            "train",
            "-c",
            str(tmp_path / "hosts.yaml"),
            *DEFAULTS,
            *LOSSY,
            *words,
        ]
        with log.open("wb") as output:
            command = hosts.command(0, *command, "--cluster", hosts.head)
            started.append(subprocess.Popen(command, stdout=output, stderr=output, env=hosts.environment))
        return started[-1], log

    yield begin
    for process in started:
        process.kill()
        process.wait()


def test_a_killed_driver_is_resumed_and_hosts_with_addresses_of_their_own_survive_every_loss(
    hosts, start, make_run, request
):
    """The head alone begins. The resumed run has three hosts: a link is cut, then a target, a drafter and a whole host
    are killed and a target is added.
    """
    config = make_run(*LOSSY, name="hosts")
    run, log = start(*ONE_EACH)
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda options: hosts.start_ray(*options), ((1, *ROOM, A_DRAFTER), (2, *SMALL))))
    expected = request.getfixturevalue("samples_of_threads")
    wait_for(config.output, 15, run)
    run.kill()
    run.wait()
    before = rows_of(list_checkpoints(config.output)[-1])
    assert before
    (config.output / "status.json").unlink()
    run, log = start("--resume")
    wait_for(config.output, len(before) + 1, run)
    hold = Hold(config.output)
    hold.on()
    hosts.cut(1, 10.0)
    hold.off()
    wait_for(config.output, committed_rows(config.output) + TWO_ROUNDS, run)
    hold.on()
    _lose(hosts)
    asked = hosts.command(0, str(COMMAND), "scale", str(config.output), "--targets", "1")
    subprocess.run(asked, check=True, capture_output=True, env=hosts.environment)
    wait_until_whole(config.output, hold, lambda: _alive(hosts), (4, 2))
    hold.let_go()
    assert run.wait(LIMIT_S) == 0, log.read_text()
    told, planned = log.read_text(), len(make_run_plan(config).rows)
    assert f"ledger: planned {planned} = committed {planned} + set aside 0" in told
    assert told.count("; another is started") == 3 and told.count("takes part from now on") == 4
    assert "Traceback" not in told and "target-3 takes part" in told
    check_committed_once(config)
    assert samples_of(config) == expected


def _lose(hosts):
    """Kills a target, a drafter, and the whole host of another target."""
    for title in (TARGET, DRAFTER):
        victim = next(process for number in (0, 1) for process in hosts.processes(number, title))
        victim.kill()
        psutil.wait_procs([victim], timeout=20)
    assert hosts.processes(2, TARGET) and not hosts.processes(2, DRAFTER)
    hosts.kill(2)


def _alive(hosts):
    return tuple(sum(len(hosts.processes(number, title)) for number in range(3)) for title in (TARGET, DRAFTER))
