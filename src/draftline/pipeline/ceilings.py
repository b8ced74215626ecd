"""What GPUs can do at best, by name, and which share of it the two stages reach.

Peaks are the vendors' figures: dense bf16 products with fp32 accumulation, decimal gigabytes, and one direction of the
fastest link to a sibling (NVLink where the card has it, else PCIe). The shares are what was measured on an H200 (see
docs/benchmarks.md); other cards are assumed to reach the same, which is why an estimate is called one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from draftline.errors import UserError

TARGET_SHARE = 0.43
DRAFTER_SHARE = 0.50
MEMORY_SHARE = 0.80
LINK_SHARE = 0.50
CPU_SHARE = 0.50


@dataclass(frozen=True, slots=True)
class Ceiling:
    """A device's peaks.

    Attributes:
        words: all of them occur in the device's name, as torch tells it.
        flops_per_s: bf16 on a GPU, fp32 on the CPU.
        memory_bytes: 0 if unknown.
        link_bytes_per_s: to another device, one direction.
    """

    name: str
    words: tuple[str, ...]
    flops_per_s: float
    memory_bytes: int
    memory_bytes_per_s: float
    link_bytes_per_s: float


def _gpu(name: str, words: str, tflops: float, gb: int, gb_per_s: float, link_gb_per_s: float) -> Ceiling:
    return Ceiling(name, tuple(words.split()), tflops * 1e12, gb * 10**9, gb_per_s * 1e9, link_gb_per_s * 1e9)


# The first entry whose words all occur wins, so the special come before the general.
GPUS = (
    _gpu("B300", "b300", 2250, 288, 8000, 900),
    _gpu("B200", "b200", 2250, 180, 8000, 900),
    _gpu("GH200", "gh200", 989, 96, 4000, 450),
    _gpu("H200 NVL", "h200 nvl", 836, 141, 4800, 450),
    _gpu("H200", "h200", 989, 141, 4800, 450),
    _gpu("H100 NVL", "h100 nvl", 836, 94, 3900, 300),
    _gpu("H100 PCIe", "h100 pcie", 756, 80, 2000, 63),
    _gpu("H100", "h100", 989, 80, 3350, 450),
    _gpu("H800", "h800", 989, 80, 3350, 200),
    _gpu("H20", "h20", 148, 96, 4000, 450),
    _gpu("A100 PCIe 40 GB", "a100 pcie 40gb", 312, 40, 1555, 32),
    _gpu("A100 40 GB", "a100 40gb", 312, 40, 1555, 300),
    _gpu("A100 PCIe", "a100 pcie", 312, 80, 1935, 32),
    _gpu("A100", "a100", 312, 80, 2039, 300),
    _gpu("A800", "a800", 312, 80, 2039, 200),
    _gpu("L40S", "l40s", 362, 48, 864, 32),
    _gpu("L40", "l40", 181, 48, 864, 32),
    _gpu("L4", "l4", 121, 24, 300, 32),
    _gpu("A40", "a40", 150, 48, 696, 32),
    _gpu("A10", "a10", 125, 24, 600, 32),
    _gpu("RTX PRO 6000", "rtx pro 6000", 504, 96, 1792, 63),
    _gpu("RTX 6000 Ada", "rtx 6000 ada", 364, 48, 960, 32),
    _gpu("RTX A6000", "a6000", 155, 48, 768, 32),
    _gpu("RTX 5090", "5090", 210, 32, 1792, 63),
    _gpu("RTX 4090", "4090", 165, 24, 1008, 32),
    _gpu("RTX 3090", "3090", 71, 24, 936, 32),
    _gpu("MI300X", "mi300x", 1307, 192, 5300, 64),
)


def ceiling_of(name: str) -> Ceiling:
    """Peaks of a GPU by the name that torch gives it, or a part of it such as `H200`.

    Raises:
        UserError: not in the table.
    """
    text = name.lower().replace("-", " ").split()
    found = next((g for g in GPUS if all(any(part == word for part in text) for word in g.words)), None)
    if found is None:
        known = ", ".join(g.name for g in GPUS)
        raise UserError(f"nothing is known about GPU {name!r}", mend=f"measure with --measure, or take one of: {known}")
    return found


def measure_cpu(seconds: float = 0.3) -> Ceiling:
    """Peaks of this machine's CPU, all cores together, from fp32 products and copies of a fraction of a second."""
    import psutil
    import torch

    a_NN = torch.randn(768, 768)
    product_s = _best_s(lambda: a_NN @ a_NN, seconds)
    source = torch.zeros(1 << 24)
    copy_s = _best_s(lambda: source.clone(), seconds)
    copied_per_s = 2 * source.numel() * source.element_size() / copy_s
    memory = int(psutil.virtual_memory().total)
    return Ceiling(f"CPU ({os.cpu_count()} cores)", (), 2 * 768**3 / product_s, memory, copied_per_s, copied_per_s / 2)


def _best_s(call: Callable[[], object], seconds: float) -> float:
    """The shortest of the calls that fit into so many seconds, at least three."""
    begin, best, done = time.perf_counter(), float("inf"), 0
    while done < 3 or time.perf_counter() - begin < seconds:
        start = time.perf_counter()
        call()
        best, done = min(best, time.perf_counter() - start), done + 1
    return best
