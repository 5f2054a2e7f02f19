"""The Triton kernels of products of few rows with weights, and of what follows such a product.

Launched by `gpu.products`. Each program reads a few rows
of the weights from end to end: they are all that takes time. Sums are float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foveal_runtime.model.gpu.kernels import LINE, activated, fetch_ahead, wait_for_last
from foveal_runtime.model.gpu.launch import kernel

_AHEAD_LINES = tl.constexpr(4)


@triton.jit
def finished(
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
def own_rows(
    weight, program, BLOCK_N: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    ACTIVATION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Rows of the weight that are this program's, and the same with the last in place of those
    behind it. Waits for earlier kernels, and fetches the rows' beginnings before."""
    n = program * BLOCK_N + tl.arange(0, BLOCK_N)
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
    n, n_read = own_rows(weight, tl.program_id(0), BLOCK_N, N, K, ACTIVATION, EARLY)
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
    found = finished(
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
    n, n_read = own_rows(weight, tl.program_id(0), BLOCK_N, N, K, ACTIVATION, EARLY)
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
    found = finished(sums, ups, bias, residual, place, n[:, None], is_there,
                      out.dtype.element_ty, N, ACTIVATION, HAS_BIAS, HAS_RESIDUAL)  # fmt: skip
    tl.store(out + place, found.to(out.dtype.element_ty), mask=is_there)
