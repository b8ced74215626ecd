"""Promises of the tracker services: what they are told, what they are kept from, and that none can stop a run."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from functools import partialmethod
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from draftline.config.schema import MonitorConfig
from draftline.errors import UserError
from draftline.monitor import trackers as trackers_module
from draftline.monitor.background import BackgroundTracker
from draftline.monitor.services import MlflowTracker, TrackioTracker, WandbTracker, tracker_id, without_secrets
from draftline.monitor.trackers import EXTRAS, TrackerSet, open_trackers


class Recorder:
    """Stands for the run object of any of the packages."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self.calls.append((name, args, kwargs))


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Any:
    package: Any = ModuleType("wandb")
    package.run, package.options, package.logged_in = Recorder(), {}, True
    package.Settings = lambda **settings: settings
    package.login = lambda **options: package.logged_in and not options["prompt"]

    def init(**options: Any) -> Recorder:
        package.options = options
        return package.run

    package.init = init
    monkeypatch.setitem(sys.modules, "wandb", package)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    return package


def test_wandb_gets_numbers_by_rows_and_nothing_of_the_machine(wandb: Any, tmp_path: Path) -> None:
    tracker = WandbTracker(tmp_path, "mine")
    tracker.log(7, {"train/loss": 1.5})
    tracker.close()
    assert wandb.options["project"] == "mine" and wandb.options["name"] == tmp_path.name
    assert wandb.options["resume"] == "allow" and wandb.options["id"] == tracker_id(tmp_path)
    settings = wandb.options["settings"]
    for collected in ("disable_code", "disable_git", "x_disable_meta", "x_disable_machine_info", "x_disable_stats"):
        assert settings[collected] is True
    assert settings["console"] == "off" and "config" not in wandb.options
    assert wandb.run.calls[1:] == [("log", ({"rows": 7, "train/loss": 1.5},), {}), ("finish", (), {})]


def test_wandb_without_a_login_is_refused_with_the_mend_and_never_asks(
    wandb: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb.logged_in = False
    with pytest.raises(UserError, match="not logged in; run `wandb login`, or set WANDB_MODE=offline"):
        open_trackers(["wandb"], tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    open_trackers(["wandb"], tmp_path).close()
    assert "resume" not in wandb.options


def test_trackio_continues_its_run_and_prints_nothing_on_standard_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package: Any = ModuleType("trackio")
    run, options = Recorder(), {}

    def init(**given: Any) -> Recorder:
        print("* Trackio project initialized")
        options.update(given)
        return run

    package.init = init
    monkeypatch.setitem(sys.modules, "trackio", package)
    tracker = TrackioTracker(tmp_path, "mine")
    tracker.log(7, {"train/loss": 1.5})
    tracker.close()
    assert options["name"] == f"{tmp_path.name}-{tracker_id(tmp_path)}" and options["resume"] == "allow"
    assert options["auto_log_gpu"] is options["auto_log_cpu"] is options["embed"] is False
    assert run.calls == [("log", ({"train/loss": 1.5},), {"step": 7}), ("finish", (), {})]
    assert capsys.readouterr().out == ""


class FakeMlflow:
    """The client's few methods, over a list of runs that outlives it."""

    def __init__(self, runs: list[dict[str, Any]]) -> None:
        self.runs = runs
        self.uris: dict[str, Any] = {}

    def __call__(self, **uris: Any) -> FakeMlflow:
        self.uris = uris
        return self

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(experiment_id=f"of {name}")

    def search_runs(self, experiments: list[str], filter_string: str, max_results: int) -> list[Any]:
        ids = [i for i, run in enumerate(self.runs) if f"'{run['tags']['draftline.id']}'" in filter_string]
        return [SimpleNamespace(info=SimpleNamespace(run_id=i)) for i in ids]

    def create_run(self, experiment: str, run_name: str, tags: dict[str, str]) -> Any:
        self.runs.append({"experiment": experiment, "name": run_name, "tags": tags, "metrics": [], "over": 0})
        return SimpleNamespace(info=SimpleNamespace(run_id=len(self.runs) - 1))

    def log_batch(self, run_id: str, metrics: list[Any]) -> None:
        self.runs[int(run_id)]["metrics"] += [(key, value, step) for key, value, _, step in metrics]

    def set_terminated(self, run_id: str) -> None:
        self.runs[int(run_id)]["over"] += 1


def test_mlflow_gets_numbers_alone_and_a_resumed_run_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = FakeMlflow([])
    entities: Any = ModuleType("mlflow.entities")
    entities.Metric = lambda *values: values
    tracking: Any = ModuleType("mlflow.tracking")
    tracking.MlflowClient = client
    for name, module in (
        ("mlflow", ModuleType("mlflow")),
        ("mlflow.entities", entities),
        ("mlflow.tracking", tracking),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for step in (1, 2):
        tracker = MlflowTracker(tmp_path, "mine")
        tracker.log(step, {"train/loss": 1.5, "train/grad_norm": float("inf")})
        tracker.close()
    assert client.uris["tracking_uri"] == f"sqlite:///{tmp_path / 'mlflow.db'}"
    tags = {"draftline.id": tracker_id(tmp_path)}
    run = {"experiment": "of mine", "name": tmp_path.name, "tags": tags, "over": 2}
    assert client.runs == [{**run, "metrics": [("train/loss", 1.5, 1), ("train/loss", 1.5, 2)]}]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://server")
    MlflowTracker(tmp_path, "mine")
    assert client.uris["tracking_uri"] is None


@pytest.mark.parametrize("name", ["wandb", "trackio", "mlflow"])
def test_a_service_that_is_not_installed_is_refused_with_its_extra(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [name, *(m for m in sys.modules if m.startswith(f"{name}."))]:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=rf"{name} is not installed; install draftline\[{EXTRAS[name]}\]"):
        open_trackers([name], tmp_path)


def test_every_tracker_of_the_configuration_has_its_extra() -> None:
    import tomllib

    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    for name, extra in EXTRAS.items():
        assert MonitorConfig.model_validate({"trackers": (name,)}).trackers == (name,)
        assert any(name in requirement for requirement in project["optional-dependencies"][extra])


def test_a_service_that_is_away_at_the_start_is_reported_without_its_secrets_and_the_run_goes_on(
    wandb: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(**options: Any) -> None:
        raise ConnectionError("https://me:pass@host/x?token=abc says: key 0123456789 is wrong\nagain")

    monkeypatch.setenv("SOME_API_KEY", "0123456789")
    wandb.init = refuse
    several = open_trackers(["wandb"], tmp_path)
    several.log(1, {"a": 1.0})
    several.close()
    assert several.failed["wandb"].startswith("ConnectionError: https://***host/x?***")
    assert "tracker wandb failed and is switched off: ConnectionError" in caplog.text
    assert not [s for s in ("pass@", "abc", "0123456789") if s in caplog.text]
    assert '"a": 1.0' in (tmp_path / "metrics.jsonl").read_text()


def test_tensorboard_that_cannot_start_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: Path) -> None:
        raise FileExistsError(f"a file is in the way: {folder.name}")

    monkeypatch.setattr(trackers_module, "TensorBoardTracker", refuse)
    several = open_trackers(["tensorboard"], tmp_path)
    several.close()
    assert several.failed == {"tensorboard": "FileExistsError: a file is in the way: tensorboard"}


def test_a_service_that_hangs_at_the_start_is_not_waited_for_and_gets_everything_once_it_comes(
    wandb: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    let, quick = threading.Event(), wandb.init

    def hang(**options: Any) -> Any:
        let.wait()
        return quick(**options)

    monkeypatch.setattr(BackgroundTracker, "await_start", partialmethod(BackgroundTracker.await_start, within_s=0.01))
    wandb.init = hang
    several = open_trackers(["wandb"], tmp_path)
    several.log(1, {"a": 1.0})
    assert "takes long to start; the run goes on" in caplog.text
    let.set()
    several.close()
    assert not several.failed
    assert [call[1] for call in wandb.run.calls if call[0] == "log"] == [({"rows": 1, "a": 1.0},)]


SECRETS = {
    "OSError: no route to host:80 as hunter22": "OSError: no route to host:80 as ***",
    "at postgres://me:p@ss/w0rd@host:5432/db now": "at postgres://***host:5432/db now",
    "GET http://host/x?api=1&key=2 failed": "GET http://host/x?*** failed",
    "401: Authorization: Bearer abc.def": "401: Authorization: Bearer ***",
    "{'api_key': 'abcdef', 'n': 3}": "{'api_key': '***', 'n': 3}",
    "password=abc; token: def, retry": "password=***; token: ***, retry",
    "quoted sl%2Fash%20ed and sl%2Fash+ed and sl/ash ed": "quoted *** and *** and ***",
    "3 tokens, keys 4 and 5": "3 tokens, keys 4 and 5",
}


@pytest.mark.parametrize("message", SECRETS)
def test_messages_keep_everything_but_secrets(monkeypatch: pytest.MonkeyPatch, message: str) -> None:
    monkeypatch.setenv("MY_PASSWORD", "hunter22")
    monkeypatch.setenv("MY_TOKEN", "sl/ash ed")
    assert without_secrets(message) == SECRETS[message]


def test_a_folder_keeps_its_id(tmp_path: Path) -> None:
    first = tracker_id(tmp_path)
    assert tracker_id(tmp_path) == first and len(first) == 8
    (tmp_path / "tracker_id").write_text("../../etc")
    assert tracker_id(tmp_path) not in (first, "../../etc")


class Slow:
    """Takes numbers only when it is let."""

    name = "slow"

    def __init__(self, error: Exception | None = None) -> None:
        self.let, self.taken, self.error = threading.Event(), [], error
        self.closed = False

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.let.wait()
        if self.error:
            raise self.error
        self.taken.append(step)

    def close(self) -> None:
        self.closed = True


def test_a_slow_service_holds_nobody_up_and_gets_everything_in_order() -> None:
    slow = Slow()
    tracker = BackgroundTracker(slow.name, lambda: slow)
    for step in range(50):
        tracker.log(step, {"a": 1.0})
    assert slow.taken == []
    slow.let.set()
    tracker.close()
    assert slow.taken == list(range(50)) and slow.closed


def test_a_service_that_hangs_is_given_up_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    slow = Slow()
    several = TrackerSet([BackgroundTracker("slow", lambda: slow, most_waiting=2, close_within_s=0.01)])
    for step in range(6):
        several.log(step, {"a": 1.0})
    several.close()
    assert several.failed == {"slow": "TrackerGone: gave no answer within 0.01 s"}
    assert "oldest records were left out" in caplog.text
    slow.let.set()


def test_services_that_hang_are_given_up_together_not_one_after_the_other() -> None:
    slow = Slow()
    trackers = [BackgroundTracker(str(i), lambda: slow, close_within_s=0.3) for i in range(8)]
    several = TrackerSet(trackers)
    several.log(1, {"a": 1.0})
    several.close()
    assert len(several.failed) == 8
    closed_by = [tracker._close_by_s for tracker in trackers]
    assert max(closed_by) - min(closed_by) < 0.3  # type: ignore[type-var, operator]
    slow.let.set()


def test_a_service_that_fails_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    slow = Slow(ConnectionError("gone"))
    several = TrackerSet([BackgroundTracker("slow", lambda: slow)])
    several.log(1, {"a": 1.0})
    slow.let.set()
    several.close()
    assert several.failed == {"slow": "ConnectionError: gone"}
    assert sum("switched off" in r.message for r in caplog.records) == 1
