"""Functions of fixed shapes, compiled, and on a GPU captured as a graph: a round then launches one graph.

    off        ordinary decoding, shapes follow the text
    graph      static shapes, no tracing; on a GPU the kernels are captured as a CUDA graph
    inductor   the same, with the function compiled by torch.compile first
    eager, aot_eager   torch.compile without code generation: shows that tracing changes nothing

Inputs are copied into tensors that never move; outputs are valid until the next call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch

from draftline.drafter.compile_cache import CompileCache
from draftline.errors import UserError

CompileMode = Literal["off", "graph", "eager", "aot_eager", "inductor"]
Outputs = tuple[torch.Tensor, ...]
_WARM_CALLS = 3


def parse_compile_mode(name: str) -> CompileMode:
    """Raises UserError for an unknown name."""
    for known in get_args(CompileMode):
        if name == known:
            return known
    raise UserError(
        f"{name!r} is not a way to compile", where="--compile", mend=f"choose from {', '.join(get_args(CompileMode))}"
    )


class StaticCompiler:
    """Compiles and captures the functions of one device.

    Args:
        mode: not `off`.
        device: where all of them run.
    """

    def __init__(self, mode: CompileMode, device: torch.device) -> None:
        assert mode != "off", "nothing is compiled"
        self.mode, self.device = mode, device
        self._cache = None if mode == "graph" else CompileCache(backend=mode)
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    @property
    def compilations(self) -> int:
        """Graphs that torch.compile has made."""
        return 0 if self._cache is None else self._cache.device(str(self.device)).compilations

    def prepare(self, function: Callable[..., Outputs], inputs: Sequence[torch.Tensor]) -> StaticCall:
        """`function` for inputs of these shapes.

        Args:
            function: takes as many tensors, changes nothing but buffers of its own, and may run several times for one
                call while it is captured.
            inputs: examples; the call keeps them and copies later values into them.
        """
        if self._cache is not None:
            function = self._cache.device(str(self.device)).compiled(function)
        return StaticCall(function, inputs, self._pool)


class StaticCall:
    """One prepared function; see `StaticCompiler.prepare`."""

    def __init__(self, function: Callable[..., Outputs], inputs: Sequence[torch.Tensor], pool: Any) -> None:
        self._function, self.inputs, self._pool = function, tuple(inputs), pool
        self._graph: torch.cuda.CUDAGraph | None = None
        self._outputs: Outputs = ()

    def __call__(self, *values: torch.Tensor | int) -> Outputs:
        """Runs on `values`, which have the shapes of the inputs (ints fill a tensor)."""
        for static, value in zip(self.inputs, values, strict=True):
            if isinstance(value, int):
                static.fill_(value)
            else:
                static.copy_(value)
        if self._pool is None:
            return self._function(*self.inputs)
        if self._graph is None:
            self._capture()
        assert self._graph is not None
        self._graph.replay()
        return self._outputs

    def _capture(self) -> None:
        device = self.inputs[0].device
        try:
            stream = torch.cuda.Stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                for _ in range(_WARM_CALLS):
                    self._function(*self.inputs)
            torch.cuda.current_stream(device).wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                self._outputs = self._function(*self.inputs)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise UserError(
                f"the forward cannot be captured as a graph ({' '.join(str(error).split())[:200]})",
                where="--compile",
                mend="decode with compile off: this model waits for the host inside its forward",
            ) from error
        self._graph = graph


def column_stops(columns: int, smallest: int = 512) -> tuple[int, ...]:
    """Lengths that attention is prepared for, doubling up to `columns`: short texts do not pay for the longest."""
    stops = []
    stop = smallest
    while stop < columns:
        stops.append(stop)
        stop *= 2
    return (*stops, columns)


def smallest_fit(sizes: Sequence[int], needed: int) -> int:
    """The first of the rising `sizes` that holds `needed`.

    Raises:
        UserError: none does.
    """
    for size in sizes:
        if size >= needed:
            return size
    raise UserError(
        f"{needed} tokens exceed what was prepared ({sizes[-1]})",
        where="compiled decoding",
        mend="prepare a larger size",
    )
