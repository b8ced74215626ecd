"""One server over HTTP: a request in, the bytes of its answer out, and every way to fail as a `Fault`.

The reply is read up to a limit; redirects are not followed (they would carry the key elsewhere); no text of a server
or of the client library leaves this module without the key struck out of it.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

from draftline.data.servers.options import ApiKey
from draftline.data.servers.protocol import Fault, printable
from draftline.errors import UserError

if TYPE_CHECKING:
    import aiohttp

_CHUNK_BYTES = 1 << 16
_SHOWN = 160


def require_client() -> None:
    """Refuse to go on without the HTTP client.

    Raises:
        UserError: the extra is not installed.
    """
    try:
        import aiohttp  # noqa: F401
    except ImportError:
        raise UserError("asking servers needs `aiohttp`", mend="pip install 'draftline[servers]'") from None


def new_session(key: ApiKey | None, concurrency: int) -> aiohttp.ClientSession:
    """A session for all servers of a run; close it. To be called in a running event loop."""
    import aiohttp

    headers = {"User-Agent": "draftline", "Accept": "application/json"}
    if key is not None:
        headers["Authorization"] = f"Bearer {key.value}"
    # Room beyond the requests under way, so that a probe never waits for them.
    connector = aiohttp.TCPConnector(limit=concurrency + 32)
    return aiohttp.ClientSession(connector=connector, headers=headers, cookie_jar=aiohttp.DummyCookieJar())


class ServerClient:
    """Requests to one server.

    Args:
        session: shared by all servers.
        url: base address, as `base_url` gives it.
        key: to be struck out of texts.
        most_bytes: longest reply that is read.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str, key: ApiKey | None, *, most_bytes: int) -> None:
        self.url = url
        self._session, self._key, self._most_bytes = session, key, most_bytes

    async def models(self, timeout_s: float) -> bytes:
        """The list of models served.

        Raises:
            Fault: no such list.
        """
        return await self._ask("GET", "/models", None, timeout_s)

    async def answer(self, path: str, body: Mapping[str, Any], timeout_s: float) -> bytes:
        """The reply to one request.

        Raises:
            Fault: no reply, or one that says no.
        """
        return await self._ask("POST", path, body, timeout_s)

    async def _ask(self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float) -> bytes:
        import aiohttp

        limits = aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(10.0, timeout_s))
        data = None if body is None else json.dumps(body, ensure_ascii=False).encode()
        headers = None if body is None else {"Content-Type": "application/json"}
        try:
            async with self._session.request(
                method, self.url + path, data=data, headers=headers, timeout=limits, allow_redirects=False
            ) as response:
                content = await self._read(response)
                if response.status != 200:
                    raise self._refusal(response.status, response.headers, content)
                return content
        except TimeoutError as error:
            if isinstance(error, aiohttp.ConnectionTimeoutError):
                raise Fault("unreachable", "no connection in time", "out", counts=False) from None
            raise Fault("timeout", f"no answer within {timeout_s:g} s", "server") from None
        except aiohttp.ClientConnectorError as error:
            raise Fault("unreachable", self._shown(str(error)), "out", counts=False) from None
        except (aiohttp.ClientError, ssl.SSLError, OSError, ValueError) as error:
            raise Fault("connection dropped", self._shown(type(error).__name__), "server") from None

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        parts, size = [], 0
        async for part in response.content.iter_chunked(_CHUNK_BYTES):
            parts.append(part)
            size += len(part)
            if size > self._most_bytes:
                raise Fault("reply too large", f"more than {self._most_bytes} bytes", "server")
        return b"".join(parts)

    def _refusal(self, status: int, headers: Mapping[str, str], content: bytes) -> Fault:
        """What follows from a status that is not 200."""
        said = self._shown(_error_text(content))
        detail = f"HTTP {status}{': ' if said else ''}{said}"
        pause = retry_after_s(headers.get("Retry-After"))
        if status == 429:
            return Fault("too many requests", detail, "busy", counts=False, retry_after_s=pause)
        if status >= 500:
            return Fault(f"HTTP {status}", said, "server", retry_after_s=pause)
        if status in (401, 403):
            return Fault("not allowed", detail, "fatal")
        if status in (400, 413, 415, 422):
            return Fault("refused by the server", detail, "refused")
        if status == 408:
            return Fault("timeout", detail, "server")
        return Fault("no such endpoint or model", detail, "fatal")

    def _shown(self, text: str) -> str:
        """The first line of a text, short, printable and without the key."""
        text = self._key.hidden_in(text) if self._key is not None else text
        line = next(iter(text.strip().splitlines()), "")
        return printable(line)[:_SHOWN]


def retry_after_s(value: str | None) -> float | None:
    """Seconds of a Retry-After header (a number, or a date), never negative; None if it says nothing."""
    if value is None:
        return None
    try:
        pause = float(value)
    except ValueError:
        try:
            pause = (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds()
        except (ValueError, TypeError):
            return None
    return max(0.0, pause) if pause < float("inf") else None


def _error_text(content: bytes) -> str:
    """The message in an error reply, in the shapes that servers use."""
    text = content[:4096].decode(errors="replace")
    try:
        said = json.loads(content)
    except (ValueError, RecursionError):
        return text
    for name in ("error", "detail", "message"):
        inner = said.get(name) if isinstance(said, dict) else None
        if isinstance(inner, dict) and isinstance(inner.get("message"), str):
            return str(inner["message"])
        if isinstance(inner, str):
            return inner
    return text
