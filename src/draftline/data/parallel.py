"""Chunks of rows worked on by several processes, results in order.

    consumes   an iterator of chunks, at most two a process ahead of what is taken
    produces   results in the order of the chunks: chunk k goes to process k mod N, and its result is awaited there
    waits for  the oldest chunk
    wakes on   its result, or the end of that process, which closes its pipe

The processes are started fresh (nothing forks a process that has threads), hold no file of the run, leave interrupts to
the main process, and end when their pipe does, however the main process ends. In each, a thread takes chunks from the
pipe, so that the main process never waits to hand one over while the other waits to hand a result back.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Protocol

from draftline.data.work import Chunk, ChunkResult, RowWorker, WorkSpec
from draftline.errors import RunFailedError, UserError

AHEAD = 2
_END_S = 5.0

Work = Callable[[Iterable[Chunk]], Iterator[ChunkResult]]


class _Process(Protocol):
    """What is used of a process of multiprocessing."""

    @property
    def exitcode(self) -> int | None: ...

    def join(self, timeout: float | None = None) -> None: ...

    def kill(self) -> None: ...


@contextmanager
def row_workers(spec: WorkSpec, n_workers: int) -> Iterator[Work]:
    """A function from chunks to results in order: in this process, or over `n_workers` others.

    A UserError that the chunks raise is raised once all results before it are taken, as in one process.

    Raises:
        RunFailedError: a process ended before its time.
    """
    if n_workers == 1:
        worker = RowWorker(spec)
        yield lambda chunks: map(worker.work, chunks)
        return
    crew = _Crew(spec, n_workers)
    try:
        yield crew.results
    finally:
        crew.end()


class _Crew:
    """N processes, each at the end of a pipe."""

    def __init__(self, spec: WorkSpec, n_workers: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes: list[_Process] = []
        # Inherited: Ctrl-C, which all processes of a terminal get, reaches the main process alone.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for i in range(n_workers):
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(spec, theirs), name=f"prepare-{i}", daemon=True)
                process.start()
                theirs.close()
                self._pipes.append(ours)
                self._processes.append(process)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def results(self, chunks: Iterable[Chunk]) -> Iterator[ChunkResult]:
        """Results in the order of the chunks."""
        n = len(self._pipes)
        pending: deque[int] = deque()
        source, sent, refusal = iter(chunks), 0, None
        while True:
            while refusal is None and len(pending) < AHEAD * n:
                try:
                    chunk = next(source, None)
                except UserError as error:
                    refusal = error
                    break
                if chunk is None:
                    break
                self._send(sent % n, chunk)
                pending.append(sent % n)
                sent += 1
            if not pending:
                break
            yield self._receive(pending.popleft())
        if refusal is not None:
            raise refusal

    def end(self) -> None:
        """Ends all processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(_END_S)
            if process.exitcode is None:
                process.kill()
                process.join()

    def _send(self, i: int, chunk: Chunk) -> None:
        try:
            self._pipes[i].send(chunk)
        except (BrokenPipeError, ConnectionResetError):
            raise self._lost(i) from None

    def _receive(self, i: int) -> ChunkResult:
        try:
            result: ChunkResult = self._pipes[i].recv()
        except (EOFError, ConnectionResetError):
            raise self._lost(i) from None
        return result

    def _lost(self, i: int) -> RunFailedError:
        process = self._processes[i]
        process.join(_END_S)
        code = process.exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code and code < 0 else f"ended with exit code {code}"
        return RunFailedError(
            f"a process {how}; nothing was written; start again, with fewer --workers if memory ran out",
            origin=f"prepare-{i}",
        )


def _serve(spec: WorkSpec, pipe: Connection) -> None:
    """A process's whole life: results for chunks until the pipe is closed."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there are processes for that
    chunks: queue.Queue[Chunk | None] = queue.Queue()
    threading.Thread(target=_take_chunks, args=(pipe, chunks), daemon=True).start()
    worker = RowWorker(spec)
    while (chunk := chunks.get()) is not None:
        try:
            pipe.send(worker.work(chunk))
        except (BrokenPipeError, ConnectionResetError):
            return  # nobody waits any more


def _take_chunks(pipe: Connection, chunks: queue.Queue[Chunk | None]) -> None:
    try:
        while True:
            chunks.put(pipe.recv())
    except (EOFError, OSError):
        return  # nobody hands over any more
    finally:
        chunks.put(None)  # however this ends: nobody waits for a chunk that never comes
