"""The compiled flex path on a CUDA device: the dense path's numbers, one compile a device under threads and streams."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from draftline.config.drafter_spec import DrafterSpec
from draftline.config.schema import FeatureNoise, ObjectiveConfig, OptimizerConfig
from draftline.drafter.compile_cache import CompileCache, CompileGate, compiled_kernels
from draftline.drafter.mlp_fp8 import linear_fp8
from draftline.drafter.model import Drafter
from draftline.drafter.optimizer import MasterOptimizer
from draftline.drafter.step import DrafterStep
from draftline.records import FrozenEmbedding, FrozenHead, HiddenStateRow
from spec_kit import small_spec

pytestmark = pytest.mark.gpu

ROW_TOKENS, VOCAB, HIDDEN = 256, 512, 128
SPEC = small_spec(
    hidden_size=HIDDEN,
    intermediate_size=256,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    vocab_size=VOCAB,
    mask_token_id=VOCAB - 1,
    layer_types=("sliding_attention", "full_attention"),
    sliding_window=40,
    block_size=8,
)
RECIPE = ObjectiveConfig(
    anchors=48, kl_weight=0.15, cap_weight=0.1, feature_noise=FeatureNoise(kind="uniform"), head_chunk_positions=100
)


def random_row(lengths: tuple[int, ...], seed: int, device: str = "cuda") -> HiddenStateRow:
    g = torch.Generator().manual_seed(seed)
    n_tokens = sum(lengths)

    def normal(width: int) -> torch.Tensor:
        return torch.randn(n_tokens, width, generator=g).to(device, torch.bfloat16)

    return HiddenStateRow(
        row_id=seed,
        epoch=0,
        sample_ids=tuple(f"{seed}-{i}" for i in range(len(lengths))),
        lengths=lengths,
        input_ids_T=torch.randint(0, VOCAB - 1, (n_tokens,), generator=g).to(device),
        loss_mask_T=(torch.rand(n_tokens, generator=g) > 0.2).to(device),
        document_ids_T=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).int().to(device),
        position_ids_T=torch.cat([torch.arange(n) for n in lengths]).to(device),
        taps_TF=normal(len(SPEC.taps) * HIDDEN),
        final_hidden_TH=normal(HIDDEN),
        final_hidden_norm="post",
        tap_layer_ids=SPEC.taps,
    )


def make_step(
    spec: DrafterSpec,
    objective: ObjectiveConfig,
    device: str,
    cache: CompileCache | None,
    name: str = "",
    *,
    cuda_graphs: bool = False,
) -> DrafterStep:
    """`cache` None: the dense path, nothing compiled."""
    drafter = Drafter(spec, attention="dense" if cache is None else "flex")
    drafter.init_weights(torch.Generator().manual_seed(1))
    drafter.to(device, torch.bfloat16)
    if cache is not None:
        drafter.kernels = compiled_kernels(cache.device(name or device), layers=True)
    g = torch.Generator().manual_seed(2)
    weight = torch.randn(VOCAB, HIDDEN, generator=g).to(device, torch.bfloat16) * 0.3
    head = FrozenHead(weight)
    return DrafterStep(
        drafter,
        FrozenEmbedding(weight),
        head,
        objective,
        teacher=head,
        row_tokens=ROW_TOKENS,
        seed=0,
        cuda_graphs=cuda_graphs,
    )


def gradients_of(step: DrafterStep, row: HiddenStateRow) -> tuple[float, torch.Tensor]:
    """(numerator, all gradients in one vector); takes the gradients away."""
    stats = step.forward_backward(row)
    found = []
    for parameter in step._drafter.parameters():
        assert parameter.grad is not None
        found.append(parameter.grad.flatten().double())
        parameter.grad = None
    return float(stats.numerator), torch.cat(found)


def new_cache() -> CompileCache:
    torch._dynamo.reset()
    return CompileCache(gate=CompileGate(300.0))


def test_a_compiled_flex_step_gives_the_dense_step_on_rows_of_any_make() -> None:
    cache = new_cache()
    flex, dense = make_step(SPEC, RECIPE, "cuda", cache), make_step(SPEC, RECIPE, "cuda", None)
    cache.device("cuda").warm(flex.warm_up)
    compiled = cache.device("cuda").compilations
    for seed, lengths in enumerate([(256,), (100, 60, 31), (9, 200), (30,) * 8, (2, 3, 250)]):
        row = random_row(lengths, seed)
        (ours, gradient), (wanted, reference) = gradients_of(flex, row), gradients_of(dense, row)
        assert ours == pytest.approx(wanted, rel=2e-2)
        assert float((gradient - reference).norm() / reference.norm()) <= 3e-2
        assert float(flex.evaluate(row).numerator) == pytest.approx(float(dense.evaluate(row).numerator), rel=2e-2)
    assert cache.device("cuda").compilations == compiled


def test_threads_on_streams_of_their_own_compile_once_a_device_and_never_race() -> None:
    cache, n_workers, n_rows = new_cache(), 4, 20
    devices = [f"cuda:{i % torch.cuda.device_count()}" for i in range(n_workers)]
    rows = [random_row((100, 90, 40), seed) for seed in range(3)]
    alone = make_step(SPEC, RECIPE, "cuda", None)
    wanted = [gradients_of(alone, row)[1] for row in rows]
    go, errors = threading.Barrier(n_workers), []

    def work(number: int) -> None:
        device = devices[number]
        name = f"{device}#{number}"  # a compile cache entry of its own, as if each worker had a device of its own
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
            step = make_step(SPEC, RECIPE, device, cache, name)
            go.wait(300)
            cache.device(name).warm(step.warm_up)
            before = cache.device(name).compilations
            for i in range(n_rows):
                row = random_row((100, 90, 40), i % len(rows), device)
                gradient = gradients_of(step, row)[1].to("cuda:0")
                assert float((gradient - wanted[i % len(rows)]).norm() / wanted[i % len(rows)].norm()) <= 3e-2
            assert cache.device(name).compilations == before

    def guarded(job: Callable[[int], None], number: int) -> None:
        try:
            job(number)
        except Exception as error:  # noqa: BLE001 - handed to the test
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work, n), daemon=True) for n in range(n_workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=300)
        assert not thread.is_alive()
    assert errors == []
    counts = {cache.device(f"{device}#{n}").compilations for n, device in enumerate(devices)}
    assert len(counts) == 1  # every device compiled the same graphs, once


def test_mlps_in_fp8_keep_the_gradient_within_fifteen_percent() -> None:
    cache = new_cache()
    step = make_step(SPEC, RECIPE.model_copy(update={"mlp_dtype": "fp8"}), "cuda", cache)
    exact = make_step(SPEC, RECIPE, "cuda", None)
    cache.device("cuda").warm(step.warm_up)
    row = random_row((150, 80), 5)
    (ours, gradient), (wanted, reference) = gradients_of(step, row), gradients_of(exact, row)
    assert ours == pytest.approx(wanted, rel=2e-2)
    assert float((gradient - reference).norm() / reference.norm()) <= 0.15


def test_products_in_fp8_are_within_four_percent_of_fp64_with_rows_of_any_size() -> None:
    g = torch.Generator("cuda").manual_seed(0)
    sizes = torch.logspace(-4, 4, 64, device="cuda")[:, None]
    x = (torch.randn(64, 256, generator=g, device="cuda") * sizes).bfloat16().requires_grad_()
    weight = torch.randn(128, 256, generator=g, device="cuda").bfloat16().requires_grad_()
    output = linear_fp8(x, weight)
    gradient = torch.randn(64, 128, generator=g, device="cuda").bfloat16()
    output.backward(gradient)
    wide_x, wide_weight, wide_gradient = (t.detach().double() for t in (x, weight, gradient))
    wanted = wide_x @ wide_weight.t()
    by_row = (output.double() - wanted).norm(dim=1) / wanted.norm(dim=1)
    assert float(by_row.max()) <= 0.06 and float(by_row.mean()) <= 0.04
    into_x = wide_gradient @ wide_weight
    assert float((x.grad.double() - into_x).norm() / into_x.norm()) <= 0.04
    into_weight = wide_gradient.t() @ wide_x
    assert float((weight.grad.double() - into_weight).norm() / into_weight.norm()) <= 1e-2


def test_steps_from_cuda_graphs_give_the_plain_steps_weights_beside_a_busy_thread() -> None:
    cache, found, stop = new_cache(), [], threading.Event()

    def keep_allocating() -> None:  # what a target on the same device does while a drafter is recorded
        with torch.cuda.stream(torch.cuda.Stream()):
            while not stop.is_set():
                torch.ones(1 << 20, device="cuda").add_(1.0)
                torch.cuda.current_stream().synchronize()
                torch.cuda.empty_cache()

    other = threading.Thread(target=keep_allocating, daemon=True)
    other.start()
    try:
        for recorded in (False, True):
            step = make_step(SPEC, RECIPE, "cuda", cache, f"cuda#{recorded}", cuda_graphs=recorded)
            optimizer = MasterOptimizer(step._drafter, OptimizerConfig(learning_rate=1e-3))
            with torch.cuda.stream(torch.cuda.Stream()):
                cache.device(f"cuda#{recorded}").warm(step.warm_up)
                for seed, lengths in enumerate([(256,), (100, 60, 31), (9, 200), (30,) * 8, (2, 3, 250), (80, 70)]):
                    stats = step.forward_backward(random_row(lengths, seed))
                    optimizer.absorb(stats.denominator)
                    if seed % 2:  # two rows a step
                        optimizer.step(1e-3)
                torch.cuda.current_stream().synchronize()
            found.append(torch.cat([master.detach().flatten().double() for master in optimizer.masters]))
    finally:
        stop.set()
        other.join(60)
    start = Drafter(SPEC)
    start.init_weights(torch.Generator().manual_seed(1))
    moved = found[0] - torch.cat([p.detach().flatten().double() for p in start.cuda().parameters()])
    assert float((found[0] - found[1]).norm() / moved.norm()) <= 2e-2
