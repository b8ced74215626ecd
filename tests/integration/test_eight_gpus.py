"""The benchmark of the big run, tiny and on the CPU: the same script, with the packages that a bare GPU machine lacks
kept away."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
MISSING = ("pyarrow", "datasets", "tensorboard", "ray")
TINY = ["--tiny", "--splits", "2:1", "--scheme", "both", "--target-layers", "6", "--samples-per-row", "1"]
SHORT = ["--every-rows", "4", "--stop-every-rows", "4", "--single-rows", "3", "--set", "data.row_tokens=32"]


def test_it_runs_every_part_without_the_packages_of_prepared_data(tmp_path):
    arguments = ["eight_gpus.py", "--output", str(tmp_path), *TINY, *SHORT]
    code = f"import sys; sys.modules.update(dict.fromkeys({MISSING!r})); sys.argv = {arguments!r}\n"
    code += f"sys.path.insert(0, {str(ROOT / 'benchmarks')!r}); import eight_gpus; raise SystemExit(eight_gpus.main())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-2000:]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert {run["scheme"] for run in summary["runs"]} == {"shared", "partitioned"}
    for run in summary["runs"]:
        assert run["tokens_per_s"] > 0 and run["measured_to_predicted"] > 0 and run["rounds"] == 1
        assert set(run["workers"]) == {"target-0", "target-1", "drafter-0"}
        assert len(run["averaging_s"]) >= 1 and run["queue_rows_over_time"] is not None
    assert set(summary["together"]["rate_to_alone"]) == {"target-0", "target-1", "drafter-0"}
    assert summary["stop"]["ledger_at_end"].startswith("planned 16 = committed 16")
    assert "| 2:1 | partitioned |" in (tmp_path / "report.md").read_text()
