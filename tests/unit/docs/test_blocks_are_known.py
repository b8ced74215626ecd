"""Whatever stands in a block of README or docs is a command that some test knows, or is listed here as none."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from documented_commands import ROOT, WITH_COMMANDS, blocks

OURS = r"(?:\.venv/bin/)?(?:draftline|make)\s"  # parsed by test_commands_parse.py, run by test_documented_commands.py
INSTALL = r"pip install\s"
SCRIPT = r"python (?:benchmarks|scripts)/\S+"
SERVER = r"(?:vllm serve|python -m sglang\.launch_server)\s"  # must be marked as needing a GPU
# Programs that no test machine has, or that another test starts.
ELSEWHERE = r"ray start\s|srun\s|head=\$\(scontrol|sleep \d|spin -"
SHELL = r"#|source \.venv/bin/activate$|if \[ -e \S+ \]; then \w+=\S+; fi$"
KNOWN = re.compile("|".join((OURS, INSTALL, SCRIPT, SERVER, ELSEWHERE, SHELL)))
# Formulas, files and configurations: page and first words of the block.
NO_COMMANDS = {
    ("README.md", "held-out acceptance length"),
    ("checkpoints-and-export.md", "config.yaml"),
    ("checkpoints-and-export.md", "weights.safetensors"),
    ("checkpoints-and-export.md", "config.json"),
    ("cluster.md", "pipeline:"),
    ("cluster.md", "cluster:"),
    ("cluster.md", "apiVersion:"),
    ("data.md", "rows in == rows out"),
    ("design.md", "prompts --regenerate-->"),
    ("dflash2.md", "drafter:"),
    ("dflash2.md", "d = kernel_projection(x)"),
    ("dflash2.md", "S_t(a, c) ="),
    ("dflash2.md", "L_sel ="),
    ("howto-data.md", '{"id": "q1"'),
    ("howto-serving.md", "speed-up ="),
    ("monitoring.md", "12/250 rows"),
    ("objective.md", "numerator ="),
    ("pipeline.md", "planned -> leased"),
    ("pipeline.md", "T + D * (1 +"),
    ("planning.md", "shared queue X ="),
    ("results.md", "objective:"),
    ("states.md", "manifest.json"),
    ("states.md", "pipeline:"),
    ("states.md", "target:"),
    ("tutorial.md", "held-out acceptance length"),
}


def joined(lines: list[str]) -> list[str]:
    """Whole lines: a backslash or an open quote goes on in the next one."""
    whole: list[str] = []
    for line in re.sub(r"\\\n\s*", " ", "\n".join(lines)).splitlines():
        if whole and whole[-1].count("'") % 2 and not whole[-1].startswith("#"):
            whole[-1] += " " + line.strip()
        elif line.strip():
            whole.append(line.strip())
    return whole


def unknown(page: str, text: str) -> Iterator[str]:
    """Lines of a page's blocks that are no known command, and blocks without any that are not listed."""
    for _, lines in blocks(text):
        whole = joined(lines)
        if not any(KNOWN.match(line) and not line.startswith("#!") for line in whole):
            words = " ".join(whole[0].split())
            if not any(name == page and words.startswith(start) for name, start in NO_COMMANDS):
                yield words
            continue
        for line in whole:
            if not KNOWN.match(line):
                if re.match(r"\w+:\s*$", line):  # a configuration begins in the same block
                    break
                yield line


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda p: p.name)
def test_every_line_of_a_block_is_a_known_command_or_listed_as_none(page: Path):
    assert list(unknown(page.name, page.read_text(encoding="utf-8"))) == []


def test_no_listed_block_is_gone():
    for page, start in sorted(NO_COMMANDS):
        text = (ROOT / "docs" / page if page != "README.md" else ROOT / page).read_text(encoding="utf-8")
        firsts = [" ".join(joined(lines)[0].split()) for _, lines in blocks(text)]
        assert any(first.startswith(start) for first in firsts), f"{page}: {start}"


@pytest.mark.parametrize("line", ["dratfline train -c run.yaml", "curl http://localhost", "sudo make test"])
def test_a_command_that_nobody_knows_is_found(line: str):
    assert list(unknown("tutorial.md", f"words\n\n    {line}\n")) == [line]
    assert list(unknown("tutorial.md", f"words\n\n    draftline watch run\n    {line}\n")) == [line]
    assert list(unknown("tutorial.md", f"words\n\n```\nmake demo\n{line}\n```\n")) == [line]


def all_lines() -> list[tuple[str, bool, str]]:
    pages = [(page.name, page.read_text(encoding="utf-8")) for page in WITH_COMMANDS]
    return [(name, marked, line) for name, text in pages for marked, lines in blocks(text) for line in joined(lines)]


def test_servers_of_others_are_marked_as_needing_a_gpu():
    served = [(name, marked, line) for name, marked, line in all_lines() if re.match(SERVER, line)]
    assert len(served) > 4
    assert [f"{name}: {line}" for name, marked, line in served if not marked] == []


def test_extras_that_are_installed_exist():
    known = set(re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M))
    texts = "\n".join(page.read_text(encoding="utf-8") for page in WITH_COMMANDS)
    named = set(re.findall(r"pip install '?(?:draftline|\.)\[([\w,]+)\]", texts))
    assert len(named) > 2 and {extra for several in named for extra in several.split(",")} <= known


def test_scripts_and_their_options_exist():
    texts = "\n".join(page.read_text(encoding="utf-8") for page in WITH_COMMANDS)
    lines = re.findall(r"python ((?:benchmarks|scripts)/[\w/]+\.py)([^\n`]*)", texts)
    assert len(lines) > 12
    for script, options in lines:
        file = ROOT / script
        files = file.parent.glob("*.py") if file.parent.name == "real" else [file]  # a benchmark of several files
        assert file.is_file(), script
        source = "\n".join(part.read_text(encoding="utf-8") for part in files)
        missing = [option for option in re.findall(r"--[a-z][\w-]*", options) if f'"{option}"' not in source]
        assert missing == [], f"{script}: {missing}"
