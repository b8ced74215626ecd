"""`draftline watch --web`: serves a page that follows one run.

consumes     GET requests; status.json, metrics.jsonl and events.jsonl of the run folder, which it only reads
produces     the page with its script and style, the state of the run, and its charts, both as JSON
waits for    requests; files are read in worker threads, once for all pages that are open
on failure   what cannot be read is told in the page in one line, and asked for again

On the loopback address anybody on this machine may look; elsewhere only who has the token that is printed at the start.
"""

from __future__ import annotations

import errno
import importlib.util
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftline.errors import UserError
from draftline.live.state import run_charts, run_state
from draftline.monitor.watch import read_status
from draftline.report.page import require_plotly

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK = ("127.0.0.1", "localhost")
_ANY = ("", "0.0.0.0", "::")
STATE_AGE_S, CHARTS_AGE_S = 1.0, 8.0
# Charts of a long run take seconds to read: not more than this share of the time goes into them.
MOST_READING_SHARE = 0.05
_HEADERS = {
    "cache-control": "no-store",
    # plotly writes style elements of its own, and draws pictures for downloads
    "content-security-policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
_NEEDED = ("starlette", "uvicorn", "plotly")


def serve(run: Path, *, host: str = LOOPBACK[0], port: int = 8765, say: Callable[[str], None] = print) -> None:
    """Serve until interrupted.

    Args:
        run: run folder, in progress or finished.
        host: address to listen on; other than the loopback address a token is asked for.
        port: 0 takes any free one.
        say: told the address to open.

    Raises:
        UserError: no run, a package is missing, or the address cannot be used.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"the page needs {', '.join(missing)}", where="--web", mend="pip install 'draftline[web]'")
    read_status(run)
    import uvicorn

    with open_socket(host, port) as listener:
        port = listener.getsockname()[1]
        token = None if host in LOOPBACK else secrets.token_urlsafe(24)
        app = make_app(run, token=token, cookie=f"draftline-{port}")
        named = socket.gethostname() if host in _ANY else host  # what others can open
        shown = f"[{named}]" if ":" in named else named
        say(f"http://{shown}:{port}/" + (f"?token={token}" if token else ""))
        # No access log: addresses in it would hold the token.
        config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=2)
        try:
            uvicorn.Server(config).run(sockets=[listener])
        except KeyboardInterrupt:
            return


def open_socket(host: str, port: int) -> socket.socket:
    """A listening socket.

    Raises:
        UserError: the port is in use or not allowed, or the host has no such address.
    """
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        why = "the port is in use" if error.errno == errno.EADDRINUSE else error.strerror or str(error)
        mend = "choose another --port (0 takes any free one)"
        raise UserError(f"cannot be listened on: {why}", where=f"{host}:{port}", mend=mend) from None


def make_app(run: Path, *, token: str | None = None, cookie: str = "draftline") -> Starlette:
    """The application: a handful of GET routes.

    Args:
        token: whoever asks must know it; None: only requests that name the loopback address are answered.
        cookie: where a browser keeps the token.
    """
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.routing import Route

    state = Fresh(lambda: run_state(run), STATE_AGE_S)
    charts = Fresh(lambda: run_charts(run), CHARTS_AGE_S)
    routes = [
        Route("/", _file("draftline.live", "live.html", "text/html")),
        Route("/live.js", _file("draftline.live", "live.js", "text/javascript")),
        Route("/live.css", _file("draftline.live", "live.css", "text/css")),
        Route("/page.css", _file("draftline.report", "page.css", "text/css")),
        Route("/plotly.js", _plotly),
        Route("/api/state", _answer(state)),
        Route("/api/charts", _answer(charts)),
    ]
    guards = [Middleware(Guard, token=token, cookie=cookie)]
    if token is None:  # a page of elsewhere whose name was pointed at this machine cannot read the answers
        guards.append(Middleware(TrustedHostMiddleware, allowed_hosts=list(LOOPBACK)))
    return Starlette(routes=routes, middleware=guards)


class Fresh:
    """A value that is made anew when it is asked for and too old. Thread-safe; one thread makes it, the others wait.

    Args:
        make: makes it.
        age_s: how old it may be, at least; longer where making it takes long.
    """

    def __init__(self, make: Callable[[], Any], age_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._make, self._least_age_s, self._clock = make, age_s, clock
        self._lock = threading.Lock()
        self._until_s: float | None = None
        self._text = b""

    def get(self) -> bytes:
        """As JSON."""
        with self._lock:
            began = self._clock()
            if self._until_s is None or began >= self._until_s:
                self._text = json.dumps(self._make(), separators=(",", ":"), allow_nan=False).encode()
                ended = self._clock()
                self._until_s = ended + max(self._least_age_s, (ended - began) / MOST_READING_SHARE)
            return self._text


class Guard:
    """Lets nobody in without the token, where there is one, and sets the headers of every answer."""

    def __init__(self, app: ASGIApp, *, token: str | None, cookie: str) -> None:
        self._app, self._token, self._cookie = app, token, cookie

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        from starlette.datastructures import MutableHeaders
        from starlette.requests import Request
        from starlette.responses import PlainTextResponse, RedirectResponse

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        app: ASGIApp = self._app
        if scope["type"] == "http" and self._token is not None:
            request = Request(scope)
            if self._is_token(request.query_params.get("token", "")):
                inside = RedirectResponse(request.url.path, status_code=303)  # out of the address, into the cookie
                inside.set_cookie(self._cookie, self._token, httponly=True, samesite="lax")
                app = inside
            elif not self._knows(request):
                app = PlainTextResponse("open the address that draftline watch --web printed\n", status_code=401)
        await app(scope, receive, send_with_headers)

    def _knows(self, request: Request) -> bool:
        kind, _, word = request.headers.get("authorization", "").partition(" ")
        return self._is_token(request.cookies.get(self._cookie, "")) or (
            kind.lower() == "bearer" and self._is_token(word)
        )

    def _is_token(self, word: str) -> bool:
        assert self._token is not None
        return secrets.compare_digest(word.encode(), self._token.encode())


def _file(package: str, name: str, kind: str) -> Callable[[Request], Any]:
    """A file of the package, read once."""
    content = files(package).joinpath(name).read_bytes()

    async def serve_file(_: Request) -> Any:
        from starlette.responses import Response

        return Response(content, media_type=kind)

    return serve_file


async def _plotly(_: Request) -> Any:
    """The library that draws, from its package."""
    from starlette.responses import FileResponse

    return FileResponse(require_plotly(), media_type="text/javascript")


def _answer(fresh: Fresh) -> Callable[[Request], Any]:
    async def answer(_: Request) -> Any:
        from starlette.concurrency import run_in_threadpool
        from starlette.responses import Response

        return Response(await run_in_threadpool(fresh.get), media_type="application/json")

    return answer
