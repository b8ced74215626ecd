"""The real Weights & Biases, trackio and MLflow packages take a run's curves offline, and write nothing secret."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SECRET = "sekrit-0123456789"
CODE = """
import sys
from pathlib import Path
from draftline.config.schema import MonitorConfig
from draftline.monitor.status import LedgerCounts
from draftline.monitor.run import RunMonitor
with RunMonitor(Path(sys.argv[1]), MonitorConfig(trackers=(sys.argv[2],)), show=False) as monitor:
    monitor.log(1, {"train/loss": 1.5})
    monitor.log(2, {"train/loss": float("nan"), "validation/acceptance_tree_16": 2.5})
assert not monitor.trackers.failed, monitor.trackers.failed
"""
READ_MLFLOW = """
import sys
from mlflow.tracking import MlflowClient
client = MlflowClient(tracking_uri=f"sqlite:///{sys.argv[1]}/mlflow.db", registry_uri=f"sqlite:///{sys.argv[1]}/mlflow.db")
runs = client.search_runs([client.get_experiment_by_name("draftline").experiment_id])
print(len(runs), [m.step for m in client.get_metric_history(runs[0].info.run_id, "train/loss")], runs[0].info.status)
"""
READ_TRACKIO = """
import sqlite3, sys
rows = sqlite3.connect(sys.argv[1] + "/store/draftline.db").execute("select step, metrics from metrics order by step")
print([(step, b"train/loss" in bytes(metrics)) for step, metrics in rows])
"""


def run(code: str, folder: Path, *arguments: str) -> str:
    environment = os.environ | {
        "WANDB_MODE": "offline",
        "TRACKIO_DIR": str(folder / "store"),
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_TRACKING_URI": "",
        "SOME_API_KEY": SECRET,
    }
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert SECRET not in done.stdout + done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("name", ["wandb", "trackio", "mlflow"])
def test_curves_reach_the_service_offline_and_secrets_do_not(name: str, tmp_path: Path) -> None:
    pytest.importorskip(name)
    assert run(CODE, tmp_path, name, f"--key={SECRET}") == ""
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]
    if name == "wandb":
        logs = list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
        assert len(logs) == 1 and b"acceptance_tree_16" in logs[0].read_bytes()
    elif name == "trackio":
        assert run(READ_TRACKIO, tmp_path) == "[(1, True), (2, True)]"
    else:
        run(CODE, tmp_path, name)
        assert run(READ_MLFLOW, tmp_path) == "1 [1, 2, 1, 2] FINISHED"
