"""Attention kernels for texts that grow: none that are planned anew for each shape."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_shape_plans() -> Iterator[None]:
    """Inside, `scaled_dot_product_attention` passes cuDNN's kernels over. Also a decorator, of functions that are no
    generators. The choice is the process's: threads must not be inside at overlapping times.

    Recent torch prefers these kernels on Hopper, and cuDNN plans each new shape on the host, for tens of milliseconds.
    While a text is written, every forward has a new shape.
    """
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
