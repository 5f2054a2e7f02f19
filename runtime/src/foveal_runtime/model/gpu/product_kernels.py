"""The Triton kernels of products of few rows with weights, and of what follows such a product.

Launched by `gpu.products`, and for quantised weights by `gpu.codes`. Each program reads a few rows
of the weights from end to end: they are all that takes time. Sums are float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foveal_runtime.model.gpu.kernels import LINE, activated, fetch_ahead, wait_for_last
from foveal_runtime.model.gpu.launch import kernel

_AHEAD_LINES = tl.constexpr(4)


@triton.jit
def _finished(
    found, up, bias, residual, place, n, is_there, dtype: tl.constexpr,
    N: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """What goes to memory, in float32, of sums `found` (and `up`, of an MLP's gate)."""
    if HAS_BIAS:
        found += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    if ACTIVATION != "":
        if HAS_BIAS:
            up += tl.load(bias + N + n, mask=n < N, other=0.0).to(tl.float32)
        gate = activated(found.to(dtype).to(tl.float32), ACTIVATION).to(dtype).to(tl.float32)
        found = gate * up.to(dtype).to(tl.float32)
    if HAS_RESIDUAL:
        found += tl.load(residual + place, mask=is_there, other=0.0).to(tl.float32)
    return found


@triton.jit
def _own_rows(
    weight, BLOCK_N: tl.constexpr, N: tl.constexpr, K: tl.constexpr, ACTIVATION: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Rows of the weight that are this program's, and the same with the last in place of those
    behind it. Waits for earlier kernels, and fetches the rows' beginnings before."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_read = tl.minimum(n, N - 1).to(tl.int64)
    if EARLY:
        step: tl.constexpr = LINE // (weight.dtype.element_ty.primitive_bitwidth // 8)
        at = tl.minimum(tl.arange(0, _AHEAD_LINES) * step, K - 1)
        fetch_ahead(weight + n_read[:, None] * K + at[None, :])
        if ACTIVATION != "":
            fetch_ahead(weight + (N + n_read)[:, None] * K + at[None, :])
    wait_for_last(EARLY)
    return n, n_read


@kernel
@triton.jit
def vector_kernel(
    x, weight, bias, residual, out,
    N: tl.constexpr, K: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """x (K) by BLOCK_N rows of the weight (N, K): grid (pieces of N). With ACTIVATION the weight
    has 2 N rows, gate and up."""
    n, n_read = _own_rows(weight, BLOCK_N, N, K, ACTIVATION, EARLY)
    k = tl.arange(0, BLOCK_K)
    sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    ups = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    places = weight + n_read[:, None] * K + k[None, :]
    for start in range(0, K, BLOCK_K):
        is_inside = start + k < K
        row = tl.load(x + start + k, mask=is_inside, other=0.0).to(tl.float32)[None, :]
        w = _loaded(places + start, is_inside[None, :], K, BLOCK_K).to(tl.float32)
        if ACTIVATION != "":
            u = _loaded(places + N * K + start, is_inside[None, :], K, BLOCK_K).to(tl.float32)
            ups += u * row
        sums += w * row
    found = _finished(
        tl.sum(sums, 1), tl.sum(ups, 1), bias, residual, n, n, n < N, out.dtype.element_ty,
        N, ACTIVATION, HAS_BIAS, HAS_RESIDUAL,
    )  # fmt: skip
    tl.store(out + n, found.to(out.dtype.element_ty), mask=n < N)


@triton.jit
def _loaded(places, mask, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Weights, which are not read again in this step."""
    if K % BLOCK_K == 0:
        found = tl.load(places, eviction_policy="evict_first")
    else:
        found = tl.load(places, mask=mask, other=0.0, eviction_policy="evict_first")
    return found


@kernel
@triton.jit(do_not_specialize=["count"])
def rows_kernel(
    x, weight, bias, residual, out, count,
    N: tl.constexpr, K: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    WIDEN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The same for up to ROWS rows of x (count, K), by tensor cores. WIDEN: the interpreter cannot
    multiply bfloat16."""
    n, n_read = _own_rows(weight, BLOCK_N, N, K, ACTIVATION, EARLY)
    row = tl.arange(0, ROWS)
    k = tl.arange(0, BLOCK_K)
    sums = tl.zeros([BLOCK_N, ROWS], tl.float32)
    ups = tl.zeros([BLOCK_N, ROWS], tl.float32)
    places = weight + n_read[:, None] * K + k[None, :]
    for start in range(0, K, BLOCK_K):
        is_inside = start + k < K
        w = _loaded(places + start, is_inside[None, :], K, BLOCK_K)
        rows = tl.load(x + row[None, :] * K + (start + k)[:, None],
                       mask=(row < count)[None, :] & is_inside[:, None], other=0.0)  # fmt: skip
        if WIDEN:
            w = w.to(tl.float32)
            rows = rows.to(tl.float32)
        sums = tl.dot(w, rows, sums, input_precision="ieee")
        if ACTIVATION != "":
            u = _loaded(places + N * K + start, is_inside[None, :], K, BLOCK_K)
            if WIDEN:
                u = u.to(tl.float32)
            ups = tl.dot(u, rows, ups, input_precision="ieee")
    is_there = (row < count)[None, :] & (n < N)[:, None]
    place = row[None, :] * N + n[:, None]
    found = _finished(sums, ups, bias, residual, place, n[:, None], is_there,
                      out.dtype.element_ty, N, ACTIVATION, HAS_BIAS, HAS_RESIDUAL)  # fmt: skip
    tl.store(out + place, found.to(out.dtype.element_ty), mask=is_there)


@triton.jit
def _widened(
    codes, scales, zeros, n, start, K: tl.constexpr, GROUPS: tl.constexpr, SHARE: tl.constexpr,
    DEEP: tl.constexpr, KIND: tl.constexpr, HAS_ZEROS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Weights of outputs n, all of which there are, and BLOCK_K inputs from `start` on (behind the
    last: that one's): float32 (outputs, inputs)."""
    k = tl.minimum(start + tl.arange(0, BLOCK_K), K - 1)
    if KIND == "int4":
        words = tl.load(codes + n[:, None] * (K // 8) + (k // 8)[None, :])
        found = ((words << (28 - 4 * (k % 8))[None, :]) >> 28).to(tl.float32)
    elif KIND == "int8":
        found = tl.load(codes + n[:, None] * K + k[None, :]).to(tl.float32)
    else:  # the bits of a float8_e4m3fn are those of a float16 that is 256 times smaller
        byte = tl.load(codes + n[:, None] * K + k[None, :]).to(tl.uint16)
        half = ((byte & 0x80) << 8) | ((byte & 0x7F) << 7)
        found = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    at = (n // SHARE)[:, None] * GROUPS
    if DEEP % BLOCK_K == 0:  # one group
        at += start // DEEP
    else:
        at += (k // DEEP)[None, :]
    if HAS_ZEROS:
        found -= tl.load(zeros + at).to(tl.float32)
    return found * tl.load(scales + at).to(tl.float32)


@kernel
@triton.jit(do_not_specialize=["count"])
def coded_rows_kernel(
    x, codes, scales, zeros, bias, out, count,
    N: tl.constexpr, K: tl.constexpr, GROUPS: tl.constexpr, SHARE: tl.constexpr,
    DEEP: tl.constexpr, KIND: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """x (count, K) by BLOCK_N outputs: grid (pieces of N). WIDEN: the interpreter cannot multiply
    bfloat16."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_read = tl.minimum(n, N - 1).to(tl.int64)
    row = tl.arange(0, ROWS)
    sums = tl.zeros([BLOCK_N, ROWS], tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        weight = _widened(codes, scales, zeros, n_read, start, K, GROUPS, SHARE, DEEP, KIND,
                          HAS_ZEROS, BLOCK_K).to(x.dtype.element_ty)  # fmt: skip
        rows = tl.load(x + row[None, :] * K + k[:, None],
                       mask=(row < count)[None, :] & (k < K)[:, None], other=0.0)  # fmt: skip
        if WIDEN:
            weight = weight.to(tl.float32)
            rows = rows.to(tl.float32)
        sums = tl.dot(weight, rows, sums, input_precision="ieee")
    if HAS_BIAS:
        sums += tl.load(bias + n_read).to(tl.float32)[:, None]
    tl.store(out + row[None, :] * N + n[:, None], sums.to(out.dtype.element_ty),
             mask=(row < count)[None, :] & (n < N)[:, None])  # fmt: skip


@kernel
@triton.jit(do_not_specialize=["first", "count"])
def widen_kernel(
    codes, scales, zeros, out, first, count,
    K: tl.constexpr, GROUPS: tl.constexpr, SHARE: tl.constexpr, DEEP: tl.constexpr,
    KIND: tl.constexpr, HAS_ZEROS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The weights of `count` outputs from `first` on to out (count, K): grid (pieces of count,
    pieces of K)."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    start = tl.program_id(1) * BLOCK_K
    k = start + tl.arange(0, BLOCK_K)
    n_read = tl.minimum(n, count - 1).to(tl.int64)
    weight = _widened(codes, scales, zeros, first + n_read, start, K, GROUPS, SHARE, DEEP, KIND,
                      HAS_ZEROS, BLOCK_K)  # fmt: skip
    tl.store(out + n_read[:, None] * K + k[None, :], weight.to(out.dtype.element_ty),
             mask=(n < count)[:, None] & (k < K)[None, :])  # fmt: skip
