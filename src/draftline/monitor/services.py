"""Weights & Biases, trackio and MLflow as trackers. Each package is imported only when it is configured.

What these packages would collect by themselves (command line, environment, code, machine) is switched off: a command
line or a git remote may hold a password. Where they send to, and with which credentials, their own environment
variables say; draftline reads none of them, except whether MLflow has been given a server.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import secrets
import sys
import time
from collections.abc import Mapping
from contextvars import copy_context
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

from draftline.errors import UserError

ID_FILE = "tracker_id"
# By name of the environment variable: their values never reach a message.
_SECRET_NAME = re.compile("key|token|secret|passw|credential", re.IGNORECASE)
# Names and passwords of addresses (people do not always escape what is special in them), and queries.
_IN_URL = re.compile(r"(?<=://)[^\s'\"<>]*@|(?<=\?)[^\s'\")]+")
# What follows words such as `api_key=` or `Authorization: Bearer`, whatever environment it came from.
_NAMED = re.compile(
    r"((?:api[_-]?key|token|secret|passw(?:or)?d|credentials?)[\"']?\s*[=:]\s*[\"']?|\b(?:bearer|basic)\s+)"
    r"(?!\*\*\*)[^\s\"',;)]+",
    re.IGNORECASE,
)
_SHORTEST_SECRET = 6
_MOST_MESSAGE_CHARS = 300


class WandbTracker:
    """A run of Weights & Biases; `rows` is the horizontal axis of every curve. Needs the extra `wandb`.

    Raises:
        UserError: nobody is logged in, and it is not offline.
    """

    name = "wandb"

    def __init__(self, run_dir: Path, project: str) -> None:
        import wandb

        settings = wandb.Settings(
            console="off",
            silent=True,
            save_code=False,
            disable_code=True,
            disable_git=True,
            x_disable_meta=True,
            x_disable_machine_info=True,
            x_disable_stats=True,
            x_save_requirements=False,
        )
        if os.environ.get("WANDB_MODE", "online") in ("online", "run") and not wandb.login(prompt=False, verify=False):
            mend = "run `wandb login`, or set WANDB_MODE=offline"
            raise UserError("wandb is not logged in", where="monitor.trackers", mend=mend)
        ident = tracker_id(run_dir)
        options: dict[str, Any] = {} if os.environ.get("WANDB_MODE") == "offline" else {"resume": "allow"}
        self._run: Any = wandb.init(
            project=project, name=run_name(run_dir), id=ident, dir=str(run_dir), settings=settings, **options
        )
        self._run.define_metric("*", step_metric="rows")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One step of the run, with the rows trained among its numbers."""
        self._run.log({"rows": step, **metrics})

    def close(self) -> None:
        """Send what is buffered and end the run there."""
        self._run.finish()


class TrackioTracker:
    """A run of trackio, in its local store unless its own variables name a server. Needs the extra `trackio`."""

    name = "trackio"

    def __init__(self, run_dir: Path, project: str) -> None:
        import trackio

        name = f"{run_name(run_dir)}-{tracker_id(run_dir)}"
        options: dict[str, Any] = {"resume": "allow", "embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        # It prints; results alone go to standard output. In a context of its own, or it would end the run once more.
        with contextlib.redirect_stdout(sys.stderr):
            self._run: Any = copy_context().run(trackio.init, project=project, name=name, **options)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One step of the run."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Write out what is buffered and end the run there."""
        with contextlib.redirect_stdout(sys.stderr):
            self._run.finish()


class MlflowTracker:
    """A run of MLflow, on MLFLOW_TRACKING_URI or else in `mlflow.db` of the run folder. Needs the extra `mlflow`."""

    name = "mlflow"

    def __init__(self, run_dir: Path, project: str) -> None:
        from mlflow.entities import Metric
        from mlflow.tracking import MlflowClient

        # The client alone, not `mlflow.start_run`: that one tags runs with the user, the program and its repository.
        local = f"sqlite:///{run_dir.resolve() / 'mlflow.db'}"
        uri = None if os.environ.get("MLFLOW_TRACKING_URI") else local
        self._metric: Any = Metric
        self._client: Any = MlflowClient(tracking_uri=uri, registry_uri=uri)
        experiment = self._client.get_experiment_by_name(project)
        number = experiment.experiment_id if experiment else self._client.create_experiment(project)
        self._run_id = self._find(number, tracker_id(run_dir)) or self._create(number, run_dir)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Infinite values are left out: a database stores them as the largest number, and the chart is lost."""
        now_ms = round(time.time() * 1000)
        kept = [self._metric(name, value, now_ms, step) for name, value in metrics.items() if not math.isinf(value)]
        self._client.log_batch(self._run_id, metrics=kept)

    def close(self) -> None:
        """End the run there."""
        self._client.set_terminated(self._run_id)

    def _find(self, experiment: str, ident: str) -> str | None:
        """The run that an earlier process of this run folder made."""
        found = self._client.search_runs([experiment], filter_string=f"tags.`draftline.id` = '{ident}'", max_results=1)
        return str(found[0].info.run_id) if found else None

    def _create(self, experiment: str, run_dir: Path) -> str:
        tags = {"draftline.id": tracker_id(run_dir)}
        return str(self._client.create_run(experiment, run_name=run_name(run_dir), tags=tags).info.run_id)


def run_name(run_dir: Path) -> str:
    """What people see: the folder's name."""
    return run_dir.resolve().name


def tracker_id(run_dir: Path) -> str:
    """Eight hexadecimal digits that a run folder keeps, so that a resumed run continues its curves."""
    path = run_dir / ID_FILE
    with contextlib.suppress(FileNotFoundError):
        text = path.read_text(encoding="utf-8").strip()
        if re.fullmatch("[0-9a-f]{8}", text):
            return text
    ident = secrets.token_hex(4)
    path.write_text(ident + "\n", encoding="utf-8")
    return ident


def without_secrets(text: str) -> str:
    """A message of another package in one line, without passwords in addresses, values of secret variables, and what
    calls itself a key or a password."""
    for name in os.environ:
        value = os.environ[name].strip()
        if _SECRET_NAME.search(name) and len(value) >= _SHORTEST_SECRET:
            for written in (value, quote(value, safe=""), quote_plus(value)):
                text = text.replace(written, "***")
    return _NAMED.sub(r"\1***", _IN_URL.sub("***", " ".join(text.split())))[:_MOST_MESSAGE_CHARS]
