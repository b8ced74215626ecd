"""The compile cache under threads: one compile a device, none in the loop, errors with names, no crossing traces.

Devices are names here; dynamo's own machinery (guards, caches, limits, the tracing flag) is the real one.
"""

from __future__ import annotations

import copy
import threading
import time
import types
from collections.abc import Callable, Iterator

import pytest
import torch
from drafter_rows import blocks_at, make_row, packed_hidden, tiny_drafter, tiny_spec

from draftline.drafter.attention import Kernels, plain_flex
from draftline.drafter.compile_cache import (
    CompileCache,
    CompileGate,
    DeviceCompiler,
    call_signature,
    compiled_kernels,
    process_cache,
    process_gate,
)
from draftline.drafter.model import default_kernels
from draftline.errors import RunFailedError

WAIT_S = 60.0
FACTOR = [2.0]


def scaled_sum(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x * y + 1).sum()


def by_hidden_factor(x: torch.Tensor) -> torch.Tensor:
    return x * FACTOR[0]


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def make_cache(backend: str = "eager", *, limit: int = 64, wait_limit_s: float = WAIT_S) -> CompileCache:
    return CompileCache(gate=CompileGate(wait_limit_s), backend=backend, recompile_limit=limit)


def in_threads(work: list[Callable[[], None]]) -> list[BaseException]:
    """Run all at once and give back what they raised."""
    errors: list[BaseException] = []

    def guarded(job: Callable[[], None]) -> None:
        try:
            job()
        except Exception as error:  # noqa: BLE001 - handed to the test, which looks at each one
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(job,), daemon=True) for job in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=WAIT_S)
        assert not thread.is_alive()
    return errors


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_many_devices_compile_once_each_and_never_in_the_loop(backend: str) -> None:
    cache = make_cache(backend)
    devices = [f"cpu:{i}" for i in range(9)]  # more than dynamo's default recompile limit of one function
    go = threading.Barrier(len(devices))

    def work(device: str) -> None:
        compiler = cache.device(device)
        step = compiler.compiled(scaled_sum)
        x = torch.ones(4, requires_grad=True)
        go.wait(WAIT_S)
        compiler.warm(lambda: step(x, x).backward())
        for _ in range(100):
            x.grad = None
            loss = step(x, x)
            loss.backward()
            assert loss.item() == 8.0 and x.grad is not None and x.grad.tolist() == [2.0] * 4

    assert in_threads([lambda device=device: work(device) for device in devices]) == []  # type: ignore[misc]
    assert [cache.device(device).compilations for device in devices] == [1] * len(devices)


def test_workers_on_one_device_share_its_compiled_code() -> None:
    cache = make_cache()

    def work() -> None:
        compiler = cache.device("cpu:0")
        step, x = compiler.compiled(scaled_sum), torch.ones(4, requires_grad=True)
        compiler.warm(lambda: step(x, x).backward())
        for _ in range(50):
            step(x, x).backward()

    assert in_threads([work] * 4) == []
    assert cache.device("cpu:0").compilations == 1


def test_another_shape_in_the_loop_is_an_error_that_names_the_device() -> None:
    compiler = make_cache().device("cuda:7")
    step, x = compiler.compiled(scaled_sum), torch.ones(4)
    compiler.warm(lambda: step(x, x))
    with pytest.raises(RunFailedError, match=r"^cuda:7: scaled_sum would be compiled again after the warm-up"):
        step(x[:3], x[:3])
    with pytest.raises(RunFailedError, match="cuda:7"), torch.no_grad():
        step(x, x)  # another gradient mode is another graph
    assert compiler.compilations == 1
    assert step(x, x).item() == 8.0


def test_a_recompilation_that_no_argument_shows_is_refused_too() -> None:
    compiler = make_cache().device("cuda:3")
    step, x = compiler.compiled(by_hidden_factor), torch.ones(4)
    compiler.warm(lambda: step(x))
    FACTOR[0] = 3.0
    try:
        with pytest.raises(RunFailedError, match=r"^cuda:3: .*compiled again after the warm-up"):
            step(x)
    finally:
        FACTOR[0] = 2.0


def test_hitting_the_recompile_limit_is_an_error_that_names_device_and_limit() -> None:
    compiler = make_cache(limit=3).device("cuda:5")
    step = compiler.compiled(scaled_sum)
    for n in range(1, 4):
        step(torch.ones(n), torch.ones(n))
    with pytest.raises(RunFailedError, match=r"^cuda:5: scaled_sum needs more than 3 compilations"):
        step(torch.ones(9), torch.ones(9))


def test_the_limit_of_one_device_is_not_used_up_by_others() -> None:
    cache = make_cache(limit=3)
    for device in ("cpu:0", "cpu:1", "cpu:2"):
        step = cache.device(device).compiled(scaled_sum)
        for n in range(1, 4):
            assert step(torch.ones(n), torch.ones(n)).item() == 2.0 * n
    assert cache.device("cpu:2").compilations == 3


def test_without_own_code_the_devices_would_share_one_limit() -> None:
    """The fault that a code object a device prevents, shown on plain torch.compile wrappers."""
    with torch._dynamo.config.patch(recompile_limit=2):
        wrappers = [torch.compile(scaled_sum, backend=_named_backend(), fullgraph=True) for _ in range(3)]
        wrappers[0](torch.ones(2), torch.ones(2))
        wrappers[1](torch.ones(2), torch.ones(2))
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
            wrappers[2](torch.ones(2), torch.ones(2))


def _named_backend() -> Callable[..., Callable[..., object]]:
    def backend(graph: torch.fx.GraphModule, _inputs: list[torch.Tensor]) -> Callable[..., object]:
        return graph.forward

    return backend


class SlowToTrace(torch.nn.Module):
    """Its symbolic trace stands still inside `forward` until told to go on."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.go_on = threading.Event(), threading.Event()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.entered.set()
        assert self.go_on.wait(WAIT_S)
        return x + 1


def test_tracing_in_one_thread_breaks_a_compiled_call_in_another_without_the_gate() -> None:
    step, slow, x = torch.compile(scaled_sum, backend="eager"), SlowToTrace(), torch.ones(4)
    step(x, x)
    tracer = threading.Thread(target=torch.fx.symbolic_trace, args=(slow,), daemon=True)
    tracer.start()
    assert slow.entered.wait(WAIT_S)
    try:
        with pytest.raises(RuntimeError, match="FX to symbolically trace a dynamo-optimized function"):
            step(x, x)
    finally:
        slow.go_on.set()
        tracer.join(WAIT_S)


def test_with_the_gate_a_compiled_call_waits_for_the_trace() -> None:
    cache, slow, x = make_cache(), SlowToTrace(), torch.ones(4)
    caller, tracing = cache.device("cpu:0"), cache.device("cpu:1")
    step = caller.compiled(scaled_sum)
    caller.warm(lambda: step(x, x))
    results: list[float] = []

    def call() -> None:
        assert slow.entered.wait(WAIT_S)
        assert cache.gate.compiling == "cpu:1"
        release = threading.Timer(0.2, slow.go_on.set)  # the call below is waiting by then, or comes later
        release.start()
        results.append(step(x, x).item())
        release.join(WAIT_S)

    def trace() -> None:
        tracing.warm(lambda: types.SimpleNamespace(graph=torch.fx.symbolic_trace(slow)))  # type: ignore[arg-type,return-value]

    assert in_threads([call, trace]) == []
    assert results == [8.0]
    assert cache.gate.compiling is None


def test_tracing_waits_for_running_calls_and_for_no_later_ones() -> None:
    gate, order = CompileGate(WAIT_S), []
    running, asked, finish = threading.Event(), threading.Event(), threading.Event()

    def first_call() -> None:
        with gate.call("a"):
            running.set()
            assert finish.wait(WAIT_S)
            order.append("first call")

    def trace() -> None:
        assert running.wait(WAIT_S)
        asked.set()
        with gate.trace("b"):
            order.append("trace")

    def later_call() -> None:
        assert asked.wait(WAIT_S)
        while not gate._tracers_waiting:
            time.sleep(0.001)
        finish.set()
        with gate.call("c"):
            order.append("later call")

    assert in_threads([first_call, trace, later_call]) == []
    assert order == ["first call", "trace", "later call"]


def test_a_failed_warm_up_opens_the_gate_again_and_does_not_freeze() -> None:
    cache = make_cache()
    compiler = cache.device("cpu:0")

    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        compiler.warm(fail)
    assert not compiler.frozen
    assert in_threads([lambda: cache.device("cpu:1").warm(lambda: None)]) == []
    assert cache.device("cpu:1").frozen


def test_a_wait_that_never_ends_fails_by_name() -> None:
    gate = CompileGate(wait_limit_s=0.05)
    with gate.trace("cuda:0"):
        errors = in_threads([lambda: gate.call("cuda:1").__enter__(), lambda: gate.trace("cuda:2").__enter__()])
    assert sorted(str(error) for error in errors) == [
        "cuda:1: waited 0.05 s for tracing for cuda:0",
        "cuda:2: waited 0.05 s for tracing for cuda:0",
    ]
    with gate.call("cuda:3"):  # nobody is left behind in the gate
        assert gate._calls == 1


def test_the_tracing_thread_may_call_and_trace_again() -> None:
    gate = CompileGate(1.0)
    with gate.trace("a"), gate.trace("a"), gate.call("a"):
        pass
    with gate.call("a"):
        with gate.call("a"):
            pass
        with pytest.raises(RuntimeError, match="cannot start tracing"), gate.trace("a"):
            pass


def test_a_call_that_raises_leaves_the_gate_open() -> None:
    def bad(x: torch.Tensor) -> torch.Tensor:
        return x @ x

    compiler = make_cache().device("cpu:0")
    step = compiler.compiled(bad)
    with pytest.raises(Exception, match=r"(?i)size|shape"):
        step(torch.ones(2, 3))
    assert torch.equal(step(torch.eye(2)), torch.eye(2))


@pytest.mark.parametrize("layers", [False, True], ids=["kernels", "layers"])
def test_the_flex_path_compiles_once_for_all_kinds_of_layers_and_never_again(layers: bool) -> None:
    types_ = ("sliding_attention", "sliding_attention", "full_attention", "full_attention")
    spec = tiny_spec(num_layers=4, layer_types=types_)
    compiler = make_cache().device("cpu:0")
    ours, reference = tiny_drafter(spec, "flex"), tiny_drafter(spec, "dense")
    ours.kernels = compiled_kernels(compiler, layers=layers)
    row, other = make_row((21, 9)), make_row((12, 18), seed=1)
    with torch.no_grad():
        compiler.warm(lambda: packed_hidden(ours, row, blocks_at(row, spec, [3, 8, 25], padding=1)))
        assert compiler.compilations == 1  # masks are data: one graph of the attention (or layer) serves both kinds
        for packed, anchors in ((row, [0, 1, 2, 3]), (other, [5, 11, 29]), (other, [13])):
            blocks = blocks_at(packed, spec, anchors, padding=4 - len(anchors))
            torch.testing.assert_close(
                packed_hidden(ours, packed, blocks), packed_hidden(reference, packed, blocks), atol=1e-5, rtol=0
            )
    assert compiler.compilations == 1


def test_a_function_is_compiled_once_and_shared_by_copies_of_a_drafter() -> None:
    compiler = make_cache().device("cpu:0")
    assert compiler.compiled(scaled_sum) is compiler.compiled(scaled_sum)
    drafter = tiny_drafter(tiny_spec(), "flex")
    drafter.kernels = compiled_kernels(compiler)
    copied = copy.deepcopy(drafter)
    assert copied.kernels is not None and copied.kernels.flex is drafter.kernels.flex
    with pytest.raises(TypeError, match="plain functions"):
        compiler.compiled(torch.nn.Linear(1, 1))


def test_kernels_are_compiled_by_default_on_a_gpu_and_only_there() -> None:
    assert default_kernels(torch.device("cpu")) == Kernels()
    ours = default_kernels(torch.device("cuda", 1))
    assert ours.flex is process_cache().device("cuda:1").compiled(plain_flex)


def test_signatures_tell_apart_what_graphs_depend_on() -> None:
    x = torch.ones(2, 3)
    calls = [(x,), (x.T,), (x.double(),), (x.clone().requires_grad_(),), (x[:1],), (2,), (2.0,), ((x, x),), (None,)]
    assert len({call_signature(args, {}) for args in calls}) == len(calls)
    assert call_signature((x,), {"k": 1}) == call_signature((torch.zeros(2, 3),), {"k": 1})
    assert call_signature((x,), {"k": 1}) != call_signature((x,), {"k": 2})
    with_gradient = call_signature((x,), {})
    with torch.no_grad():
        assert call_signature((x,), {}) != with_gradient
    assert call_signature((torch.nn.Linear(2, 2),), {}) != call_signature((torch.nn.Linear(2, 3),), {})


def test_the_process_has_one_gate_and_one_cache() -> None:
    assert process_gate() is process_gate()
    assert process_cache() is process_cache()
    assert process_cache().gate is process_gate() is CompileCache().gate
    assert isinstance(process_cache().device("cpu"), DeviceCompiler)
