"""`draftline train --cluster auto` on one host: Ray is started and ended by the run, rows travel in shared memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import held
import pytest
from cluster_kit import committed_rows
from held import Hold

from draftline.cluster.slab import FOLDER, PREFIX
from draftline.pipeline.checkpoint import latest_checkpoint, read_checkpoint
from draftline.pipeline.runplan import make_run_plan

OVERRIDES = ("epochs=8", "monitor.status_every_s=0.2")
pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]  # on a busy machine; a free one needs a tenth of it


def start(file, log, *words):
    command = [sys.executable, held.__file__, "train", "-c", str(file), *OVERRIDES, "--cluster", "auto", *words]
    with log.open("ab") as output:
        return subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)


def slabs():
    return set(FOLDER.glob(f"{PREFIX}*"))


def test_a_run_stopped_by_ctrl_c_has_its_checkpoint_and_a_resumed_one_commits_every_row_once(make_run, tmp_path):
    config, log, others = make_run(*OVERRIDES), tmp_path / "log.txt", slabs()
    hold = Hold(config.output)
    run = start(tmp_path / "run.yaml", log)
    while committed_rows(config.output) < 4 and run.poll() is None:
        time.sleep(0.05)
    hold.on()
    assert run.poll() is None, log.read_text()
    assert slabs() - others  # all workers are on one host
    os.killpg(run.pid, signal.SIGINT)  # as a terminal does: to Ray's processes, too
    assert run.wait(120) == 130, log.read_text()
    before = read_checkpoint(latest_checkpoint(config.output)[0]).state["ledger"]
    assert 4 <= before["n_committed"] < before["planned"] == len(make_run_plan(config).rows)
    assert not slabs() - others
    hold.let_go()
    assert start(tmp_path / "run.yaml", log, "--resume").wait(240) == 0, log.read_text()
    planned, told = before["planned"], log.read_text()
    assert f"ledger: planned {planned} = committed {planned} + set aside 0" in told
    trained = next(line for line in told.splitlines() if "rows by drafter" in line).rpartition(": ")[2]
    assert sum(map(int, trained.split(", "))) == planned - before["n_committed"]
    assert not slabs() - others and "Traceback" not in told
