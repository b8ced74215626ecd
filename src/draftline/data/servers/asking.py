"""Puts every prompt to the servers until it is answered or rejected, once.

    prompts (one at a time) ─> N askers ─> pool of servers ─> answer, verified ─> outbox ─> log, fsync a batch

Each asker takes the next prompt, waits for a server (woken by the pool), asks, and hands the row to the outbox; the
next prompt is rendered only then, so memory holds at most N prompts and what arrived in the last tenth of a second.
The outbox wakes when something arrives and writes what has gathered. The first error, or a signal, cancels all askers;
what had arrived by then is written before the run ends.
"""

from __future__ import annotations

import asyncio
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from draftline.data.answer_log import AnswerLog
from draftline.data.conversations import Conversation
from draftline.data.sampling import Prompt
from draftline.data.servers.client import ServerClient, new_session
from draftline.data.servers.options import ServerOptions
from draftline.data.servers.pool import Server, ServerPool
from draftline.data.servers.protocol import Asking, Fault, ServedAnswer, read_answer
from draftline.data.servers.verify import AnswerVerifier
from draftline.errors import RunStoppedError, UserError

FLUSH_S = 0.1
HOPELESS = 64  # prompts rejected before the first answer, after which asking on is a waste
_PATHS = {"chat": "/chat/completions", "completions": "/completions"}
_BYTES_BASE, _BYTES_A_TOKEN = 1 << 20, 4096


@dataclass(frozen=True, slots=True)
class Listener:
    """Who is told.

    Attributes:
        on_open: called once the servers have told what they serve, before the first prompt is taken.
        advance: takes how many prompts were settled.
        tell: takes a line for people.
    """

    on_open: Callable[[ServerPool], None]
    advance: Callable[[int], None]
    tell: Callable[[str], None]


class Outbox:
    """Rows and rejects on their way to the log.

    Args:
        log: where they are written.
        advance: told how many prompts were settled.
    """

    def __init__(self, log: AnswerLog, advance: Callable[[int], None]) -> None:
        self._log, self._advance = log, advance
        self._rows: list[dict[str, Any]] = []
        self._rejects: list[tuple[str, str]] = []
        self._arrived = asyncio.Event()

    def answer(self, row: dict[str, Any]) -> None:
        """Hand over an answer to be written."""
        self._rows.append(row)
        self._arrived.set()

    def reject(self, name: str, reason: str) -> None:
        """Hand over a rejected prompt, with the reason, to be written."""
        self._rejects.append((name, reason))
        self._arrived.set()

    @property
    def has_answers(self) -> bool:
        """Whether any prompt of this file was ever answered."""
        return bool(self._log.answered)

    async def run(self) -> None:
        """Write what gathers, until cancelled. A write blocks the loop: one fsync for all that came meanwhile."""
        while True:
            await self._arrived.wait()
            await asyncio.sleep(FLUSH_S)
            self.flush()

    def flush(self) -> None:
        """Write what is here now."""
        rows, self._rows = self._rows, []
        rejects, self._rejects = self._rejects, []
        self._arrived.clear()
        if rows or rejects:
            self._log.append(rows, rejects)
            self._advance(len(rows) + len(rejects))


@dataclass(slots=True)
class AskingReport:
    """What the servers did in this run.

    Attributes:
        new_tokens: tokens generated, as far as the servers count them.
        retokenized: how often our tokenizer gave the answer again, by verdict.
        servers: what each did, for the manifest.
        first_reject: the first prompt that was rejected, and why.
    """

    new_tokens: int = 0
    n_answers: int = 0
    n_rejects: int = 0
    retokenized: dict[str, int] = field(default_factory=dict)
    servers: list[dict[str, Any]] = field(default_factory=list)
    first_reject: str | None = None

    def count(self, row: dict[str, Any]) -> None:
        """Count one answer: its tokens, and what tokenizing it again gave."""
        self.n_answers += 1
        self.new_tokens += row["answer_tokens"] or 0
        verdict = row["retokenized"] or "unknown"
        self.retokenized[verdict] = self.retokenized.get(verdict, 0) + 1


class Askers:
    """The work of one run inside the event loop.

    Args:
        pool: open servers.
        prompts: what is left to ask, one at a time.
        asking: what is the same in every request.
        verifier: makes rows of answers.
        outbox: takes them.
    """

    def __init__(
        self,
        pool: ServerPool,
        prompts: Iterator[tuple[Conversation, Prompt]],
        asking: Asking,
        verifier: AnswerVerifier,
        outbox: Outbox,
        options: ServerOptions,
    ) -> None:
        self._pool, self._prompts, self._asking = pool, prompts, asking
        self._verifier, self._outbox, self._options = verifier, outbox, options
        self._vocab_size = verifier.vocab_size
        self.report = AskingReport()

    async def run(self) -> None:
        """Settle every prompt.

        Raises:
            UserError: nothing will work as it was asked.
            DraftlineError: the servers are gone.
        """
        helpers = [asyncio.ensure_future(self._outbox.run()), asyncio.ensure_future(self._pool.watch())]
        askers = [asyncio.ensure_future(self._ask_on()) for _ in range(self._options.concurrency)]
        try:
            left = set(askers)
            while left:
                done, _ = await asyncio.wait({*left, *helpers}, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                left -= done
        finally:
            for task in (*askers, *helpers):
                task.cancel()
            await asyncio.gather(*askers, *helpers, return_exceptions=True)
            self._outbox.flush()
            self.report.servers = [_told(server) for server in self._pool.servers]

    async def _ask_on(self) -> None:
        for conversation, prompt in self._prompts:
            await self._settle(conversation, prompt)

    async def _settle(self, conversation: Conversation, prompt: Prompt) -> None:
        """Ask until there is an answer, or the tries are used up."""
        failures: Counter[Server] = Counter()
        variation = 0
        while fault := await self._try_once(conversation, prompt, variation, failures):
            tries = failures.total()
            variation += fault.blame == "answer"
            if fault.blame == "refused" or tries >= self._options.tries:
                self._reject(prompt, fault)
                return
            if fault.counts:  # for the others, it is the server that pauses
                await asyncio.sleep(self._options.backoff.after(tries) * random.uniform(0.5, 1.0))

    async def _try_once(
        self, conversation: Conversation, prompt: Prompt, variation: int, failures: Counter[Server]
    ) -> Fault | None:
        """Ask once. None: it is answered, and the row is on its way.

        Args:
            failures: the prompt's tries so far, by server; a fault that counts is added.

        Raises:
            UserError: nothing will work as it was asked.
        """
        server = await self._pool.acquire(failures)
        era = server.era
        try:
            row = await self._ask(server, conversation, prompt, variation)
        except Fault as fault:
            if fault.blame == "fatal" and not server.n_answers:  # one that did answer may come to its senses
                raise UserError(str(fault), where=server.url, mend="mend the server or the options") from None
            self._pool.failed(server, fault, era)
            failures[server] += fault.counts
            return fault
        finally:
            self._pool.release(server)
        server.n_answers += 1
        self.report.count(row)
        self._outbox.answer(row)
        return None

    async def _ask(self, server: Server, conversation: Conversation, prompt: Prompt, variation: int) -> dict[str, Any]:
        model, options = server.model, self._options
        assert model is not None
        body = self._asking.body(model, prompt, conversation.messages, conversation.tools, variation)
        reply = await server.client.answer(_PATHS[options.endpoint], body, options.timeout_s)
        answer: ServedAnswer = read_answer(reply, model, vocab_size=self._vocab_size)
        self._pool.answered(server)
        return self._verifier.row(conversation, prompt, answer)

    def _reject(self, prompt: Prompt, fault: Fault) -> None:
        report = self.report
        report.n_rejects += 1
        report.first_reject = report.first_reject or f"{prompt.id}: {fault}"
        self._outbox.reject(prompt.id, fault.reason)
        if report.n_rejects >= HOPELESS and not report.n_answers and not self._outbox.has_answers:
            raise UserError(
                f"the first {HOPELESS} prompts were all rejected; first {report.first_reject}",
                mend="mend that and start again",
            )


def ask_servers(
    log: AnswerLog,
    prompts: Iterator[tuple[Conversation, Prompt]],
    asking: Asking,
    verifier: AnswerVerifier,
    options: ServerOptions,
    *,
    model: str,
    listener: Listener,
) -> AskingReport:
    """Settle every prompt, in an event loop of its own.

    Args:
        model: the name that the servers know the target by.
        listener: see there.

    Raises:
        UserError: wrong servers, or nothing will work as it was asked.
        DraftlineError: the servers are gone for too long.
        RunStoppedError: SIGINT or SIGTERM; what had arrived is written.
    """
    received: list[int] = []

    async def main() -> AskingReport:
        with _cancelled_by_signals(received):
            async with new_session(options.api_key, options.concurrency) as session:
                most_bytes = _BYTES_BASE + _BYTES_A_TOKEN * asking.max_new_tokens
                clients = [ServerClient(session, u, options.api_key, most_bytes=most_bytes) for u in options.urls]
                pool = ServerPool(clients, options, model, listener.tell)
                try:
                    await pool.open()
                    listener.on_open(pool)
                    askers = Askers(pool, prompts, asking, verifier, Outbox(log, listener.advance), options)
                    await askers.run()
                    return askers.report
                finally:
                    await pool.close()

    try:
        return asyncio.run(main())
    except asyncio.CancelledError:
        number = received[0] if received else signal.SIGINT
        raise RunStoppedError(
            f"stopped by {signal.Signals(number).name}; {len(log.answered)} answers are kept, start again to go on",
            signal_number=number,
        ) from None


@contextmanager
def _cancelled_by_signals(received: list[int]) -> Iterator[None]:
    """The first SIGINT or SIGTERM cancels the current task; the second ends the process at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}

    def stop(number: int) -> None:
        received.append(number)
        for each in numbers:
            loop.remove_signal_handler(each)
            signal.signal(each, signal.SIG_DFL)
        task.cancel()

    for number in numbers:
        loop.add_signal_handler(number, stop, number)
    try:
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)


def _told(server: Server) -> dict[str, Any]:
    """What the manifest says of a server."""
    model = server.model
    return {
        "url": server.url,
        "model": model.name if model else None,
        "kind": model.kind if model else None,
        "answers": server.n_answers,
        "faults": server.n_faults,
        "outages": server.n_outages,
    }
