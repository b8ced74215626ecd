"""Every command line of README and docs is one that the app and the Makefile know, and says if it needs a GPU."""

from __future__ import annotations

import re
from typing import Any

import pytest
import typer
from ruamel.yaml import YAML
from typer.testing import CliRunner

from documented_commands import GPU_MARK, PAGES, ROOT, Command, blocks, commands_in_blocks, commands_in_sentences
from draftline.cli import app

BLOCKS, SENTENCES = commands_in_blocks(), commands_in_sentences()
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([a-z][\w-]*):", MAKEFILE, re.M))
VARIABLES = set(re.findall(r"^([A-Z_]+) \??:?=", MAKEFILE, re.M))
# These load a target or train; the others read a tokenizer or nothing.
ON_THE_LINE = "COMMANDLINE"
COMPUTING = ("train", "regenerate", "eval", "capture", "check-labels", "plan", "doctor")


def named(command: Command) -> str:
    return f"{command.page}: {command.text[:70]}"


def known_commands():
    return typer.main.get_command(app).commands


def parse(words: tuple[str, ...]) -> Any:
    """What the command line understood; raises as it would, and runs nothing. `...` stands for whatever else a
    command requires."""
    command = known_commands()[words[0]]
    given = [word for word in words[1:] if word != "..." and not word.startswith("$")]
    if "..." in words:
        for parameter in command.params:
            if parameter.required and not set(parameter.opts) & set(given):
                given += ["X"] if parameter.param_type_name == "argument" else [parameter.opts[0], "X"]
    return command.make_context(words[0], given)


def test_commands_are_found_on_many_pages():
    assert len({c.page for c in BLOCKS}) > 12 and len(BLOCKS) > 60 and len(SENTENCES) > 20


@pytest.mark.parametrize("command", [c for c in BLOCKS if c.words[0] == "draftline"], ids=named)
def test_command_lines_parse(command):
    words = command.words[1:]
    found = parse(words)
    options = {p.name for p in found.command.params if set(p.opts) & set(words)}
    assert found.info_name == words[0]
    assert all(found.get_parameter_source(name).name == ON_THE_LINE for name in options)


@pytest.mark.parametrize("command", [c for c in SENTENCES if c.words[0] == "draftline"], ids=named)
def test_commands_named_in_a_sentence_exist_with_their_options(command):
    found = known_commands()[command.words[1].rstrip(",.")]
    options = {name for parameter in found.params for name in parameter.opts} | {"--help"}
    assert {word for word in command.words[2:] if word.startswith("--")} <= options


@pytest.mark.parametrize("command", [c for c in BLOCKS + SENTENCES if c.words[0] == "make"], ids=named)
def test_make_targets_and_variables_exist(command):
    for word in command.words[1:]:
        name, is_variable, _ = word.partition("=")
        assert name in (VARIABLES if is_variable else TARGETS), word


def test_what_needs_a_gpu_is_marked():
    for command in BLOCKS:
        words = command.words
        large = re.search(r"Qwen/|qwen3|cuda:", command.text)
        runs = words[1] in COMPUTING and "--dry-run" not in words and "--server" not in words
        if words[1] == "plan":
            runs = "--measure" in words
        assert command.marked or not (large and runs), f"put {GPU_MARK} before it: {named(command)}"


def test_an_unknown_option_or_a_missing_argument_does_not_pass():
    for words in ("train --confg x", "prepare a.jsonl", "eval --target t --prompts p --limit many"):
        assert CliRunner().invoke(app, words.split()).exit_code == 2, words


def test_blocks_are_told_from_text_and_know_their_mark():
    fenced = "```\ndraftline b \\\n  --c\n```\nmore"
    text = f"words\n\n    draftline a\n\n{GPU_MARK}\n\n{fenced}\n\n{GPU_MARK}\n\n    draftline d\n"
    assert list(blocks(text)) == [
        (False, ["draftline a"]),
        (True, ["draftline b \\", "  --c"]),
        (True, ["draftline d"]),
    ]


def test_every_page_has_its_place_in_the_site():
    nav = YAML(typ="safe").load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    placed = re.findall(r"[\w-]+\.md", str(nav))
    assert sorted(placed) == sorted(page.name for page in PAGES if page.parent.name == "docs")
