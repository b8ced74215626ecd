"""The head's kernels on a CUDA device: the plain chunk's values and gradients, bounded memory, no host sync."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from draftline.drafter.head import HeadOutput, Teacher, run_head
from draftline.drafter.head_chunk import TeacherRows, torch_chunk
from draftline.drafter.head_fp8 import quantize_head
from draftline.drafter.head_plan import plan_slots
from draftline.drafter.loss import LossTerms
from draftline.records import FrozenHead

pytestmark = pytest.mark.gpu

FULL = LossTerms(ce=0.85, kl=0.15, tv=0.3, reverse_kl=0.2, cap=0.1)
TERMS = {
    "ce": LossTerms(),
    "ce-cap": LossTerms(cap=0.1),
    "kl-cap": LossTerms(ce=0.85, kl=0.15, cap=0.1),
    "kl-soft-top-k": LossTerms(ce=0.5, kl=0.5, kl_temperature=2.5, teacher_top_k=9),
    "tv": LossTerms(ce=0.0, tv=1.0),
    "full": FULL,
    "full-soft": replace(FULL, kl_temperature=1.7, cap_temperature=0.5, labels_from_teacher=True),
}


@pytest.mark.parametrize("vocab", [37, 2048, 50_257])
@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("name", TERMS)
@pytest.mark.parametrize("with_gradient", [True, False])
def test_kernels_equal_the_plain_chunk(vocab: int, odd: bool, name: str, with_gradient: bool) -> None:
    from draftline.drafter.head_gpu import kernel_chunk

    g = torch.Generator("cuda").manual_seed(vocab)
    raw, teacher = (2 * torch.randn(n, vocab, generator=g, device="cuda") for n in (33, 5))
    row = torch.randint(0, 5, (33,), generator=g, device="cuda")
    raw[::3] = teacher[row[::3]] * 1.001
    label = torch.randint(0, vocab, (33,), generator=g, device="cuda")
    label[::2] = raw.argmax(-1)[::2]
    head = FrozenHead(raw.new_zeros(vocab, 1))
    if odd:
        head = replace(head, bias_V=torch.randn(vocab, generator=g, device="cuda"), multiplier=1.3, softcap=8.0)
    terms = TERMS[name]
    rows = TeacherRows(teacher, row) if terms.needs_teacher else None
    dtype = torch.float32 if with_gradient else None
    values, gradient = kernel_chunk(raw.clone(), head, label, terms, rows, dtype)
    wanted, wanted_gradient = torch_chunk(raw.clone(), head, label, terms, rows, dtype)
    torch.testing.assert_close(values, wanted, rtol=2e-4, atol=1e-5)
    if with_gradient:
        # The gradient of TV jumps where draft and teacher agree, so rows made to agree may fall on either side.
        away = torch.arange(33, device="cuda") % 3 != 0 if terms.tv else slice(None)
        torch.testing.assert_close(gradient[away], wanted_gradient[away], rtol=1e-3, atol=2e-6)


class Problem:
    """bf16 inputs of a head: 64 blocks of 16 slots over 256 positions."""

    def __init__(self, vocab: int = 32_000, hidden: int = 256) -> None:
        g = torch.Generator("cuda").manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=g, device="cuda").to(torch.bfloat16)

        self.head = FrozenHead(normal(vocab, hidden) * 0.1)
        self.hidden = normal(1024, hidden).requires_grad_()
        self.teacher = normal(256, hidden)
        self.label = torch.randint(0, vocab, (1024,), generator=g, device="cuda")
        anchors = torch.randint(1, 240, (64,), generator=g, device="cuda")
        self.index = (anchors[:, None] + torch.arange(16, device="cuda") - 1).flatten()
        self.mask = (torch.arange(16, device="cuda") > 0).repeat(64)

    def double(self) -> Problem:
        wide = Problem.__new__(Problem)
        wide.__dict__.update(self.__dict__)
        wide.head = FrozenHead(self.head.weight_VH.double())
        wide.hidden, wide.teacher = self.hidden.detach().double().requires_grad_(), self.teacher.double()
        return wide

    def run(self, terms: LossTerms, chunk: int, form: str = "fused") -> HeadOutput:
        plan = plan_slots(self.mask, self.index, chunk=chunk)
        out = run_head(self.hidden, self.label, plan, self.head, terms, Teacher(self.head, self.teacher), form=form)
        out.backward(self.mask.to(out.values.ce.dtype))
        return out


@pytest.mark.parametrize("name", TERMS)
@pytest.mark.parametrize("form", ["fused", "checkpointed"])
def test_bf16_gradient_is_within_one_percent_of_fp64(name: str, form: str) -> None:
    problem = Problem()
    exact = problem.double()
    problem.run(TERMS[name], 300, form)
    exact.run(TERMS[name], 4096, "checkpointed")
    wanted = exact.hidden.grad
    assert float((problem.hidden.grad.double() - wanted).norm() / wanted.norm()) <= 1e-2


def test_fp8_gradient_is_within_three_percent_of_fp64() -> None:
    problem = Problem()
    exact = problem.double()
    exact.run(LossTerms(cap=0.1), 4096, "checkpointed")
    problem.head = quantize_head(problem.head)
    problem.run(LossTerms(cap=0.1), 300)
    wanted = exact.hidden.grad
    assert float((problem.hidden.grad.double() - wanted).norm() / wanted.norm()) <= 3e-2


def test_peak_memory_follows_the_chunk_and_not_the_row() -> None:
    problem, chunk = Problem(), 64
    problem.run(FULL, chunk)
    problem.hidden.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    problem.run(FULL, chunk)
    peak = torch.cuda.max_memory_allocated() - before
    vocab = problem.head.weight_VH.shape[0]
    assert peak < 2.5 * chunk * vocab * 4 + 8 * problem.hidden.numel()


def test_the_head_never_waits_for_the_device() -> None:
    problem = Problem()
    problem.run(FULL, 300)  # kernels are compiled now
    torch.cuda.synchronize()
    waits: list[str] = []
    torch.cuda.set_sync_debug_mode("error")
    try:
        problem.run(FULL, 300)
    except RuntimeError as error:  # what torch raises at a synchronizing call
        waits.append(str(error))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert waits == []
