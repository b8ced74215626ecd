"""Tokens per second of `draftline prepare` beside `datasets.map`, with the same tokenizer and the same masks.

    python benchmarks/prepare_data.py --megabytes 1000 --processes 2 --output benchmarks/results/prepare-cpu.json

Conversations are made up (seeded), written as JSON lines, and prepared by both in turn, each in a process tree of its
own whose memory is watched (resident bytes, summed over the tree, so shared pages count more than once). The peer is
tuned: batched, rendered and tokenized in batches, masks from the edges of the turns by the tokenizer's own lookup, no
field that is not needed. Both cut behind the last label. What both wrote is compared at the end: every id and every
flag of the masks, in order. The disk is synced before each; it must hold five times `--megabytes`. On a machine that
does other work too, compare `times_less_cpu`, the processor seconds of both trees, start-up included.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from argtypes import json_file, whole
from draftline.data.prompts import builtin_prompts

if TYPE_CHECKING:
    import pyarrow as pa

MAX_TOKENS = 4096
SYSTEM = ("You are a helpful assistant.", "Answer briefly and to the point.", "You write code and explain it.")
EXTRAS = (
    "`f(x) = x ** 2`",
    "def f(x):\n    return x + 1",
    "- 1, 2, 3",
    "Größe und Länge",
    "你好, 世界",
    "naïve café 🤗",
)
SYLLABLES = (
    "an",
    "be",
    "con",
    "der",
    "en",
    "fi",
    "gra",
    "ho",
    "in",
    "ka",
    "lo",
    "men",
    "no",
    "or",
    "pro",
    "que",
    "ri",
    "sta",
)


def write_conversations(path: Path, n_bytes: int, seed: int) -> int:
    """About `n_bytes` of conversations as JSON lines; returns the number of rows."""
    source = random.Random(seed)
    sentences = _sentences(source)
    rows = written = 0
    with path.open("w", encoding="utf-8") as file:
        while written < n_bytes:
            messages = [{"role": "system", "content": source.choice(SYSTEM)}] if source.random() < 0.3 else []
            for _ in range(source.choice((1, 1, 1, 2, 3, 5))):
                messages.append({"role": "user", "content": _text(source, sentences, source.randint(1, 6))})
                messages.append({"role": "assistant", "content": _text(source, sentences, source.randint(3, 25))})
            line = json.dumps({"id": str(rows), "messages": messages}, ensure_ascii=False) + "\n"
            file.write(line)
            written += len(line.encode())
            rows += 1
    return rows


def _sentences(source: random.Random) -> list[str]:
    """Sentences of English words and rarer made-up ones, with some numbers, code and other scripts."""
    english = sorted(set(re.findall(r"[A-Za-z]+", builtin_prompts().read_text(encoding="utf-8"))))
    source.shuffle(english)
    words = english + ["".join(source.choices(SYLLABLES, k=source.randint(2, 4))) for _ in range(30_000)]
    weights = list(accumulate(1 / (rank + 2) for rank in range(len(words))))  # summed once, not for each sentence
    sentences = []
    for _ in range(20_000):
        chosen = source.choices(words, cum_weights=weights, k=source.randint(5, 22))
        sentences.append(" ".join(chosen).capitalize() + source.choice(".,.!?:."))
    return sentences + [f"{source.choice(sentences)} {item}" for item in EXTRAS for _ in range(100)]


def _text(source: random.Random, sentences: list[str], n: int) -> str:
    separator = "\n\n" if source.random() < 0.2 else " "
    return separator.join(source.choices(sentences, k=n))


def run_draftline(source: Path, output: Path, tokenizer: Path, processes: int) -> dict[str, Any]:
    """`prepare`, from JSON lines to shards."""
    from draftline.config.schema import TargetConfig
    from draftline.data.prepare import prepare

    start = time.perf_counter()
    target = TargetConfig(model=str(tokenizer))
    report = prepare([str(source)], output, target=target, max_tokens=MAX_TOKENS, workers=processes)
    seconds = time.perf_counter() - start
    manifest = report.manifest
    return {
        "seconds": seconds,
        "rows": manifest.n_samples,
        "tokens": manifest.n_tokens,
        "supervised": manifest.n_supervised,
        "rejected": report.rejected,
    }


def run_datasets(source: Path, output: Path, tokenizer: Path, processes: int) -> dict[str, Any]:
    """`load_dataset` and `map`, from JSON lines to Arrow files."""
    import datasets
    from transformers import AutoTokenizer

    datasets.disable_progress_bars()
    start = time.perf_counter()
    fast = AutoTokenizer.from_pretrained(tokenizer)
    rows = datasets.load_dataset("json", data_files=str(source), split="train", cache_dir=str(output))
    loaded = time.perf_counter()
    mapped = rows.map(
        peer_batch,
        batched=True,
        num_proc=processes,
        remove_columns=rows.column_names,
        fn_kwargs={"tokenizer": fast},
        cache_file_name=str(output / "mapped.arrow"),
    )
    end = time.perf_counter()
    counts = mapped.select_columns(["n_tokens", "n_supervised"]).with_format("numpy")
    totals = [(int(b["n_tokens"].sum()), int(b["n_supervised"].sum())) for b in counts.iter(10_000)]
    tokens, labels = (sum(column) for column in zip(*totals, strict=True))
    return {
        "seconds": end - start,
        "map_seconds": end - loaded,
        "rows": len(mapped),
        "tokens": tokens,
        "supervised": labels,
    }


def peer_batch(batch: dict[str, list[Any]], tokenizer: Any) -> dict[str, list[Any]]:
    """What a careful user of `datasets` writes for ChatML: ids, and a mask over each answer and its end."""
    import numpy as np

    opening, closing = "<|im_start|>assistant\n", "<|im_end|>"
    texts = tokenizer.apply_chat_template(batch["messages"], tokenize=False)
    encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False)
    ids, masks = [], []
    for row, text in enumerate(texts):
        mask = np.zeros(len(encoded["input_ids"][row]), np.bool_)
        place, size = text.find(opening), 0
        while place >= 0:
            end = text.index(closing, place)
            first, last = encoded.char_to_token(row, place + len(opening)), encoded.char_to_token(row, end)
            mask[first : last + 1] = True
            size, place = last + 1, text.find(opening, end)
        size = min(size, MAX_TOKENS)
        ids.append(np.asarray(encoded["input_ids"][row][:size], np.int32))
        masks.append(mask[:size])
    return {
        "input_ids": ids,
        "loss_mask": masks,
        "n_supervised": [int(mask.sum()) for mask in masks],
        "n_tokens": [len(mask) for mask in masks],
    }


RUNS = {"draftline": run_draftline, "datasets": run_datasets}


def measured(name: str, source: Path, output: Path, tokenizer: Path, processes: int) -> dict[str, Any]:
    """One contender in a process of its own; its figures and the peak memory of its tree."""
    command = [sys.executable, __file__, "--contender", name, str(source), str(output), str(tokenizer), str(processes)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    os.sync()  # nothing that was written before is left for this one's time
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    peak = _PeakMemory(child.pid)
    peak.start()
    printed, _ = child.communicate()
    peak.stop()
    if child.returncode:
        raise SystemExit(f"{name} ended with exit code {child.returncode}")
    result: dict[str, Any] = json.loads(printed.splitlines()[-1])
    print(f"{name}: {result['seconds']:.1f} s", file=sys.stderr, flush=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return result | {
        "tokens_per_s": result["tokens"] / result["seconds"],
        "cpu_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "peak_rss_bytes": peak.n_bytes,
    }


class _PeakMemory(threading.Thread):
    """Largest sum of resident bytes over a process and its children, looked at five times a second."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._root, self._end = psutil.Process(pid), threading.Event()
        self.n_bytes = 0

    def run(self) -> None:
        while not self._end.wait(0.2):
            self.n_bytes = max(self.n_bytes, self._now())

    def stop(self) -> None:
        self._end.set()
        self.join()

    def _now(self) -> int:
        try:
            tree = [self._root, *self._root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return 0
        return sum(map(_resident_bytes, tree))


def _resident_bytes(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:  # it ended meanwhile; the others still count
        return 0


def written_digest(files: Iterable[Path]) -> str:
    """Hash of the lengths, ids and masks of all samples in order, however they are cut into files and batches."""
    from draftline.data.arrow import numbers

    sizes, ids, masks = (hashlib.blake2b(digest_size=8) for _ in range(3))
    for batch in (batch for file in files for batch in record_batches(file)):
        tokens, flags = batch.column("input_ids"), batch.column("loss_mask")
        if not tokens.value_lengths().equals(flags.value_lengths()):
            raise SystemExit("a mask does not fit its tokens")
        sizes.update(memoryview(numbers(tokens.value_lengths())))
        ids.update(memoryview(numbers(tokens.flatten())))
        masks.update(memoryview(numbers(flags.flatten())))
    return " ".join(digest.hexdigest() for digest in (sizes, ids, masks))


def record_batches(file: Path) -> Iterator[pa.RecordBatch]:
    """Of one of our shards, or of a file of `datasets`, which writes the other of Arrow's two formats."""
    import pyarrow as pa

    mapped = pa.memory_map(str(file))
    if not file.name.startswith("shard-"):
        yield from pa.ipc.open_stream(mapped)
        return
    reader = pa.ipc.open_file(mapped)
    yield from map(reader.get_batch, range(reader.num_record_batches))


def require_same_samples(folder: Path) -> None:
    """Compare what both wrote."""
    theirs = written_digest(sorted((folder / "datasets").glob("mapped*.arrow")))
    ours = written_digest(sorted((folder / "draftline").glob("shard-*.arrow")))
    if theirs != ours:
        raise SystemExit(f"lengths, ids and masks: datasets {theirs}, draftline {ours}")


def unpack_tokenizer(folder: Path) -> Path:
    """The tokenizer of SmolLM2, with its chat template, in a folder that both can read."""
    from draftline.config.schema import TargetConfig
    from draftline.demo import model_path
    from draftline.target.load import load_tokenizer

    load_tokenizer(TargetConfig(model=str(model_path()))).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 49152}))
    return folder


def main() -> None:
    """Prints and writes the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=whole(1), default=20)
    parser.add_argument("--processes", type=whole(1), default=2)
    parser.add_argument("--seed", type=whole(0), default=0)
    parser.add_argument("--output", type=json_file)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = folder / "conversations.jsonl"
        rows = write_conversations(source, options.megabytes * 10**6, options.seed)
        tokenizer = unpack_tokenizer(folder / "tokenizer")
        figures = {
            run: measured(run, source, folder / run, tokenizer, options.processes) for run in ("datasets", "draftline")
        }
        require_same_samples(folder)
    ours, peer = figures["draftline"], figures["datasets"]
    for field in ("rows", "tokens", "supervised"):
        if ours[field] != peer[field]:
            raise SystemExit(f"{field}: draftline {ours[field]}, datasets {peer[field]}")
    report = {
        "megabytes": options.megabytes,
        "rows": rows,
        "processes": options.processes,
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "contenders": figures,
        "times_faster": ours["tokens_per_s"] / peer["tokens_per_s"],
        "times_less_cpu": peer["cpu_seconds"] / ours["cpu_seconds"],
        "times_faster_than_map_alone": ours["tokens_per_s"] * peer["map_seconds"] / peer["tokens"],
    }
    print(json.dumps(report, indent=2))
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--contender"]:
        contender, *paths, count = sys.argv[2:]
        source_path, output_path, tokenizer_path = map(Path, paths)
        print(json.dumps(RUNS[contender](source_path, output_path, tokenizer_path, int(count))))
    else:
        main()
