"""torch.compile under several worker threads: one gate for the process, one code cache a device, no surprise.

torch.compile is process-wide state. Tracing in one thread sets a flag that makes a compiled call in another thread
fail ("FX to symbolically trace a dynamo-optimized function"); wrappers around one function share one code cache and
stop compiling, silently, at its recompile limit. So:

* compiled calls hold the gate together, tracing holds it alone (`CompileGate`);
* each device compiles a copy of the function with a code object, and so a code cache and a limit, of its own;
* a device is warmed once, forward and backward, before its loop starts; from then on a call that would compile
  fails and names the device, and so does hitting the limit. Nothing ever falls back.

Consumes: functions to compile and a callable that runs one step on dummy data. Produces: compiled functions.
Waits: a call for a tracer to end, a tracer for running calls to end; both are woken when the other leaves, also by
an exception, and give up after `wait_limit_s`. Calls are only held while they launch work, not while it runs.
A compiled function must not be called from inside a backward pass of the same warm-up (activation checkpointing):
autograd runs that in a thread of its own, which would wait for the gate.
"""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._dynamo import config as dynamo_config
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch.nn.attention.flex_attention import BlockMask

from draftline.drafter.attention import Kernels, plain_flex, run_layer
from draftline.drafter.masks import FlexMask
from draftline.errors import RunFailedError

# A drafter needs a handful of graphs a device (two mask kinds, with and without gradient, per block count).
DEFAULT_RECOMPILE_LIMIT = 64
Backend = str | Callable[..., Any]


class CompileGate:
    """Many calls or one tracer. The tracing thread may call compiled functions itself, and may enter again.

    Args:
        wait_limit_s: longest wait before the run fails by name; compiling a big graph takes minutes.
    """

    def __init__(self, wait_limit_s: float = 3600.0) -> None:
        self._changed = threading.Condition()
        self._wait_limit_s = wait_limit_s
        self._calls = 0
        self._tracers_waiting = 0
        self._tracer: int | None = None
        self._local = threading.local()
        self.compiling: str | None = None
        """The device that is being traced for, if any: a worker that waits for it is not stalled."""

    @contextmanager
    def call(self, device: str) -> Iterator[None]:
        """Held around each compiled call."""
        if self._tracer == threading.get_ident() or self._depth() > 0:
            yield
            return
        with self._changed:
            self._wait(lambda: self._tracer is None and not self._tracers_waiting, device)
            self._calls += 1
        self._local.depth = 1
        try:
            yield
        finally:
            self._local.depth = 0
            with self._changed:
                self._calls -= 1
                self._changed.notify_all()

    @contextmanager
    def trace(self, device: str) -> Iterator[None]:
        """Held around anything that may trace: warm-ups, and calls of functions that are not warmed.

        Raises:
            RuntimeError: asked for inside a compiled call, which would wait for itself.
        """
        if self._tracer == threading.get_ident():
            yield
            return
        if self._depth() > 0:
            raise RuntimeError("a compiled call cannot start tracing")
        with self._changed:
            self._tracers_waiting += 1
            try:
                self._wait(lambda: self._tracer is None and self._calls == 0, device)
                self._tracer, self.compiling = threading.get_ident(), device
            finally:
                self._tracers_waiting -= 1
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._tracer = self.compiling = None
                self._changed.notify_all()

    def _depth(self) -> int:
        return getattr(self._local, "depth", 0)

    def _wait(self, free: Callable[[], bool], device: str) -> None:
        if not self._changed.wait_for(free, timeout=self._wait_limit_s):
            holder = f"tracing for {self.compiling}" if self.compiling else f"{self._calls} compiled calls"
            raise RunFailedError(f"waited {self._wait_limit_s:g} s for {holder}", origin=device)


@functools.cache
def process_gate() -> CompileGate:
    """The gate of this process: torch.compile's state is one for the process, so its gate is too."""
    return CompileGate()


@functools.cache
def process_cache() -> CompileCache:
    """The compile cache of this process, with the default backend."""
    return CompileCache()


class CompileCache:
    """A `DeviceCompiler` for each device, made on first use."""

    def __init__(
        self,
        *,
        gate: CompileGate | None = None,
        backend: Backend = "inductor",
        recompile_limit: int = DEFAULT_RECOMPILE_LIMIT,
    ) -> None:
        self.gate = gate or process_gate()
        self._backend, self._recompile_limit = backend, recompile_limit
        self._lock = threading.Lock()
        self._devices: dict[str, DeviceCompiler] = {}

    def device(self, device: str) -> DeviceCompiler:
        """The compiler of `device`, for all workers on it."""
        with self._lock:
            if device not in self._devices:
                self._devices[device] = DeviceCompiler(device, self.gate, self._backend, self._recompile_limit)
            return self._devices[device]


class DeviceCompiler:
    """Compiles functions for one device.

    Attributes:
        compilations: graphs compiled so far.
        frozen: True once warmed: a further compilation is an error.
    """

    def __init__(self, device: str, gate: CompileGate, backend: Backend, recompile_limit: int) -> None:
        self.device, self.gate, self.recompile_limit = device, gate, recompile_limit
        self.compilations = 0
        self.frozen = False
        self._backend = backend
        self._functions: dict[Callable[..., Any], DeviceFunction] = {}
        self._lock = threading.Lock()

    def compiled(self, function: Callable[..., Any]) -> DeviceFunction:
        """`function`, compiled whole and with static shapes for this device; the same object for the same function."""
        with self._lock:
            if function not in self._functions:
                self._functions[function] = DeviceFunction(self, function)
            return self._functions[function]

    def warm(self, run: Callable[[], None]) -> None:
        """Run `run` alone in the process, then freeze: it must call all that the loop will call, backward included.

        May be repeated (a restarted worker, a second worker on the device).
        """
        with self.gate.trace(self.device):
            self.frozen = False
            run()
            self.frozen = True

    def backend(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        """What dynamo calls for a new graph, with examples of its inputs (any shapes): counts it.

        Raises:
            RunFailedError: after the warm-up, where each compilation would stop the loop for minutes.
        """
        if self.frozen:
            raise RunFailedError("a compiled function was compiled again after the warm-up", origin=self.device)
        self.compilations += 1
        compiler = lookup_backend(self._backend) if isinstance(self._backend, str) else self._backend
        return compiler(graph, inputs)


class DeviceFunction:
    """A compiled function of one device. Calls wait for tracing elsewhere; see the module's first lines."""

    def __init__(self, compiler: DeviceCompiler, function: Callable[..., Any]) -> None:
        self._compiler = compiler
        self._name = getattr(function, "__name__", "function")
        self._seen: set[Hashable] = set()
        own = _with_own_code(function, compiler.device)
        self._compiled = torch.compile(own, backend=compiler.backend, fullgraph=True, dynamic=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        compiler = self._compiler
        signature = call_signature(args, kwargs)
        if compiler.frozen:
            if signature not in self._seen:
                raise RunFailedError(f"{self._name} would be compiled again after the warm-up", origin=compiler.device)
            with compiler.gate.call(compiler.device):
                return self._run(args, kwargs)
        with compiler.gate.trace(compiler.device), _raised_limits(compiler.recompile_limit):
            result = self._run(args, kwargs)
            self._seen.add(signature)
            return result

    def __deepcopy__(self, _memo: dict[int, Any]) -> DeviceFunction:
        """Shared, like a function: a copied module calls the same compiled code."""
        return self

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return self._compiled(*args, **kwargs)
        except FailOnRecompileLimitHit as error:
            raise RunFailedError(
                f"{self._name} needs more than {self._compiler.recompile_limit} compilations (the recompile limit)",
                origin=self._compiler.device,
            ) from error
        except TorchDynamoException as error:
            cause = getattr(error, "inner_exception", None)
            if isinstance(cause, RunFailedError):
                raise cause from error
            raise


def compiled_kernels(compiler: DeviceCompiler, *, layers: bool = False) -> Kernels:
    """Kernels of the flex path for one device.

    Args:
        layers: compile whole layers, attention inside; False: flex_attention alone.
    """
    if layers:
        return Kernels(flex=plain_flex, run_layer=compiler.compiled(run_layer))
    return Kernels(flex=compiler.compiled(plain_flex))


def call_signature(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    """What a compiled graph depends on: shapes, layouts, types and plain values of the arguments, gradient mode."""
    named = tuple((name, _describe(kwargs[name])) for name in sorted(kwargs))
    modes = (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
    return (*(_describe(arg) for arg in args), named, modes)


def _describe(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), value.stride(), value.dtype, value.device, value.requires_grad)
    if isinstance(value, tuple | list):
        return tuple(_describe(item) for item in value)
    if value is None or isinstance(value, bool | int | float | str):
        return (type(value), value)
    if isinstance(value, FlexMask):
        return _describe(value.block_mask)
    if isinstance(value, BlockMask):
        return (value.seq_lengths, _describe(value.kv_indices), _describe(value.full_kv_indices))
    if isinstance(value, torch.nn.Module):
        return (type(value), tuple(_describe(p) for p in value.parameters()))
    return type(value).__qualname__


@contextmanager
def _raised_limits(limit: int) -> Iterator[None]:
    """Dynamo's limits for this thread (they are per thread since torch 2.12, global before; the gate is held)."""
    total = max(dynamo_config.accumulated_recompile_limit, 16 * limit)
    with dynamo_config.patch(
        recompile_limit=limit, accumulated_recompile_limit=total, fail_on_recompile_limit_hit=True
    ):
        yield


def _with_own_code(function: Callable[..., Any], device: str) -> Callable[..., Any]:
    """A copy of a plain function whose code object, and so dynamo's cache, belongs to `device` alone."""
    if not isinstance(function, types.FunctionType):
        raise TypeError(f"only plain functions can be compiled per device, not {type(function).__name__}")
    suffix = "".join(c if c.isalnum() else "_" for c in device)
    code = function.__code__.replace(co_name=f"{function.__name__}_{suffix}")
    own = types.FunctionType(code, function.__globals__, code.co_name, function.__defaults__, function.__closure__)
    own.__kwdefaults__ = function.__kwdefaults__
    return own
