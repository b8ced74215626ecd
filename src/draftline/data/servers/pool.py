"""Which server takes the next request: bounded, the least busy first, none that is out.

Consumes faults and answers of the requests; gives out servers. `acquire` waits until a server is free and is woken by
`release`, by the end of a pause, and by a server that comes back. A server is taken out when it fails several times in
a row (or cannot be reached), and looked at again after a growing, jittered pause by a task of its own; it comes back
when it lists the target's model. Failures of requests that were under way when it was taken out are the same outage
and count no further. The watch ends the run when no answer has come for too long. One event loop: no locks.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from draftline.data.servers.client import ServerClient
from draftline.data.servers.options import ServerOptions
from draftline.data.servers.protocol import Fault, ServedModel, read_models
from draftline.errors import DraftlineError, UserError

STRIKES = 3


@dataclass(slots=True, eq=False)
class Server:
    """A server and how it does.

    Attributes:
        model: what it serves, once it has told.
        is_out: gets no requests.
        in_flight: requests under way.
        strikes: failures in a row since the last answer.
        outages: times taken out since the last answer.
        era: counts up each time it is taken out.
        rest_until: event-loop time before which it asked to be left alone.
        n_answers, n_faults, n_outages: totals; only answers that became rows count.
    """

    client: ServerClient
    model: ServedModel | None = None
    is_out: bool = False
    in_flight: int = 0
    strikes: int = 0
    outages: int = 0
    era: int = 0
    rest_until: float = 0.0
    n_answers: int = 0
    n_faults: int = 0
    n_outages: int = 0
    pauses: int = 0

    @property
    def url(self) -> str:
        """Its address."""
        return self.client.url


class ServerPool:
    """The servers of a run. Use within one event loop: `open`, then `acquire`/`release`, with `watch` beside them.

    Args:
        clients: one a server.
        options: bounds and patience.
        wanted: the name that the target is served by.
        tell: takes one line for people when a server goes out or comes back.
    """

    def __init__(
        self, clients: list[ServerClient], options: ServerOptions, wanted: str, tell: Callable[[str], None]
    ) -> None:
        self.servers = [Server(client) for client in clients]
        self._options, self._wanted, self._tell = options, wanted, tell
        self._waiting: list[asyncio.Future[None]] = []
        self._recoveries: set[asyncio.Task[None]] = set()
        self._since = 0.0
        self._last_fault = "nothing was heard"

    async def open(self) -> None:
        """Ask every server what it serves. Those that do not answer are out, and looked at again.

        Raises:
            UserError: one serves another model or refuses us, or none answers.
        """
        faults = await asyncio.gather(*(self._probe(server) for server in self.servers))
        self._since = _now()
        for server, fault in zip(self.servers, faults, strict=True):
            if fault is not None and fault.blame == "fatal":
                raise UserError(str(fault), where=server.url, mend=_mend(fault))
        if all(faults):
            first = next(fault for fault in faults if fault is not None)
            raise UserError(str(first), where=self.servers[0].url, mend="start the server, or mend --server")
        for server, fault in zip(self.servers, faults, strict=True):
            if fault is not None:
                self._take_out(server, fault)

    async def acquire(self, failures: Mapping[Server, int]) -> Server:
        """The least busy server that may take a request now; waits for one. To be given back by `release`.

        Args:
            failures: how often each server failed this prompt. Those that failed it least are waited for: one that
                lists its model but hangs must not use up the tries of a prompt that another server can answer.
        """
        while (server := self._free(failures)) is None:
            changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(changed)
            await changed
        server.in_flight += 1
        return server

    def release(self, server: Server) -> None:
        """Give a server back after a request."""
        server.in_flight -= 1
        self._wake()

    def answered(self, server: Server) -> None:
        """A reply came that has an answer's form; what is in it is still to be proven."""
        server.strikes = server.outages = server.pauses = 0
        self._since = _now()

    def failed(self, server: Server, fault: Fault, era: int) -> None:
        """A request failed.

        Args:
            era: the server's era when the request was sent.
        """
        server.n_faults += 1
        self._last_fault = f"{server.url}: {fault}"
        if era != server.era or fault.blame in ("answer", "refused"):
            return
        if fault.blame == "busy":
            server.pauses += 1
            self._rest(server, self._pause(server.pauses, fault))
            return
        server.strikes += 1
        if fault.retry_after_s is not None:
            self._rest(server, self._pause(server.strikes, fault))
        if fault.blame in ("out", "fatal") or server.strikes >= STRIKES:
            self._take_out(server, fault)

    async def watch(self) -> None:
        """Runs until nothing has come of the servers for too long: no answer, and none of them went out or came back.

        Raises:
            DraftlineError: then, with the last thing heard.
        """
        while True:
            patience = self._options.patience_s
            if not all(server.is_out for server in self.servers):
                patience += self._options.timeout_s
            left = self._since + patience - _now()
            if left <= 0:
                raise DraftlineError(
                    f"no server has answered for {patience:g} s (last: {self._last_fault}); "
                    "the answers so far are kept, start again to go on"
                )
            await asyncio.sleep(min(left, max(0.05, self._options.patience_s / 4)))

    async def close(self) -> None:
        """End the tasks that look at servers."""
        for task in self._recoveries:
            task.cancel()
        await asyncio.gather(*self._recoveries, return_exceptions=True)

    def _free(self, failures: Mapping[Server, int]) -> Server | None:
        now = _now()
        ready = [server for server in self.servers if not server.is_out and server.rest_until <= now]
        fewest = min((failures.get(server, 0) for server in ready), default=0)
        free = [
            server
            for server in ready
            if failures.get(server, 0) == fewest and server.in_flight < self._options.most_at_one
        ]
        return min(free, key=lambda server: (server.in_flight, random.random())) if free else None

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for changed in waiting:
            if not changed.done():
                changed.set_result(None)

    def _pause(self, failures: int, fault: Fault) -> float:
        """The pause asked for (at most the patience), or a growing one; jittered, so that not all come at once."""
        if fault.retry_after_s is not None:
            return min(fault.retry_after_s, self._options.patience_s) * random.uniform(1.0, 1.1)
        return self._options.backoff.after(failures) * random.uniform(0.5, 1.0)

    def _rest(self, server: Server, pause_s: float) -> None:
        server.rest_until = max(server.rest_until, _now() + pause_s)
        asyncio.get_running_loop().call_later(pause_s + 0.001, self._wake)

    def _take_out(self, server: Server, fault: Fault) -> None:
        server.is_out = True
        self._since = _now()
        server.era += 1
        server.outages += 1
        server.n_outages += 1
        self._last_fault = f"{server.url}: {fault}"
        self._tell(f"{server.url} is out: {fault}")
        task = asyncio.get_running_loop().create_task(self._recover(server))
        self._recoveries.add(task)
        task.add_done_callback(self._recoveries.discard)

    async def _recover(self, server: Server) -> None:
        """Look at a server again and again, until it serves the target's model."""
        looks = server.outages
        fault: Fault | None = Fault("unreachable", "", "out")
        while fault is not None:
            await asyncio.sleep(self._pause(looks, fault))
            fault = await self._probe(server)
            looks += 1
            if fault is not None:
                self._last_fault = f"{server.url}: {fault}"
        server.is_out, server.strikes = False, 0
        self._since = _now()
        self._tell(f"{server.url} is back")
        self._wake()

    async def _probe(self, server: Server) -> Fault | None:
        """Ask what it serves; the fault, if that is not the target."""
        try:
            listed = await server.client.models(self._options.probe_timeout_s)
            server.model = read_models(listed, self._wanted, self._options.kind)
        except Fault as fault:
            return fault
        return None


def _mend(fault: Fault) -> str:
    if fault.reason == "another model":
        return "name the target as the server does with --model, or start the server with the target"
    if fault.reason == "not allowed":
        return "name the environment variable that holds the key with --api-key-env"
    return "give the base address of an OpenAI-compatible server, for example http://localhost:8000/v1"


def _now() -> float:
    return asyncio.get_running_loop().time()
