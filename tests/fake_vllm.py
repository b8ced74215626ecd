"""A stand-in for a vLLM server that extracts hidden states: the HTTP answers and the locked files of the real one.

It speaks what speculators' own client and `hs-connectors`' own FileTransfer expect (tests/interop checks that), and
computes with a real tiny model. A real vLLM was never run by these tests.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from draftline.target.load import LoadedTarget

LOCK_S = 0.02  # how long the file stays locked after the answer
_ONE_AT_A_TIME = threading.Lock()  # hooks of one forward must not see another's


def captured_layers(target: LoadedTarget, token_ids: Sequence[int], aux_ids: Sequence[int]) -> tuple[Any, Any]:
    """(states [T, L, H] as vLLM captures them, the last one BEFORE the final norm; logits of the last position).

    Id i is what layer i - 1 puts out, 0 what goes into the first; nothing here asks transformers for hidden states.
    """
    seen: dict[int, torch.Tensor] = {}

    def keep(number: int, output: Any) -> None:
        seen[number] = output[0] if isinstance(output, tuple) else output

    with _ONE_AT_A_TIME:
        hooks = [
            layer.register_forward_hook(lambda _m, _a, output, n=n + 1: keep(n, output))
            for n, layer in enumerate(target.layers)
        ]
        hooks.append(target.layers[0].register_forward_pre_hook(lambda _m, args: keep(0, args[0])))
        try:
            with torch.no_grad():
                output = target.model(torch.tensor([list(token_ids)]), use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
    return torch.stack([seen[i][0] for i in aux_ids], dim=1), output.logits[0, -1]


@dataclass
class FakeVllm:
    """What the server does; change `fault` while it runs.

    Attributes:
        fault: None, or one of: other tokens, prefix cache, post norm, early, busy, lost file, nan.
        requests: token ids that were asked for.
    """

    target: LoadedTarget
    aux_ids: tuple[int, ...]
    folder: Path
    fault: str | None = None
    fail_first: int = 0
    requests: list[list[int]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        ids = body["prompt"]
        with self.lock:
            self.requests.append(ids)
            number = len(self.requests)
            aux_ids = tuple(max(0, i - 1) for i in self.aux_ids) if self.fault == "early" else self.aux_ids
            hidden_TLH, logits_V = captured_layers(self.target, ids, aux_ids)
        if self.fault == "post norm":
            assert self.target.final_norm is not None
            hidden_TLH[:, -1] = self.target.final_norm(hidden_TLH[:, -1])
        if self.fault == "nan":
            hidden_TLH[0, 0, 0] = torch.nan
        path = self.folder / f"request-{number}.safetensors"
        kept = hidden_TLH[4:] if self.fault == "prefix cache" else hidden_TLH
        self._write(path, {"hidden_states": kept.contiguous(), "token_ids": torch.tensor(ids)})
        if self.fault == "lost file":
            path.unlink()
        token = int(logits_V.argmax())
        return {
            "choices": [
                {
                    "prompt_token_ids": [0, *ids[1:]] if self.fault == "other tokens" else ids,
                    "token_ids": [token],
                    "logprobs": {"token_logprobs": [float(logits_V.log_softmax(-1)[token])]},
                    "text": "",
                    "index": 0,
                    "finish_reason": "length",
                }
            ],
            "id": f"cmpl-{number}",
            "object": "text_completion",
            "created": 0,
            "model": "tiny",
            "kv_transfer_params": {"hidden_states_path": str(path)},
        }

    def _write(self, path: Path, tensors: dict[str, torch.Tensor]) -> None:
        """Answers before the file is there, under a lock that is let go once it is."""
        descriptor = os.open(f"{path}.lock", os.O_CREAT | os.O_RDWR)
        fcntl.flock(descriptor, fcntl.LOCK_EX)

        def finish() -> None:
            save_file(tensors, path)
            os.close(descriptor)

        if self.fault == "lost file":
            finish()
            Path(f"{path}.lock").unlink()
            return
        threading.Timer(LOCK_S, finish).start()


@contextmanager
def serve(fake: FakeVllm) -> Iterator[str]:
    """Runs the server on a free port; gives its endpoint."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(200, {"object": "list", "data": [{"id": "tiny", "object": "model"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if fake.fault == "busy" or fake.fail_first > 0:
                fake.fail_first -= 1
                self._answer(503, {"error": "busy"})
                return
            self._answer(200, fake.complete(body))

        def _answer(self, code: int, content: dict[str, Any]) -> None:
            data = json.dumps(content).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
