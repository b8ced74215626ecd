"""Every command of README and docs that needs no GPU is run, in the order of its page, on tiny stand-ins.

In an empty folder the names of the pages are made: the targets, configurations, data, runs and prompts that a reader
would have by then. What is replaced are sizes that a tiny target cannot have.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from documented_commands import Command, commands_in_blocks
from draftline.cli import app
from tiny_run_kit import TINY_YAML, finished_run, invoke

TARGETS = (
    "MODEL",
    "TARGET",
    "NAME",
    "Qwen/Qwen3-8B",
    "path/or/name",
    "demo/target",
    "HuggingFaceTB/SmolLM2-135M-Instruct",
)
CONFIGS = ("run.yaml", "RUN.yaml", "mine.yaml", "base.yaml", "recipes/demo-cpu.yaml")
RUNS = ("RUN", "runs/mine", "runs/a", "runs/b", "demo/run", "RUN_OR_EXPORT")
EXPORTS = ("PATH", "path/to/drafter", "WHOLE", "PRUNED")
CHATS = ("answers.jsonl", "maths.jsonl", "chat.jsonl")
PROMPTS = ("prompts.jsonl", "held-out.jsonl", "demo/prompts-held-out.jsonl", "gsm8k_test.jsonl")
INSTEAD = {
    "builtin": ("builtin.jsonl",),
    "$resume": ("--resume",),
    "...": ("answers.jsonl", "--output", "again", "--target", "MODEL"),
    "16384": ("256",),  # tokens of a pruned vocabulary, of a row
    "8192": ("128",),
    "3072": ("256",),
    "0.05": ("0.3",),  # of so few answers
    "0.02": ("0.3",),
}
# What is run elsewhere, and where.
ELSEWHERE = {
    "--web": "serves until it is stopped: tests/unit/report/test_live_page.py",
    "--server http": "needs servers: tests/unit/data/servers",
    "draftline scale": "needs a run on a Ray cluster: tests/cluster",
    "--measure": "measures for half a minute: tests/integration/test_plan.py",
}
# Nothing later on a page needs what these make: with the same options once is enough.
ONCE = ("eval", "plan", "report")
# Of the folder that is looked at, not of the command: it says what is wrong with the stand-in.
FINDS = ("doctor", "export --check")
QUESTION = "times the capital of France"


def runnable() -> dict[str, list[Command]]:
    """Commands by page, in the order of the page."""
    pages: dict[str, list[Command]] = {}
    seen = set[tuple[str, ...]]()
    for command in commands_in_blocks():
        form = tuple(word for word in command.words if word[0] == "-" or word in ONCE)
        again = form in seen and command.words[1] in ONCE
        elsewhere = any(words in f"{command.text} " for words in ELSEWHERE)
        if command.words[0] == "draftline" and not command.marked and not elsewhere and not again:
            pages.setdefault(command.page, []).append(command)
            seen.add(form)
    return pages


def arguments(command: Command, number: int) -> list[str]:
    """Words of the command behind `draftline`, with tiny sizes; each new run in a folder of its own."""
    words = [part for word in command.words[1:] for part in INSTEAD.get(word, (word,))]
    for option, value in (("--workers", "1"), ("--max-new-tokens", "4")):
        if option in words:
            words[words.index(option) + 1] = value
        elif words[0] in ("eval", "regenerate") and option == "--max-new-tokens":
            words += [option, value]
    if "--methods" in words:
        words[words.index("--methods") + 1] = few_methods(words[words.index("--methods") + 1])
    if words[0] == "train" and "--resume" not in words and not any(word.startswith("output=") for word in words):
        words.append(f"output=runs/new-{number}")
    return words


def few_methods(methods: str) -> str:
    """One small tree; `adaptive` measures what trees cost for seconds, in tests/integration/test_eval_command.py."""
    small = dict.fromkeys(re.sub(r"tree@\d+", "tree@4", methods).split(","))
    return ",".join(method for method in small if method != "adaptive")


def output_of(words: list[str]) -> str | None:
    """What the command writes, if an option says so."""
    return next((words[i + 1] for i, word in enumerate(words) if word in ("-o", "--output")), None)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, tiny_target_dir: Path, tiny_data: Path) -> Path:
    """A finished run, its export and its evaluation; what every page's folder begins with."""
    world = tmp_path_factory.mktemp("world")
    run = finished_run(world, tiny_target_dir, tiny_data, "max_rows=6")
    write_prompts(world / "held-out.jsonl")
    told = [
        "--target",
        tiny_target_dir,
        "--drafter",
        run,
        "--prompts",
        world / "held-out.jsonl",
        "--max-new-tokens",
        "4",
    ]
    assert invoke("eval", *told, "--methods", "plain,chain", "--output", world / "evaluation.json")[0] == 0
    return world


@pytest.fixture
def in_folder(world: Path, tiny_target_dir: Path, tiny_data: Path, tmp_path: Path) -> Callable[[], Path]:
    """Makes the names of the pages in the test's folder."""

    def make() -> Path:
        for name in TARGETS:
            linked(tmp_path / name, tiny_target_dir)
        for name in ("data/mine", "DATA"):
            linked(tmp_path / name, tiny_data)
        for name in CONFIGS:
            output = "runs/mine" if name == "run.yaml" else "runs/" + Path(name).stem
            text = TINY_YAML.format(output=output, model=tiny_target_dir, data=tiny_data)
            placed(tmp_path / name).write_text(f"{text}\nmax_rows: 6\n", encoding="utf-8")
        for name in RUNS:
            shutil.copytree(world / "run", tmp_path / name)
        for name in EXPORTS:
            shutil.copytree(world / "run" / "export", placed(tmp_path / name))
        shutil.copy(world / "evaluation.json", tmp_path)
        for name in PROMPTS:
            write_prompts(placed(tmp_path / name))
        write_prompts(tmp_path / "builtin.jsonl", asked=80)
        for name in CHATS:
            write_chats(tmp_path / name)
        return tmp_path

    return make


def placed(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def linked(path: Path, to: Path) -> None:
    placed(path).symlink_to(to)


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_prompts(path: Path, *, asked: int = 4) -> None:
    rows = [{"id": f"{i}", "messages": [{"role": "user", "content": f"{i} {QUESTION}?"}]} for i in range(asked)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_chats(path: Path) -> None:
    rows = [{"id": f"{path.stem}-{i}", "prompt": f"{path.stem} {i}?", "response": f"one two {i}"} for i in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def told() -> Iterator[tuple[str, list[Command]]]:
    yield from sorted(runnable().items())


@pytest.mark.parametrize(("page", "commands"), told(), ids=[page for page, _ in told()])
def test_the_commands_of_a_page_run(page: str, commands: list[Command], in_folder, monkeypatch) -> None:
    folder = in_folder()
    monkeypatch.chdir(folder)
    for number, command in enumerate(commands):
        words = arguments(command, number)
        if output := output_of(words):
            remove(folder / output)  # a stand-in for what the page itself makes, or what a like command wrote
        result = CliRunner().invoke(app, words)
        code, output = result.exit_code, f"{result.output}\n{result.exception!r}"
        may_find = any(command.text.startswith(f"draftline {words}") for words in FINDS)
        assert code == 0 or (may_find and result.exit_code in (1, 2)), f"{command.text}: {code}\n{output}"


def test_enough_is_run() -> None:
    pages = runnable()
    assert len(pages) > 12 and sum(map(len, pages.values())) > 45
    assert {command.words[1] for commands in pages.values() for command in commands} >= {
        *("capture", "doctor", "eval", "export", "import", "plan", "prepare", "preview", "regenerate", "report"),
        *("train", "watch"),
    }
