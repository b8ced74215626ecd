"""A row of 250 MB from one process to another on one host, as a ratio to one memory copy of its size, in one run.

    python benchmarks/row_transport.py --output FILE     needs the extra `cluster`

Each path moves the same bf16 row; the clock runs from the row's tensors in the target's process to the tensors in the
drafter's, as the loops would use them. Rounds of all paths take turns, and the quickest round of each counts: it is the
one that other work of the machine disturbed least.

copy       one copy of the row's bytes into memory that is there already: the unit
slab       the target writes into its slot, the drafter maps it
objects    the target stores the row in Ray's object store, the drafter maps it
pickled    the row's tensors through a pipe, pickled by the standard library's multiprocessing: what is avoided
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
import uuid
from typing import Any

import ray
import torch

from argtypes import json_file, whole
from draftline.cluster.refs import RowRef, slot_bytes
from draftline.cluster.slab import Slab, remove_abandoned
from draftline.cluster.store import ObjectStore
from draftline.cluster.transport import ObjectSender, RowReceiver, SlabSender
from draftline.records import HiddenStateRow
from measure import environment

TAPS, HIDDEN, TOKENS = 5, 4096, 6400
MOST_OBJECTS, MOST_SLAB = 8.0, 2.0


def make_row(tokens: int) -> HiddenStateRow:
    """5 taps of width 4096 in bf16: 262 MB for 6400 tokens."""
    return HiddenStateRow(
        row_id=0,
        epoch=0,
        sample_ids=("sample",),
        lengths=(tokens,),
        input_ids_T=torch.zeros(tokens, dtype=torch.int64),
        loss_mask_T=torch.ones(tokens, dtype=torch.bool),
        document_ids_T=torch.zeros(tokens, dtype=torch.int32),
        position_ids_T=torch.arange(tokens),
        taps_TF=torch.randn(tokens, TAPS * HIDDEN).bfloat16(),
        final_hidden_TH=None,
        final_hidden_norm="post",
        tap_layer_ids=tuple(range(TAPS)),
    )


class Source:
    """The target's process."""

    def __init__(self, name: str, tokens: int) -> None:
        self._row = make_row(tokens)
        self._slab = Slab(name, 2, slot_bytes(self._row.n_bytes()))
        self._slab_sender, self._object_sender = (
            SlabSender(self._slab, "node", "run"),
            ObjectSender(ObjectStore(), "run"),
        )
        self._copy = torch.empty_like(self._row.taps_TF)

    def copy(self) -> float:
        """Seconds of one copy, into memory that was just written: a fork before it would cost a fault a page."""
        self._copy.copy_(self._row.taps_TF)
        start = time.perf_counter()
        self._copy.copy_(self._row.taps_TF)
        return time.perf_counter() - start

    def send(self, path: str) -> tuple[RowRef, float]:
        """The row by reference, and when sending began."""
        start = time.time()
        sender = self._slab_sender if path == "slab" else self._object_sender
        return sender.send(self._row, 0), start

    def pickled(self) -> float:
        """Seconds of sending the row's tensors to a process of its own, pickled, and getting them there."""
        here, there = multiprocessing.Pipe()
        start = time.perf_counter()
        sender = multiprocessing.get_context("fork").Process(target=_send_bytes, args=(there, self._row))
        sender.start()
        here.recv()
        seconds = time.perf_counter() - start
        sender.join()
        return seconds


def _send_bytes(connection: Any, row: HiddenStateRow) -> None:
    connection.send(row.taps_TF.view(torch.int16).numpy())


class Sink:
    """The drafter's process."""

    def __init__(self, name: str, tokens: int) -> None:
        slab = Slab(name, 2, slot_bytes(make_row(tokens).n_bytes()))
        self._receiver = RowReceiver(torch.device("cpu"), ObjectStore(), slab, "node")

    def receive(self, sent: tuple[RowRef, float]) -> float:
        """Seconds from the beginning of sending until the tensors are here and their ends were read."""
        ref, start = sent
        row = self._receiver.receive(ref)
        float(row.taps_TF[0, 0]), float(row.taps_TF[-1, -1])
        return time.time() - start


def measure(tokens: int, rounds: int) -> dict[str, Any]:
    name = uuid.uuid4().hex
    source = ray.remote(Source).remote(name, tokens)
    sink = ray.remote(Sink).remote(name, tokens)
    seconds: dict[str, list[float]] = {"copy": [], "slab": [], "objects": [], "pickled": []}
    for _ in range(rounds):
        seconds["copy"].append(ray.get(source.copy.remote()))
        for path in ("slab", "objects"):
            sent = ray.get(source.send.remote(path))
            seconds[path].append(ray.get(sink.receive.remote(sent)))
        seconds["pickled"].append(ray.get(source.pickled.remote()))
    counted = {path: values[2:] for path, values in seconds.items()}  # the first two touch the memory
    best = {path: min(values) for path, values in counted.items()}
    return {
        "row_bytes": make_row(tokens).n_bytes(),
        "best_s": best,
        "medians_s": {path: statistics.median(values) for path, values in counted.items()},
        "ratios": {path: best[path] / best["copy"] for path in best},
        "seconds": counted,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=whole(1), default=TOKENS)
    parser.add_argument("--rounds", type=whole(1), default=12)
    parser.add_argument("--output", type=json_file)
    arguments = parser.parse_args()
    ray.init(address="local", num_cpus=4, object_store_memory=2 << 30, include_dashboard=False, log_to_driver=False)
    found = measure(arguments.tokens, arguments.rounds)
    ray.shutdown()
    remove_abandoned()  # the actors had no time to
    for path, ratio in found["ratios"].items():
        print(f"{path:8} {1e3 * found['best_s'][path]:8.1f} ms  {ratio:6.2f} copies")
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        report = {"environment": environment(torch.device("cpu")), **found}
        arguments.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if found["ratios"]["slab"] > MOST_SLAB or found["ratios"]["objects"] > MOST_OBJECTS:
        raise SystemExit(f"above {MOST_SLAB:g} (slab) or {MOST_OBJECTS:g} (objects) copies")


if __name__ == "__main__":
    main()
