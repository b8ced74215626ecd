"""A server of the OpenAI protocol in a thread of its own, that fails as it is told to. Answers with its own ids."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, Self

import data_kit as kit
from aiohttp import web

# What a request meets: (text of the last message, how often it was asked before here) -> name of a fault or None.
Script = Callable[[str, int], str | None]
MODEL = "tiny-target"


def always(*faults: str, on: str = "") -> Script:
    """The first requests of each prompt that contains `on` meet these faults, one after the other."""
    return lambda text, seen: faults[seen] if on in text and seen < len(faults) else None


class FakeServer:
    """Use as a context manager.

    Args:
        script: what each request meets.
        kind: `owned_by` in its list of models; `vllm` gives token ids.
        delay_s: before each answer.

    Attributes:
        bodies, headers: of every request for an answer.
        answered: how often each prompt was answered well.
        most_in_flight: most requests under way at once.
    """

    def __init__(self, script: Script | None = None, *, kind: str = "vllm", delay_s: float = 0.0) -> None:
        self.script = script or (lambda text, seen: None)
        self.kind, self.delay_s, self.model = kind, delay_s, MODEL
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.asked: Counter[str] = Counter()
        self.answered: Counter[str] = Counter()
        self.in_flight = self.most_in_flight = self.probes = 0
        self.port = 0
        self.tokenizer = kit.tokenizer_with(kit.CHATML)
        self.words = lambda text: f"yes, {text}"
        self.message: dict[str, Any] = {}
        self.finish = "stop"
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            self.stop()

    def start(self) -> None:
        """Serve, on the port it had before if it had one."""
        ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(ready)), daemon=True)
        self._thread.start()
        assert ready.wait(20)

    def stop(self) -> None:
        """Break off every connection and listen no more."""
        assert self._thread is not None
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()
        self._thread = None

    async def _serve(self, ready: threading.Event) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._answer)
        app.router.add_post("/v1/completions", self._answer)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.01, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = runner.addresses[0][1]
        ready.set()
        await self._end.wait()
        for connection in list(runner.server.connections) if runner.server else []:
            if connection.transport is not None:
                connection.transport.abort()
        await runner.cleanup()

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self.probes += 1
        self.headers.append(dict(request.headers))
        return web.json_response({"data": [{"id": self.model, "owned_by": self.kind, "max_model_len": 256}]})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        asked = body["messages"][-1]["content"] if "messages" in body else self.tokenizer.decode(body["prompt"])
        seen, self.asked[asked] = self.asked[asked], self.asked[asked] + 1
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await asyncio.sleep(self.delay_s)
            fault = self.script(asked, seen)
            if fault is not None:
                return await self._fail(fault, request, body, asked)
            self.answered[asked] += 1
            return web.json_response(self._reply(body, asked))
        finally:
            self.in_flight -= 1

    def _reply(self, body: dict[str, Any], asked: str) -> dict[str, Any]:
        text = self.words(asked)
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        ids += [self.tokenizer.eos_token_id] if self.finish != "length" else []
        prompt = body.get("prompt") or self.tokenizer.apply_chat_template(
            body["messages"], tools=body.get("tools"), add_generation_prompt=True, return_dict=False
        )
        given = {"token_ids": ids} if self.kind == "vllm" else {}
        said = (
            {"text": text} if "prompt" in body else {"message": {"role": "assistant", "content": text} | self.message}
        )
        return {
            "model": self.model,
            "choices": [{"index": 0, "finish_reason": self.finish, **said, **given}],
            "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(ids)},
            **({"prompt_token_ids": prompt} if given else {}),
        }

    async def _fail(self, fault: str, request: web.Request, body: dict[str, Any], asked: str) -> web.StreamResponse:
        reply = self._reply(body, asked)
        choice = reply["choices"][0]
        if fault == "hang":
            await asyncio.sleep(3600)
        if fault in ("drop", "half"):
            if fault == "half":
                response = web.StreamResponse(headers={"Content-Length": "100000"})
                await response.prepare(request)
                await response.write(b'{"choices": [')
            if request.transport is not None:
                request.transport.abort()
            return web.Response()
        if fault.isdigit():
            headers = {"Retry-After": "0.05"} if fault == "429" else {}
            headers |= {"Location": "/v1/models"} if fault == "307" else {}
            text = json.dumps({"error": {"message": f"no: {request.headers.get('Authorization')}\nsecond line"}})
            return web.Response(status=int(fault), text=text, headers=headers)
        if fault == "huge":
            return web.Response(body=b" " * (3 << 20))
        broken: dict[str, Any] = {
            "garbage": b'{"choices": [{"mess',
            "latin1": '{"choices": "é"}'.encode("latin-1"),
            "list": b"[1, 2]",
            "surrogate": json.dumps(reply).replace("yes", "\\ud800").encode(),
        }
        if fault in broken:
            return web.Response(body=broken[fault])
        {
            "no choices": lambda: reply.update(choices=[]),
            "no message": lambda: (choice.pop("message", None), choice.pop("text", None)),
            "number": lambda: choice["message"].update(content=3),
            "empty": lambda: (choice["message"].update(content=" "), choice.pop("token_ids", None)),
            "unfinished": lambda: choice.update(finish_reason="abort"),
            "odd end": lambda: choice.update(finish_reason=["stop"]),
            "half a character called": lambda: (
                choice.pop("token_ids", None),
                choice["message"].update(tool_calls=[{"function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}]),
            ),
            "other model": lambda: reply.update(model="another"),
            "ids too large": lambda: choice.update(token_ids=[10**6]),
            "ids of another": lambda: choice.update(token_ids=[300, 301]),
            "ids as text": lambda: choice.update(token_ids=["1"]),
            "other prompt": lambda: reply.update(prompt_token_ids=[1, 2, 3]),
            "other length": lambda: (reply.pop("prompt_token_ids", None), reply["usage"].update(prompt_tokens=3)),
        }[fault]()
        return web.json_response(reply)
