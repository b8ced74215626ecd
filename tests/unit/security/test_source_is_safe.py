"""What the source must never contain, and what must never reach a log or a stored configuration."""

from __future__ import annotations

import ast
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

import draftline
from draftline.config.load import dump_config, load_config
from draftline.config.schema import TargetConfig
from draftline.monitor.run import RunMonitor

ROOT = Path(__file__).parents[3]
SOURCES = sorted([*Path(draftline.__file__).parent.rglob("*.py"), *(ROOT / "scripts").rglob("*.py")])
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "yaml", "torchvision"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "torch.load", "torch.save", "os.system", "os.popen"}
FORBIDDEN_CALLS |= {"np.load", "numpy.load", "tempfile.mktemp"}
SECRETS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY")
RUN_YAML = "output: run\ntarget: {model: m}\ndata: {path: d}\ndrafter: {mask_token_id: 5}\n"


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def unsafe_lines(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        else:
            names = []
        yield from (f"line {node.lineno}: imports {name}" for name in names if name.split(".")[0] in FORBIDDEN_MODULES)
        if isinstance(node, ast.Call):
            if dotted(node.func) in FORBIDDEN_CALLS:
                yield f"line {node.lineno}: calls {dotted(node.func)}"
            for keyword in node.keywords:
                constant = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
                if (keyword.arg, constant) in (("shell", True), ("trust_remote_code", True), ("allow_pickle", True)):
                    yield f"line {node.lineno}: {keyword.arg}=True"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_no_file_unpickles_evaluates_or_trusts_what_it_reads(path: Path):
    assert list(unsafe_lines(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from dill import loads",
        "import torch; torch.load('x')",
        "eval('1')",
        "exec(text)",
        "run(x, shell=True)",
        "f(trust_remote_code=True)",
        "import yaml",
    ],
)
def test_the_search_finds_what_it_looks_for(line: str):
    assert list(unsafe_lines(line))


def test_remote_code_is_off_unless_asked_for():
    assert TargetConfig(model="m").trust_remote_code is False


def test_secrets_of_the_environment_reach_no_configuration_and_no_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    for name in SECRETS:
        monkeypatch.setenv(name, f"secret-of-{name}")
    (tmp_path / "run.yaml").write_text(RUN_YAML)
    with caplog.at_level(logging.DEBUG):
        config = load_config([tmp_path / "run.yaml"])
        with (
            RunMonitor(tmp_path, config.monitor, show=False) as monitor,
            monitor.metrics.worker("target-0").span("working", "row 0"),
        ):
            pass
    written = dump_config(config) + caplog.text
    for path in tmp_path.iterdir():
        written += path.read_text(encoding="utf-8")
    assert "secret-of" not in written
    assert not [name for name in SECRETS if name in written]


def test_the_source_reads_no_secret_by_name():
    """Tokens stay with the libraries that use them: nothing here could pass one on."""
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        assert not [name for name in SECRETS if name in text], path
        assert "os.environ.items()" not in text and "dict(os.environ)" not in text, path
