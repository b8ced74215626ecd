"""Promises about the code itself: sizes, rooms, and what `--help` may import."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from draftline.config.schema import TargetConfig
from draftline.target.facts import target_facts
from draftline.target.load import load_target
from draftline.target.remote.lender import lent_names

ROOT = Path(__file__).parents[3]
SOURCE = ROOT / "src" / "draftline"
FILES = sorted(SOURCE.rglob("*.py"))
OTHER_FILES = sorted(path for name in ("tests", "scripts", "benchmarks") for path in (ROOT / name).rglob("*.py"))
MAX_FUNCTION_LINES, MAX_FILE_LINES, MAX_PARAMETERS = 60, 400, 8
# Commands take their options, kernels their pointers, constructors at the composition root their parts.
MANY_PARAMETERS = {
    "cli.py": "a command's options",
    "cli_export.py": "a command's options",
    "cli_eval.py": "a command's options",
    "cli_data.py": "a command's options",
    "cli_regenerate.py": "a command's options",
    "data/regenerate.py": "the command's options",
    "data/prepare.py": "the command's options",
    "evaluate/command.py": "the command's options",
    "drafter/head_kernels.py": "kernel arguments",
    "drafter/head_gpu.py": "kernel arguments",
    "drafter/step.py": "composition",
    "drafter/loop.py": "composition",
    "target/varlen.py": "the signature of an attention backend",
}
# Rooms may import those to their right only (and themselves).
LAYERS = {
    "config": set(),
    "data": {"config", "monitor", "target"},
    "target": {"config", "data", "monitor", "pipeline"},
    "drafter": {"config", "target", "monitor", "pipeline"},
    "decode": {"config", "target", "drafter"},
    "export": {"config", "drafter", "target"},
    "monitor": {"config"},
    "report": {"config", "data", "monitor"},
}


def functions(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def parameters(node):
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return sum(argument.arg not in ("self", "cls") for argument in arguments)


@pytest.mark.parametrize("path", [*FILES, *OTHER_FILES], ids=lambda p: str(p.relative_to(ROOT)))
def test_files_and_functions_stay_small(path):
    assert path.read_text(encoding="utf-8").count("\n") <= MAX_FILE_LINES
    for node in functions(path):
        assert node.end_lineno - node.lineno < MAX_FUNCTION_LINES, node.name


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_functions_take_few_parameters(path):
    many = {node.name: parameters(node) for node in functions(path) if parameters(node) > MAX_PARAMETERS}
    assert bool(many) == (str(path.relative_to(SOURCE)) in MANY_PARAMETERS), many or "needs no exception any more"


@pytest.mark.parametrize("room", LAYERS)
def test_rooms_import_in_one_direction(room):
    """Loops of target and drafter speak to the exchange, so those two may name pipeline's driver; nothing else may.

    `data` and `target` share one level: regenerate runs the target, the target's loop reads the data set.
    """
    allowed = LAYERS[room] | {room}
    rooms = {p.name for p in SOURCE.iterdir() if p.is_dir()} - {"recipes"}
    for path in (SOURCE / room).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("draftline."):
                used = node.module.split(".")[1]
                if used in rooms - allowed:
                    message = f"{path.relative_to(SOURCE)} imports {node.module}"
                    assert (path.name, used) in {("command.py", "pipeline")}, message
                if used == "pipeline" and room in ("target", "drafter"):
                    assert path.name == "loop.py", path


def test_scaling_a_run_never_imports_torch():
    code = "import sys, draftline.cluster.control; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["eval", "--help"], ["--version"]])
def test_help_never_imports_torch(arguments):
    code = f"import sys; sys.argv = ['draftline', *{arguments!r}]\nfrom draftline.cli import main\n"
    code += "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
    code += "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", ["pipeline.coordinator", "pipeline.workers", "cluster.seat"])
def test_only_what_loads_a_target_imports_its_modelling_code(module):
    """Seconds of a processor for each process, and processes of drafters need none of it."""
    code = f"import sys, draftline.{module}\n"
    code += "sys.exit(', '.join(m for m in ('transformers', 'torch._dynamo') if m in sys.modules) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_drafter_of_a_cluster_reads_what_it_borrows_and_trains_without_them(tiny_target_dir):
    """Nor does torch's own AdamW bring its compiler in by the back door."""
    config = TargetConfig(model=str(tiny_target_dir))
    lent = lent_names(load_target(config, "cpu"))
    code = f"""
import sys, torch
from draftline.config.schema import OptimizerConfig, TargetConfig
from draftline.drafter.optimizer import MasterOptimizer
from draftline.target.facts import TargetFacts
from draftline.target.remote.lender import LentNames, read_lent
read_lent(TargetConfig(model={config.model!r}), {target_facts(config)!r}, {lent!r}, torch.device("cpu"))
module = torch.nn.Linear(2, 2)
optimizer = MasterOptimizer(module, OptimizerConfig())
module(torch.ones(2)).sum().backward()
optimizer.absorb(torch.tensor(1.0))
before = module.weight.clone()
optimizer.step(0.1)
assert not torch.equal(module.weight, before)
sys.exit(", ".join(m for m in ("transformers", "torch._dynamo") if m in sys.modules) or 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_config_and_core_import_no_torch():
    for folder in ("config", "pipeline/core"):
        for path in (SOURCE / folder).rglob("*.py"):
            assert not re.search(r"^\s*(import|from) (torch|transformers)", path.read_text(), re.M), path


def test_every_make_target_of_the_readme_exists():
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.M))
    named = set(re.findall(r"\bmake ([a-z][\w-]*)", (ROOT / "README.md").read_text()))
    assert named and named <= targets
