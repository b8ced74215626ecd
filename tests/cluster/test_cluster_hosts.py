"""Hosts with addresses of their own: `draftline train` as users start it, links cut, hosts lost, targets added."""

from __future__ import annotations

import subprocess
import sys
import time
from itertools import pairwise

import pytest
from cluster_kit import committed_rows, wait_until_whole
from host_kit import Hosts

from draftline.pipeline.checkpoint import list_checkpoints, read_checkpoint
from draftline.pipeline.runplan import make_run_plan

STORE = f"--object-store-memory={150 << 20}"
LIMIT_S = 480.0
pytestmark = pytest.mark.timeout(1200)  # on a busy machine; a free one needs a tenth of it


def draftline(*words):
    code = "import sys; from draftline.cli import main; sys.argv[0] = 'draftline'; main()"
    return [sys.executable, "-c", code, *words]


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
        for number in (1, 2, 3):
            made.start_ray(number, "--num-cpus=2", STORE)
        yield made


def test_hosts_with_addresses_of_their_own_survive_every_loss(hosts, make_run, tmp_path):
    overrides = (
        "pipeline.target_devices=[cpu,cpu,cpu]",
        "pipeline.drafter_devices=[cpu,cpu]",
        "epochs=100",
        "sync.every_rows=10",
        "cluster.strategy=SPREAD",
        "checkpoint.every_rounds=3",
    )
    config = make_run(*overrides, name="hosts")
    words = draftline("train", "-c", str(tmp_path / "hosts.yaml"), *overrides, "--cluster", hosts.head)
    log = tmp_path / "log.txt"
    with log.open("wb") as output:
        run = subprocess.Popen(hosts.command(0, *words), stdout=output, stderr=output, env=hosts.environment)
    try:
        wait_for(config.output, 40, run)
        hosts.cut(1, 10.0)
        wait_for(config.output, committed_rows(config.output) + 40, run)
        _one_of(hosts, "ray::TargetActor").kill()
        wait_until_whole(config.output)
        hosts.kill(3)
        wait_until_whole(config.output)
        _one_of(hosts, "ray::DrafterActor").kill()
        asked = hosts.command(0, *draftline("scale", str(config.output), "--targets", "1"))
        subprocess.run(asked, check=True, capture_output=True, env=hosts.environment)
        assert run.wait(LIMIT_S) == 0, log.read_text()
    finally:
        if run.poll() is None:
            run.kill()
    planned = len(make_run_plan(config).rows)
    assert f"ledger: planned {planned} = committed {planned} + set aside 0" in log.read_text()
    history = [_rows(folder) for folder in list_checkpoints(config.output)]
    assert all(before < after for before, after in pairwise(history)) and history[-1] == set(range(planned))


def _one_of(hosts, title):
    return next(process for number in (1, 2, 3) for process in hosts.processes(number, title))


def _rows(folder):
    state = read_checkpoint(folder).state["ledger"]
    return {row for start, stop in state["committed"] for row in range(start, stop)}


def test_a_killed_driver_is_resumed_from_its_checkpoint(hosts, make_run, tmp_path):
    overrides = ("pipeline.target_devices=[cpu,cpu]", "pipeline.drafter_devices=[cpu,cpu]", "epochs=30")
    config = make_run(*overrides, name="killed")
    words = draftline("train", "-c", str(tmp_path / "killed.yaml"), *overrides, "--cluster", hosts.head)
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": hosts.environment}
    run = subprocess.Popen(hosts.command(0, *words), **quiet)
    wait_for(config.output, 40, run)
    run.kill()
    run.wait()
    before = _rows(list_checkpoints(config.output)[-1])
    log = tmp_path / "resumed.txt"
    with log.open("wb") as output:
        again = hosts.command(0, *words, "--resume")
        done = subprocess.run(again, stdout=output, stderr=output, env=hosts.environment, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, log.read_text()
    planned = len(make_run_plan(config).rows)
    assert _rows(list_checkpoints(config.output)[-1]) == set(range(planned))
    told = next(line for line in log.read_text().splitlines() if "rows by drafter" in line)
    assert sum(map(int, told.rpartition(": ")[2].split(", "))) == planned - len(before)
