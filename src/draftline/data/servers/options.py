"""Which servers answer, and how patient we are with them. Checked before anything is asked; imports no client."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

from draftline.errors import UserError

ServerKind = Literal["auto", "vllm", "sglang", "llama.cpp", "transformers", "openai"]
Endpoint = Literal["chat", "completions"]
# Fields that decide what is answered, or that the answers are checked by.
_OWN_FIELDS = frozenset({"model", "messages", "prompt", "max_tokens", "n", "stream", "seed", "tools"})
# Of requests, tries and seconds: beyond it (and with nan) timers cannot count.
_MOST = 1_000_000


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key that no log, dump or error text shows: only `value` does."""

    value: str = field(repr=False)

    def __str__(self) -> str:
        return "***"

    def hidden_in(self, text: str) -> str:
        """`text` without the key."""
        return text.replace(self.value, "***")


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pauses that double from `first_s` up to `most_s` seconds."""

    first_s: float = 0.5
    most_s: float = 30.0

    def after(self, failures: int) -> float:
        """Longest pause after so many failures in a row, in seconds."""
        return float(min(self.most_s, self.first_s * 2.0 ** min(max(failures - 1, 0), 30)))


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """How prompts are put to servers.

    Attributes:
        urls: base addresses; without a path, `/v1` is added.
        model: the name that the servers know the target by; None: as the target is named.
        concurrency: requests under way at once, over all servers.
        per_server: the same at one server; None: an equal share of `concurrency`.
        kind: what the servers are, which decides the fields asked beyond OpenAI's; `auto`: from their list of models.
        endpoint: `chat` lets the server render the conversation, `completions` sends the rendered token ids.
        timeout_s: longest wait for one answer.
        tries: how often a prompt is put to a server before it is rejected.
        patience_s: how long all servers may be out before the run gives up.
        extra_body: further fields of each request.
    """

    urls: tuple[str, ...]
    api_key: ApiKey | None = None
    model: str | None = None
    concurrency: int = 64
    per_server: int | None = None
    kind: ServerKind = "auto"
    endpoint: Endpoint = "chat"
    timeout_s: float = 600.0
    tries: int = 5
    patience_s: float = 300.0
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    backoff: Backoff = field(default_factory=Backoff)
    probe_timeout_s: float = 10.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "urls", tuple(base_url(url) for url in self.urls))
        if not self.urls:
            raise UserError("no server is named", mend="pass --server URL")
        if len(set(self.urls)) < len(self.urls):
            raise UserError("a server is named twice", where="--server", mend="name each once")
        if self.kind not in get_args(ServerKind):
            raise UserError(
                f"unknown kind {self.kind!r}", where="--server-kind", mend=f"use {', '.join(get_args(ServerKind))}"
            )
        if self.endpoint not in get_args(Endpoint):
            raise UserError(f"unknown endpoint {self.endpoint!r}", where="--endpoint", mend="use chat or completions")
        for name in ("concurrency", "per_server", "timeout_s", "tries", "patience_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= _MOST:
                raise UserError(f"{name} is {value}", mend=f"set it above 0 and at most {_MOST}")
        own = sorted(_OWN_FIELDS & self.extra_body.keys())
        if own:
            raise UserError(f"`{own[0]}` is set by draftline itself", where="--extra-body", mend="leave it out")

    @property
    def most_at_one(self) -> int:
        """Requests under way at one server at once."""
        return self.per_server or -(-self.concurrency // len(self.urls))


def base_url(url: str) -> str:
    """The address that `/chat/completions` is put behind.

    Raises:
        UserError: no http(s) address, or one that holds a name, a password or a query (they would be seen in logs).
    """
    try:
        parts = urlsplit(url.strip())
        _ = parts.port
    except ValueError:
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError("not an http address", where="--server", mend="write for example http://localhost:8000")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise UserError(
            f"the address of {parts.hostname} holds more than a place",
            where="--server",
            mend="keep names, passwords and queries out of it; a key goes through --api-key-env",
        )
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/') or '/v1'}"


def key_from_environment(name: str | None) -> ApiKey | None:
    """The API key in the environment variable `name`.

    Raises:
        UserError: the variable is unset, or holds what no header can carry.
    """
    if name is None:
        return None
    key = os.environ.get(name, "").strip()
    if not key:
        raise UserError(
            "the environment variable is not set", where=f"--api-key-env {name}", mend="export the key in it"
        )
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise UserError("holds characters that no key has", where=f"--api-key-env {name}", mend="export the bare key")
    return ApiKey(key)


def parse_extra_body(text: str | None) -> dict[str, Any]:
    """The JSON object of `--extra-body`.

    Raises:
        UserError: something else.
    """
    try:
        body = json.loads(text) if text else {}
    except ValueError as error:
        raise UserError(f"not JSON ({error})", where="--extra-body", mend="write an object") from None
    if not isinstance(body, dict):
        raise UserError("not a JSON object", where="--extra-body", mend="write for example '{\"min_p\": 0}'")
    return body


def server_options(
    urls: Sequence[str] | None, *, api_key_env: str | None, model: str | None, extra_body: str | None, **rest: Any
) -> ServerOptions | None:
    """Options as the command line spells them; None without a server.

    Raises:
        UserError: a wrong option, or one that is for servers where none is named.
    """
    if urls:
        key, body = key_from_environment(api_key_env), parse_extra_body(extra_body)
        return ServerOptions(tuple(urls), api_key=key, model=model, extra_body=body, **rest)
    if model or api_key_env or extra_body:
        raise UserError("--model, --api-key-env and --extra-body are for servers", mend="name one with --server")
    return None
