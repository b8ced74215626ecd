"""Forward and backward of the packed drafter as CUDA graphs: one launch each instead of a thousand.

A small drafter's step is bound by the host, which launches kernels more slowly than the device runs them. A graph is
recorded for each set of input shapes, on its first use; then inputs are copied into the recording's own tensors and
the graph is replayed. The head stays outside, for how much of it there is to do depends on the row.

Recording is thread-local: other threads go on with their own streams (and their own graphs) meanwhile. All recordings
of one function share their memory, so a result is to be used, and its backward run, before the next call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

Function = Callable[..., Tensor]
# Eager runs before a recording: whatever is compiled, tuned or allocated on a first call is not for the graph.
_RUNS_BEFORE = 2


class Recording(Protocol):
    """A function recorded for one set of shapes.

    Attributes:
        gradients: one for each parameter, rewritten by each backward; None where the function does not use it.
    """

    gradients: list[Tensor | None]

    def forward(self, inputs: Sequence[Tensor]) -> Tensor:
        """The function's result [..., H] for inputs of the recorded shapes, in memory that the next forward reuses."""

    def backward(self, gradient: Tensor) -> None:
        """Fills `gradients` for this gradient of the last result, which has the result's shape."""


Record = Callable[[Function, Sequence[Tensor], Sequence[Tensor], dict[str, Any]], Recording]


class GraphedFunction:
    """A function of tensors whose gradient goes to `parameters` alone.

    Args:
        function: gives one tensor; every call with inputs of the same shapes must do the same work, without waiting
            for the device. Parameters may change in place between calls.
        parameters: receive gradients in `.grad`, which is the recording's own memory where the parameter is not fp32:
            it is to be used up before the next backward, as `MasterOptimizer.absorb` does.
        record: makes a recording from (function, parameters, inputs, what all recordings share).
    """

    def __init__(self, function: Function, parameters: Sequence[Tensor], record: Record | None = None) -> None:
        self._function, self._parameters = function, list(parameters)
        self._record = record or CudaRecording
        self._recordings: dict[tuple[torch.Size, ...], Recording] = {}
        self._shared: dict[str, Any] = {}
        self._root = torch.zeros((), device=self._parameters[0].device, requires_grad=True)

    def __call__(self, *inputs: Tensor) -> Tensor:
        """The function of these inputs; records it first if their shapes are new. Types are those of the recording."""
        shapes = tuple(x.shape for x in inputs)
        if shapes not in self._recordings:
            self._recordings[shapes] = self._record(self._function, self._parameters, inputs, self._shared)
        result: Tensor = _Replay.apply(self._root, self, self._recordings[shapes], *inputs)
        return result

    def add_gradients(self, recording: Recording, gradient: Tensor) -> None:
        """Runs a backward and adds to the parameters' `.grad`; `gradient` has the result's shape."""
        pairs = list(zip(self._parameters, recording.gradients, strict=True))
        for parameter, own in pairs:  # a gradient that nobody has used yet must survive the replay
            if parameter.grad is not None and parameter.grad is own:
                parameter.grad = parameter.grad.clone()
        recording.backward(gradient)
        for parameter, own in pairs:
            if own is None:
                continue
            if parameter.grad is not None:
                parameter.grad.add_(own)
            else:  # fp32 gradients are kept as they are by the optimizer, over several rows
                parameter.grad = own.clone() if own.dtype == torch.float32 else own


class _Replay(torch.autograd.Function):
    """Joins a recording to autograd. Its first input stands for the parameters: it asks for a gradient."""

    @staticmethod
    def forward(ctx: Any, _root: Tensor, owner: GraphedFunction, recording: Recording, *inputs: Tensor) -> Tensor:
        ctx.owner, ctx.recording, ctx.n_inputs = owner, recording, len(inputs)
        return recording.forward(inputs).detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        ctx.owner.add_gradients(ctx.recording, gradients[0])
        return (None,) * (3 + ctx.n_inputs)


class CudaRecording:
    """Two CUDA graphs, forward and backward, over tensors of their own.

    Args:
        parameters: what gradients are wanted for, of any shapes.
        inputs: examples; later ones must have their shapes and dtypes.
        shared: holds the memory pool of all recordings of one function.
    """

    def __init__(
        self, function: Function, parameters: Sequence[Tensor], inputs: Sequence[Tensor], shared: dict[str, Any]
    ) -> None:
        device = parameters[0].device
        pool = shared.setdefault("pool", torch.cuda.graph_pool_handle())
        stream = torch.cuda.Stream(device)
        with torch.cuda.device(device):
            self._inputs = [x.clone() for x in inputs]
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream), torch.enable_grad():
                for _ in range(_RUNS_BEFORE):
                    result = function(*self._inputs)
                    _gradients(result, parameters, torch.zeros_like(result))
                    del result
            stream.synchronize()
            self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
            with torch.enable_grad(), _recorded(self._forward, pool, stream):
                result = function(*self._inputs)
            self._result_gradient = torch.empty_like(result)
            with _recorded(self._backward, pool, stream):
                self.gradients = _gradients(result, parameters, self._result_gradient)
            self._result = result.detach()
            torch.cuda.current_stream(device).wait_stream(stream)

    def forward(self, inputs: Sequence[Tensor]) -> Tensor:
        """Copies the inputs, replays. See `Recording.forward`."""
        for own, given in zip(self._inputs, inputs, strict=True):
            own.copy_(given)
        self._forward.replay()
        return self._result

    def backward(self, gradient: Tensor) -> None:
        """Copies the gradient, replays. See `Recording.backward`."""
        self._result_gradient.copy_(gradient)
        self._backward.replay()


def _recorded(graph: torch.cuda.CUDAGraph, pool: Any, stream: torch.cuda.Stream) -> torch.cuda.graph:
    return torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local")


def _gradients(result: Tensor, parameters: Sequence[Tensor], gradient: Tensor) -> list[Tensor | None]:
    return list(torch.autograd.grad(result, parameters, gradient, allow_unused=True))
