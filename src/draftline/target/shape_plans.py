"""Attention kernels for texts that grow: none that are planned anew for each shape."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_shape_plans() -> Iterator[None]:
    """Inside, `scaled_dot_product_attention` passes cuDNN's kernels over. Also a decorator of functions.

    On Hopper, torch from 2.11 on prefers them, and cuDNN plans each new shape on the host, which takes tens of
    milliseconds. A row of training data is planned for once;
    """
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
