"""Runs `draftline` commands in children forked from an interpreter that has imported everything already.

Reads one JSON object a line, {"arguments": [...], "log": path}; answers each with the child's process id and, when the
child is over, with its exit code (minus the signal's number if it was killed). A child is a process like any other: its
memory, locks and threads are its own. Only the seconds that imports take are saved.
"""

from __future__ import annotations

import json
import os
import sys
import threading

import transformers
from transformers.models.qwen3 import modeling_qwen3

import draftline.cli
import draftline.pipeline.coordinator

PRELOADED = (
    draftline.cli,
    draftline.pipeline.coordinator,
    modeling_qwen3,
    transformers.AutoModelForCausalLM,
    transformers.AutoTokenizer,
)


def become(arguments: list[str], log: str) -> None:
    """The child: `draftline` with these arguments, its output appended to a file."""
    out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.argv = ["draftline", *arguments]
    draftline.cli.main()


def main() -> None:
    assert threading.active_count() == 1 and len(os.listdir("/proc/self/task")) == 1, "a fork would lose threads"
    print("ready", flush=True)
    child = 0
    for line in sys.stdin:
        if child:  # only now, so that its number was no other process's as long as somebody might kill it
            os.waitpid(child, 0)
        command = json.loads(line)
        child = os.fork()
        if child == 0:
            become(command["arguments"], command["log"])
            return
        print(child, flush=True)
        ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        print(ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status, flush=True)


if __name__ == "__main__":
    main()
