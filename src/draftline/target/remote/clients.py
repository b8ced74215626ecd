"""Where captured states come from: a running vLLM, or files that `speculators` wrote.

The protocol is that of vLLM's hidden-state extraction with `hs-connectors` on both sides: a completion of one token
answers with the place of a safetensors file, `hidden_states` [T, L, H] and `token_ids` [T]. Thread-safe.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from draftline.config.sections import FilesBackend, VllmBackend
from draftline.errors import RunFailedError, UserError

_SCALES = "hidden_states_scales"
_BACKOFF_S = 0.5
# What an answer or a file of a server can do to its reader; each is worth another try.
_FAILURES = (OSError, ValueError, LookupError, TypeError, RecursionError, SafetensorError, HTTPException)


@dataclass(frozen=True, slots=True)
class CapturedStates:
    """What one request gave.

    Attributes:
        hidden_TLH: one layer for each capture id, in their order.
        next_token, next_logprob: what the server itself writes next, greedily; None from files.
    """

    hidden_TLH: torch.Tensor
    next_token: int | None = None
    next_logprob: float | None = None


class StatesClient(Protocol):
    """Gives the states of a sequence of token ids."""

    origin: str

    def fetch(self, token_ids: Sequence[int]) -> CapturedStates:
        """Raises RunFailedError: not there, or not of these tokens."""
        ...


class FilesClient:
    """`hs_N.safetensors` as speculators' offline data generation writes them, found by their token ids.

    Args:
        folder: searched once, when it is opened; only token ids are read then.

    Raises:
        UserError: no such files, or one that is none.
    """

    def __init__(self, folder: Path) -> None:
        self.origin = f"states in {folder}"
        self._files: dict[str, Path] = {}
        for file in sorted(folder.glob("hs_*.safetensors")) if folder.is_dir() else ():
            try:
                with safe_open(file, framework="pt") as handle:
                    self._files[_digest(handle.get_tensor("token_ids").tolist())] = file
            except (SafetensorError, OSError, ValueError, TypeError) as error:
                raise UserError(f"broken file ({error})", where=str(file), mend="capture it again") from error
        if not self._files:
            raise UserError(
                "holds no hs_*.safetensors", where=str(folder), mend="give speculators' hidden_states folder"
            )

    def __len__(self) -> int:
        return len(self._files)

    def fetch(self, token_ids: Sequence[int]) -> CapturedStates:
        """See StatesClient."""
        file = self._files.get(_digest(token_ids))
        if file is None:
            raise RunFailedError(f"no file holds these {len(token_ids)} tokens", origin=self.origin)
        try:
            return CapturedStates(_checked(load_file(file), token_ids, self.origin))
        except (SafetensorError, OSError, ValueError) as error:
            raise RunFailedError(f"{file.name} cannot be read ({error})", origin=self.origin) from error


class VllmClient:
    """A vLLM server that was started to extract hidden states into a folder that is seen here too.

    Args:
        backend: where it listens, and how long to wait.

    Raises:
        UserError: hs-connectors is missing, or the server does not answer.
    """

    def __init__(self, backend: VllmBackend) -> None:
        self._backend, self.origin = backend, f"vLLM at {backend.endpoint}"
        if importlib.util.find_spec("hs_connectors") is None:
            mend = "pip install 'draftline[capture]'"
            raise UserError("hs-connectors is not installed", where="target.backend vllm", mend=mend)
        from hs_connectors import FileTransfer

        self._transfer = FileTransfer(Path("."))
        self._model = self._served_model()

    def fetch(self, token_ids: Sequence[int]) -> CapturedStates:
        """See StatesClient. A request that fails is repeated, later each time, `max_retries` times."""
        for attempt in range(self._backend.max_retries + 1):
            try:
                return self._fetch_once(token_ids)
            except _FAILURES as error:
                failure = error
                time.sleep(min(30.0, _BACKOFF_S * 2**attempt) if attempt < self._backend.max_retries else 0.0)
        reason = f"{len(token_ids)} tokens, {self._backend.max_retries + 1} tries: {type(failure).__name__}: {failure}"
        raise RunFailedError(reason, origin=self.origin)

    def _fetch_once(self, token_ids: Sequence[int]) -> CapturedStates:
        answer = self._post(
            "completions",
            {
                "model": self._model,
                "prompt": list(token_ids),
                "max_tokens": 1,
                "temperature": 0.0,
                "logprobs": 1,
                "return_token_ids": True,
            },
        )
        choice, place = answer["choices"][0], answer["kv_transfer_params"]
        if not isinstance(choice, dict) or not isinstance(place, dict):
            raise ValueError("the answer is not one of hidden-state extraction")
        if choice.get("prompt_token_ids") != list(token_ids):
            raise RunFailedError("the server answered for other tokens than were sent", origin=self.origin)
        handle = place.get("hidden_states_path") or place.get("handle")
        if not str(handle).endswith(".safetensors"):  # it is deleted when it has been read
            raise ValueError(f"the server named {handle!r}, which is no safetensors file")
        states = self._transfer.get_generated(place)
        if states is None:
            raise ValueError(f"the server named {place}, where nothing is: is that folder shared with this machine?")
        hidden_TLH = _checked(states, token_ids, self.origin)
        self._transfer.delete(str(handle))
        token, logprob = _next(choice)
        return CapturedStates(hidden_TLH, token, logprob)

    def _served_model(self) -> str:
        try:
            with urllib.request.urlopen(f"{self._backend.endpoint}/models", timeout=self._backend.timeout_s) as reply:
                return str(json.load(reply)["data"][0]["id"])
        except (OSError, ValueError, LookupError, TypeError, RecursionError, HTTPException) as error:
            raise UserError(
                f"does not answer ({type(error).__name__}: {error})",
                where=f"target.backend.endpoint {self._backend.endpoint}",
                mend="start the server (docs/states.md), or mend the address",
            ) from error

    def _post(self, what: str, body: Mapping[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            f"{self._backend.endpoint}/{what}",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=self._backend.timeout_s) as reply:
            content = json.load(reply)
        if not isinstance(content, dict):
            raise ValueError("the answer is no object")
        return content


def open_client(backend: VllmBackend | FilesBackend) -> StatesClient:
    """The client of a configured backend."""
    if isinstance(backend, FilesBackend):
        return FilesClient(backend.path.expanduser())
    return VllmClient(backend)


def _next(choice: Mapping[str, Any]) -> tuple[int | None, float | None]:
    """What the server wrote next, where it says so."""
    told = choice.get("logprobs")
    ids, logprobs = choice.get("token_ids"), told.get("token_logprobs") if isinstance(told, dict) else None
    token = ids[0] if isinstance(ids, list) and ids else None
    logprob = logprobs[0] if isinstance(logprobs, list) and logprobs else None
    if not isinstance(token, int) or not isinstance(logprob, int | float) or token < 0:
        return None, None
    return token, float(logprob)


def _checked(states: Mapping[str, torch.Tensor], token_ids: Sequence[int], origin: str) -> torch.Tensor:
    """The states of a payload, expanded from fp8 where they are.

    Raises:
        RunFailedError: of other tokens, or of another length than the tokens (a prefix cache, for one).
    """
    if "token_ids" not in states or "hidden_states" not in states:
        raise RunFailedError(f"a payload holds {sorted(states)}", origin=origin)
    hidden = states["hidden_states"]
    if states["token_ids"].tolist() != list(token_ids):
        raise RunFailedError("states of other tokens than were asked for", origin=origin)
    if hidden.ndim != 3 or hidden.shape[0] != len(token_ids) or not hidden.is_floating_point():
        what = f"states of shape {list(hidden.shape)} for {len(token_ids)} tokens; is its prefix cache off?"
        raise RunFailedError(what, origin=origin)
    if _SCALES not in states:
        if hidden.element_size() == 1:
            raise RunFailedError(f"states in {hidden.dtype} without {_SCALES}", origin=origin)
        return hidden
    try:
        expanded = hidden.float() * states[_SCALES].float()
    except RuntimeError as error:
        raise RunFailedError(f"scales do not fit the states ({error})", origin=origin) from error
    if expanded.shape != hidden.shape:
        raise RunFailedError(f"scales of shape {list(states[_SCALES].shape)} do not fit the states", origin=origin)
    return expanded


def _digest(token_ids: Sequence[int]) -> str:
    return hashlib.sha256(json.dumps(list(token_ids)).encode()).hexdigest()
