"""Triton kernels of the frozen-head loss; `head_gpu.py` launches them.

One program takes one slot's row of V logits and walks over it in blocks, so a row is read once per kernel:

    row_statistics_kernel   log-sum-exps (running maximum), entropy, rank of the label, argmax      always
    distances_kernel        KL, TV, RKL and TV's mean slope against the slot's teacher row           TV, RKL, validation
    gradient_kernel         the logits' gradient in the compute dtype; KL if not formed before       training

Multiplier, bias and soft cap are applied while reading; the raw products stay as they are. CE with KL and CAP costs two
reads of the logits and one write of half their size; TV and RKL need one read more, because their gradients hold a sum
over the whole row. The formulas are those of `head_chunk.py`. Rows go over two small fp32 tables between kernels:
STATISTICS and DISTANCES name their columns. Triton passes no structures: hence the long parameter lists.
"""

from __future__ import annotations

import triton
import triton.language as tl

STATISTICS = ("lse", "lse_kl", "lse_cap", "entropy", "rank", "label_logit", "peak", "argmax")
DISTANCES = ("kl", "tv", "slope", "reverse_kl")


@triton.jit
def _logit(
    raw: tl.tensor,
    bias_ptr: tl.tensor,
    index: tl.tensor,
    inside: tl.tensor,
    multiplier: tl.tensor,
    softcap: tl.tensor,
    HAS_BIAS: tl.constexpr,
    HAS_CAP: tl.constexpr,
) -> tl.tensor:
    """softcap * tanh(multiplier * (raw + bias) / softcap)."""
    z = raw
    if HAS_BIAS:
        z += tl.load(bias_ptr + index, mask=inside, other=0.0).to(tl.float32)
    z *= multiplier
    if HAS_CAP:
        z = softcap * (1.0 - 2.0 / (tl.exp(2.0 * z / softcap) + 1.0))
    return z


@triton.jit
def _excess(p: tl.tensor, q: tl.tensor, d: tl.tensor) -> tl.tensor:
    """p * (e^d - 1 - d) for d = log(q / p); see `head_chunk.excess`."""
    series = p * d * d * (0.5 + d * (1 / 6 + d * (1 / 24 + d * (1 / 120))))
    direct = q - p - tl.where(p > 0, p * d, 0.0)
    return tl.where(tl.abs(d) < 0.05, series, direct)


# fmt: off
@triton.jit
def row_statistics_kernel(
    z_ptr: tl.tensor, label_ptr: tl.tensor, bias_ptr: tl.tensor, table_ptr: tl.tensor, n_vocab: tl.tensor,
    multiplier: tl.tensor, softcap: tl.tensor, kl_scale: tl.tensor, cap_scale: tl.tensor, HAS_BIAS: tl.constexpr,
    HAS_CAP: tl.constexpr, SOFT_KL: tl.constexpr, ENTROPY: tl.constexpr, ARGMAX: tl.constexpr, BLOCK: tl.constexpr,
) -> None:
    # fmt: on
    """One program a row: largest logit, log-sum-exp, label's logit, and what the terms need, into the table."""
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * n_vocab
    label = tl.load(label_ptr + row).to(tl.int32)
    raw_label = tl.load(z_ptr + label)
    z_label = _logit(raw_label, bias_ptr, label, True, multiplier, softcap, HAS_BIAS, HAS_CAP)
    peak, best = z_label, label
    # One lane of the block sums its own share; only the running maximum is agreed on by all in every step.
    total = tl.zeros([BLOCK], tl.float32)
    total_kl = tl.zeros([BLOCK], tl.float32)
    total_cap = tl.zeros([BLOCK], tl.float32)
    mean_cap = tl.zeros([BLOCK], tl.float32)
    before = tl.zeros([BLOCK], tl.int32)
    for start in range(0, n_vocab, BLOCK):
        index = start + tl.arange(0, BLOCK)
        inside = index < n_vocab
        raw = tl.load(z_ptr + index, mask=inside, other=0.0)
        z = _logit(raw, bias_ptr, index, inside, multiplier, softcap, HAS_BIAS, HAS_CAP)
        z = tl.where(inside, z, float("-inf"))
        before += ((z > z_label) | ((z == z_label) & (index < label))).to(tl.int32)
        block_peak = tl.max(z)
        if ARGMAX:
            block_best = tl.min(tl.where(z == block_peak, index, n_vocab))
            better = (block_peak > peak) | ((block_peak == peak) & (block_best < best))
            best = tl.where(better, block_best, best)
        new_peak = tl.maximum(peak, block_peak)
        shift = peak - new_peak
        x = z - new_peak
        total = total * tl.exp(shift) + tl.exp(x)
        if SOFT_KL:
            total_kl = total_kl * tl.exp(shift * kl_scale) + tl.exp(x * kl_scale)
        if ENTROPY:
            y = x * cap_scale
            e = tl.exp(y)
            faded = tl.exp(shift * cap_scale)
            mean_cap = faded * (mean_cap + total_cap * (shift * cap_scale)) + tl.where(inside, e * y, 0.0)
            total_cap = total_cap * faded + e
        peak = new_peak
    lse = peak + tl.log(tl.sum(total))
    table_ptr += row * 8
    tl.store(table_ptr + 0, lse)
    if SOFT_KL:
        tl.store(table_ptr + 1, peak * kl_scale + tl.log(tl.sum(total_kl)))
    else:
        tl.store(table_ptr + 1, lse)
    if ENTROPY:
        cap_sum = tl.sum(total_cap)
        tl.store(table_ptr + 2, peak * cap_scale + tl.log(cap_sum))
        tl.store(table_ptr + 3, tl.log(cap_sum) - tl.sum(mean_cap) / cap_sum)
    tl.store(table_ptr + 4, tl.sum(before).to(tl.float32))
    tl.store(table_ptr + 5, z_label)
    tl.store(table_ptr + 6, peak)
    tl.store(table_ptr + 7, best.to(tl.float32))


# fmt: off
@triton.jit
def distances_kernel(
    z_ptr: tl.tensor, bias_ptr: tl.tensor, table_ptr: tl.tensor, t_ptr: tl.tensor, t_kl_ptr: tl.tensor,
    t_row_ptr: tl.tensor, t_lse_ptr: tl.tensor, t_lse_kl_ptr: tl.tensor, out_ptr: tl.tensor, n_vocab: tl.tensor,
    multiplier: tl.tensor, softcap: tl.tensor, kl_scale: tl.tensor, HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr,
    KL: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr,
) -> None:
    # fmt: on
    """One program a row: KL, and where asked TV and reverse KL, between the draft and its teacher."""
    row = tl.program_id(0).to(tl.int64)
    t_row = tl.load(t_row_ptr + row)
    z_ptr += row * n_vocab
    lse, lse_kl = tl.load(table_ptr + row * 8), tl.load(table_ptr + row * 8 + 1)
    t_lse, t_lse_kl = tl.load(t_lse_ptr + t_row), tl.load(t_lse_kl_ptr + t_row)
    kl = tl.zeros([BLOCK], tl.float32)
    tv = tl.zeros([BLOCK], tl.float32)
    slope = tl.zeros([BLOCK], tl.float32)
    reverse = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n_vocab, BLOCK):
        index = start + tl.arange(0, BLOCK)
        inside = index < n_vocab
        raw = tl.load(z_ptr + index, mask=inside, other=0.0)
        z = _logit(raw, bias_ptr, index, inside, multiplier, softcap, HAS_BIAS, HAS_CAP)
        if KL:
            t = tl.load(t_kl_ptr + t_row * n_vocab + index, mask=inside, other=0.0)
            p = tl.exp(t * kl_scale - t_lse_kl)
            q = tl.exp(z * kl_scale - lse_kl)
            d = (z - t) * kl_scale - (lse_kl - t_lse_kl)
            kl += tl.where(inside, _excess(p, q, d), 0.0)
        if FULL:
            t = tl.load(t_ptr + t_row * n_vocab + index, mask=inside, other=0.0)
            p = tl.exp(t - t_lse)
            q = tl.exp(z - lse)
            d = (z - t) - (lse - t_lse)
            tv += tl.where(inside, tl.abs(q - p), 0.0)
            half_sign = tl.where(q > p, 0.5, tl.where(q < p, -0.5, 0.0))
            slope += tl.where(inside, q * half_sign, 0.0)
            reverse += tl.where(inside, _excess(q, p, -d), 0.0)
    out_ptr += row * 4
    tl.store(out_ptr + 0, tl.sum(kl))
    tl.store(out_ptr + 1, 0.5 * tl.sum(tv))
    tl.store(out_ptr + 2, tl.sum(slope))
    tl.store(out_ptr + 3, tl.sum(reverse))


# fmt: off
@triton.jit
def gradient_kernel(
    z_ptr: tl.tensor, label_ptr: tl.tensor, bias_ptr: tl.tensor, table_ptr: tl.tensor, t_ptr: tl.tensor,
    t_kl_ptr: tl.tensor, t_row_ptr: tl.tensor, t_lse_ptr: tl.tensor, t_lse_kl_ptr: tl.tensor,
    distance_ptr: tl.tensor, g_ptr: tl.tensor, n_vocab: tl.tensor, multiplier: tl.tensor, softcap: tl.tensor,
    kl_scale: tl.tensor, cap_scale: tl.tensor, ce_weight: tl.tensor, kl_weight: tl.tensor, tv_weight: tl.tensor,
    rkl_weight: tl.tensor, cap_weight: tl.tensor, HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, KL: tl.constexpr,
    KL_VALUE: tl.constexpr, FULL: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
) -> None:
    # fmt: on
    """One program a row: the weighted gradient of all terms by the logits, written to `g`."""
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(label_ptr + row).to(tl.int32)
    z_ptr += row * n_vocab
    g_ptr += row * n_vocab
    table_ptr += row * 8
    lse, lse_kl = tl.load(table_ptr), tl.load(table_ptr + 1)
    if KL or FULL:
        t_row = tl.load(t_row_ptr + row)
        t_lse, t_lse_kl = tl.load(t_lse_ptr + t_row), tl.load(t_lse_kl_ptr + t_row)
    if FULL:
        slope, reverse = tl.load(distance_ptr + row * 4 + 2), tl.load(distance_ptr + row * 4 + 3)
    if ENTROPY:
        lse_cap, entropy = tl.load(table_ptr + 2), tl.load(table_ptr + 3)
        right = tl.where(tl.load(table_ptr + 4) == 0, cap_weight * cap_scale, 0.0)
    kl = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n_vocab, BLOCK):
        index = start + tl.arange(0, BLOCK)
        inside = index < n_vocab
        raw = tl.load(z_ptr + index, mask=inside, other=0.0)
        z = _logit(raw, bias_ptr, index, inside, multiplier, softcap, HAS_BIAS, HAS_CAP)
        q = tl.exp(z - lse)
        g = ce_weight * (q - tl.where(index == label, 1.0, 0.0))
        if KL:
            t = tl.load(t_kl_ptr + t_row * n_vocab + index, mask=inside, other=0.0)
            p = tl.exp(t * kl_scale - t_lse_kl)
            soft_q = tl.exp(z * kl_scale - lse_kl)
            g += kl_weight * (soft_q - p)
            if KL_VALUE:
                d = (z - t) * kl_scale - (lse_kl - t_lse_kl)
                kl += tl.where(inside, _excess(p, soft_q, d), 0.0)
        if FULL:
            t = tl.load(t_ptr + t_row * n_vocab + index, mask=inside, other=0.0)
            p = tl.exp(t - t_lse)
            half_sign = tl.where(q > p, 0.5, tl.where(q < p, -0.5, 0.0))
            d = (z - t) - (lse - t_lse)
            g += q * (tv_weight * (half_sign - slope) + rkl_weight * (d - reverse))
        if ENTROPY:
            log_q = z * cap_scale - lse_cap
            g -= right * tl.exp(log_q) * (log_q + entropy)
        if HAS_CAP:
            g *= 1.0 - (z / softcap) * (z / softcap)
        tl.store(g_ptr + index, g.to(g_ptr.dtype.element_ty), mask=inside)
    if KL_VALUE:
        tl.store(distance_ptr + row * 4, tl.sum(kl))


# fmt: off
@triton.jit
def quantize_rows_kernel(
    g_ptr: tl.tensor, g8_ptr: tl.tensor, scale_ptr: tl.tensor, largest_ptr: tl.tensor, value_ptr: tl.tensor,
    n_vocab: tl.tensor, fp8_max: tl.tensor, BLOCK: tl.constexpr,
) -> None:
    # fmt: on
    """Rows without their largest entry, scaled so that the next one is `fp8_max`; see `head_fp8.quantize_rows`."""
    row = tl.program_id(0).to(tl.int64)
    g_ptr += row * n_vocab
    g8_ptr += row * n_vocab
    lane = tl.arange(0, BLOCK)
    first = tl.full([BLOCK], -1.0, tl.float32)
    second = tl.full([BLOCK], 0.0, tl.float32)
    where = tl.zeros([BLOCK], tl.int32)
    for start in range(0, n_vocab, BLOCK):
        index = start + lane
        size = tl.abs(tl.load(g_ptr + index, mask=index < n_vocab, other=0.0).to(tl.float32))
        is_new = size > first
        second = tl.maximum(second, tl.where(is_new, first, size))
        where = tl.where(is_new, index, where)
        first = tl.where(is_new, size, first)
    peak = tl.max(first)
    largest = tl.min(tl.where(first == peak, where, n_vocab))
    rest = tl.max(tl.where(where == largest, second, first))
    scale = tl.maximum(rest / fp8_max, 1e-30)
    for start in range(0, n_vocab, BLOCK):
        index = start + lane
        inside = index < n_vocab
        g = tl.load(g_ptr + index, mask=inside, other=0.0).to(tl.float32)
        g = tl.where(index == largest, 0.0, g / scale)
        tl.store(g8_ptr + index, g.to(g8_ptr.dtype.element_ty), mask=inside)
    tl.store(scale_ptr + row, scale)
    tl.store(largest_ptr + row, largest.to(tl.int64))
    tl.store(value_ptr + row, tl.load(g_ptr + largest).to(tl.float32))
